"""Messages between a worker and the server over a stream socket, on one host or between two.

A message is the lengths of its head and of its tensors, the head, and the tensors. If it has tensors, zeros after the
head align them to 64 bytes. Tensors are sent from the caller's memory and received into it.
``paceline.transport.streams`` encrypts all of it, or nothing.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from collections import deque
from typing import NamedTuple

from paceline.errors import WireError
from paceline.transport.noise import Ciphers
from paceline.transport.pieces import Pieces, without
from paceline.transport.sockets import Silence, connect, host_of, is_tcp, prepare
from paceline.transport.streams import PlainStream, SealedStream
from paceline.transport.wire import MAX_HEAD

MAX_FIRST = 512  # bytes of a head during the handshake
LENGTHS = struct.Struct("<IQ")
NO_TENSORS = 2**64 - 1
ALIGNMENT = 64  # of tensors in the stream: unaligned copies are slower
TIME_TO_TAKE = 60.0  # seconds that the peer may take nothing of what waits
MOST_WAITING = 2**24  # bytes of heads that may wait
_READ = 2**16
_NOWHERE = memoryview(bytearray(_READ))  # for bytes that nobody wants


class Received(NamedTuple):
    """A received message; ``tensors`` is the memory that its tensors were put into."""

    head: bytes
    tensors: Pieces | None


class _Waiting(NamedTuple):
    """A message that waits to be sent."""

    head: bytes
    tensors: Pieces | None
    overtaken_by_next: bool

    def copied(self) -> _Waiting:
        return self if self.tensors is None else self._replace(tensors=self.tensors.copied())

    def stretches(self) -> list[memoryview]:
        if self.tensors is None:
            return [memoryview(LENGTHS.pack(len(self.head), NO_TENSORS) + self.head)]
        front = LENGTHS.pack(len(self.head), self.tensors.nbytes) + self.head
        return [memoryview(front + bytes(-len(front) % ALIGNMENT)), *self.tensors.stretches]


class Connection:
    """One end of a connection; during the handshake, up to ``open``, messages are short and have no tensors."""

    def __init__(self, connection: socket.socket) -> None:
        prepare(connection)
        self._socket = connection
        self.remote, self.host = is_tcp(connection), host_of(connection)
        self._stream: PlainStream | SealedStream = PlainStream(connection)
        self._opened = False
        self.ended = False
        self.silence = Silence(connection)
        self._poll = select.poll()
        self._poll.register(connection)
        # Receiving. The bytes of the buffer from start to stop have come and are not interpreted yet.
        self._buffer = memoryview(bytearray(_READ))
        self._start = self._stop = 0
        self._wanted = 0  # bytes of lengths, head and zeros, once the lengths have come
        self._message: Received | None = None  # whose tensors come now
        self._targets: list[memoryview] = []  # memory for the rest of the tensors
        self._unwanted = 0  # bytes of refused tensors, after the targets
        # Sending.
        self._going: list[memoryview] = []  # what the socket takes next
        self._queue: deque[_Waiting] = deque()  # messages after it
        self._waiting_bytes = 0  # of heads, since the queue was last empty
        self._took_at = 0.0
        self._deaf = False  # sending has failed

    @classmethod
    def to(cls, address: str, seconds: float) -> Connection:
        """Connect to a server; raise ``OSError`` if that fails or takes longer than ``seconds``."""
        return cls(connect(address, seconds))

    def open(self, ciphers: Ciphers | None) -> None:
        """End the handshake: from now on messages may be long, and are encrypted if there are keys."""
        self._opened = True
        if self.waits:  # the handshake fits into an empty socket, unless the connection is broken
            self.give_up()
        if ciphers is not None:
            plain = self._stream
            self._stream = SealedStream(self._socket, ciphers, self._buffer[self._start : self._stop])
            self._stream.sent, self._stream.received = plain.sent, plain.received
            self._start = self._stop = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def sent(self) -> int:
        """The bytes that the socket has taken, with all that is around tensors."""
        return self._stream.sent

    @property
    def received(self) -> int:
        """The bytes that have come from the socket."""
        return self._stream.received

    # Sending -------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._going or self._queue or self._stream.waits) and not (self._deaf or self.ended)

    def send(self, head: bytes, tensors: Pieces | None = None, *, overtakes: bool = False) -> None:
        """Send what the socket takes of a message; the rest waits for ``flush``.

        A message that ``overtakes`` replaces earlier such messages of which nothing was sent.
        """
        if self.ended or self._deaf:
            return
        if self._queue and overtakes:
            self._queue = deque(message for message in self._queue if not message.overtaken_by_next)
        if not self.waits:
            self._took_at = time.monotonic()
        self._queue.append(_Waiting(head, tensors, overtakes))
        self.flush()
        self._waiting_bytes = self._waiting_bytes + len(head) if self._queue else 0
        if self._waiting_bytes > MOST_WAITING:
            self.give_up()

    def flush(self) -> None:
        """Send what the socket takes of what waits."""
        while self.waits:
            if not self._going and self._queue:
                self._going = self._queue.popleft().stretches()
            try:
                taken = self._stream.send(self._going)
            except BlockingIOError:
                if self.stuck_for() > TIME_TO_TAKE:
                    self.give_up()
                return
            except OSError:  # received bytes can still be read
                self._going, self._queue, self._deaf = [], deque(), True
                return
            self._took_at = time.monotonic()
            self._going = without(self._going, taken)

    def stuck_for(self) -> float:
        """The seconds for which the peer has taken nothing of what waits."""
        return time.monotonic() - self._took_at if self.waits else 0.0

    def keep_what_waits(self) -> None:
        """Copy the tensors that wait, before their memory changes."""
        self._going = Pieces(*self._going).copied().stretches
        self._queue = deque(message.copied() for message in self._queue)

    def send_all(self, head: bytes, tensors: Pieces | None = None, *, vanished_after: float) -> None:
        """Send a message, and wait until the socket has taken it or the connection has ended."""
        self.send(head, tensors)
        while self.waits:
            self._await(select.POLLOUT, 0.5)
            if self.silence.seconds(time.monotonic()) > vanished_after:
                self.give_up()
            self.flush()

    # Receiving -----------------------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Whether all that has come was given."""
        return self._start == self._stop and self._stream.exhausted

    def receive(self, into: Pieces | None = None) -> Received | None:
        """The next message, or None if it is not complete; ``into`` is memory for tensors that begin now.

        Raise ``WireError`` if the message is refused; the connection ends if what follows cannot be interpreted.
        """
        while True:
            if self._unwanted and not self._targets:
                self._targets = [_NOWHERE[: min(self._unwanted, _READ)]]
                self._unwanted -= len(self._targets[0])
            elif self._message is None and not self._targets:
                self._begin(into)
            if self._message is not None and not self._targets:
                message, self._message = self._message, None
                return message
            if not self._read():
                return None

    def _begin(self, into: Pieces | None) -> None:
        """Interpret lengths and head, if they have come."""
        have = self._stop - self._start
        if have < LENGTHS.size:
            return
        length, tensors = LENGTHS.unpack_from(self._buffer, self._start)
        longest = MAX_HEAD if self._opened else MAX_FIRST
        if length > longest or (tensors != NO_TENSORS and not self._opened):
            self.give_up()
            raise WireError(f"wanted a head of at most {longest} bytes, found {length} announced, or tensors too early")
        stop = LENGTHS.size + length
        self._wanted = stop if tensors == NO_TENSORS else stop + -stop % ALIGNMENT
        if have < self._wanted:
            return
        head = bytes(self._buffer[self._start + LENGTHS.size : self._start + stop])
        self._start, self._wanted = self._start + self._wanted, 0
        room = None if into is None or tensors == NO_TENSORS else into.room_for(tensors)
        if tensors == NO_TENSORS:
            self._message = Received(head, None)
        elif room is not None:
            self._message, self._targets = Received(head, room), room.stretches
        else:
            self._unwanted = tensors
            most = "at most " if into is not None and into.at_most else ""
            wanted = "no tensors" if into is None else f"{most}{into.nbytes} bytes of tensors"
            raise WireError(f"wanted {wanted}, found {tensors} announced")

    def _read(self) -> bool:
        """Fill the targets, or else the buffer, with what has come; False if nothing has."""
        if self._targets and self._start < self._stop:
            count = min(len(self._targets[0]), self._stop - self._start)
            self._targets[0][:count] = self._buffer[self._start : self._start + count]
            self._start += count
            self._targets = without(self._targets, count)
            return True
        if self.ended:
            return False
        try:
            count = self._stream.receive(self._targets or [self._room()])
        except BlockingIOError:
            return False
        except WireError:
            self.give_up()
            raise
        except OSError:
            count = 0
        if count == 0:
            self.give_up()
        elif self._targets:
            self._targets = without(self._targets, count)
        else:
            self._stop += count
        return count > 0

    def _room(self) -> memoryview:
        """The free part of the buffer; it is made longer for a long head, and short again after it."""
        have = self._stop - self._start
        needed = max(self._wanted, have + 1)
        if have == 0 or self._start + needed > len(self._buffer):
            length = max(needed, len(self._buffer) if have else _READ)
            buffer = self._buffer if length == len(self._buffer) else memoryview(bytearray(length))
            buffer[:have] = bytes(self._buffer[self._start : self._stop])
            self._buffer, self._start, self._stop = buffer, 0, have
        return self._buffer[self._stop :]

    def wait(self, seconds: float) -> None:
        """Wait until something may have come, at most so long."""
        if not self.ended:
            self._await(select.POLLIN, seconds)

    def _await(self, events: int, seconds: float) -> bool:
        self._poll.modify(self._socket, events)
        return bool(self._poll.poll(math.ceil(seconds * 1000)))

    # The end -------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """End the connection: nothing is sent or received any more."""
        self.ended = True
        self._going, self._queue = [], deque()

    def close(self, linger: float = 0.0) -> None:
        """Close, after the peer has had ``linger`` seconds to take what waits and to close its end."""
        if self.fileno() < 0:
            return
        end = time.monotonic() + linger
        while self.waits and (left := end - time.monotonic()) > 0:
            self._await(select.POLLOUT, left)
            self.flush()
        if linger and not self.ended:
            self._read_to_the_end(end)
        self.give_up()
        self._socket.close()

    def _read_to_the_end(self, end: float) -> None:
        """Read until the peer closes: a socket closed with unread bytes discards what the peer has not read."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while (left := end - time.monotonic()) > 0 and self._await(select.POLLIN, left):
                if not self._socket.recv_into(_NOWHERE):
                    return
