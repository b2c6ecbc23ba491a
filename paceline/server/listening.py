"""The server's ear: sockets, who is connected, whose process has ended; messages in, messages out."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

import zmq

from paceline.errors import CommError, WireError
from paceline.server.channel import MAX_FRAME, Channel, Sealing
from paceline.server.handshake import HandshakeRefused, answer
from paceline.server.lines import SOCKET_BUFFER, UnixLine, abstract_name, bytes_of
from paceline.server.messages import Alive, Message, Push
from paceline.server.wire import decode, encode

logger = logging.getLogger("paceline")

_PROBE_EVERY = 0.5  # seconds between two looks at connections to other hosts
_MOST_NAMELESS = 256  # connections of this host that have not proved the token yet
_HEARTBEAT = 300  # milliseconds between ZeroMQ's own signs of life, and ...
_HEARTBEAT_TIMEOUT = 1000  # ... without one for so long a connection is closed


def sealing_to(address: str, *, trusted: bool) -> Sealing:
    """How messages travel to or from an address: what stays on this host needs no sealing."""
    if not address.startswith("tcp://"):
        return "none"
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return _sealing_for(host, trusted)


def _sealing_for(host: str, trusted: bool) -> Sealing:
    if host.startswith("127.") or host in ("::1", "localhost", "::ffff:127.0.0.1"):
        return "none"
    return "heads" if trusted else "all"


class Peer:
    """One authenticated connection; ``tensors`` is where the tensors that it sends go."""

    def __init__(self, socket: zmq.Socket[bytes] | UnixLine, route: bytes | None, channel: Channel) -> None:
        self._socket = socket
        self._route = route
        self._channel = channel
        self.remote = route is not None
        self.tensors: memoryview | None = None
        self.connected = True

    def send(self, message: Message, tensors: memoryview | None = None) -> None:
        """Send a message; that its receiver is gone shows in ``connected``."""
        if not self.connected:
            return
        try:
            self._channel.send(self._socket, encode(message), tensors, route=self._route)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.connected = False
        if isinstance(self._socket, UnixLine) and self._socket.ended:
            self.connected = False

    def receive(self, parts: Sequence[zmq.Frame | bytes]) -> Message | None:
        """The message that these frames complete, or None if more of its tensors are to come."""
        received = self._channel.receive(parts, self.tensors)
        if received is None:
            return None
        head, has_tensors = received
        message = decode(head)
        if has_tensors != (self.tensors is not None and isinstance(message, Push)):
            found = "found some" if has_tensors else "found none"
            raise WireError(f"wanted tensors with a push from a worker that shares no memory, {found} with {message}")
        return message


class Ended(NamedTuple):
    """A process that was watched has ended, or a connection to another host is lost."""


Heard: TypeAlias = Message | WireError | Ended


class Listener:
    """Listens at addresses; who does not know the token is not heard."""

    def __init__(self, token: bytes, *, trusted: bool = False) -> None:
        self._token, self._trusted = token, trusted
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[zmq.Socket[bytes], Sealing | None] = {}  # for other hosts; always sealed so?
        self._peers: dict[tuple[zmq.Socket[bytes], bytes], Peer] = {}
        self._doors: dict[int, socket.socket] = {}  # where processes of this host knock, by descriptor
        self._lines: dict[int, tuple[UnixLine, Peer | None]] = {}  # to them; without a peer before the token is proved
        self._processes: dict[int, Peer] = {}  # descriptors of processes
        self._next_probe = 0.0
        self.strangers = 0  # frames of those who do not know the token

    def bind(self, address: str, *, sealing: Sealing | None = None) -> str:
        """Listen at an address, and give it with the port that was found if it had none.

        ``ipc://@name`` is for processes of this host and user, ``tcp://...`` for all; there each peer gets the sealing
        of the address it comes from, unless one is given for all.
        """
        if address.startswith("ipc://"):
            door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            door.bind(abstract_name(address))
            door.listen(1024)
            door.setblocking(False)
            self._doors[door.fileno()] = door
            self._poller.register(door.fileno(), zmq.POLLIN)
            return address
        listening = self._zmq_socket("[" in address)
        try:
            listening.bind(address)
        except zmq.ZMQError as error:
            listening.close()
            raise CommError(f"the server cannot listen at {address}: {error}; choose another address") from error
        self._sockets[listening] = sealing
        self._poller.register(listening, zmq.POLLIN)
        return cast(bytes, listening.get(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    def _zmq_socket(self, version_6: bool) -> zmq.Socket[bytes]:
        made: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        made.set(zmq.LINGER, 1000)
        made.set(zmq.ROUTER_MANDATORY, 1)
        made.set(zmq.SNDHWM, 0)  # a peer has at most one unanswered message with tensors
        made.set(zmq.MAXMSGSIZE, MAX_FRAME)
        made.set(zmq.SNDBUF, SOCKET_BUFFER)
        made.set(zmq.RCVBUF, SOCKET_BUFFER)
        made.set(zmq.HEARTBEAT_IVL, _HEARTBEAT)
        made.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT)
        made.set(zmq.IPV6, version_6)
        return made

    def watch(self, peer: Peer, process: int) -> bool:
        """Tell when this process of ours ends; False if it has ended already."""
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError) as error:
            raise WireError(f"wanted the process of a worker, found number {process}: {error}") from error
        self._unwatch_all(peer)
        self._processes[descriptor] = peer
        self._poller.register(descriptor, zmq.POLLIN)
        return True

    def forget(self, peer: Peer) -> None:
        """Hear no more of a peer."""
        self._peers = {key: known for key, known in self._peers.items() if known is not peer}
        for number in [number for number, (_, known) in self._lines.items() if known is peer]:
            self._hang_up(number)
        self._unwatch_all(peer)

    def hear(self, seconds: float) -> Iterator[tuple[Peer, Heard]]:
        """Wait for something to happen, and give all that has happened."""
        for source, _ in self._poller.poll(round(seconds * 1000)):
            if isinstance(source, zmq.Socket):
                yield from self._receive(source)
            elif source in self._lines:
                yield from self._read_line(source)
            elif source in self._doors:
                self._open_door(self._doors[source])
            elif source in self._processes:
                peer = self._processes[source]
                self._unwatch(source)
                yield peer, Ended()
        yield from self._probe()

    def close(self) -> None:
        """Send what is still to be sent, and be gone."""
        for descriptor in list(self._processes):
            self._unwatch(descriptor)
        for descriptor in list(self._lines):
            self._hang_up(descriptor)
        for door in self._doors.values():
            door.close()
        for listening in self._sockets:
            listening.close()
        self._context.term()

    # This host ---------------------------------------------------------------------------------------------------

    def _open_door(self, door: socket.socket) -> None:
        try:
            connection, _ = door.accept()
        except OSError:  # gone again, or too many files open
            return
        if _user_of(connection) != os.getuid():
            connection.close()
            self._refuse_stranger("it belongs to another user")
            return
        nameless = [number for number, (_, peer) in self._lines.items() if peer is None]
        if len(nameless) >= _MOST_NAMELESS:
            self._hang_up(nameless[0])
        line = UnixLine(connection)
        self._lines[line.fileno()] = line, None
        self._poller.register(line.fileno(), zmq.POLLIN)

    def _read_line(self, number: int) -> Iterator[tuple[Peer, Heard]]:
        line, peer = self._lines[number]
        while number in self._lines:  # what we give may lead to its end
            try:
                parts = line.receive()
                if parts is None:
                    break
                if peer is None:
                    peer = self._let_in(line, parts)
                    continue
            except WireError as error:  # nothing that follows on this line can be understood
                self._hang_up(number)
                yield from self._hung_up(peer, error)
                return
            try:
                message = peer.receive(parts)
            except WireError as error:
                yield peer, error
                continue
            if message is not None:
                yield peer, message
        if line.ended and number in self._lines:
            self._hang_up(number)
            if peer is not None:
                yield peer, Ended()

    def _let_in(self, line: UnixLine, parts: Sequence[bytes]) -> Peer:
        try:
            channel, reply = self._greet(parts, "none")
        except HandshakeRefused as error:
            self._refuse_stranger(error)
            line.send_multipart([error.reply])
            raise
        peer = Peer(line, None, channel)
        self._lines[line.fileno()] = line, peer
        line.send_multipart([reply])
        return peer

    def _hung_up(self, peer: Peer | None, error: WireError) -> Iterator[tuple[Peer, Heard]]:
        if peer is not None:
            yield peer, Ended()
        elif not isinstance(error, HandshakeRefused):
            self._refuse_stranger(error)

    def _hang_up(self, number: int) -> None:
        line, _ = self._lines.pop(number)
        self._poller.unregister(number)
        line.close()

    # Other hosts -------------------------------------------------------------------------------------------------

    def _receive(self, source: zmq.Socket[bytes]) -> Iterator[tuple[Peer, Heard]]:
        for _ in range(64):  # and not without end: there is more to listen to
            try:
                route, *parts = source.recv_multipart(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            peer = self._peers.get((source, route.bytes))
            if peer is None:
                self._meet(source, route.bytes, parts)
                continue
            try:
                message = peer.receive(parts)
            except WireError as error:
                yield peer, error
                continue
            if message is not None:
                yield peer, message

    def _meet(self, source: zmq.Socket[bytes], route: bytes, parts: Sequence[zmq.Frame]) -> None:
        address = str(parts[0].get("Peer-Address")) if parts else ""
        if not route.startswith(b"\0"):
            self._refuse_stranger("it has named itself")  # it could take the name of one that has proved the token
            return
        try:
            channel, reply = self._greet(parts, self._sockets[source] or _sealing_for(address, self._trusted))
        except WireError as error:
            self._refuse_stranger(error)
            if isinstance(error, HandshakeRefused):
                with contextlib.suppress(zmq.ZMQError):  # it may be gone
                    source.send_multipart([route, error.reply])
            return
        with contextlib.suppress(zmq.ZMQError):
            source.send_multipart([route, reply])
            self._peers[source, route] = Peer(source, route, channel)

    def _greet(self, parts: Sequence[zmq.Frame | bytes], sealing: Sealing) -> tuple[Channel, bytes]:
        if len(parts) != 1:
            raise WireError(f"wanted a handshake of 1 frame, found {len(parts)}")
        return answer(bytes_of(parts[0]), self._token, sealing)

    def _refuse_stranger(self, reason: object) -> None:
        self.strangers += 1
        if self.strangers.bit_count() == 1:  # the first, second, fourth, ...: nobody fills a disk with this
            logger.warning("refused a stranger (%d so far): %s", self.strangers, reason)

    def _probe(self) -> Iterator[tuple[Peer, Heard]]:
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + _PROBE_EVERY
        for peer in list(self._peers.values()):
            peer.send(Alive())
            if not peer.connected:
                yield peer, Ended()

    def _unwatch_all(self, peer: Peer) -> None:
        for descriptor in [number for number, known in self._processes.items() if known is peer]:
            self._unwatch(descriptor)

    def _unwatch(self, descriptor: int) -> None:
        del self._processes[descriptor]
        self._poller.unregister(descriptor)
        os.close(descriptor)


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
