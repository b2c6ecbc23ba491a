"""A worker's end of the live server: ask for steps, push results, notice that a step is cancelled."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket as sockets
import time
from typing import Any, NoReturn, TypeVar, cast

import torch
import zmq
from torch import nn
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import CommError, UsageError
from paceline.server import messages as wire
from paceline.server.channel import MAX_FRAME, Channel, Sealing
from paceline.server.gathering import fill_push, read_parameters
from paceline.server.handshake import Opening
from paceline.server.interrupt import StepCancelled
from paceline.server.layout import ModelLayouts, memory_of
from paceline.server.memory import SharedMemory
from paceline.server.wire import decode, encode

logger = logging.getLogger("paceline")

_TIME_TO_ANSWER = 60.0  # seconds for a server to come up and answer the first message
_TIME_TO_RETURN = 10.0  # for a server whose connection is lost
_TICK = 500  # milliseconds between two looks at whether the connection still stands

M = TypeVar("M", bound=wire.Message)


class _JoinedAgain(Exception):
    """The server had taken this worker for dead; it is a new incarnation now, with nothing under way."""


class Client:
    """One worker's connection to the server at ``address``; ``memory`` is the file that processes of its host share.

    Steps come as ``wire.Go``: ``next_step`` waits for one. ``cancelled`` tells, without waiting, that a later one has
    come while a step is under way, or word that there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        address: str,
        token: bytes,
        sealing: Sealing,
        rank: int,
        incarnation: int,
        memory: int | None,
    ) -> None:
        self._model, self._layouts = model, ModelLayouts(model)
        self._address, self._token, self._sealing = address, token, sealing
        self._memory_file = memory
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._later: wire.Go | wire.Finished | None = None  # has come while a step was under way
        self._step = -1
        self._lost_at: float | None = None
        self._closed = False
        self.rank, self.incarnation = rank, incarnation
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    # Coming and going ----------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Meet the server, for the first time or after it has taken us for gone."""
        self._disconnect()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 500)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        if self._address.startswith("tcp"):
            self._socket.set(zmq.HEARTBEAT_IVL, 300)
            self._socket.set(zmq.HEARTBEAT_TIMEOUT, 2000)
            self._socket.set(zmq.IPV6, 1)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._lost_at = None
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        try:
            self._socket.connect(self._address)
        except zmq.ZMQError as error:
            raise UsageError(
                f"cannot connect to {self._address!r}: {error}; wanted an address such as tcp://10.0.0.5:7777"
            ) from error
        opening = Opening(self._token, self._sealing)
        self._socket.send(opening.hello())
        deadline = time.monotonic() + _TIME_TO_ANSWER
        while not self._socket.poll(_TICK):
            if time.monotonic() > deadline:
                raise CommError(
                    f"no answer from a server at {self._address} within {_TIME_TO_ANSWER:.0f} s; is it running, is the "
                    "token the one that it was started with, and do both say --trusted-network or neither?"
                )
        self._channel: Channel = opening.finish(self._socket.recv())
        self._into: memoryview | None = None
        local = self._memory_file is not None
        model = tuple(wire.Described(*entry) for entry in ModelLayouts.describe(self._model))
        self._send(wire.Hello(self.rank, self.incarnation, os.getpid(), sockets.gethostname(), local, model))
        welcome = self._wait_for(wire.Welcome)
        self.rank, self.incarnation, self.welcome = welcome.rank, welcome.incarnation, welcome
        self._make_room(welcome)

    def _make_room(self, welcome: wire.Welcome) -> None:
        down, up = self._layouts.down.nbytes, self._layouts.up.nbytes
        if self._memory_file is not None:
            self._memory = SharedMemory(self._memory_file, down=down, up=up, slots=welcome.slots)
            self._gradients = self._memory.slot(self.rank)
            return
        self._parameters = torch.zeros(down, dtype=torch.uint8)
        self._into = memory_of(self._parameters)
        self._gradients = torch.zeros(up, dtype=torch.uint8)

    def leave(self, *, failed: bool) -> None:
        """Tell the server that this worker has ended, and close."""
        if not self._closed:
            with contextlib.suppress(zmq.ZMQError, CommError):
                self._send(wire.Leave(failed))
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._disconnect()
            self._context.term()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._events.close()
            self._socket.close()
            self._socket = None

    # Steps ---------------------------------------------------------------------------------------------------

    def describe(self, num_samples: int, batch_size: int, last: Any, shuffle: bool) -> None:
        """Tell the server what its batch numbers are numbers of."""
        self._send(wire.Data(num_samples, batch_size, last, shuffle))

    def ask(self, epochs: int) -> None:
        """Ask for a step: with a batch of an epoch below ``epochs``, or on data of one's own if that is negative."""
        self._send(wire.Ask(epochs))

    def next_step(self, epochs: int) -> wire.Go | wire.Finished:
        """Wait for the next step, or to hear that there is none; the model then has the parameters to use.

        ``epochs`` is for asking again, should the server have taken this worker for dead.
        """
        while True:
            try:
                answer = self._later or cast(wire.Go | wire.Finished, self._wait_for(wire.Go, wire.Finished))
                break
            except _JoinedAgain:
                self.ask(epochs)
        self._later = None
        if isinstance(answer, wire.Finished):
            self._read(answer.version)
            return answer._replace(version=self.version)
        self._step = answer.step
        if answer.fresh:
            self._read(answer.version)
        return answer._replace(version=self.version)

    def _read(self, version: int) -> None:
        """Take the parameters: as they are now where they are shared, else as they came."""
        if self._memory_file is None:
            read_parameters(self._layouts, self._parameters)
            self.version = version
            return
        with self._memory.reading():
            read_parameters(self._layouts, self._memory.down)
            self.version = self._memory.version

    def cancelled(self) -> bool:
        """Whether the step under way has been overtaken: by a later one, or by the end of the data."""
        assert self._socket is not None
        while self._later is None and cast(int, self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            message = self._receive()
            if isinstance(message, wire.Go | wire.Finished):
                self._later = message
        return self._later is not None

    def pause(self, seconds: float) -> None:
        """Sleep; a cancelled step ends the sleep by ``StepCancelled``."""
        assert self._socket is not None
        deadline = time.monotonic() + seconds
        while not self.cancelled():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if left > 0.002:
                self._socket.poll(int(left * 1000))
            else:
                time.sleep(left)  # polls count in whole milliseconds
        raise StepCancelled

    def push(self, *, examples: int, loss: float | None, seconds: float) -> None:
        """Push the gradients that lie in the model, and its buffers."""
        used = fill_push(self._layouts, self._layouts.up.views(self._gradients))
        no_loss = float("nan")
        message = wire.Push(self._step, self.version, examples, no_loss if loss is None else loss, seconds, used)
        self._send(message, None if self._memory_file is not None else memory_of(self._gradients))

    def skip(self) -> None:
        """Give the step up and count its batch as used; another step comes."""
        self._send(wire.Skip(self._step))

    def more(self) -> wire.Batch | None:
        """Get one more batch for the same step, -1 if there is none; None if the step was cancelled meanwhile."""
        if self.cancelled():
            return None
        self._send(wire.More(self._step))
        answer: wire.Message = self._wait_for(wire.Batch, wire.Go, wire.Finished)
        if isinstance(answer, wire.Go | wire.Finished):
            self._later = answer
        return answer if isinstance(answer, wire.Batch) else None

    # Other wishes --------------------------------------------------------------------------------------------

    def mean(self, key: str, weight: float, values: tuple[float, ...]) -> tuple[float, ...]:
        """Average values over all workers, each of whom calls this with the same key."""
        most = wire.MOST_VALUES
        parts = [values[start : start + most] for start in range(0, len(values), most)]
        means = [
            self._request(wire.Mean(f"{key}/{place}", weight, part), wire.Averaged).values
            for place, part in enumerate(parts)
        ]
        return tuple(number for mean in means for number in mean)

    def save(self, path: str) -> str:
        """Have the server write a checkpoint, to the run's directory if the path is empty."""
        return self._request(wire.Save(path), wire.Saved).path

    def record(self, event: str, values: dict[str, Any]) -> None:
        """Add a line to the run's metrics."""
        self._send(wire.Record(event, json.dumps(values)))

    # Messages ------------------------------------------------------------------------------------------------

    def _send(self, message: wire.Message, tensors: memoryview | None = None) -> None:
        assert self._socket is not None, "the client is closed"
        self._channel.send(self._socket, encode(message), tensors)

    def _request(self, message: wire.Message, answer: type[M]) -> M:
        while True:
            self._send(message)
            with contextlib.suppress(_JoinedAgain):
                return self._wait_for(answer)

    def _wait_for(self, *kinds: type[M]) -> M:
        """Wait for a message of these kinds; steps that come meanwhile are kept."""
        while True:
            message = self._receive(wait=True)
            if isinstance(message, kinds):
                return cast(M, message)
            if isinstance(message, wire.Go | wire.Finished):
                self._later = message

    def _receive(self, *, wait: bool = False) -> wire.Message | None:
        """The next message, or None if there is none yet (or only a part of one)."""
        assert self._socket is not None
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                if not wait:
                    return None
                self._watch_connection()
                continue
            received = self._channel.receive(parts, self._into)
            message = decode(received[0]) if received is not None else None
            match message:
                case None | wire.Alive():
                    continue
                case wire.Warned():
                    logger.warning("%s", message.reason)
                case wire.Refused():
                    raise CommError(f"the server refused worker {self.rank}: {message.reason}")
                case wire.Unknown():
                    self._join_again()
                case _:
                    return message

    def _join_again(self) -> NoReturn:
        """The server has taken us for dead: come back as a new incarnation."""
        self.incarnation += 1
        self._later, self._step = None, -1
        self._connect()
        raise _JoinedAgain

    def _watch_connection(self) -> None:
        """Wait for something to happen; raise if the server has been away for too long."""
        ready = dict(self._poller.poll(_TICK))
        if self._events in ready:
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._lost_at = time.monotonic()
            elif self._lost_at is not None:
                self._join_again()
        if self._lost_at is not None and time.monotonic() > self._lost_at + _TIME_TO_RETURN:
            raise CommError(
                f"worker {self.rank}: the server at {self._address} has been gone for {_TIME_TO_RETURN:.0f} s; "
                "look at its own output for the reason"
            )
