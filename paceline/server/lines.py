"""A worker's line to the server: a Unix socket on the server's host, ZeroMQ over TCP from others.

Both take and give messages of one or two frames, as ``paceline.server.channel`` makes them. On one host every message
through ZeroMQ wakes four threads, where a socket wakes one: a round trip takes a third of the time.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from paceline.errors import CommError, UsageError, WireError
from paceline.server.channel import MAX_FRAME

_LENGTHS = struct.Struct("<II")  # of two frames; the second may be none
_NO_FRAME = 2**32 - 1
_READ = 1 << 16
SOCKET_BUFFER = 4 << 20  # bytes in the kernel: tensors then go in large pieces
_TIME_TO_TAKE = 10.0  # seconds that the other end may leave its buffer full

Frame = bytes | memoryview


class Line(Protocol):
    """What a client asks of its line."""

    def send_multipart(self, parts: Sequence[Any], *, copy: bool = True) -> object:
        """Send the frames of a message."""
        ...

    def receive(self) -> Sequence[Any] | None:
        """The frames of the next message, or None if none has come."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until something may have come, at most so long."""
        ...

    def lost_for(self) -> float:
        """For how many seconds the other end has been away; negative if it was, and is back but knows us no more."""
        ...

    def close(self) -> None: ...


def connect(address: str) -> Line:
    """Connect to a server; one that is not there yet is waited for."""
    if address.startswith("ipc://"):
        return UnixLine.to(address)
    return _ZmqLine(address)


def abstract_name(address: str) -> str:
    """The name in the abstract namespace, which leaves nothing in any file system, of ``ipc://@name``."""
    return "\0" + address.removeprefix("ipc://@")


def bytes_of(frame: Any) -> bytes:
    """The bytes of a frame, whichever line it came by."""
    return frame.bytes if isinstance(frame, zmq.Frame) else bytes(frame)


class UnixLine:
    """Messages over a connected Unix socket, each with the lengths of its frames in front."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._come = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self.ended = False

    @classmethod
    def to(cls, address: str, seconds: float = 60.0) -> UnixLine:
        """Connect, trying again for so long while nobody listens there."""
        deadline = time.monotonic() + seconds
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                connection.connect(abstract_name(address))
                return cls(connection)
            except (ConnectionRefusedError, BlockingIOError, FileNotFoundError):
                if time.monotonic() > deadline:
                    connection.close()
                    raise CommError(f"no server at {address} within {seconds:.0f} s; look at its own output") from None
                time.sleep(0.02)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send_multipart(self, parts: Sequence[Any], *, copy: bool = True) -> None:
        lengths = [len(part) for part in parts]
        frames: list[Any] = [_LENGTHS.pack(lengths[0], lengths[1] if len(lengths) > 1 else _NO_FRAME), *parts]
        left = _LENGTHS.size + sum(lengths)
        try:
            left -= self._socket.sendmsg(frames)
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
            return
        if left:
            self._send_rest(b"".join(frames)[-left:])

    def _send_rest(self, rest: bytes) -> None:
        """The other end has not read for a while: wait for it, but not for ever."""
        self._socket.settimeout(_TIME_TO_TAKE)
        try:
            self._socket.sendall(rest)
        except OSError:
            self.ended = True
        finally:
            self._socket.setblocking(False)

    def receive(self) -> list[bytes] | None:
        while (message := self._parse()) is None:
            try:
                more = self._socket.recv(_READ)
            except BlockingIOError:
                return None
            except OSError:
                more = b""
            if not more:
                self.ended = True
                return None
            self._come += more
        return message

    def _parse(self) -> list[bytes] | None:
        if len(self._come) < _LENGTHS.size:
            return None
        lengths = [length for length in _LENGTHS.unpack_from(self._come) if length != _NO_FRAME]
        if max(lengths, default=MAX_FRAME + 1) > MAX_FRAME:
            raise WireError(f"wanted frames of at most {MAX_FRAME} bytes, found {max(lengths, default=0)} announced")
        if len(self._come) < _LENGTHS.size + sum(lengths):
            return None
        start, frames = _LENGTHS.size, []
        for length in lengths:
            frames.append(bytes(self._come[start : start + length]))
            start += length
        del self._come[:start]
        return frames

    def wait(self, seconds: float) -> None:
        if not self.ended:
            self._poll.poll(seconds * 1000)

    def lost_for(self) -> float:
        return float("inf") if self.ended else 0.0

    def close(self) -> None:
        self._socket.close()


class _ZmqLine:
    """Messages over a ZeroMQ socket, which reconnects by itself and says so."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 500)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.set(zmq.SNDBUF, SOCKET_BUFFER)
        self._socket.set(zmq.RCVBUF, SOCKET_BUFFER)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.set(zmq.HEARTBEAT_IVL, 300)
        self._socket.set(zmq.HEARTBEAT_TIMEOUT, 2000)
        self._socket.set(zmq.IPV6, "[" in address)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)
        self._lost_at: float | None = None
        self._back = False
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(
                f"cannot connect to {address!r}: {error}; wanted an address such as tcp://10.0.0.5:7777"
            ) from error

    def send_multipart(self, parts: Sequence[Any], *, copy: bool = True) -> None:
        self._socket.send_multipart(parts, copy=copy)

    def receive(self) -> list[zmq.Frame] | None:
        with contextlib.suppress(zmq.Again):
            return self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
        return None

    def wait(self, seconds: float) -> None:
        self._poller.poll(round(seconds * 1000))

    def lost_for(self) -> float:
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._lost_at = time.monotonic()
            elif self._lost_at is not None:
                self._back = True
        if self._back:
            return -1.0
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._events.close()
            self._socket.close()
            self._context.term()
