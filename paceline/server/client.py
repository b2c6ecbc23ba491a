"""A worker's end of the live server: ask for steps, push results, notice that a step is cancelled."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket as sockets
import time
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from torch import nn

from paceline.errors import CommError, WireError
from paceline.server.cancellation import StepCancelled
from paceline.server.parts import ConnectionLost, OtherParts
from paceline.store.gathering import Filled, fill_push, read_parameters
from paceline.store.in_place import Gradients, Parameters
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.memory import Copied, SharedMemory, is_over
from paceline.transport import messages as wire
from paceline.transport.calling import prove
from paceline.transport.connections import Connection
from paceline.transport.pieces import Pieces
from paceline.transport.wire import decode, encode

logger = logging.getLogger("paceline")

_TIME_TO_ANSWER = 60.0  # seconds for a server to come up and answer the first message
_TIME_TO_RETURN = 60.0  # for a server whose connection is lost: another process may take its place
_TIME_TO_RETURN_HERE = 600.0  # on this host, where a supervisor ends us if none does
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2  # between two attempts to connect
_TIME_TO_CONNECT = 2.0  # of one attempt
_VANISHED_AFTER = 4.0  # seconds without any answer of the server's host
_TIME_FOR_LAST_WORDS = 0.5
_TICK = 0.5  # seconds between two looks at whether the connection still stands
_TIME_FOR_A_COMMIT = 0.001  # seconds between two attempts to read while the server does not wait for us

M = TypeVar("M", bound=wire.Message)


class _JoinedAgain(Exception):
    """The connection was lost and made anew; this worker is a new incarnation now, with nothing under way."""


class _Lost(Exception):
    """The connection is lost."""


class Client:
    """One worker's connection to the server at ``address``; ``memory`` is the file that processes of its host share.

    Where several servers hold the parameters, this is the first, and ``shard_memories`` are the others' files.

    Steps come as ``wire.Go``: ``next_step`` waits for one. ``cancelled`` tells, without waiting, that a later one has
    come while a step is under way, or word that there is none.
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
        self._others: OtherParts | None = None  # of the parameters, with other servers
        self._connection: Connection | None = None
        self._later: wire.Go | wire.Finished | None = None  # has come while a step was under way
        # Where parameters go that come now, where the last ones are, and where they go while a step is under way.
        self._into = self._came = self._aside = cast(Pieces | None, None)
        self._data: wire.Data | None = None  # for a server that has not heard of it
        self._step, self._doomed = -1, False
        self._asks = 0  # how often steps were asked for
        self._must_ask = False  # has joined again, and been told of no step since
        self._closed = False
        self.rank, self.incarnation = rank, incarnation
        self.version = 0  # of the parameters that the model has
        try:
            self._meet(
                _TIME_TO_ANSWER,
                f"no answer from a server at {self._address} within {_TIME_TO_ANSWER:.0f} s; is it running, is the "
                "token the one that it was started with, and do both say --trusted-network or neither?",
            )
        except BaseException:
            self.close()
            raise

    # Coming and going ----------------------------------------------------------------------------------------

    def _meet(self, seconds: float, complaint: str) -> None:
        """Become a member of the server's, trying for so long to reach it."""
        deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
        while True:
            try:
                self._join()
                return
            except _Lost:
                if self._memory_file is not None and is_over(self._memory_file):
                    raise CommError(f"worker {self.rank}: the server has ended, and the run with it") from None
                if time.monotonic() > deadline:
                    raise CommError(complaint) from None
                time.sleep(pause)
                pause = min(1.5 * pause, _LONGEST_PAUSE)

    def _join(self) -> None:
        """Connect, prove the token and say hello; ``_Lost`` if that comes to nothing."""
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
        self.rank, self.incarnation, self.welcome = welcome.rank, welcome.incarnation, welcome
        self._make_room(welcome)
        if self._data is not None:
            self._send(self._data)

    def _make_room(self, welcome: wire.Welcome) -> None:
        if welcome.shards:
            self._meet_others(welcome)
        elif welcome.with_reads != bool(self._layouts.reads):
            self._layouts = ModelLayouts(self._model, with_reads=welcome.with_reads)
        if self._memory_file is None:
            self._gradients, self._parameters = Gradients(self._layouts), Parameters(self._layouts)
            self._into = self._came = self._aside = self._parameters.aside
            return
        down, up = self._layouts.down.nbytes, self._layouts.up.nbytes
        self._memory = SharedMemory(self._memory_file, down=down, up=up, slots=welcome.slots)
        self._room = Arena(self._layouts.up, self._memory.slot(self.rank))
        self._parameter_views = self._layouts.down.views(self._memory.down)

    def _meet_others(self, welcome: wire.Welcome) -> None:
        if self._others is not None:
            self._others.close()
        try:
            self._others = OtherParts(
                self._model,
                welcome,
                token=self._token,
                sealed=self._sealed,
                memories=self._shard_memories if self._memory_file is not None else None,
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
        """Tell the server what its batch numbers are numbers of."""
        self._data = wire.Data(num_samples, batch_size, last, shuffle, checksum)
        self._send(self._data)

    def ask(self, demand: int) -> None:
        """Ask for a step; ``demand`` is the number of a ``Demand``, and says what for.

        The step under way, or on its way, is given up.
        """
        self._asks += 1
        self._must_ask, self._later = False, None
        self._send(wire.Ask(int(demand), self._asks, self.version))

    def next_step(self, demand: int) -> wire.Go | wire.Finished:
        """Wait for the next step, or to hear that there is none; the model then has the parameters to use.

        ``demand`` is for asking again, should the server have taken this worker for dead.
        """
        while True:
            if self._must_ask:
                self.ask(demand)
            try:
                answer = self._later or self._wait_for_step()
            except _JoinedAgain:
                continue
            self._later = None
            if (isinstance(answer, wire.Go) and not answer.fresh) or self._read(answer.version):
                break
        if isinstance(answer, wire.Go):
            self._step, self._doomed = answer.step, answer.doomed
        return answer._replace(version=self.version)

    def _wait_for_step(self) -> wire.Go | wire.Finished:
        """Nothing is under way: parameters may go where the model has them."""
        if self._memory_file is None:
            self._into = self._parameters.in_model()
        try:
            return cast(wire.Go | wire.Finished, self._wait_for(wire.Go, wire.Finished))
        finally:
            self._into = self._aside

    def _read(self, version: int) -> bool:
        """Take the parameters: as they are now where they are shared, else as they came.

        False if another server's have been overtaken by later ones, or they are lost: then another step comes.
        """
        if self._memory_file is None:
            if self._others is not None and not self._read_others(version):
                return False
            assert self._came is not None, "a step without its parameters"
            self._parameters.take(self._came)
            self.version = version
            return True
        return self._read_shared()

    def _read_shared(self) -> bool:
        """Copy the parameters out of the memory, again if a commit has overtaken us."""
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
        if not fits:  # the first server's lock keeps all from commits while we read
            raise CommError(f"worker {self.rank}: the servers have different versions of the parameters")
        self.version = found
        return True

    def _read_others(self, version: int) -> bool:
        assert self._others is not None and self._connection is not None
        try:
            return self._others.read(version)
        except ConnectionLost:
            self._connection.give_up()  # the whole of it is made anew
            return False

    def cancelled(self) -> bool:
        """Whether the step under way has been overtaken: by a later one, by the end of the data, or by silence.

        If the connection is lost, the server gives the batch to another; the next step is where we wait for it.
        """
        try:
            while self._later is None and not self._must_ask and (message := self._receive()) is not None:
                if isinstance(message, wire.Go | wire.Finished):
                    self._later = message
        except _Lost:
            self._must_ask = True
        return self._doomed or self._later is not None or self._must_ask

    def pause(self, seconds: float) -> None:
        """Sleep; a cancelled step ends the sleep by ``StepCancelled``."""
        assert self._connection is not None
        deadline = time.monotonic() + seconds
        while not self.cancelled():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if left > 0.002:
                self._connection.wait(left - 0.001)  # which counts in whole milliseconds
            else:
                time.sleep(left)
        raise StepCancelled

    def push(self, *, examples: int, loss: float | None, seconds: float) -> None:
        """Push the gradients that lie in the model, and its buffers."""
        self._layouts.check_trained()
        tensors, filled = None, Filled(b"", finite=False, checksum=0)  # it is for the server to look
        if self._memory_file is None:
            tensors, used = self._gradients.pieces()
            filled = filled._replace(used=used)
        else:
            filled = fill_push(self._layouts, self._room)
        if self._others is not None:
            assert self._connection is not None
            try:
                filled = self._others.push(self._step, filled)
            except ConnectionLost:
                self._connection.give_up()  # the whole of it is made anew
                return
        told = float("nan") if loss is None else loss
        used, finite, checksum = filled
        message = wire.PushMessage(self._step, self.version, examples, told, seconds, finite, checksum, used)
        self._send(message, tensors)

    def skip(self) -> None:
        """Give the step up and count its batch as used; another step comes."""
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

    # Other wishes --------------------------------------------------------------------------------------------

    def mean(self, epoch: int, key: str, weight: float, values: tuple[float, ...]) -> tuple[float, ...]:
        """Average values over all workers, each of whom calls this with the same key."""
        most = wire.MOST_VALUES
        parts = [values[start : start + most] for start in range(0, len(values), most)]
        means = [
            self._request(wire.Mean(epoch, f"{key}/{index}", weight, part), wire.Averaged).values
            for index, part in enumerate(parts)
        ]
        return tuple(number for mean in means for number in mean)

    def save(self, path: str) -> str:
        """Have the server write a checkpoint, to the run's directory if the path is empty."""
        return self._request(wire.Save(path), wire.Saved).path

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Add a line to the run's metrics."""
        self._send(wire.Record(event, json.dumps(values)))

    # Messages ------------------------------------------------------------------------------------------------

    def _send(self, message: wire.Message, tensors: Pieces | None = None) -> None:
        """Send a message; that it is lost is seen when an answer is waited for."""
        assert self._connection is not None, "the client is closed"
        self._connection.send_all(encode(message), tensors, vanished_after=_VANISHED_AFTER)

    def _request(self, message: wire.Message, answer: type[M]) -> M:
        while True:
            self._send(message)
            with contextlib.suppress(_JoinedAgain):
                return self._wait_for(answer)

    def _wait_for(self, *kinds: type[M]) -> M:
        """Wait for a message of these kinds; steps that come meanwhile are kept. ``_JoinedAgain``: it will not come."""
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
        """The next message, or None if it has not all come; ``_Lost`` if it will not."""
        assert self._connection is not None
        while (received := self._connection.receive(self._into)) is not None:
            message = decode(received.head)
            if received.tensors is not None:
                self._came = received.tensors
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
                    raise _Lost  # it has taken us for dead
                case wire.Go() | wire.Finished() if message.ask != self._asks:
                    if received.tensors not in (None, self._aside):
                        self._read(message.version)  # the model has its parameters already
                    continue  # it was on its way when we asked anew
                case _:
                    return message
        if self._connection.ended:
            raise _Lost
        return None

    def _watch_connection(self, connection: Connection) -> None:
        """Wait for something to happen; ``_Lost`` if the server or its host is gone."""
        connection.wait(_TICK)
        if connection.ended or connection.silence.seconds(time.monotonic()) > _VANISHED_AFTER:
            raise _Lost
