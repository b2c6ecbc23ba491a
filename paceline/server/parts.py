"""A worker's access to the other servers, each of which holds a part of the parameters."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor, nn

from paceline.errors import CommError
from paceline.store.gathering import Filled, fill_push, read_parameters
from paceline.store.layout import Arena, ModelLayouts, memory_of
from paceline.store.memory import SharedMemory
from paceline.store.partition import layouts_of, starts_of
from paceline.transport import messages as wire
from paceline.transport.calling import call
from paceline.transport.connections import Connection
from paceline.transport.pieces import Pieces
from paceline.transport.wire import decode, encode

_TIME_TO_COME = 10.0  # seconds; the others have started before the first server accepts a worker
_VANISHED_AFTER = 4.0  # seconds without any answer of the servers' host
_TICK = 0.5


class ConnectionLost(Exception):
    """The connection to one of the other servers is lost."""


class _SharedPart:
    """A part in memory that this host's processes share."""

    def __init__(self, layouts: ModelLayouts, file: int, *, slots: int, rank: int) -> None:
        self._layouts = layouts
        self._memory = SharedMemory(file, down=layouts.down.nbytes, up=layouts.up.nbytes, slots=slots)
        self._gradients = Arena(layouts.up, self._memory.slot(rank))
        self._parameters = layouts.down.views(self._memory.down)

    def begin_push(self, step: int) -> Filled:
        return fill_push(self._layouts, self._gradients)

    def end_push(self, step: int) -> None: ...

    def receive(self, version: int, *, exchanged: bool) -> int:
        return version if exchanged else self._memory.version

    def read(self) -> None:
        read_parameters(self._layouts, self._parameters)

    def differences(self) -> list[Tensor]:
        return self._gradients.views[: len(self._layouts.trained)]

    def close(self) -> None: ...


class _DistantPart:
    """A part that is sent and received over its own connection."""

    def __init__(self, layouts: ModelLayouts, address: str, *, token: bytes, sealed: bool, rank: int) -> None:
        self._layouts = layouts
        self._gradients, parameters = Arena(layouts.up), Arena(layouts.down)
        self._parameter_views = parameters.views
        self._into = Pieces(memory_of(parameters.memory))
        self._version, self._exchanged = -1, False  # of the parameters that were received, or what came in their place
        try:
            self._connection: Connection = call(address, token, sealed=sealed, seconds=_TIME_TO_COME)
        except CommError:
            raise ConnectionLost from None
        try:
            self._connection.send_all(encode(wire.Attach(rank)), vanished_after=_VANISHED_AFTER)
            self.end_push(0)  # until then the server does not know where to send parameters
        except BaseException:
            self._connection.close()
            raise

    def begin_push(self, step: int) -> Filled:
        filled = fill_push(self._layouts, self._gradients)
        tensors = Pieces(memory_of(self._gradients.memory))
        self._connection.send_all(encode(wire.Part(step)), tensors, vanished_after=_VANISHED_AFTER)
        return filled

    def send_packet(self, step: int, packet: Pieces) -> None:
        self._connection.send_all(encode(wire.Part(step)), packet, vanished_after=_VANISHED_AFTER)

    def end_push(self, step: int) -> None:
        """Wait until the server has the part."""
        while True:
            message = self._hear()
            if isinstance(message, wire.Took) and message.step == step:
                return

    def receive(self, version: int, *, exchanged: bool) -> int:
        """Wait for parameters of this version; return the version that came, which may be a later one.

        ``exchanged``: wait for what the worker's last push has become, which is sent in their place.
        """
        while self._version < version or (self._version == version and self._exchanged != exchanged):
            self._hear()
        return self._version

    def read(self) -> None:
        read_parameters(self._layouts, self._parameter_views)

    def differences(self) -> list[Tensor]:
        return self._parameter_views  # all that this part has is trained

    def close(self) -> None:
        self._connection.close()

    def _hear(self) -> wire.Message:
        while (received := self._connection.receive(self._into)) is None:
            self._connection.wait(_TICK)
            if self._connection.ended or self._connection.silence.seconds(time.monotonic()) > _VANISHED_AFTER:
                raise ConnectionLost
        message = decode(received.head)
        if isinstance(message, wire.Refused):
            raise CommError(f"a server that holds a part of the parameters refused this worker: {message.reason}")
        if isinstance(message, wire.Parameters):
            self._version, self._exchanged = message.version, message.exchanged
        return message


class OtherParts:
    """The parts of the parameters that the other servers hold, for one worker to push and pull."""

    def __init__(
        self,
        model: nn.Module,
        welcome: wire.Welcome,
        *,
        token: bytes,
        sealed: bool,
        memories: Sequence[int] | None,
        reached_at: str,
    ) -> None:
        own, *others = layouts_of(model, 1 + len(welcome.shards), with_reads=welcome.with_reads)
        self.own = own  # what the first server holds
        self._starts = starts_of([own, *others])
        self._parts: list[_SharedPart | _DistantPart] = []
        try:
            for index, (layouts, address) in enumerate(zip(others, welcome.shards, strict=True)):
                if memories is not None:
                    part = _SharedPart(layouts, memories[index], slots=welcome.slots, rank=welcome.rank)
                    self._parts.append(part)
                    continue
                where = _at_the_same_host(address, reached_at)
                self._parts.append(_DistantPart(layouts, where, token=token, sealed=sealed, rank=welcome.rank))
        except BaseException:
            self.close()
            raise

    def push(self, step: int, own: Filled) -> Filled:
        """Push the parts of the other servers; ``own`` tells of the first server's part, the result of all parts.

        When this returns, all other servers have their parts.
        """
        filled = [own, *(part.begin_push(step) for part in self._parts)]
        for part in self._parts:
            part.end_push(step)
        bits = sum(
            int.from_bytes(each.used, "little") << start for each, start in zip(filled, self._starts, strict=False)
        )
        return Filled(
            used=bits.to_bytes(-(-self._starts[-1] // 8), "little"),
            finite=all(each.finite for each in filled),
            checksum=sum(each.checksum for each in filled) % 2**64,
        )

    def push_packets(self, step: int, packets: Sequence[Pieces]) -> None:
        """Push the parts of the other servers as packets; when this returns, all have theirs."""
        for part, packet in zip(self._parts, packets, strict=True):
            assert isinstance(part, _DistantPart), "packets do not go through shared memory"
            part.send_packet(step, packet)
        for part in self._parts:
            part.end_push(step)

    def read(self, version: int) -> bool:
        """Copy the parameters of this version into the model; False if a server has another version.

        Over a network that is a later version, and then a later step has been sent too.
        """
        if not self._receive(version, exchanged=False):
            return False
        for part in self._parts:
            part.read()
        return True

    def differences(self, version: int) -> list[Tensor] | None:
        """What the last push has become, which a step of this version comes with; None if a later one has come."""
        if not self._receive(version, exchanged=True):
            return None
        return [difference for part in self._parts for difference in part.differences()]

    def _receive(self, version: int, *, exchanged: bool) -> bool:
        found = [part.receive(version, exchanged=exchanged) for part in self._parts]
        return all(each == version for each in found)

    def close(self) -> None:
        for part in self._parts:
            part.close()


def _at_the_same_host(address: str, known: str) -> str:
    """The address with the host name of the first server: an address that a server binds may name any interface."""
    if not (address.startswith("tcp://") and known.startswith("tcp://")):
        return address
    return f"{known.rpartition(':')[0]}:{address.rpartition(':')[2]}"
