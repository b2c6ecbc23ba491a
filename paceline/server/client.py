"""A worker's connection to the live server: ask for steps, push results, notice that a step is cancelled."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket as sockets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from paceline.codecs import parse_codec
from paceline.errors import CommError, WireError
from paceline.policies.messages import PushKind
from paceline.server.cancellation import StepCancelled
from paceline.server.parts import ConnectionLost, OtherParts
from paceline.store.behind import Behind
from paceline.store.gathering import Filled, fill_push, read_parameters
from paceline.store.in_place import Gradients, Parameters
from paceline.store.layout import Arena, ModelLayouts, memory_of
from paceline.store.memory import Copied, SharedMemory, is_over
from paceline.store.packets import PushPackets
from paceline.store.partition import layouts_of
from paceline.transport import messages as wire
from paceline.transport.calling import prove
from paceline.transport.connections import Connection
from paceline.transport.pieces import Pieces
from paceline.transport.wire import decode, encode

logger = logging.getLogger("paceline")

_TIME_TO_ANSWER = 60.0  # seconds until a server has started and answered the first message
_TIME_TO_RETURN = 60.0  # seconds for a lost server to be replaced
_TIME_TO_RETURN_HERE = 600.0  # the same on this host, whose supervisor ends this worker if there is none
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2  # between two attempts to connect
_TIME_TO_CONNECT = 2.0  # of one attempt
_VANISHED_AFTER = 4.0  # seconds without any answer of the server's host
_TIME_FOR_LAST_WORDS = 0.5
_TICK = 0.5  # seconds between two checks of the connection
_TIME_FOR_A_COMMIT = 0.001  # seconds between two attempts to read, after a commit has overtaken the first

T = TypeVar("T")
M = TypeVar("M", bound=wire.Message)


class _JoinedAgain(Exception):
    """The connection was lost and made again; this worker is now a new incarnation without a step."""


class _Lost(Exception):
    """The connection is lost."""


class Client:
    """One worker's connection to the server at ``address``; ``memory`` is the file that processes of its host share.

    If several servers hold the parameters, ``address`` is that of the first, and ``shard_memories`` are the files of
    the others.

    ``next_step`` waits for a step. ``cancelled`` checks, without waiting, whether the present step has been replaced by
    a later one or by the end of the data.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        address: str,
        token: bytes,
        sealed: bool,
        rank: int,
        incarnation: int,
        memory: int | None,
        shard_memories: Sequence[int] = (),
    ) -> None:
        self._model, self._layouts = model, ModelLayouts(model)
        self._address, self._token, self._sealed = address, token, sealed
        self._memory_file, self._shard_memories = memory, shard_memories
        self._shares = memory is not None  # pushes and parameters go through it
        self._packing: PushPackets | None = None
        self._behind: Behind | None = None  # if parameters come as packets
        self._others: OtherParts | None = None  # the parts of the parameters that other servers hold
        self._connection: Connection | None = None
        self._later: wire.Go | wire.Finished | None = None  # came during the present step
        # Where parameters are received now, where the last ones are, and where they are received during a step.
        self._into = self._came = self._aside = cast(Pieces | None, None)
        self._data: wire.Data | None = None  # to describe to a server that does not know it
        self._step, self._doomed = -1, False
        self._asks = 0  # number of requests for steps
        self._must_ask = False  # has joined again, and has no step since
        self._closed = False
        self.rank, self.incarnation = rank, incarnation
        self.version = 0  # of the parameters in the model
        self._pushed = -1  # the step of our last push
        self.read_seconds = 0.0  # how long the last next_step() took to have the parameters when its answer had come
        self.differences: list[Tensor] | None = None  # what the server has added for it, of each trained parameter
        try:
            self._meet(
                _TIME_TO_ANSWER,
                f"no answer from a server at {self._address} within {_TIME_TO_ANSWER:.0f} s; is it running, is the "
                "token the one that it was started with, and do both say --trusted-network or neither?",
            )
        except BaseException:
            self.close()
            raise

    # Joining and leaving -------------------------------------------------------------------------------------

    def _meet(self, seconds: float, complaint: str) -> None:
        """Join the server, and try again for so many seconds; then raise ``CommError(complaint)``."""
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        told = self._address.startswith("ipc://")  # on the server's host the supervisor tells of its death
        while True:
            try:
                self._join()
                return
            except _Lost:
                if not told:
                    logger.warning("the server at %s does not answer; trying again for %.0f s", self._address, seconds)
                    told = True
                if self._memory_file is not None and is_over(self._memory_file):
                    raise CommError(f"worker {self.rank}: the server has ended, and the run with it") from None
                if time.monotonic() > deadline:
                    raise CommError(complaint) from None
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _join(self) -> None:
        """Connect, prove the token and join; ``_Lost`` if that fails."""
        if self._connection is not None:
            self._connection.close()
        try:
            self._connection = connection = Connection.to(self._address, _TIME_TO_CONNECT)
        except OSError:
            raise _Lost from None
        deadline = time.monotonic() + _TIME_TO_ANSWER

        def wait() -> None:
            if time.monotonic() > deadline:
                raise _Lost
            self._watch_connection(connection)

        try:
            prove(connection, self._token, sealed=self._sealed, wait=wait)
        except WireError as error:
            raise WireError(f"joining the server at {self._address}: {error}") from None
        local = self._memory_file is not None
        model = tuple(wire.Described(*entry) for entry in ModelLayouts.describe(self._model))
        self._send(wire.Hello(self.rank, self.incarnation, os.getpid(), sockets.gethostname(), local, model))
        welcome = self._hear(wire.Welcome)
        if welcome.version < self.version:
            logger.warning("the server is back at version %d; this worker had %d", welcome.version, self.version)
        self.rank, self.welcome = welcome.rank, welcome
        self._make_room(welcome)
        if self._data is not None:
            self._send(self._data)

    def _make_room(self, welcome: wire.Welcome) -> None:
        self._packing = self._make_packing(welcome)
        # A replay sends parameters: a read of shared memory depends on its moment.
        self._shares = self._memory_file is not None and self._packing is None and welcome.packets
        if welcome.shards:
            self._meet_others(welcome)
        elif welcome.with_reads != bool(self._layouts.reads):
            self._layouts = ModelLayouts(self._model, with_reads=welcome.with_reads)
        if self._memory_file is None or not self._shares:
            self._gradients, self._parameters = Gradients(self._layouts), Parameters(self._layouts)
            self._into = self._came = self._aside = self._parameters.aside
            self._behind = None
            if self._packing is not None and self._packing.codec.both and welcome.packets:
                self._behind = Behind(self._packing.codec, self._layouts)
                self._packet = torch.empty(self._behind.most_bytes, dtype=torch.uint8)
                self._into = self._aside = Pieces(memory_of(self._packet), at_most=True)
            return
        down, up = self._layouts.down.nbytes, self._layouts.up.nbytes
        self._memory = SharedMemory(self._memory_file, down=down, up=up, slots=welcome.slots)
        self._room = Arena(self._layouts.up, self._memory.slot(self.rank))
        self._parameter_views = self._layouts.down.views(self._memory.down)

    def _make_packing(self, welcome: wire.Welcome) -> PushPackets | None:
        """A codec that remembers nothing yet, as this worker is a new incarnation, or what an earlier run has left."""
        if not welcome.codec:
            return None
        layouts = layouts_of(self._model, welcome.packet_parts, with_reads=welcome.with_reads)
        codec, kind = parse_codec(welcome.codec), PushKind(welcome.kind)
        return PushPackets(
            codec,
            layouts,
            kind,
            seed=welcome.seed,
            rank=welcome.rank,
            since=welcome.version,
            file=self._memory_file if welcome.rank < welcome.slots else None,
            kept=welcome.kept,
        )

    def _meet_others(self, welcome: wire.Welcome) -> None:
        if self._others is not None:
            self._others.close()
        try:
            self._others = OtherParts(
                self._model,
                welcome,
                token=self._token,
                sealed=self._sealed,
                memories=self._shard_memories if self._shares else None,
                reached_at=self._address,
            )
        except ConnectionLost:
            raise _Lost from None
        self._layouts = self._others.own

    def leave(self, *, failed: bool) -> None:
        """Tell the server that this worker has ended, and close."""
        if not self._closed:
            self._send(wire.Leave(failed, self.version))
            self.close(_TIME_FOR_LAST_WORDS)

    def close(self, linger: float = 0.0) -> None:
        if not self._closed:
            self._closed = True
            if self._connection is not None:
                self._connection.close(linger)
            if self._others is not None:
                self._others.close()

    # Steps ---------------------------------------------------------------------------------------------------

    def describe(self, num_samples: int, batch_size: int, last: Any, shuffle: bool, checksum: int) -> None:
        """Describe the data set whose batches the server numbers."""
        self._data = wire.Data(num_samples, batch_size, last, shuffle, checksum)
        self._send(self._data)

    def ask(self, demand: int) -> None:
        """Ask for a step of this ``Demand``; a step that was begun or sent before is abandoned."""
        self._asks += 1
        self._must_ask, self._later = False, None
        self._send(wire.Ask(int(demand), self._asks, self.version))

    def next_step(self, demand: int) -> wire.Go | wire.Finished:
        """Wait for the next step, or for the end of the data; the model then has the parameters of it.

        After an exchange the model stays as it is. If it was that of the last push, ``differences`` has what the server
        has added.

        ``demand`` is for asking again, if the server has taken this worker for dead.
        """
        self.read_seconds = 0.0
        while True:
            if self._must_ask:
                self.ask(demand)
            try:
                answer = self._later or self._wait_for_step()
            except _JoinedAgain:
                continue
            self._later, self.differences = None, None
            if self._packing is not None:
                self._packing.answered(taken=answer.taken == self._pushed)
            if isinstance(answer, wire.Go) and not answer.fresh:
                break
            exchanged = answer.exchanged if isinstance(answer, wire.Go) else -1
            began = time.perf_counter()
            read = self._read(answer.version) if exchanged < 0 else self._read_differences(answer.version, exchanged)
            self.read_seconds += time.perf_counter() - began
            if read:
                break
        if isinstance(answer, wire.Go):
            self._step, self._doomed = answer.step, answer.doomed
        return answer._replace(version=self.version)

    def _wait_for_step(self) -> wire.Go | wire.Finished:
        """Wait without a step: parameters may be received directly into the model."""
        its_own = self.welcome.kind == PushKind.PARAMETERS.value
        if not (self._shares or its_own or self._behind is not None):
            self._into = self._parameters.in_model()
        try:
            return cast(wire.Go | wire.Finished, self._wait_for(wire.Go, wire.Finished))
        finally:
            self._into = self._aside

    def _read(self, version: int) -> bool:
        """Take the parameters: the present ones from shared memory, or those that were received.

        False if another server has a later version by now, or a connection is lost; then another step follows.
        """
        if not self._shares:
            if self._others is not None and not self._of_others(lambda parts: parts.read(version), False):
                return False
            assert self._came is not None, "a step without its parameters"
            self._parameters.take(self._came)
            self.version = version
            return True
        return self._read_shared()

    def _read_differences(self, version: int, step: int) -> bool:
        """Have what the push of a step has become: in our slot of shared memory, or received in place of parameters.

        If we have pushed again since, and too late, our slot has that push, and we had the other's answer before.
        """
        if step == self._pushed:
            others: list[Tensor] | None = []
            if self._others is not None:
                others = self._of_others(lambda parts: parts.differences(version), None)
            if others is None:
                return False
            own = self._room.views if self._shares else self._parameters.of_trained()
            self.differences = [*own[: len(self._layouts.trained)], *others]
        self.version = version
        return True

    def _read_shared(self) -> bool:
        """Copy the parameters from shared memory, and again if a commit was made meanwhile."""
        found, fits = -1, False

        def copy() -> None:
            nonlocal found, fits
            read_parameters(self._layouts, self._parameter_views)
            found = self._memory.version
            fits = self._others is None or self._others.read(found)

        while (copied := self._memory.read(self.rank, copy)) is Copied.OVERTAKEN:
            if self.cancelled():
                return False
            time.sleep(_TIME_FOR_A_COMMIT)
        if copied is Copied.TORN:
            return False
        if not fits:  # while we hold the first server's lock, no server makes a commit
            raise CommError(f"worker {self.rank}: the servers have different versions of the parameters")
        self.version = found
        return True

    def _of_others(self, read: Callable[[OtherParts], T], lost: T) -> T:
        """Receive what other servers send; ``lost`` if a connection is."""
        assert self._others is not None and self._connection is not None
        try:
            return read(self._others)
        except ConnectionLost:
            self._connection.give_up()  # all connections are made again
            return lost

    def cancelled(self) -> bool:
        """Whether the present step was cancelled: a later one or the end of the data came, or the connection is lost.

        After a lost connection the server gives the batch to another worker; ``next_step`` waits for the server.
        """
        try:
            while self._later is None and not self._must_ask and (message := self._receive()) is not None:
                if isinstance(message, wire.Go | wire.Finished):
                    self._later = message
        except _Lost:
            self._must_ask = True
        return self._doomed or self._later is not None or self._must_ask

    def pause(self, seconds: float) -> None:
        """Sleep; raise ``StepCancelled`` when the step is cancelled."""
        assert self._connection is not None
        deadline = time.monotonic() + seconds
        while not self.cancelled():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if left > 0.002:
                self._connection.wait(left - 0.001)  # poll() counts whole milliseconds
            else:
                time.sleep(left)
        raise StepCancelled

    def push(self, *, examples: int, loss: float | None, seconds: float) -> None:
        """Push the gradients and buffers of the model."""
        self._layouts.check_trained()
        self._pushed = self._step
        try:
            tensors, (used, finite, checksum) = self._fill()
        except ConnectionLost:
            assert self._connection is not None
            self._connection.give_up()  # all connections are made again
            return
        told = float("nan") if loss is None else loss
        message = wire.PushMessage(self._step, self.version, examples, told, seconds, finite, checksum, used)
        self._send(message, tensors)

    def _fill(self) -> tuple[Pieces | None, Filled]:
        """Have a push where the first server reads it, or as the bytes to send; all other servers have their parts."""
        if self._packing is not None and self.welcome.packets:
            packets = self._packing.encode(self._step)
            sent = [part.pieces(packet) for part, packet in zip(self._packing.parts, packets, strict=True)]
            if self._others is not None:
                self._others.push_packets(self._step, sent[1:])
            return sent[0], Filled(self._packing.used(), finite=False, checksum=0)
        if self._packing is not None:
            self._packing.code(self._step)
        tensors = None
        if self._shares:
            filled = fill_push(self._layouts, self._room)
        else:
            tensors, used = self._gradients.pieces()
            filled = Filled(used, finite=False, checksum=0)  # the server checks them
        return tensors, filled if self._others is None else self._others.push(self._step, filled)

    def skip(self) -> None:
        """Abandon the step and count its batch as used; another step follows."""
        self._send(wire.Skip(self._step, self.version))

    def more(self) -> wire.BatchMessage | None:
        """Get one more batch for the same step, -1 if there is none; None if the step was cancelled meanwhile."""
        if self.cancelled():
            return None
        self._send(wire.More(self._step))
        try:
            answer: wire.Message = self._wait_for(wire.BatchMessage, wire.Go, wire.Finished)
        except _JoinedAgain:
            return None
        if isinstance(answer, wire.Go | wire.Finished):
            self._later = answer
        return answer if isinstance(answer, wire.BatchMessage) else None

    # Other requests ------------------------------------------------------------------------------------------

    def mean(self, epoch: int, key: str, weight: float, values: tuple[float, ...]) -> tuple[float, ...]:
        """Average values over all workers; each must call this with the same key."""
        most = wire.MOST_VALUES
        parts = [values[start : start + most] for start in range(0, len(values), most)]
        means = [
            self._request(wire.Mean(epoch, f"{key}/{index}", weight, part), wire.Averaged).values
            for index, part in enumerate(parts)
        ]
        return tuple(number for mean in means for number in mean)

    def save(self, path: str) -> str:
        """Let the server write a checkpoint, into the run's directory if the path is empty."""
        return self._request(wire.Save(path), wire.Saved).path

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Add a line to the run's metrics."""
        self._send(wire.Record(event, json.dumps(values)))

    # Messages ------------------------------------------------------------------------------------------------

    def _send(self, message: wire.Message, tensors: Pieces | None = None) -> None:
        """Send a message; a lost connection is noticed by the next wait for an answer."""
        assert self._connection is not None, "the client is closed"
        self._connection.send_all(encode(message), tensors, vanished_after=_VANISHED_AFTER)

    def _request(self, message: wire.Message, answer: type[M]) -> M:
        while True:
            self._send(message)
            with contextlib.suppress(_JoinedAgain):
                return self._wait_for(answer)

    def _wait_for(self, *kinds: type[M]) -> M:
        """Wait for a message of these kinds; steps that come before it are kept. ``_JoinedAgain``: it will not come."""
        try:
            return self._hear(*kinds)
        except _Lost:
            self.incarnation += 1
            self._later, self._step, self._must_ask = None, -1, True
            self._meet(
                _TIME_TO_RETURN if self._memory_file is None else _TIME_TO_RETURN_HERE,
                f"worker {self.rank}: the server at {self._address} is gone; look at its own output for the reason",
            )
        raise _JoinedAgain

    def _hear(self, *kinds: type[M]) -> M:
        assert self._connection is not None
        while True:
            message = self._receive()
            if message is None:
                self._watch_connection(self._connection)
            elif isinstance(message, kinds):
                return cast(M, message)
            elif isinstance(message, wire.Go | wire.Finished):
                self._later = message

    def _receive(self) -> wire.Message | None:
        """The next message, or None if it is not complete yet; ``_Lost`` if it never will be."""
        assert self._connection is not None
        while (received := self._connection.receive(self._into)) is not None:
            message = decode(received.head)
            if received.tensors is not None:
                self._came = received.tensors if self._behind is None else self._lay(message, received.tensors.nbytes)
            match message:
                case wire.Alive():
                    continue
                case wire.Warned():
                    logger.warning("%s", message.reason)
                case wire.Refused():
                    raise CommError(f"the server refused worker {self.rank}: {message.reason}")
                case wire.Over():
                    raise SystemExit(0)
                case wire.Unknown():
                    raise _Lost  # the server has taken this worker for dead
                case wire.Go() | wire.Finished() if message.ask != self._asks:
                    if self._behind is None and received.tensors not in (None, self._aside):
                        self._read(message.version)  # the model has its parameters already
                    continue  # it answers an earlier request
                case _:
                    return message
        if self._connection.ended:
            raise _Lost
        return None

    def _lay(self, message: wire.Message, nbytes: int) -> Pieces:
        """Have aside what came in place of parameters, or all of them; every packet counts, also of no step of ours."""
        assert self._behind is not None
        came, views = self._packet[:nbytes], self._parameters.views
        if isinstance(message, wire.Go) and message.packet:
            self._behind.unpack(came, views)
        elif nbytes == self._layouts.down.nbytes:
            self._parameters.memory.copy_(came)
            self._behind.take_all(views)
        else:
            raise WireError(f"wanted parameters of {self._layouts.down.nbytes} bytes, found {nbytes}")
        return self._parameters.aside

    def _watch_connection(self, connection: Connection) -> None:
        """Wait for a message; ``_Lost`` if the server or its host is gone."""
        connection.wait(_TICK)
        if connection.ended or connection.silence.seconds(time.monotonic()) > _VANISHED_AFTER:
            raise _Lost
