"""One of several servers, not the first: it holds a part of the parameters and carries out the first one's orders."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paceline.aggregators import parse_aggregator
from paceline.codecs import parse_codec
from paceline.errors import CommError, WireError
from paceline.policies.messages import PushKind
from paceline.store.commit_rule import CommitRule
from paceline.store.double_buffer import DoubleBuffer
from paceline.store.gathering import adopt, examine
from paceline.store.in_place import with_differences
from paceline.store.layout import Arena, memory_of
from paceline.store.memory import HEAD, SharedMemory
from paceline.store.packets import PartPackets
from paceline.store.parameter_store import ParameterStore
from paceline.store.partition import layouts_of
from paceline.store.pending import PushKey, Share
from paceline.store.shard_state import load_state, norms_of, write_rows, write_state
from paceline.train_state import TrainState
from paceline.transport import messages as wire
from paceline.transport.listening import Ended, Heard, Listener, Peer
from paceline.transport.pieces import Pieces

_TICK = 0.2  # seconds between two checks for a request to stop
TIME_TO_BE_ENDED = 30.0  # seconds; if a server is killed, the supervisor ends and replaces all of them
_REMEMBERED = 8  # answers to orders


class _Part:
    """The part of a push that a worker of another host has sent."""

    def __init__(self, peer: Peer, laid: Arena, packing: PartPackets | None) -> None:
        self.peer, self.laid, self._packing = peer, laid, packing
        self.step = -1
        self._last: Tensor | None = None  # what the part is the difference to, if any
        self._decoded: Tensor | None = None  # and the next one
        self._packet = laid.memory if packing is None else torch.empty(packing.most_bytes, dtype=torch.uint8)
        peer.tensors = Pieces(memory_of(self._packet), at_most=packing is not None)

    def note(self, step: int) -> None:
        """Have the part of a step that has come; raise WireError if it is a packet that cannot be decoded."""
        self.step = -1
        if self._packing is not None:
            self._packing.unpack(self._packet[: self.peer.came], self.laid, self._last)
            self._decoded = self._packing.decoded()
        self.step = step

    def taken(self) -> None:
        """The part is of a push that was taken."""
        self._last = self._decoded


class ShardServer:
    """Server number ``shard`` (the first server is 0); the parameters of its part are in the memory ``file``.

    ``address`` is for workers of other hosts, if there are any. All orders come from the first server, over one
    connection. They are numbered; a repeated order is answered again, and not carried out again.
    """

    def __init__(
        self,
        train_state: TrainState,
        *,
        shard: int,
        servers: int,
        file: int,
        listener: Listener,
        address: str | None = None,
    ) -> None:
        self._train_state = replace(train_state, scaler=None)
        self._shard, self._servers = shard, servers
        self._layouts = layouts_of(train_state.model, servers)[shard]
        self._store: ParameterStore | None = None
        self._packing: PartPackets | None = None  # if pushes go through a codec
        self._shares: list[Share] = []  # of the next order that is of chosen pushes
        self._file, self._listener, self._address = file, listener, address
        self._memory: SharedMemory | None = None
        self._double_buffer: DoubleBuffer | None = None
        self._first: Peer | None = None  # the first server
        self._orders = 0  # number of orders carried out
        self._answers: dict[int, wire.Done] = {}  # to the last few orders
        self._slots: dict[int, Arena] = {}  # rank -> memory of its pushes, of workers of this host
        self._parts: dict[int, _Part] = {}  # by rank; kept after a worker has left, since its push may still count
        self._bytes: dict[str, list[int]] = {}  # by rank: of connections that others have taken the place of
        self._ended = False
        self._alone_since: float | None = None  # when the connection to the first server was lost

    def serve(self, asked_to_stop: Callable[[], bool]) -> None:
        """Serve until the first server ends the run; without a first server, until a stop is requested."""
        while not self._ended and not (self._is_alone() and asked_to_stop()):
            for peer, heard in self._listener.hear(_TICK):
                self._take_in(peer, heard)

    def _is_alone(self) -> bool:
        """Whether there is no first server: it has not connected yet, or was killed a moment ago."""
        if self._alone_since is not None and time.monotonic() > self._alone_since + TIME_TO_BE_ENDED:
            raise CommError("the first server is gone, which decides; look at its own output for the reason")
        return self._first is None or self._alone_since is not None

    def _take_in(self, peer: Peer, heard: Heard) -> None:
        try:
            match heard:
                case WireError():
                    raise heard
                case Ended():
                    self._listener.forget(peer)
                    if peer is self._first:
                        self._alone_since = time.monotonic()
                case wire.Begin() if self._first is None and not peer.remote:
                    self._first = peer
                    self._obey(heard)
                case wire.Attach():
                    self._attach(peer, heard.rank)
                case wire.Part():
                    self._note_part(peer, heard.step)
                case wire.Alive():
                    pass
                case _ if peer is self._first:
                    self._obey(heard)
                case _:
                    raise WireError(f"wanted a part of a push, found {type(heard).__name__}; the first server decides")
        except WireError as error:
            peer.send(wire.Refused(str(error)))

    # Workers -----------------------------------------------------------------------------------------------------

    def _attach(self, peer: Peer, rank: int) -> None:
        if rank in self._parts:
            self._bytes[str(rank)] = self._count_bytes()[str(rank)]
        self._parts[rank] = _Part(peer, Arena(self._layouts.up), self._packing)
        peer.send(wire.Took(0))

    def _count_bytes(self) -> dict[str, list[int]]:
        """By rank: the bytes that its connections have brought and taken."""
        counted = dict(self._bytes)
        for rank, part in self._parts.items():
            before, connection = counted.get(str(rank), [0, 0]), part.peer.connection
            counted[str(rank)] = [before[0] + connection.received, before[1] + connection.sent]
        return counted

    def _note_part(self, peer: Peer, step: int) -> None:
        for part in self._parts.values():
            if part.peer is peer:
                part.note(step)
                peer.send(wire.Took(step))

    def _part_of(self, rank: int, *, shared: bool) -> Arena:
        if not shared:
            return self._parts[rank].laid
        if rank not in self._slots:
            assert self._memory is not None
            self._slots[rank] = Arena(self._layouts.up, self._memory.slot(rank))
        return self._slots[rank]

    # Orders ------------------------------------------------------------------------------------------------------

    def _obey(self, order: wire.Message) -> None:
        """Carry out an order and answer it."""
        assert self._first is not None
        number = getattr(order, "number", 0)
        if number == self._orders + 1:
            self._answers[number] = self._carry_out(order)._replace(number=number)
            self._answers.pop(number - _REMEMBERED, None)
            self._orders = number
        if number not in self._answers:
            raise WireError(f"wanted order {self._orders + 1}, found {order}")
        self._first.send(self._answers[number])

    def _carry_out(self, order: wire.Message) -> wire.Done:
        done = wire.Done(0)
        match order:
            case wire.Begin():
                self._begin(order)
                return done._replace(result=(self._address or "").encode())
            case wire.Examine():
                return self._examine(order)
            case wire.Take():
                assert self._store is not None
                part, key = self._part_of(order.rank, shared=order.shared), PushKey(order.rank, order.step)
                if not order.shared:
                    self._parts[order.rank].taken()
                self._store.take(key, part, examples=order.examples, used=order.used, alone=order.alone)
            case wire.Choose():
                self._shares.append(Share(PushKey(order.rank, order.step), order.weight))
            case wire.Compare():
                return done._replace(value=self._compare())
            case wire.Ready():
                return done._replace(result=self._make_ready(order))
            case wire.Update():
                self._update(order)
            case wire.Decided():
                assert self._double_buffer is not None
                self._double_buffer.catch_up()
            case wire.Give():
                self._give(order)
            case wire.Tell():
                return done._replace(value=write_state(self._file, self._train_state, self._layouts))
            case wire.CountBytes():
                return done._replace(result=json.dumps(self._count_bytes()).encode())
            case wire.End():
                self._ended = True
            case _:
                raise WireError(f"wanted an order, found {type(order).__name__}")
        return done

    def _begin(self, order: wire.Begin) -> None:
        aggregator, kind = parse_aggregator(order.aggregator), PushKind(order.kind)
        codec = parse_codec(order.codec) if order.codec else None
        rule = CommitRule(adds_up=order.adds_up, aggregator=aggregator, kind=kind, codec=codec)
        self._train_state = rule.remembering(self._train_state)
        model, servers = self._train_state.model, self._servers
        self._layouts = layouts_of(model, servers, with_reads=rule.with_reads)[self._shard]
        self._packing = None if codec is None else PartPackets(codec, self._layouts, kind)
        down, up = self._layouts.down.nbytes, self._layouts.up.nbytes
        self._memory = SharedMemory(self._file, down=down, up=up, slots=order.workers)
        self._memory.version = order.version
        self._double_buffer = DoubleBuffer(self._file, self._train_state, self._memory.down, HEAD)
        self._store = ParameterStore(self._train_state, self._layouts, self._memory.down, rule)
        if order.state == 0:
            self._double_buffer.recover(self._double_buffer.note_of(order.version))
            adopt(self._layouts, self._memory.down, found=True)
        else:
            adopt(self._layouts, self._memory.down, found=True)
            load_state(self._file, order.state, self._train_state)
            self._double_buffer.begin(order.version, {})

    def _examine(self, order: wire.Examine) -> wire.Done:
        if not order.shared and (order.rank not in self._parts or self._parts[order.rank].step != order.step):
            return wire.Done(0, result=wire.MISSING_PART)
        amiss, checksum = examine(self._layouts, self._part_of(order.rank, shared=order.shared))
        return wire.Done(0, checksum, (amiss or "").encode())

    def _compare(self) -> int:
        assert self._store is not None
        rows = self._store.compare(self._shares)
        self._shares = []
        return write_rows(self._file, rows)

    def _make_ready(self, order: wire.Ready) -> bytes:
        assert self._double_buffer is not None and self._store is not None
        self._check_version(order.version - 1)
        # The first server makes no commit before the last one counts everywhere. What an aggregator remembers changes.
        self._double_buffer.before_update()
        self._store.combine(self._shares or None)
        self._shares = []
        return norms_of(self._layouts) if self._train_state.clip_norm is not None else b""

    def _update(self, order: wire.Update) -> None:
        """Make the commit; meanwhile the first server keeps workers of this host from reading."""
        assert self._memory is not None and self._double_buffer is not None and self._store is not None
        self._check_version(order.version - 1)
        self._listener.keep_what_waits()
        self._store.update(norm=order.norm)
        self._memory.version = order.version
        self._double_buffer.after_update(order.version, {})

    def _give(self, order: wire.Give) -> None:
        assert self._memory is not None
        self._check_version(order.version)
        part = self._parts.get(order.rank)
        if part is None:
            return  # it has left
        tensors = Pieces(memory_of(self._memory.down))
        if order.exchanged:
            tensors = with_differences(self._layouts, self._memory.down, part.laid)
        part.peer.send(wire.Parameters(order.version, order.exchanged), tensors)

    def _check_version(self, version: int) -> None:
        found = self._memory.version if self._memory is not None else None
        if found != version:
            raise WireError(f"an order for version {version}, and this server has {found}")
