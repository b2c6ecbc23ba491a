"""The server's ear: sockets, who is connected, whose process has ended; messages in, messages out."""

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
from paceline.transport.sockets import address_of, host_of, is_tcp, listen
from paceline.transport.wire import decode, encode

logger = logging.getLogger("paceline")

_PROBE_EVERY = 0.25  # seconds between two looks at connections to other hosts
_VANISHED_AFTER = 1.0  # seconds without any answer of a host's kernel; with the looks, missed in under 2
_MOST_NAMELESS = 256  # connections that have not proved the token yet
_TIME_TO_PROVE = 10.0  # seconds that each has for it
_MOST_AT_ONCE = 64  # messages of one line before others are heard
_LAST_WORDS = 1.0  # seconds for what waits when the server ends


def sealed_to(address: str, *, trusted: bool) -> bool:
    """Whether messages to or from an address are encrypted: what stays on this host is not."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return not trusted and address.startswith("tcp://") and not _is_this_host(host)


def _is_this_host(host: str) -> bool:
    return host.removeprefix("::ffff:").startswith("127.") or host in ("::1", "localhost")


class Peer:
    """One authenticated connection; ``tensors`` is where the tensors that it sends go."""

    def __init__(self, connection: Connection, listener: Listener) -> None:
        self._connection, self._listener = connection, listener
        self.remote = connection.remote
        self.tensors: Pieces | None = None

    def send(self, message: Message, tensors: memoryview | None = None) -> None:
        """Send a message, of which what the peer does not take now waits; that it is gone is heard later."""
        overtakes = isinstance(message, Parameters) or (isinstance(message, Go) and message.fresh)
        self._connection.send(encode(message), None if tensors is None else Pieces(tensors), overtakes=overtakes)
        if self._connection.waits:
            self._listener.wait_to_send(self._connection)

    def receive(self) -> Message | None:
        """The next message, or None if it has not all come."""
        received = self._connection.receive(self.tensors)
        if received is None:
            return None
        message = decode(received.head)
        if (received.tensors is not None) != (self.tensors is not None and isinstance(message, PushMessage | Part)):
            found = "found none" if received.tensors is None else "found some"
            raise WireError(f"wanted tensors with a push from a worker that shares no memory, {found} with {message}")
        return message


class Ended(NamedTuple):
    """A process that was watched has ended, or a connection is lost."""


Heard: TypeAlias = Message | WireError | Ended


class _Caller:
    """A line, and who is at its other end once that is known."""

    def __init__(self, connection: Connection, answer: Answer, host: str) -> None:
        self.connection, self.answer, self.host = connection, answer, host
        self.peer: Peer | None = None
        self.since = time.monotonic()


class Listener:
    """Listens at addresses; who does not know the token is not heard."""

    def __init__(self, token: bytes, *, trusted: bool = False) -> None:
        self._token, self._trusted = token, trusted
        self._selector = selectors.DefaultSelector()
        self._doors: dict[int, tuple[socket.socket, bool | None]] = {}  # by descriptor; are all lines sealed?
        self._callers: dict[int, _Caller] = {}
        self._processes: dict[int, Peer] = {}  # descriptors of processes
        self._sending: dict[int, Connection] = {}  # of which something waits
        self._unheard: set[int] = set()  # lines of which more has come than was heard
        self._next_probe = 0.0
        self.strangers = 0  # first messages of those who do not know the token

    def bind(self, address: str, *, sealed: bool | None = None) -> str:
        """Listen at an address, and give it with the port that was found if it had none.

        ``ipc://@name`` is for processes of this host and user, ``tcp://...`` for all; there the address that a peer
        comes from decides whether its messages are encrypted, unless it is given for all.
        """
        door = listen(address)
        self._doors[door.fileno()] = door, sealed
        self._selector.register(door, selectors.EVENT_READ)
        return address_of(door) if is_tcp(door) else address

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
        self._selector.register(descriptor, selectors.EVENT_READ, peer)
        return True

    def forget(self, peer: Peer) -> None:
        """Hear no more of a peer."""
        for number in [number for number, caller in self._callers.items() if caller.peer is peer]:
            self._hang_up(number)
        self._unwatch_all(peer)

    def hear(self, seconds: float) -> Iterator[tuple[Peer, Heard]]:
        """Wait for something to happen, and give all that has happened."""
        wait = 0.0 if self._unheard else min(seconds, max(0.0, self._next_probe - time.monotonic()))
        ready = self._selector.select(wait)
        unheard, self._unheard = self._unheard, set()
        for number in unheard:
            yield from self._read_line(number)
        for key, events in ready:
            number = key.fd
            if number in self._callers:
                if number in self._sending and events & selectors.EVENT_WRITE:
                    self._send_on(number)
                if events & selectors.EVENT_READ:
                    yield from self._read_line(number)
            elif number in self._doors:
                self._open_door(*self._doors[number])
            elif (peer := self._processes.get(number)) is not None and peer is key.data:  # else it is another's by now
                self._unwatch(number)
                yield peer, Ended()
        yield from self._probe()

    def close(self) -> None:
        """Send what is still to be sent, and be gone."""
        for descriptor in list(self._processes):
            self._unwatch(descriptor)
        end = time.monotonic() + _LAST_WORDS
        for number, caller in list(self._callers.items()):
            left = max(0.0, end - time.monotonic())
            self._hang_up(number, left if caller.connection.waits else 0.0)
        for door, _ in self._doors.values():
            door.close()
        self._doors = {}
        self._selector.close()

    # What is sent ------------------------------------------------------------------------------------------------

    def wait_to_send(self, connection: Connection) -> None:
        """Send the rest of what waits on a line when its socket takes it."""
        number = connection.fileno()
        if number in self._callers and number not in self._sending:
            self._sending[number] = connection
            self._selector.modify(number, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def keep_what_waits(self) -> None:
        """Parameters that were given to be sent are about to change: what of them waits is copied."""
        for connection in self._sending.values():
            connection.keep_what_waits()

    def _send_on(self, number: int) -> None:
        connection = self._sending[number]
        connection.flush()
        if not connection.waits:
            del self._sending[number]
            self._selector.modify(number, selectors.EVENT_READ)

    # What is heard -----------------------------------------------------------------------------------------------

    def _read_line(self, number: int) -> Iterator[tuple[Peer, Heard]]:
        caller = self._callers.get(number)
        if caller is None:
            return
        peer = caller.peer or self._meet(number, caller)
        if peer is None:
            return
        for _ in range(_MOST_AT_ONCE):
            if self._callers.get(number) is not caller:  # what we gave has led to its end
                return
            try:
                message = peer.receive()
            except WireError as error:
                if not caller.connection.ended:
                    yield peer, error
                    continue
                message = None
            if message is None:
                break
            yield peer, message
            if caller.connection.drained and not caller.connection.has_more:
                return
        else:
            self._unheard.add(number)  # of no consequence if it is gone
        if caller.connection.ended and number in self._callers:
            self._hang_up(number)
            yield peer, Ended()

    def _meet(self, number: int, caller: _Caller) -> Peer | None:
        """Go on with the handshake of one who has no name yet; None if it has still none."""
        connection = caller.connection
        try:
            received = connection.receive()
            if received is None:
                if connection.ended:
                    self._hang_up(number)
                return None
            if not caller.answer.given:
                connection.send(caller.answer.reply(received.head))
                return None
            connection.open(caller.answer.finish(received.head))
        except WireError as error:
            self._refuse_stranger(error, caller.host)
            if isinstance(error, HandshakeRefused):
                connection.send(error.reply)
            self._hang_up(number)
            return None
        caller.peer = Peer(connection, self)
        return caller.peer

    def _open_door(self, door: socket.socket, sealed: bool | None) -> None:
        try:
            accepted, _ = door.accept()
        except OSError:  # gone again, or too many files open
            return
        if not is_tcp(accepted) and _user_of(accepted) != os.getuid():
            accepted.close()
            self._refuse_stranger("it belongs to another user")
            return
        nameless = [number for number, caller in self._callers.items() if caller.peer is None]
        if len(nameless) >= _MOST_NAMELESS:
            self._hang_up(nameless[0])
        host = host_of(accepted)
        if sealed is None:
            sealed = is_tcp(accepted) and not self._trusted and not _is_this_host(host)
        try:
            connection = Connection(accepted)
        except OSError:
            accepted.close()
            return
        self._callers[connection.fileno()] = _Caller(connection, Answer(self._token, sealed=sealed), host)
        self._selector.register(connection.fileno(), selectors.EVENT_READ)

    def _hang_up(self, number: int, linger: float = 0.0) -> None:
        caller = self._callers.pop(number)
        self._selector.unregister(number)
        self._sending.pop(number, None)
        self._unheard.discard(number)
        caller.connection.close(linger)

    def _refuse_stranger(self, reason: object, host: str = "") -> None:
        self.strangers += 1
        if self.strangers.bit_count() == 1:  # the first, second, fourth, ...: nobody fills a disk with this
            whence = f" from {host}" if host else ""
            logger.warning("refused a stranger%s (%d so far): %s", whence, self.strangers, reason)

    # Who is there ------------------------------------------------------------------------------------------------

    def _probe(self) -> Iterator[tuple[Peer, Heard]]:
        now = time.monotonic()
        if now < self._next_probe:
            return
        self._next_probe = now + _PROBE_EVERY
        for number, caller in list(self._callers.items()):
            connection, peer = caller.connection, caller.peer
            if self._callers.get(number) is not caller:
                continue
            if peer is None:
                if now > caller.since + _TIME_TO_PROVE:
                    self._refuse_stranger(f"it has not proved the token within {_TIME_TO_PROVE:.0f} s", caller.host)
                    self._hang_up(number)
                continue
            if connection.silence.seconds(now) > _VANISHED_AFTER or connection.stuck_for() > TIME_TO_TAKE:
                connection.give_up()
            elif connection.remote and not connection.waits:
                peer.send(Alive())
            if connection.ended:
                self._hang_up(number)
                yield peer, Ended()

    def _unwatch_all(self, peer: Peer) -> None:
        for descriptor in [number for number, known in self._processes.items() if known is peer]:
            self._unwatch(descriptor)

    def _unwatch(self, descriptor: int) -> None:
        del self._processes[descriptor]
        self._selector.unregister(descriptor)
        os.close(descriptor)


def _user_of(accepted: socket.socket) -> int:
    credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)
