"""The server of a replay: workers run the same script, and the server handles all messages in the recorded order."""

from __future__ import annotations

import code
import contextlib
import os
import signal
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from paceline.codecs import read_codec
from paceline.errors import UsageError, WireError
from paceline.launch.environment import ReplayOrder, ServerAssignment
from paceline.launch.reports import report
from paceline.policies import ServerPolicy, parse_policy
from paceline.policies.messages import PushKind
from paceline.record import trace as traced
from paceline.record.fingerprints import hash_of, state_tensors
from paceline.replay.outcome import Differs, Replayed, ReplayedPush, gradients_of, same_bits
from paceline.replay.reads import Read, read_versions
from paceline.server.averages import Average
from paceline.server.kept_codecs import KeptCodecs
from paceline.store.behind import Behind
from paceline.store.codec_memory import CodecMemory
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import adopt, examine
from paceline.store.in_place import with_differences
from paceline.store.layout import Arena, ModelLayouts, memory_of
from paceline.store.parameter_store import ParameterStore
from paceline.store.partition import layouts_of
from paceline.store.pending import PushKey, Share
from paceline.train_state import TrainState
from paceline.transport import messages as wire
from paceline.transport.listening import Ended, Listener, Peer
from paceline.transport.pieces import Pieces

_PATIENCE = 300.0  # seconds for a worker's step
_TIME_TO_LEAVE = 5.0  # seconds for the workers to leave, if the replay ends before they do
_TICK = 0.2
_TELL_EVERY = 0.2  # seconds between two reports of progress

M = TypeVar("M", bound=wire.Message)


def serve_replay(train_state: TrainState, assignment: ServerAssignment, order: ReplayOrder) -> int:
    """Run the server of a replay and report the result to the supervisor; return the exit code of the process."""
    listener = Listener(bytes.fromhex(assignment.token))
    listener.bind(assignment.address)
    try:
        trace = traced.Trace(Path(order.trace))
        server = ReplayServer(
            train_state, trace, listener, keeps_pushes=order.shell is not None, memory=assignment.memory_fd
        )
        replayed = server.run(order.until)
        report("replayed", result=asdict(replayed))
        server.dismiss()
        if order.shell is not None and replayed.difference is None:
            server.open_shell(*order.shell)
    finally:
        listener.close()
    return 0


class _Planned(NamedTuple):
    """A message to a worker, due when the parameters have this version (None: any) and it has so many pushes."""

    version: int | None
    pushes: int
    send: Callable[[], None]


@dataclass(kw_only=True)
class _Worker:
    """A worker that has joined."""

    peer: Peer
    process: int
    room: Arena  # the memory of its pushes
    behind: Behind | None = None
    remembers: CodecMemory | None = None  # as the live server's of its members
    taken: int = -1
    exchanges: int = -1
    exchanged: bool = False
    ask: int = 0
    said: deque[wire.Message] = field(default_factory=deque)  # messages received and not used yet
    pushes: int = 0  # received
    planned: deque[_Planned] = field(default_factory=deque)
    computes: bool = False  # the step that it was given last, which was not cancelled
    gone: bool = False


class ReplayServer:
    """Carries out a trace record by record, and waits for the message that each record answers."""

    def __init__(
        self,
        train_state: TrainState,
        trace: traced.Trace,
        listener: Listener,
        *,
        keeps_pushes: bool = False,
        memory: int | None = None,
    ) -> None:
        self._listener = listener
        self._about, self._records = trace.about, list(trace)
        self._reads = read_versions(self._records)
        self._model = ModelLayouts.describe(train_state.model)
        policy = parse_policy(trace.about["policy"])
        assert isinstance(policy, ServerPolicy), "a run with a trace has a server"
        self._policy = policy
        adds_up = not any(isinstance(record, traced.Chose) for record in self._records)
        self._rule = replace(CommitRule.of(policy, read_codec(trace.about.get("codec"))), adds_up=adds_up)
        self._train_state = self._rule.remembering(replace(train_state, scaler=None))
        self._layouts = ModelLayouts(train_state.model, with_reads=self._rule.with_reads)
        self._memory = torch.zeros(self._layouts.down.nbytes, dtype=torch.uint8)
        adopt(self._layouts, self._memory)
        self._store = ParameterStore(self._train_state, self._layouts, self._memory, self._rule)
        self._shares: list[Share] = []  # that were chosen for the next commit
        self._uncommitted: set[PushKey] = set()
        self._lost: set[PushKey] = set()  # those when the last server ended
        self._codecs: KeptCodecs | None = None
        if self._rule.codec is not None:
            parts = layouts_of(train_state.model, trace.about.get("servers", 1), with_reads=self._rule.with_reads)
            self._codecs = KeptCodecs(self._rule.codec, parts, policy.kind, memory, {})
        self._calls: dict[int, deque[tuple[Peer, wire.Hello]]] = defaultdict(deque)  # of those who want to join
        self._workers: dict[int, _Worker] = {}
        self._latest: dict[int, _Worker] = {}  # the same, with those that have left
        self._ranks: dict[Peer, int] = {}
        self._averaged: dict[int, dict[int, wire.Mean]] = defaultdict(dict)  # key of a mean -> its parts by rank
        self._keeps_pushes = keeps_pushes  # for the shell
        self._kept: dict[PushKey, ReplayedPush] = {}  # of those, the pushes that wait for a commit
        self._pushes: list[ReplayedPush] = []  # the pushes of the last commit
        self._counts = {"commits": 0, "pushes": 0, "hashes": 0}
        self._version, self._told_at = 0, 0.0

    def run(self, until: int | None) -> Replayed:
        """Replay up to version ``until``, the end of the trace, or the first difference."""
        difference, whole = None, False
        try:
            self._check_start()
            for position, record in enumerate(self._records):
                if until is not None and self._version >= until and isinstance(record, traced.Given):
                    break
                self._do(position, record)
                whole = isinstance(record, traced.Ended)
        except Differs as differs:
            difference = str(differs)
        digest = hash_of(state_tensors(self._train_state.model)).hex()
        return Replayed(version=self._version, **self._counts, digest=digest, difference=difference, whole=whole)

    def last_pushes(self) -> list[ReplayedPush]:
        """The pushes of the last commit, if pushes are kept."""
        return self._pushes

    def open_shell(self, reading: int, writing: int) -> None:
        """Open a Python shell on the present parameters and the pushes of the last commit.

        It may stay open for hours; meanwhile another thread answers workers that come or leave.
        """
        names = {
            "model": self._train_state.model,
            "optimizer": self._train_state.optimizers[0],
            "version": self._version,
            "pushes": self.last_pushes(),
        }
        banner = f"version {self._version}: {', '.join(names)}; a push has {', '.join(ReplayedPush._fields)}"
        with (
            self._turning_away(),
            os.fdopen(reading) as told,
            os.fdopen(writing, "w") as screen,
            contextlib.redirect_stdout(screen),
            contextlib.redirect_stderr(screen),
        ):
            _interact(banner, names, told, screen)

    def dismiss(self) -> None:
        """End the remaining workers; their messages are ignored."""
        peers = [worker.peer for worker in self._workers.values()]
        peers += [peer for calls in self._calls.values() for peer, _ in calls]
        for peer in peers:
            peer.send(wire.Over())
        for worker in self._workers.values():
            worker.gone = worker.gone or any(isinstance(message, wire.Leave) for message in worker.said)
        deadline = time.monotonic() + _TIME_TO_LEAVE
        while time.monotonic() < deadline and not all(worker.gone for worker in self._workers.values()):
            self._turn_away()

    def _turn_away(self) -> None:
        """Note who leaves, and end those who come."""
        for peer, heard in self._listener.hear(_TICK):
            if isinstance(heard, wire.Hello):
                peer.send(wire.Over())
            elif peer in self._ranks and isinstance(heard, Ended | wire.Leave):
                self._workers[self._ranks[peer]].gone = True

    @contextlib.contextmanager
    def _turning_away(self) -> Iterator[None]:
        """Do this in a thread during the block: a worker without an answer for two minutes would fail with an error."""
        over = threading.Event()

        def turn_away() -> None:
            while not over.is_set():
                self._turn_away()

        thread = threading.Thread(target=turn_away)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _check_start(self) -> None:
        first = self._records[0] if self._records else None
        if not isinstance(first, traced.Began) or first.version:
            raise UsageError(
                "the trace begins in the middle of a run; only one recorded from its first step is replayed"
            )

    # Records -----------------------------------------------------------------------------------------------------

    def _do(self, position: int, record: traced.Record) -> None:
        match record:
            case traced.Began():
                self._begin(record, first=position == 0)
            case traced.Joined():
                self._let_in(record)
            case traced.Asked():
                asked = self._take(record.rank, wire.Ask)
                if asked.epochs != record.epochs:
                    raise self._other(record.rank, f"asked for epochs below {asked.epochs}, and not {record.epochs}")
                self._workers[record.rank].ask = asked.number
            case traced.Given():
                self._give(record, self._reads[position])
            case traced.GivenMore():
                self._give_more(record)
            case traced.Pushed():
                self._take_push(record)
            case traced.Late():
                self._take(record.rank, wire.PushMessage)
                self._workers[record.rank].exchanged = False
            case traced.NotFinite():
                self._take(record.rank, wire.PushMessage)
                self._workers[record.rank].exchanged = False
                self._warn(record)
            case traced.Skipped():
                self._take(record.rank, wire.Skip)
            case traced.Chose():
                self._shares.append(Share(PushKey(record.rank, record.step), record.weight, record.group))
            case traced.Committed():
                self._commit(record)
            case traced.Finished():
                self._finish(record, self._reads[position])
            case traced.Averaged():
                self._average(position, record)
            case traced.Left():
                self._let_go(record)
            case traced.Hashed():
                self._compare_hash(record)
            case _:
                pass

    def _begin(self, record: traced.Began, *, first: bool) -> None:
        """The server began. A replacement of a killed one has the same worker processes, a resumed run has new ones."""
        if not first:
            for worker in self._workers.values():
                if not record.replaced:
                    _kill(worker.process)
                self._listener.forget(worker.peer)
            self._workers, self._ranks = {}, {}
            self._store.forget()
            self._shares, self._kept = [], {}
            self._lost, self._uncommitted = self._uncommitted, set()

    def _let_in(self, record: traced.Joined) -> None:
        calls = self._calls[record.rank]
        self._wait(lambda: bool(calls), f"worker {record.rank} to join")
        peer, hello = calls.popleft()
        if tuple(tuple(entry) for entry in hello.model) != self._model:
            raise UsageError(f"worker {record.rank} has another model than the server; is the script the same?")
        room = Arena(self._layouts.up)
        peer.tensors = Pieces(memory_of(room.memory))
        worker = _Worker(peer=peer, process=hello.pid, room=room)
        self._give_memory(record, worker)
        self._workers[record.rank] = self._latest[record.rank] = worker
        self._ranks[peer] = record.rank
        peer.send(
            wire.Welcome(
                rank=record.rank,
                world_size=self._about["world_size"],
                seed=self._about["seed"],
                version=self._version,
                incarnation=record.life,
                slots=self._about["world_size"],
                epoch=record.epoch,
                with_reads=self._rule.with_reads,
                kind=self._policy.kind.value,
                local_steps=self._policy.local_steps,
                coded=self._policy.coded,
                local_momentum=self._policy.local_momentum,
                codec="" if self._rule.codec is None else str(self._rule.codec),
                packet_parts=self._about.get("servers", 1),
                packets=False,
                kept=record.kept,
            )
        )

    def _give_memory(self, record: traced.Joined, worker: _Worker) -> None:
        """Let a worker's codec remember nothing, or what it did in the run that was then resumed."""
        rank, codec = record.rank, self._rule.codec
        if codec is None or self._codecs is None:
            return
        worker.remembers = self._codecs.memory_of(rank)
        if codec.both:
            worker.behind = Behind(codec, self._layouts, seed=self._about["seed"] % 2**63, rank=rank)
        if not record.kept:
            return
        before = self._latest.get(rank)
        found = None
        if before is not None and before.remembers is not None:
            lost = PushKey(rank, before.taken) in self._lost
            found = before.remembers.before(before.taken) if lost else before.remembers.after(before.taken)
        if before is None or found is None:
            raise Differs(f"worker {rank}, after version {self._version}: nothing is left of what its codec remembered")
        worker.remembers.begin_with(found)
        if worker.behind is not None and before.behind is not None:
            worker.behind.go_on_from(before.behind.remembered())

    def _give(self, record: traced.Given, read: Read) -> None:
        """Send a step when the parameters have the version that its worker read.

        The worker must also have sent all pushes that it had sent before, late ones too. Otherwise it would take this
        step for a cancel of its present one.
        """
        worker = self._workers[record.rank]
        worker.computes = not (read.lost or read.doomed)
        has = self._has_after(worker, packet=record.packet, version=self._version) if record.fresh else None
        if read.lost:
            return  # the worker died before it sent any result
        at = max(record.version, read.version)
        go = wire.Go(
            record.step,
            record.version,
            record.fresh,
            record.epoch,
            record.batch,
            worker.ask,
            more=record.more,
            weight=record.weight,
            taken=worker.taken,
        )
        if read.doomed:
            message = _Planned(None, read.pushes, lambda: worker.peer.send(go._replace(doomed=True, fresh=False)))
        elif not record.fresh:
            message = _Planned(None, read.pushes, lambda: worker.peer.send(go))
        elif has is not None:
            message = _Planned(None, read.pushes, lambda: worker.peer.send(go, memory_of(has)))
        elif worker.exchanged:
            go = go._replace(version=at, exchanged=worker.exchanges)
            tensors = with_differences(self._layouts, self._memory, worker.room)
            message = _Planned(at, read.pushes, lambda: worker.peer.send(go, tensors))
        else:
            go = go._replace(version=at)
            message = _Planned(at, read.pushes, lambda: worker.peer.send(go, memory_of(self._memory)))
        worker.planned.append(message)
        self._send_due(worker)

    def _has_after(self, worker: _Worker, *, packet: bool, version: int = -1) -> Tensor | None:
        """What a worker has after it was sent a packet or all parameters, if these go through a codec.

        With a step those of a ``version`` were sent.
        """
        if worker.behind is None:
            return None
        memory = self._memory.clone()
        views = self._layouts.down.views(memory)
        sent = packet and worker.behind.encode(views, version=version) is not None
        if not sent:
            worker.behind.take_all(views, version=version)
        worker.behind.write(views)
        return memory

    def _give_more(self, record: traced.GivenMore) -> None:
        worker = self._workers[record.rank]
        if not worker.computes:
            return
        self._take(record.rank, wire.More)
        worker.peer.send(wire.BatchMessage(record.step, record.epoch, record.batch, record.weight))

    def _finish(self, record: traced.Finished, read: Read) -> None:
        worker, at = self._workers[record.rank], max(record.version, read.version)
        self._has_after(worker, packet=False)
        finished = wire.Finished(at, worker.ask, worker.taken)
        message = _Planned(at, read.pushes, lambda: worker.peer.send(finished, memory_of(self._memory)))
        worker.planned.append(message)
        self._send_due(worker)

    def _send_due(self, worker: _Worker) -> None:
        """Send a worker the planned messages that are due, in order."""
        while worker.planned:
            version, pushes, send = worker.planned[0]
            if worker.pushes < pushes or version not in (None, self._version):
                return
            worker.planned.popleft()
            send()

    def _none_needs_these(self) -> bool:
        """Whether no planned message needs the present parameters."""
        return not any(message.version == self._version for each in self._workers.values() for message in each.planned)

    def _take_push(self, record: traced.Pushed) -> None:
        push = self._take(record.rank, wire.PushMessage)
        worker = self._workers[record.rank]
        worker.exchanges, worker.exchanged, worker.taken = record.step, False, record.step
        amiss, checksum = examine(self._layouts, worker.room)
        where = f"worker {record.rank}, step {record.step}, on version {record.version}"
        if (push.step, push.version) != (record.step, record.version):
            raise Differs(f"{where}: it pushed step {push.step} on version {push.version}")
        if amiss is not None or checksum != record.checksum or not same_bits(push.loss, record.loss):
            raise Differs(
                f"{where}: loss {push.loss!r} and gradients with the checksum {checksum:016x}, where the run had "
                f"{record.loss!r} and {record.checksum:016x}"
            )
        key = PushKey(record.rank, record.step)
        self._store.take(key, worker.room, examples=push.examples, used=push.used)
        self._uncommitted.add(key)
        if self._keeps_pushes:
            gradients = gradients_of(self._layouts, worker.room, push.used)
            self._kept[key] = ReplayedPush(record.rank, record.step, record.version, push.loss, gradients)
        self._counts["pushes"] += 1

    def _warn(self, record: traced.NotFinite) -> None:
        worker = self._workers[record.rank]
        amiss, _ = examine(self._layouts, worker.room)
        if amiss is None:
            raise Differs(f"worker {record.rank}, step {record.step}: its gradients are finite, where they were not")
        worker.peer.send(wire.Warned(f"step {record.step}: the gradient of {amiss} is not finite; it is left out"))

    def _commit(self, record: traced.Committed) -> None:
        self._wait(self._none_needs_these, f"pushes before version {record.version}")
        self._listener.keep_what_waits()
        self._store.commit(self._shares or None)
        self._uncommitted -= {share.push for share in self._shares} or self._uncommitted
        if self._rule.kind is PushKind.PARAMETERS:
            self._note_exchanges()
        if self._keeps_pushes:
            keys = [share.push for share in self._shares] or [*self._kept]
            self._pushes = [self._kept.pop(key) for key in keys]
        self._shares = []
        self._version = record.version
        self._counts["commits"] += 1
        if time.monotonic() > self._told_at + _TELL_EVERY:
            self._told_at = time.monotonic()
            report("replaying", version=self._version)
        for worker in self._workers.values():
            self._send_due(worker)

    def _note_exchanges(self) -> None:
        """Note whose pushes have become differences, as the live server does."""
        for share in self._shares:
            worker = self._workers.get(share.push.worker)
            if worker is not None and worker.exchanges == share.push.step:
                worker.exchanged = True

    def _average(self, position: int, record: traced.Averaged) -> None:
        """Answer a mean when all workers that were answered together have sent their parts."""
        if record.rank not in self._averaged[record.key]:
            together = []
            for other in self._records[position:]:
                if not (isinstance(other, traced.Averaged) and other.key == record.key):
                    break
                together.append(other.rank)
            self._averaged[record.key] = {rank: self._take(rank, wire.Mean) for rank in together}
        parts = self._averaged[record.key]
        own = parts[record.rank]
        if zlib.crc32(own.key.encode()) != record.key:
            raise self._other(record.rank, f"asked for the mean {own.key!r}, and not for the one that it had")
        average = Average(own.epoch, {rank: (part.weight, part.values) for rank, part in parts.items()})
        self._workers[record.rank].peer.send(wire.Averaged(own.key, average.mean()))
        if record.rank == list(parts)[-1]:
            del self._averaged[record.key]

    def _let_go(self, record: traced.Left) -> None:
        worker = self._workers[record.rank]
        if record.dead:
            _kill(worker.process)
        else:
            self._take(record.rank, wire.Leave)
        del self._workers[record.rank], self._ranks[worker.peer]
        self._listener.forget(worker.peer)

    def _compare_hash(self, record: traced.Hashed) -> None:
        digest = hash_of(state_tensors(self._train_state.model))
        if digest != record.digest:
            raise Differs(
                f"version {self._version}: the parameters and buffers have the hash {digest.hex()}, where the run had "
                f"{record.digest.hex()}; all pushes before are equal"
            )
        self._counts["hashes"] += 1

    # Messages ----------------------------------------------------------------------------------------------------

    def _take(self, rank: int, kind: type[M]) -> M:
        """Wait for the next message of a worker, which must be of this kind."""
        worker = self._workers[rank]
        self._wait(lambda: bool(worker.said) or worker.gone, f"worker {rank}'s {kind.__name__}")
        if not worker.said:
            raise self._other(rank, f"ended where it had a {kind.__name__}")
        message = worker.said.popleft()
        if isinstance(message, wire.Skip) and kind is not wire.Skip:  # of a cancelled step: ignored
            return self._take(rank, kind)
        if not isinstance(message, kind):
            raise self._other(rank, f"sent {message} where it had a {kind.__name__}")
        return cast(M, message)

    def _other(self, rank: int, what: str) -> Differs:
        return Differs(
            f"worker {rank}, after version {self._version}: it {what}; does the script depend on something that is not "
            "replayed, such as the time?"
        )

    def _wait(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not happened():
            self._hear()
            if time.monotonic() > deadline:
                raise Differs(f"after version {self._version}: waited {_PATIENCE:.0f} s for {what}")

    def _hear(self) -> None:
        for peer, heard in self._listener.hear(_TICK):
            if isinstance(heard, WireError):
                raise heard
            if isinstance(heard, wire.Hello):
                self._calls[heard.rank].append((peer, heard))
            elif (rank := self._ranks.get(peer)) is not None:
                self._take_in(self._workers[rank], heard)

    def _take_in(self, worker: _Worker, heard: wire.Message | Ended) -> None:
        match heard:
            case Ended():
                worker.gone = True
            case wire.Save():
                worker.peer.send(wire.Saved(heard.path))
            case wire.Data():
                self._compare_data(heard)
            case wire.Record() | wire.Alive():
                pass
            case _:
                worker.said.append(heard)
                if isinstance(heard, wire.PushMessage):
                    worker.pushes += 1
                    self._send_due(worker)

    def _compare_data(self, found: wire.Data) -> None:
        told = [record for record in self._records if isinstance(record, traced.Described)]
        sizes = {(record.num_samples, record.batch_size) for record in told}
        sums = {record.checksum for record in told if record.checksum}
        if (found.num_samples, found.batch_size) not in sizes or (found.checksum and found.checksum not in sums):
            raise Differs(
                f"the data is other data: {found.num_samples} samples in batches of {found.batch_size} with the "
                f"checksum {found.checksum}, where the run had {sorted(sizes)} and {sorted(sums)}"
            )


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _interact(banner: str, names: dict[str, Any], told: Any, screen: Any) -> None:
    """Run a Python shell on other files than this process's input and output."""

    def ask(prompt: str = "") -> str:
        screen.write(prompt)
        screen.flush()
        line = told.readline()
        if not line:
            raise EOFError
        return str(line.rstrip("\n"))

    code.interact(banner, readfunc=ask, local=names, exitmsg="")
