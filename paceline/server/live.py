"""The live server: a policy driven by real workers.

One thread handles all messages, in the order of their arrival. An event (a worker joins, asks, pushes or leaves) goes
to the policy, and the server carries out the actions that the policy returns. The script's own optimizer makes the
commits, on parameters in memory that the workers of this host share.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.codecs import Codec
from paceline.errors import PacelineError, UsageError, WireError
from paceline.policies import messages as decided
from paceline.policies.messages import PushKind
from paceline.policies.server import ServerPolicy
from paceline.policies.state import NOT_YET
from paceline.record import trace as traced
from paceline.record.trace import TraceWriter
from paceline.server.averages import Averages
from paceline.server.demand import Demand
from paceline.server.kept_codecs import Kept, KeptCodecs
from paceline.server.members import Figures, GivenBatch, Member, Standing
from paceline.server.shards import Shards
from paceline.server.work_queue import WorkQueue
from paceline.store.behind import Behind
from paceline.store.commit_rule import CommitRule
from paceline.store.double_buffer import DoubleBuffer
from paceline.store.gathering import adopt, examine
from paceline.store.in_place import with_differences
from paceline.store.layout import Arena, ModelLayouts, memory_of
from paceline.store.memory import HEAD, SharedMemory
from paceline.store.packets import PartPackets
from paceline.store.parameter_store import ParameterStore
from paceline.store.pending import PushKey, Share, shares_of
from paceline.train_state import TrainState
from paceline.transport import messages as wire
from paceline.transport.listening import Ended, Heard, Listener, Peer
from paceline.transport.pieces import Pieces

logger = logging.getLogger("paceline")

_TICK = 0.2  # seconds between two looks at whether we are asked to stop
_LONGEST_ABSENCE = 600.0  # seconds that workers from elsewhere have to miss a server that was replaced, and come back
_LONGEST_READ = 1.0  # seconds that a worker may take to copy the parameters, beside their size
_SLOWEST_COPY = 2**30  # bytes in a second
_MOST_EXAMPLES = 2**32  # of one push: its gradients are multiplied by them
_MOST_LOCAL_STEPS = 2**63  # a worker makes fewer; a message has to hold their number
_MOST_LEFT_OUT = 50  # commits in a row that are too small for the aggregator
_LONGEST_REASON = 2000  # characters: names in it come from others, and a message has to hold it


class CommitSummary(NamedTuple):
    """One commit, for the metrics."""

    version: int  # after it
    epoch: int
    workers: list[int]
    staleness: list[int]
    waited: list[float]  # seconds from each push to the commit
    examples: int
    loss: float | None  # mean over the pushes that have one
    rate: float
    seconds: float  # of the update
    bytes: int  # of tensors pushed and sent since the commit before, by all workers, as a codec leaves them


class Host(Protocol):
    """What the server calls in the process that runs it."""

    def rate(self) -> float: ...
    def committed(self, commit: CommitSummary) -> None: ...
    def write_down(self) -> None: ...
    def save(self, path: Path | None) -> Path | None: ...
    def note(self, event: str, values: dict[str, Any]) -> None: ...


class LiveServer:
    """Serve ``train_state`` under ``policy`` to ``workers`` workers; those of this host share ``memory``.

    When all workers that have joined have left, the server waits ``patience`` seconds for the others. ``found`` is the
    note of a killed server in that memory (see ``read_note``); this one continues from it. ``shards`` are the other
    servers, which hold the rest of the parameters and which this one directs. With a ``codec`` pushes come as packets,
    from workers of this host too, so that a run has the same bits wherever its workers are. ``codec_state`` is what
    ``codec_state()`` gave in a run that is resumed.
    """

    def __init__(
        self,
        train_state: TrainState,
        policy: ServerPolicy,
        *,
        workers: int,
        patience: float = math.inf,
        memory: int,
        queue: WorkQueue,
        version: int,
        seed: int,
        listener: Listener,
        host: Host,
        trace: TraceWriter | None = None,
        found: Mapping[str, Any] | None = None,
        shards: Shards | None = None,
        codec: Codec | None = None,
        codec_state: Mapping[str, Any] | None = None,
    ) -> None:
        self._train_state = replace(train_state, scaler=None)  # pushes are not scaled
        self._shards = shards
        self._policy, self._host, self._listener = policy, host, listener
        self._trace: Callable[[traced.Record], None] = trace.append if trace is not None else lambda _: None
        self._tracer = trace
        self._model = ModelLayouts.describe(train_state.model)
        self._rule = CommitRule.of(policy, codec, servers=1 if shards is None else 1 + len(shards.addresses))
        with_reads = self._rule.with_reads
        self._layouts = ModelLayouts(train_state.model, with_reads=with_reads) if shards is None else shards.layouts
        self._num_trained = len(self._layouts.trained) if shards is None else shards.num_trained
        self._packing = None if codec is None else PartPackets(codec, self._layouts, policy.kind)
        self._kept_codecs = None
        if codec is not None:
            parts = [self._layouts] if shards is None else shards.all_layouts
            self._kept_codecs = KeptCodecs(codec, parts, policy.kind, memory, codec_state or {})
            if codec_state is not None and self._rule.codec_remembers and (lost := self._kept_codecs.lost(workers)):
                ranks = ", ".join(map(str, lost))
                logger.warning("version %d: what codec %s has kept back on workers %s is lost", version, codec, ranks)
        self._up_bytes = self._layouts.up.nbytes if shards is None else shards.up_bytes
        self._down_bytes = self._layouts.down.nbytes if shards is None else shards.down_bytes
        self._workers, self._patience = workers, patience
        self._seed = seed % 2**63  # fits into a message; torch's own seeds have 64 bits
        self._memory = SharedMemory(
            memory, down=self._layouts.down.nbytes, up=self._layouts.up.nbytes, slots=workers, create=True
        )
        self._state = policy.begin(workers)
        self._state.version = version
        self._queue = queue
        self._began = time.monotonic()
        self._averages = Averages()
        self._lives: dict[int, int] = {}  # the last incarnation of each rank
        self._double_buffer = DoubleBuffer(memory, self._train_state, self._memory.down, HEAD)
        if found is not None:
            self._take_over(found)
        adopt(self._layouts, self._memory.down, found=found is not None)
        self._parameters = self._layouts.down.views(self._memory.down)
        self._memory.version = version
        self._memory.wrote()  # though one who was killed may not have got so far
        self._store = ParameterStore(self._train_state, self._layouts, self._memory.down, self._rule)
        self._members: dict[int, Member] = {}
        self._remembering: dict[int, Member] = {}  # the last of each rank whose codec's memory is of this host
        self._by_peer: dict[Peer, Member] = {}
        self._figures: dict[int, Figures] = {}
        self._num_bytes = 0  # of tensors moved since the last commit
        self._asking: dict[int, None] = {}  # ranks that the policy is told of when all others ask too
        self._todo: deque[decided.Action] = deque()
        self._arrived: dict[decided.Push, float] = {}  # pushes not committed yet -> time of arrival
        self._start_epoch = queue.epoch
        self._saves: list[tuple[Peer, str]] = []
        self._left_at: float | None = None  # when a worker last left because it was done
        self._left_out = 0  # commits in a row that were too small for the aggregator
        if found is not None and math.isfinite(patience):
            # All workers may have left already, or may leave unnoticed.
            self._patience, self._left_at = max(patience, _LONGEST_ABSENCE), self._now()
        self._trace(traced.Began(version, found is not None))
        if found is None:
            self._double_buffer.begin(version, self._note())

    def serve(self, asked_to_stop: Callable[[], bool]) -> bool:
        """Serve until all workers have left, or a stop is requested; True if the workers have left."""
        while not asked_to_stop():
            for peer, heard in self._listener.hear(_TICK):
                self._take_in(peer, heard)
            if self._shards is not None:
                self._shards.decided()
            self._double_buffer.catch_up()  # while the workers compute
            self._host.write_down()
            if not self._members and self._left_at is not None and not self._awaits_more(self._left_at):
                return True
        for member in self._members.values():
            member.peer.send(wire.Refused("the run was asked to stop"))
        return False

    def _awaits_more(self, since: float) -> bool:
        return NOT_YET in self._state.members.values() and self._now() < since + self._patience

    def worker_is_gone(self, rank: int) -> None:
        """Record that a worker, which may never have joined, will not come (again)."""
        if rank in self._members:
            self._leave(self._members[rank])
        elif rank in self._state.members:
            self._do(self._policy.left(self._state, rank, self._now()))
        if not self._members and NOT_YET not in self._state.members.values():
            self._left_at = self._now()
        self._settle()

    def figures(self) -> dict[int, dict[str, Any]]:
        """The figures of every worker."""
        for member in self._members.values():
            self._count_bytes(member)
        return {rank: figures.as_dict() for rank, figures in sorted(self._figures.items())}

    def count_bytes_of_others(self) -> None:
        """Have in the figures, at the end, the bytes of the workers' connections to the other servers."""
        for rank, received, sent in () if self._shards is None else self._shards.count_bytes():
            figures = self._figures.setdefault(rank, Figures())
            figures.received, figures.sent = figures.received + received, figures.sent + sent

    def _count_bytes(self, member: Member) -> None:
        """Have the bytes of a member's connection in its figures; those of its earlier ones are there."""
        connection, figures = member.peer.connection, member.figures
        figures.received += connection.received - member.counted[0]
        figures.sent += connection.sent - member.counted[1]
        member.counted = connection.received, connection.sent

    # Messages -----------------------------------------------------------------------------------------------

    def _take_in(self, peer: Peer, heard: Heard) -> None:
        member = self._by_peer.get(peer)
        try:
            if isinstance(heard, WireError):
                raise heard
            if isinstance(heard, wire.Hello):
                if member is not None:
                    raise WireError(f"this connection has joined already, as worker {member.rank}")
                self._join(peer, heard)
            elif isinstance(heard, Ended):
                self._listener.forget(peer)
                if member is not None:
                    self._leave(member)
            elif member is None:
                peer.send(wire.Unknown())
            else:
                self._hear(member, heard)
        except (WireError, UsageError) as error:
            who = "a peer" if member is None else f"worker {member.rank}"
            reason = str(error)[:_LONGEST_REASON]
            logger.warning("refused %s: %s", who, reason)
            if member is not None:
                member.figures.refused += 1
            peer.send(wire.Refused(reason))
            if member is not None:
                self._leave(member)
        self._settle()

    def _hear(self, member: Member, message: wire.Message) -> None:
        match message:
            case wire.PushMessage():
                self._take_push(member, message)
            case wire.Ask():
                self._take_ask(member, message)
            case wire.Skip():
                if message.step == member.step:
                    self._trace(traced.Skipped(member.rank, message.step, message.version))
                    self._go_on_without(member, member.given[-1:])
            case wire.More():
                self._give_more(member, message)
            case wire.Data():
                self._describe(message)
            case wire.Mean():
                self._take_mean(member, message)
            case wire.Save():
                self._saves.append((member.peer, message.path))
            case wire.Record():
                if member.rank == min(self._members):  # all workers send the same
                    self._host.note(message.event, {**_values_of(message), "worker": member.rank})
            case wire.Leave():
                if not message.failed:
                    self._left_at = self._now()
                self._listener.forget(member.peer)
                self._leave(member, dead=message.failed, version=message.version)
                self._note_down()
            case wire.Alive():
                pass
            case _:
                raise WireError(f"wanted a message of a worker, found {type(message).__name__}")

    def _describe(self, data: wire.Data) -> None:
        known = self._queue.described
        self._queue.describe(data.num_samples, data.batch_size, data.last, data.shuffle)
        if data.checksum or not known:
            self._trace(traced.Described(data.num_samples, data.batch_size, data.checksum))

    def _join(self, peer: Peer, hello: wire.Hello) -> None:
        self._check_model(hello)
        rank = self._rank_for(hello)
        local = hello.local and rank < self._workers and not peer.remote and self._packing is None
        gradients = Arena(self._layouts.up, self._memory.slot(rank) if local else None)
        packets = None if self._packing is None else torch.empty(self._packing.most_bytes, dtype=torch.uint8)
        if not local:
            peer.tensors = Pieces(
                memory_of(gradients.memory if packets is None else packets), at_most=packets is not None
            )
        if not peer.remote and not self._listener.watch(peer, hello.pid):
            return  # its process has ended
        if rank in self._members:  # its earlier connection was lost, or its death not noticed
            self._listener.forget(self._members[rank].peer)
            self._leave(self._members[rank])
        figures = self._figures.setdefault(rank, Figures())
        member = Member(
            rank=rank,
            peer=peer,
            gradients=gradients,
            packets=packets,
            behind=self._new_behind(rank),
            local=local,
            figures=figures,
            incarnation=hello.incarnation,
        )
        if self._queue.epoch > self._start_epoch:
            member.first_epoch = self._queue.epoch
        kept = self._hand_over_memory(member, of_this_host=hello.local and rank < self._workers and not peer.remote)
        self._members[rank] = self._by_peer[peer] = member
        if member.remembers is not None:
            self._remembering[rank] = member
        self._enter(member)
        self._trace(traced.Joined(rank, member.life, self._now(), self._queue.epoch, kept))
        self._host.note("joined", {"worker": rank, "incarnation": member.incarnation})
        peer.send(
            wire.Welcome(
                rank=rank,
                world_size=self._workers,
                seed=self._seed,
                version=self._memory.version,
                incarnation=member.life,
                slots=self._workers,
                epoch=self._queue.epoch,
                shards=self._addresses_for(peer),
                with_reads=self._rule.with_reads,
                kind=self._policy.kind.value,
                local_steps=min(self._policy.local_steps, _MOST_LOCAL_STEPS),
                coded=self._policy.coded,
                local_momentum=self._policy.local_momentum,
                codec="" if self._rule.codec is None else str(self._rule.codec),
                packet_parts=1 if self._shards is None else 1 + len(self._shards.addresses),
                kept=kept,
            )
        )

    def _hand_over_memory(self, member: Member, *, of_this_host: bool) -> bool:
        """Have a worker's codec go on with what was kept of it in a run that is resumed; False if nothing was."""
        if self._kept_codecs is None:
            return False
        if of_this_host:
            member.remembers = self._kept_codecs.memory_of(member.rank)
        return self._kept_codecs.hand_over(member.rank, member.remembers, member.behind)

    def codec_state(self) -> dict[str, Any]:
        """What the codecs remember of the pushes that are committed, for a checkpoint; of workers of this host."""
        if self._kept_codecs is None:
            return {}
        found = {rank: self._remembered(member) for rank, member in self._remembering.items()}
        return self._kept_codecs.state_dict({rank: kept for rank, kept in found.items() if kept is not None})

    def _remembered(self, member: Member) -> Kept | None:
        """None if nobody knows: a worker that goes on before its pushes are committed remembers more than these."""
        if member.remembers is None:
            return None
        if not any((push.worker, push.step) == (member.rank, member.taken) for push in self._arrived):
            found = member.remembers.after(member.taken)
        else:
            found = member.remembers.before(member.taken) if member.pushed_at is not None else None
        down = member.behind.remembered() if member.behind is not None else []
        return None if found is None else Kept(found, down)

    def _new_behind(self, rank: int) -> Behind | None:
        codec = self._rule.codec
        return Behind(codec, self._layouts, seed=self._seed, rank=rank) if codec is not None and codec.both else None

    def _addresses_for(self, peer: Peer) -> tuple[str, ...]:
        if self._shards is None:
            return ()
        return self._shards.remote_addresses if peer.remote else self._shards.addresses

    def _check_model(self, hello: wire.Hello) -> None:
        theirs = tuple(tuple(entry) for entry in hello.model)
        for index, (wanted, found) in enumerate(zip(self._model, theirs, strict=False)):
            if wanted != found:
                raise WireError(f"another model than the server's: tensor {index} is {found}, and {wanted} here")
        if len(theirs) != len(self._model):
            raise WireError(
                f"another model than the server's: it has {len(theirs)} tensors, and {len(self._model)} here"
            )

    def _rank_for(self, hello: wire.Hello) -> int:
        if hello.rank >= 0:
            return hello.rank
        expected = [rank for rank, life in self._state.members.items() if life == NOT_YET]
        return min(expected, default=max([self._workers - 1, *self._lives]) + 1)

    def _enter(self, member: Member) -> None:
        """Report a member to the policy as a new incarnation."""
        member.life = self._lives[member.rank] = self._lives.get(member.rank, -1) + 1
        self._do(self._policy.joined(self._state, member.rank, member.life, self._now()))

    def _leave(self, member: Member, *, dead: bool = True, version: int = 0) -> None:
        if self._members.get(member.rank) is not member:
            return
        self._trace(traced.Left(member.rank, dead, self._now(), version))
        self._host.note("left", {"worker": member.rank, "incarnation": member.incarnation, "dead": dead})
        del self._members[member.rank], self._by_peer[member.peer]
        self._asking.pop(member.rank, None)
        self._count_bytes(member)
        member.figures.forgotten += dead and self._rule.codec_remembers
        self._queue.give_back(member.rank)
        if member.standing is Standing.IN_ROUNDS:
            self._do(self._policy.left(self._state, member.rank, self._now()))

    def _take_ask(self, member: Member, message: wire.Ask) -> None:
        demand = Demand(message.epochs)
        if demand.batches and not self._queue.described:
            raise WireError("a batch was asked for, and nobody has said what the data is")
        if demand.own_data and self._policy.coded:
            raise WireError(
                f"steps on data of one's own were asked for, and under {self._policy} workers share batches"
            )
        self._trace(traced.Asked(member.rank, message.epochs, message.version))
        member.demand, member.ask = demand, message.number
        self._queue.give_back(member.rank)
        self._end_rest(member)
        self._asking[member.rank] = None
        if not (self._policy.needs_all and self._has_batch_for(member)):
            self._pass_on_asks()

    def _pass_on_asks(self) -> None:
        """Tell the policy who asks, in the order of ranks."""
        asking, self._asking = sorted(self._asking), {}
        for rank in asking:
            self._do(self._policy.asked(self._state, rank, self._now()))

    def _begin_round(self) -> None:
        """Let the first round of an epoch begin when all ask for it: so the batch of each depends on its rank alone.

        Nobody waits longer for it, since the round ends when all have pushed.
        """
        state = self._state
        others = [rank for rank in state.members if rank not in self._asking]
        if self._asking and (not others or state.under_way or state.pending):
            self._pass_on_asks()

    def _take_push(self, member: Member, message: wire.PushMessage) -> None:
        now = self._now()
        if message.version > self._state.version:
            raise WireError(f"a push on version {message.version}, and the newest is {self._state.version}")
        if message.examples > _MOST_EXAMPLES:
            raise WireError(f"a push of {message.examples} examples, and there can be {_MOST_EXAMPLES} at most")
        if len(message.used) != -(-self._num_trained // 8):
            raise WireError(f"a push that tells of {8 * len(message.used)} parameters, of {self._num_trained}")
        member.pushed_at, member.exchanges, member.exchanged = now, -1, False
        member.figures.bytes_in += self._up_bytes
        self._num_bytes += self._up_bytes if member.packets is None else self._as_sent(member.peer.came)
        loss = None if math.isnan(message.loss) else message.loss
        push = decided.Push(member.rank, member.life, message.step, message.version, message.examples, loss)
        checksum, decoded = 0, None
        if message.step == member.step:
            decoded = self._unpack(member)
            amiss, checksum = self._examine(member, message)
            if amiss is not None:
                self._trace(traced.NotFinite(member.rank, message.step, message.version))
                self._refuse_numbers(member, message.step, amiss)
                return
        actions = self._policy.pushed(self._state, push, now)
        if any(isinstance(action, decided.Drop) for action in actions):
            self._trace(traced.Late(member.rank, message.step, message.version))
            member.figures.dropped += 1
            if message.step == member.step:
                self._queue.give_back(member.rank)
            self._do(actions)
            return
        self._queue.push(member.rank, message.step)
        member.exchanges = member.taken = message.step
        member.last = decoded
        member.figures.pushes += 1
        member.figures.examples += message.examples
        member.figures.computing_seconds += message.seconds
        self._trace(
            traced.Pushed(member.rank, message.step, message.version, message.examples, message.loss, checksum, now)
        )
        self._arrived[push] = now
        self._double_buffer.taken(len(self._arrived))
        first = actions[0] if actions else None
        alone = message.examples > 0 and isinstance(first, decided.Commit) and first.pushes == (push,)
        self._store_push(member, message, alone=alone)
        self._do(actions)

    def _as_sent(self, packet: int) -> int:
        """The bytes of the packets to all servers, of which that to this one has so many: about, by their parts."""
        return round(packet * self._up_bytes / max(1, self._layouts.up.nbytes))

    def _store_push(self, member: Member, push: wire.PushMessage, *, alone: bool) -> None:
        """Put a push into the store, and its parts into those of the other servers, before its worker goes on."""
        key, examples = PushKey(member.rank, push.step), push.examples
        if self._shards is not None:
            self._shards.take(key, examples, push.used, shared=member.local, alone=alone)
        self._store.take(key, member.gradients, examples=examples, used=push.used, alone=alone)
        if self._shards is not None and not alone:
            self._shards.settle()

    def _unpack(self, member: Member) -> Tensor | None:
        """Have a push in its memory, if it came as a packet; return what the next one is the difference to, if any."""
        if self._packing is None or member.packets is None:
            return None
        self._packing.unpack(member.packets[: member.peer.came], member.gradients, member.last)
        return self._packing.decoded()

    def _examine(self, member: Member, push: wire.PushMessage) -> tuple[str | None, int]:
        """Name what is not finite in a push, if anything, and return its checksum; every server checks its own part.

        A worker of this host checks its gradients when it copies them. If it found nothing, they are not checked again.
        """
        if member.local and push.finite:
            return None, push.checksum
        if self._shards is None:
            return examine(self._layouts, member.gradients)
        self._shards.begin_examining(member.rank, push.step, shared=member.local)
        amiss, checksum = examine(self._layouts, member.gradients)
        elsewhere, rest = self._shards.end_examining()
        return amiss or elsewhere, (checksum + rest) % 2**64

    def _take_mean(self, member: Member, message: wire.Mean) -> None:
        """Take a worker's part of a mean, and the worker out of the rounds: else it and others wait for each other."""
        self._averages.add(member.rank, message)
        self._asking.pop(member.rank, None)
        if member.standing is Standing.RESTING:
            member.standing = Standing.AVERAGING_AT_REST
        elif member.standing is Standing.IN_ROUNDS:
            member.standing = Standing.AVERAGING
            self._queue.give_back(member.rank)
            self._do(self._policy.left(self._state, member.rank, self._now()))

    def _refuse_numbers(self, member: Member, step: int, name: str) -> None:
        """Leave out a push that is not finite: its batch counts as used, and the worker goes on."""
        reason = f"step {step} of worker {member.rank}: the gradient of {name} is not finite; it is left out"
        logger.warning("%s", reason)
        member.figures.refused += 1
        member.peer.send(wire.Warned(reason))
        self._go_on_without(member, member.batches)

    def _go_on_without(self, member: Member, spoilt: Sequence[GivenBatch]) -> None:
        """Go on after a step that came to nothing: its batches count as used; of a round's the spoilt ones."""
        self._queue.use(member.rank)
        if self._policy.coded:
            self._queue.spoil((each.epoch, each.number) for each in spoilt)
        self._do(self._policy.skipped(self._state, member.rank, self._now()))

    def _give_more(self, member: Member, message: wire.More) -> None:
        if message.step != member.step or member.demand is None:
            return  # cancelled; the next step has been sent
        if self._policy.coded:
            given = member.parts.popleft() if member.parts else GivenBatch()
        else:
            given = GivenBatch(*(self._queue.take(member.rank, member.demand) or ()))
        self._trace(traced.GivenMore(member.rank, message.step, *given))
        member.peer.send(wire.BatchMessage(message.step, *given))

    # Actions -------------------------------------------------------------------------------------------------

    def _do(self, actions: decided.Actions) -> None:
        """Carry out actions in order, then those that they cause."""
        busy = bool(self._todo)
        self._todo.extend(actions)
        while self._todo and not busy:
            self._carry_out(self._todo[0])
            self._todo.popleft()

    def _carry_out(self, action: decided.Action) -> None:
        match action:
            case decided.Commit():
                self._commit(action)
            case decided.Send():
                works = [*zip_longest(action.workers, action.work)]
                for rank, work in sorted(works) if self._policy.needs_all else works:
                    self._send_step(self._members[rank], action.step, fresh=True, work=work)
            case decided.Continue():
                self._send_step(self._members[action.worker], action.step, fresh=False)
            case decided.Cancel():
                now = self._now()
                for rank in action.workers:
                    member = self._members[rank]
                    member.figures.cancelled += 1
                    member.figures.thrown_away_seconds += now - member.step_began
                    self._trace(traced.Cancelled(rank, member.step))
                    self._queue.give_back(rank)

    def _send_step(self, member: Member, step: int, *, fresh: bool, work: decided.Work | None = None) -> None:
        now = self._now()
        if work is not None and self._state.under_way.get(member.rank) != step:
            return  # what earlier actions have caused has ended the step
        batches = self._batches_for(member, work)
        if batches is None:
            self._let_rest(member)
            return
        if not batches:
            self._do(self._policy.idle(self._state, member.rank, now))
            return
        first, *rest = batches
        member.batches, member.parts = batches, deque(rest)
        if member.pushed_at is not None:
            member.figures.waiting_seconds += now - member.pushed_at
            member.pushed_at = None
        member.step, member.step_began = step, now
        version, more = self._memory.version, len(rest)
        lacks_all = member.behind is not None and member.behind.lacks_all
        packet = self._packet_for(member) if fresh else None
        has_packet = packet is not None
        self._trace(
            traced.Given(member.rank, step, version, fresh, first.epoch, first.number, more, first.weight, has_packet)
        )
        tensors = packet
        if fresh and packet is None:
            tensors = self._parameters_for(member, exchanged=member.exchanged)
        member.figures.bytes_out += self._down_bytes if fresh else 0
        if fresh:
            self._num_bytes += self._down_bytes if packet is None else self._as_sent(packet.nbytes)
        go = wire.Go(
            step,
            version,
            fresh,
            first.epoch,
            first.number,
            member.ask,
            exchanged=member.exchanges if member.exchanged else -1,
            taken=member.taken,
            more=more,
            weight=first.weight,
            packet=has_packet and not lacks_all,
        )
        member.peer.send(go, tensors)

    def _batches_for(self, member: Member, work: decided.Work | None) -> list[GivenBatch] | None:
        """The batches of a member's step: none if its parts of a round are empty, None if no batch is left."""
        demand = member.demand
        if demand is None or demand.own_data:
            return [GivenBatch()]
        if not demand.batches:
            return None
        if work is None:
            taken = self._queue.take(member.rank, demand)
            return None if taken is None else [GivenBatch(*taken)]
        found = self._queue.take_round(work.round, work.num_parts, self._epochs_of_round(demand))
        if any(batch.epoch >= demand for batch in found):
            return None
        total = sum(batch.examples for batch in found)
        return (
            [
                GivenBatch(found[part].epoch, found[part].number, coefficient * found[part].examples / total)
                for part, coefficient in work.parts
                if part < len(found)
            ]
            if found
            else None
        )

    def _epochs_of_round(self, demand: Demand) -> Demand:
        """The epochs of a round for a member with this demand: those of which the others want batches come first."""
        demands = [member.demand for member in self._members.values() if member.demand is not None]
        earlier = [each for each in demands if each.batches and each < demand and not self._queue.finished(each)]
        return min(earlier, default=demand)

    def _let_rest(self, member: Member) -> None:
        """Take a member for which there is no batch out of the rounds."""
        member.standing = Standing.RESTING
        self._do(self._policy.left(self._state, member.rank, self._now()))

    def _end_rest(self, member: Member) -> None:
        """Let a member that rests take part in rounds again, at once or after the mean that it waits for."""
        if member.standing is Standing.AVERAGING_AT_REST:
            member.standing = Standing.AVERAGING
        elif member.standing is Standing.RESTING:
            member.standing = Standing.IN_ROUNDS
            self._enter(member)

    def _parameters_for(self, member: Member, *, exchanged: bool = False) -> Pieces | None:
        """The parameters to send to a member, or None if it shares memory; unsent bytes are copied before a commit.

        ``exchanged``: what its last push has become is sent in the place of those that are trained.
        """
        if member.local:
            return None
        if self._shards is not None:
            self._shards.give(member.rank, self._memory.version, exchanged=exchanged)
        if exchanged:
            return with_differences(self._layouts, self._memory.down, member.gradients)
        return Pieces(memory_of(self._memory.down))

    def _packet_for(self, member: Member) -> Pieces | None:
        """What brings a member near to the newest parameters, or None if all of them have to be sent.

        So it is at first, and if something waits to be sent: what is sent now may take its place. One that goes on from
        an earlier run is sent all that it has after the packet, in place of the packet.
        """
        behind = member.behind
        if behind is None:
            return None
        packet, lacks_all = None, behind.lacks_all
        if not member.peer.connection.waits:
            packet = behind.encode(self._parameters, version=self._memory.version)
        if packet is None:
            behind.take_all(self._parameters, version=self._memory.version)
            return None
        if lacks_all:
            return behind.all_pieces(self._memory.down, self._layouts.down)
        return behind.pieces(packet, self._parameters)

    def _commit(self, commit: decided.Commit) -> None:
        self._listener.keep_what_waits()
        self._keep_from_reading()
        began = time.monotonic()
        rate = self._host.rate()
        self._double_buffer.before_update()
        shares = shares_of(commit)
        if self._shards is None:
            counts = self._store.commit(shares)
        else:
            counts = self._commit_with_others(self._shards, shares)
        if self._rule.kind is PushKind.PARAMETERS:
            self._note_exchanges(shares)
        self._memory.version += 1
        self._queue.commit([share.push for share in shares])
        examples = sum(push.examples for push in commit.pushes)
        if self._policy.coded:
            examples = self._queue.end_round(used=counts)
        for share in () if self._policy.adds_up else shares:
            self._trace(traced.Chose(*share.push, share.weight, share.group))
        self._trace(traced.Committed(self._memory.version, len(commit.pushes), self._now()))
        if counts:
            self._left_out = 0
        else:
            self._tell_of_left_out(commit)
        waiting = len(self._arrived) - len(shares)
        self._double_buffer.after_update(self._memory.version, self._note(), waiting)
        self._memory.wrote()  # not after a failure: then the parameters may be incomplete
        self._tell(commit, examples, rate, time.monotonic() - began)

    def _note_exchanges(self, shares: list[Share]) -> None:
        """Note whose pushes have become differences; one that has joined again since its push takes none."""
        for share in shares:
            member = self._members.get(share.push.worker)
            if member is not None and member.exchanges == share.push.step:
                member.exchanged = True

    def _tell_of_left_out(self, commit: decided.Commit) -> None:
        """Tell of a commit that the store has left out, unless its pushes have no examples.

        At the end of the data and after deaths there are such commits; a run that makes no others learns nothing.
        """
        aggregator, pushes = self._rule.aggregator, sum(weight != 0 for weight in commit.weights)
        advice = f"{len(self._members)} workers are left: start the run again with more, from its last checkpoint"
        if pushes >= aggregator.least:
            reason = f"a commit of {pushes} pushes is left out, since too few agree for aggregator {aggregator}"
            advice = (
                "workers of a group must compute the same bits: have they the same processor, torch and number of "
                "threads, and is the script deterministic? Or more of them are wrong than the policy bears"
            )
        elif pushes:
            reason = f"a commit of {pushes} pushes is left out, since aggregator {aggregator} needs {aggregator.least}"
        elif self._policy.coded:
            reason = f"{len(commit.pushes)} pushes are left out, since they do not give the gradient of their round"
        else:
            return
        self._left_out += 1
        logger.warning("version %d: %s", self._memory.version, reason)
        if self._left_out > _MOST_LEFT_OUT:
            raise PacelineError(
                f"version {self._memory.version}: {reason}, and so were the {_MOST_LEFT_OUT} before it; {advice}"
            )

    def _keep_from_reading(self) -> None:
        """Keep workers from reading until the commit is made; do not wait for one that is stopped."""
        longest = _LONGEST_READ + self._down_bytes / _SLOWEST_COPY
        for rank in self._memory.begin_writing(longest):
            logger.warning(
                "worker %d has been copying the parameters for more than %.0f s; is it stopped? Commits go on, and it "
                "has to read them again",
                rank,
                longest,
            )

    def _commit_with_others(self, shards: Shards, shares: list[Share]) -> bool:
        """Make our part of a commit while the other servers make theirs; False if no push counts."""
        version = self._memory.version + 1
        if self._rule.compares:
            shares = self._weigh_with_others(shards, shares)
        shards.ready(version, () if self._policy.adds_up and not self._rule.compares else shares)
        counts = self._store.combine(shares)
        self._store.update(norm=shards.update(version))
        shards.settle()
        return counts

    def _weigh_with_others(self, shards: Shards, shares: list[Share]) -> list[Share]:
        """Give the pushes of a commit their weights, by what all servers say of each pair."""
        if sum(share.weight != 0 for share in shares) < 2:  # without pairs
            return self._store.weigh(shares, [])
        shards.begin_comparing(shares)
        rows = self._store.compare(shares)
        return self._store.weigh(shares, [rows, *shards.end_comparing()])

    def _tell(self, commit: decided.Commit, examples: int, rate: float, seconds: float) -> None:
        """Report a commit; the policy's version may be ahead of it, since it counts decisions."""
        now, version = self._now(), self._memory.version
        staleness = [version - 1 - push.version for push in commit.pushes]
        for push, stale in zip(commit.pushes, staleness, strict=True):
            self._figures[push.worker].staleness += stale
        told = [(push.loss, push.examples) for push in commit.pushes if push.loss is not None and push.examples]
        weight = sum(examples for _, examples in told)
        self._host.committed(
            CommitSummary(
                version=version,
                epoch=self._queue.epoch,
                workers=[push.worker for push in commit.pushes],
                staleness=staleness,
                waited=[round(now - self._arrived.pop(push), 6) for push in commit.pushes],
                examples=examples,
                loss=sum(loss * examples for loss, examples in told) / weight if weight else None,
                rate=rate,
                seconds=seconds,
                bytes=self._num_bytes,
            )
        )
        self._num_bytes = 0

    def _note(self) -> dict[str, Any]:
        """What a replacement of this server needs beside the tensors."""
        return {
            "queue": self._queue.state_dict(),
            "policy": {**self._state.carry(), "version": self._memory.version},
            "at": self._now(),
            "seed": self._seed,
            "traced": self._tracer.flush() if self._tracer is not None else None,
            "means": self._averages.told(),
            "gone": [rank for rank in range(self._workers) if rank in self._lives and rank not in self._members],
        }

    def _note_down(self) -> None:
        """Write the note again, for a change or an answer that is no commit."""
        self._double_buffer.note_again(self._memory.version, self._note())

    def _take_over(self, found: Mapping[str, Any]) -> None:
        """Continue from the note of a killed server."""
        self._double_buffer.recover(found)
        self._queue.load_state_dict(found["queue"])
        self._state.take_over(found["policy"])
        self._began -= found["at"]
        self._averages.know(found["means"])
        for rank in found["gone"]:
            self._lives[rank] = NOT_YET
            self._policy.left(self._state, rank, self._now())

    # Answers that wait for other workers ---------------------------------------------------------------------

    def _settle(self) -> None:
        """Answer what waits for other workers: rounds, means, ends of epochs, checkpoints."""
        self._begin_round()
        self._tell_means()
        self._wake_for_returned()
        self._end_epochs()
        self._save()

    def _tell_means(self) -> None:
        if not self._averages:
            return
        sure_to_come = math.isinf(self._patience)
        expected = [rank for rank, life in self._state.members.items() if life == NOT_YET and sure_to_come]
        for key, values, ranks in self._averages.ready(self._members.values(), expected):
            told = [self._members[rank] for rank in ranks if rank in self._members]
            for member in told:
                self._trace(traced.Averaged(member.rank, zlib.crc32(key.encode())))
            self._note_down()
            for member in told:
                member.peer.send(wire.Averaged(key, values))
                member.standing = Standing.RESTING if member.standing.rests else Standing.IN_ROUNDS
                if member.standing is Standing.IN_ROUNDS:
                    self._enter(member)
            self._asking |= {
                member.rank: None
                for member in told
                if member.standing is Standing.IN_ROUNDS and member.demand is not None
            }
            self._pass_on_asks()
        standings = [member.standing for member in self._members.values()]
        if self._averages and standings and not expected and all(standing.averages for standing in standings):
            raise PacelineError(
                f"version {self._memory.version}: all workers wait for means, and not for the same one: "
                f"{self._averages.waited_for()}. Call mean() as often on every worker, and after the same epochs; "
                "a worker that breaks out of the loop over its batches is still in that epoch"
            )

    def _save(self) -> None:
        for peer, path in self._saves:
            try:
                saved = self._host.save(Path(path) if path else None)
            except (PacelineError, OSError, ValueError) as error:  # ValueError: the path is invalid
                peer.send(wire.Refused(str(error)[:_LONGEST_REASON]))
            else:
                peer.send(wire.Saved(str(saved)))
        self._saves = []

    def _wake_for_returned(self) -> None:
        """Give batches that were given back to resting members, also those of a round that nobody is in."""
        state = self._state
        if self._policy.coded and not (state.under_way or state.waiting or state.pending):
            self._queue.end_round(used=False)
        for _, member in sorted(self._members.items()):
            if member.standing is Standing.RESTING and self._has_batch_for(member):
                self._end_rest(member)
                self._do(self._policy.asked(self._state, member.rank, self._now()))

    def _has_batch_for(self, member: Member) -> bool:
        return member.demand is not None and member.demand.batches and self._queue.has(member.demand)

    def _end_epochs(self) -> None:
        """Tell resting members that no batches are left, once all are used and committed."""
        if self._policy.coded:
            for member in self._held_back():  # they wait for another round, and there may be none
                self._let_rest(member)
        waiting = self._without_batches()
        if not waiting:
            return
        if any(member.demand is not None and member.demand.batches for member in waiting):
            self._do(self._policy.ended(self._state, self._now()))
            for member in self._held_back():  # they wait for a round that cannot be completed
                self._let_rest(member)
        done = self._without_batches()  # also those that waited for the commit
        for member in done:
            member.demand = None
            self._end_rest(member)  # all before the first asks again, or a round would be too small
        for member in done:
            self._trace(traced.Finished(member.rank, self._memory.version))
        self._note_down()
        for member in done:
            member.pushed_at = None
            member.figures.bytes_out += self._down_bytes
            self._num_bytes += self._down_bytes
            if member.behind is not None:
                member.behind.take_all(self._parameters)
            finished = wire.Finished(self._memory.version, member.ask, member.taken)
            member.peer.send(finished, self._parameters_for(member))

    def _without_batches(self) -> list[Member]:
        return [member for member in self._members.values() if member.standing.rests and self._has_used_all(member)]

    def _held_back(self) -> list[Member]:
        """Members without batches that the policy keeps waiting."""
        return [self._members[rank] for rank in self._state.waiting if self._has_used_all(self._members[rank])]

    def _has_used_all(self, member: Member) -> bool:
        """Whether all batches that a member has requested are used."""
        demand = member.demand
        return demand is not None and not demand.own_data and self._queue.finished(demand)

    def _now(self) -> float:
        return time.monotonic() - self._began


def _values_of(record: wire.Record) -> dict[str, Any]:
    try:
        values = json.loads(record.values)
    except (ValueError, RecursionError) as error:
        raise WireError(f"wanted the values of {record.event!r} as JSON: {error}") from None
    if not isinstance(values, dict):
        raise WireError(f"wanted the values of {record.event!r} as a JSON object, found {type(values).__name__}")
    return values
