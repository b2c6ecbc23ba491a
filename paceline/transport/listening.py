"""Receives and sends the server's messages, and notices workers whose connection or process has ended."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from paceline.errors import WireError
from paceline.transport.connections import TIME_TO_TAKE, Connection
from paceline.transport.handshake import Answer, HandshakeRefused
from paceline.transport.messages import Alive, Go, Message, Parameters, Part, PushMessage
from paceline.transport.pieces import Pieces
from paceline.transport.sockets import address_of, is_tcp, listen
from paceline.transport.wire import decode, encode

logger = logging.getLogger("paceline")

_PROBE_EVERY = 0.25  # seconds between two checks of all connections
_VANISHED_AFTER = 1.0  # seconds without an acknowledgement; with the checks, a vanished host is noticed in under 2
_MOST_NAMELESS = 256  # connections that have not proved the token
_TIME_TO_PROVE = 10.0  # seconds that each of them has
_MOST_AT_ONCE = 64  # messages of one connection before the others are read
_LAST_WORDS = 1.0  # seconds for what waits when the server ends


def sealed_to(address: str, *, trusted: bool) -> bool:
    """Whether messages to and from an address are encrypted: only between hosts, unless the network is trusted."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return not trusted and address.startswith("tcp://") and not _is_this_host(host)


def _is_this_host(host: str) -> bool:
    return host.removeprefix("::ffff:").startswith("127.") or host in ("::1", "localhost")


class Peer:
    """The other end of a connection, which is heard once it has proved the token.

    ``tensors`` is the memory for the tensors that it sends.
    """

    def __init__(self, connection: Connection, listener: Listener, answer: Answer | None = None) -> None:
        self.connection, self._listener = connection, listener
        self.remote = connection.remote
        self.tensors: Pieces | None = None
        self.came = 0  # bytes of the last tensors that it has sent
        self.answer = answer  # until it has proved the token
        self.since = time.monotonic()
        self.process: int | None = None  # a descriptor of the process that is watched

    def send(self, message: Message, tensors: memoryview | Pieces | None = None) -> None:
        """Send a message; what the socket does not take waits. Nothing is raised if the peer is gone."""
        overtakes = isinstance(message, Parameters) or (isinstance(message, Go) and message.fresh)
        pieces = Pieces(tensors) if isinstance(tensors, memoryview) else tensors
        self.connection.send(encode(message), pieces, overtakes=overtakes)
        if self.connection.waits:
            self._listener.wait_to_send(self)

    def receive(self) -> Message | None:
        """The next message, or None if it is not complete."""
        received = self.connection.receive(self.tensors)
        if received is None:
            return None
        message = decode(received.head)
        if (received.tensors is not None) != (self.tensors is not None and isinstance(message, PushMessage | Part)):
            found = "found none" if received.tensors is None else "found some"
            raise WireError(f"wanted tensors with a push from a worker that shares no memory, {found} with {message}")
        if received.tensors is not None:
            self.came = received.tensors.nbytes
        return message


class Ended(NamedTuple):
    """The connection is lost, or the process that is watched has ended."""


Heard: TypeAlias = Message | WireError | Ended


class Listener:
    """Listens at addresses, and hears peers that have proved the token."""

    def __init__(self, token: bytes, *, trusted: bool = False) -> None:
        self._token, self._trusted = token, trusted
        self._selector = selectors.DefaultSelector()
        self._doors: dict[int, tuple[socket.socket, bool | None]] = {}  # by descriptor; whether to encrypt, if given
        self._peers: dict[int, Peer] = {}  # by the descriptor of the connection
        self._sending: dict[int, Peer] = {}  # those for whom something waits
        self._unheard: set[int] = set()  # descriptors of connections of which more has come than was heard
        self._next_probe = 0.0
        self.strangers = 0  # connections refused for want of the token

    def bind(self, address: str, *, sealed: bool | None = None) -> str:
        """Listen at an address, and return it, with the port that was found for port 0.

        ``ipc://@name`` is for processes of this host and user, ``tcp://...`` for all. By default messages are encrypted
        between hosts, unless the network is trusted; ``sealed`` sets it for all connections of this address.
        """
        door = listen(address)
        self._doors[door.fileno()] = door, sealed
        self._selector.register(door, selectors.EVENT_READ)
        return address_of(door) if is_tcp(door) else address

    def watch(self, peer: Peer, process: int) -> bool:
        """Give ``Ended`` when this process of this host ends; False if it has already ended."""
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError) as error:
            raise WireError(f"wanted the process of a worker, found number {process}: {error}") from error
        self._unwatch(peer)
        peer.process = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ, peer)
        return True

    def forget(self, peer: Peer) -> None:
        """Close a peer's connection, and watch its process no more."""
        self._unwatch(peer)
        if self._peers.get(peer.connection.fileno()) is peer:
            self._hang_up(peer)

    def hear(self, seconds: float) -> Iterator[tuple[Peer, Heard]]:
        """Wait for events, at most so long, and give all of them."""
        wait = 0.0 if self._unheard else min(seconds, max(0.0, self._next_probe - time.monotonic()))
        ready = self._selector.select(wait)
        unheard, self._unheard = self._unheard, set()
        for number in unheard:
            yield from self._read(number)
        for key, events in ready:
            if key.fd in self._doors:
                self._accept(*self._doors[key.fd])
            elif key.fd in self._peers:
                if key.fd in self._sending and events & selectors.EVENT_WRITE:
                    self._send_on(key.fd)
                if events & selectors.EVENT_READ:
                    yield from self._read(key.fd)
            elif key.data is not None and key.data.process == key.fd:  # else the descriptor was closed in this loop
                self._unwatch(key.data)
                yield key.data, Ended()
        yield from self._probe()

    def close(self) -> None:
        """Send what waits, for a second at most, and close everything."""
        for key in list((self._selector.get_map() or {}).values()):  # None if closed before
            if key.data is not None:
                self._unwatch(key.data)
        end = time.monotonic() + _LAST_WORDS
        for peer in list(self._peers.values()):
            self._hang_up(peer, max(0.0, end - time.monotonic()) if peer.connection.waits else 0.0)
        for door, _ in self._doors.values():
            door.close()
        self._doors = {}
        self._selector.close()

    # Sending -----------------------------------------------------------------------------------------------------

    def wait_to_send(self, peer: Peer) -> None:
        """Send what waits for a peer when its socket takes it."""
        number = peer.connection.fileno()
        if number in self._peers and number not in self._sending:
            self._sending[number] = peer
            self._selector.modify(number, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def keep_what_waits(self) -> None:
        """Copy the parameters that wait to be sent, before they change."""
        for peer in self._sending.values():
            peer.connection.keep_what_waits()

    def _send_on(self, number: int) -> None:
        connection = self._sending[number].connection
        connection.flush()
        if not connection.waits:
            del self._sending[number]
            self._selector.modify(number, selectors.EVENT_READ)

    # Receiving ---------------------------------------------------------------------------------------------------

    def _read(self, number: int) -> Iterator[tuple[Peer, Heard]]:
        peer = self._peers.get(number)
        if peer is None or (peer.answer is not None and not self._prove(peer, peer.answer)):
            return
        for _ in range(_MOST_AT_ONCE):
            if self._peers.get(number) is not peer:  # the last message led to its end
                return
            try:
                message = peer.receive()
            except WireError as error:
                if not peer.connection.ended:
                    yield peer, error
                    continue
                message = None
            if message is None:
                break
            yield peer, message
            if peer.connection.exhausted:
                return
        else:
            self._unheard.add(number)
        yield from self._end_of(peer)

    def _end_of(self, peer: Peer) -> Iterator[tuple[Peer, Heard]]:
        """Close a peer's connection if it has ended."""
        if peer.connection.ended and self._peers.get(peer.connection.fileno()) is peer:
            self._hang_up(peer)
            yield peer, Ended()

    def _prove(self, peer: Peer, answer: Answer) -> bool:
        """Continue the handshake; whether it is done."""
        try:
            received = peer.connection.receive()
            if received is not None and not answer.given:
                peer.connection.send(answer.reply(received.head))
            elif received is not None:
                peer.connection.open(answer.finish(received.head))
                peer.answer = None
            elif peer.connection.ended:
                self._hang_up(peer)
        except WireError as error:
            self._refuse_stranger(error, peer.connection.host)
            if isinstance(error, HandshakeRefused):
                peer.connection.send(error.reply)
            self._hang_up(peer)
        return peer.answer is None

    def _accept(self, door: socket.socket, sealed: bool | None) -> None:
        try:
            accepted, _ = door.accept()
            connection = Connection(accepted)
        except OSError:  # the peer has gone, or too many files are open
            return
        if not connection.remote and _user_of(accepted) != os.getuid():
            connection.close()
            self._refuse_stranger("it belongs to another user")
            return
        nameless = [peer for peer in self._peers.values() if peer.answer is not None]
        if len(nameless) >= _MOST_NAMELESS:
            self._hang_up(nameless[0])
        if sealed is None:
            sealed = connection.remote and not self._trusted and not _is_this_host(connection.host)
        self._peers[connection.fileno()] = Peer(connection, self, Answer(self._token, sealed=sealed))
        self._selector.register(connection.fileno(), selectors.EVENT_READ)

    def _hang_up(self, peer: Peer, linger: float = 0.0) -> None:
        number = peer.connection.fileno()
        del self._peers[number]
        self._selector.unregister(number)
        self._sending.pop(number, None)
        self._unheard.discard(number)
        peer.connection.close(linger)

    def _refuse_stranger(self, reason: object, host: str = "") -> None:
        self.strangers += 1
        if self.strangers.bit_count() == 1:  # the first, second, fourth, ...: nobody fills a disk with this
            whence = f" from {host}" if host else ""
            logger.warning("refused a stranger%s (%d so far): %s", whence, self.strangers, reason)

    # Checking ----------------------------------------------------------------------------------------------------

    def _probe(self) -> Iterator[tuple[Peer, Heard]]:
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + _PROBE_EVERY
        for number, peer in list(self._peers.items()):
            connection = peer.connection
            if self._peers.get(number) is not peer:
                continue
            if peer.answer is not None:
                if now > peer.since + _TIME_TO_PROVE:
                    self._refuse_stranger(f"it has not proved the token within {_TIME_TO_PROVE:.0f} s", connection.host)
                    self._hang_up(peer)
                continue
            if connection.silence.seconds(now) > _VANISHED_AFTER or connection.stuck_for() > TIME_TO_TAKE:
                connection.give_up()
            elif connection.remote and not connection.waits:
                peer.send(Alive())
            yield from self._end_of(peer)

    def _unwatch(self, peer: Peer) -> None:
        if peer.process is not None:
            self._selector.unregister(peer.process)
            os.close(peer.process)
            peer.process = None


def _user_of(accepted: socket.socket) -> int:
    credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
