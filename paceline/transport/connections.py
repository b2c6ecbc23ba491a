"""A line between a worker and the server: messages over a stream socket, of one host or between two.

Each message is the lengths of its head and of its tensors, of which there may be none, the head, zeros up to a multiple
of 64 bytes if there are tensors, and the tensors. What has come in part is kept until the rest comes, and what the
socket does not take waits. Tensors are sent from where they lie and received where they belong.
``paceline.transport.streams`` encrypts all of it, or nothing.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from paceline.errors import WireError
from paceline.transport.noise import Ciphers
from paceline.transport.pieces import Pieces, without
from paceline.transport.sockets import Silence, connect, is_tcp, prepare
from paceline.transport.streams import PlainStream, SealedStream
from paceline.transport.wire import MAX_HEAD

MAX_FIRST = 512  # bytes of a message before the token is proved
LENGTHS = struct.Struct("<IQ")
NO_TENSORS = 2**64 - 1
ALIGNMENT = 64  # tensors begin at a multiple of it in the stream: unaligned copies are slower
TIME_TO_TAKE = 60.0  # seconds that the other end may take nothing of what waits for it
MOST_WAITING = 2**24  # bytes of messages without tensors that may wait
_READ = 2**16
_NOWHERE = memoryview(bytearray(_READ))  # what is refused goes there


class Received(NamedTuple):
    """A message that has come; ``tensors`` is where those with it were put."""

    head: bytes
    tensors: Pieces | None


class _Waiting(NamedTuple):
    """A message of which nothing is sent."""

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
    """One end of a connection. Until it is ``opened``, after the handshake, its messages are short, without tensors."""

    def __init__(self, connection: socket.socket) -> None:
        prepare(connection)
        self._socket = connection
        self.remote = is_tcp(connection)
        self._stream: PlainStream | SealedStream = PlainStream(connection)
        self._opened = False
        self.ended = False
        self.silence = Silence(connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        # Of what comes: the bytes from start to stop are not understood yet.
        self._buffer = memoryview(bytearray(_READ))
        self._start = self._stop = 0
        self._targets: list[memoryview] | None = None  # for the rest of the tensors, while they come
        self._message: Received | None = None  # the message that they belong to; None: nobody wants it
        self._unwanted = 0  # bytes of it behind the targets
        # Of what goes: what the socket is to take next, and messages behind it.
        self._going: list[memoryview] = []
        self._queue: deque[_Waiting] = deque()
        self._waiting_bytes = 0  # of heads, since nothing last waited
        self._took_at = 0.0
        self._deaf = False  # the other end takes nothing any more

    @classmethod
    def to(cls, address: str, seconds: float) -> Connection:
        """Connect to a server; raise ``OSError`` if it is not there, or not within so long."""
        connection = connect(address, seconds)
        try:
            return cls(connection)
        except OSError:
            connection.close()
            raise

    def open(self, ciphers: Ciphers | None) -> None:
        """The handshake is done: messages may be long from now on, and are encrypted if there are keys."""
        self._opened = True
        if self.waits:  # so little fits into an empty socket, unless the connection is broken
            self.give_up()
        if ciphers is not None:
            self._stream = SealedStream(self._socket, ciphers, self._buffer[self._start : self._stop])
            self._start = self._stop = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    # Sending -------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._going or self._queue or self._stream.waits) and not (self._deaf or self.ended)

    def send(self, head: bytes, tensors: Pieces | None = None, *, overtakes: bool = False) -> None:
        """Send a message as far as the socket takes it; the rest waits for ``flush``.

        A message that ``overtakes`` makes earlier such ones needless, of which nothing has been sent.
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
        """Send as much of what waits as the socket takes."""
        while self.waits and not self.ended:
            if not self._going and self._queue:
                self._going = self._queue.popleft().stretches()
            try:
                taken = self._stream.send(self._going)
            except BlockingIOError:
                if self.stuck_for() > TIME_TO_TAKE:
                    self.give_up()
                return
            except OSError:  # what has come before can still be read
                self._going, self._queue, self._deaf = [], deque(), True
                return
            self._took_at = time.monotonic()
            self._going = without(self._going, taken)

    def stuck_for(self) -> float:
        """For how many seconds the other end has taken nothing of what waits."""
        return time.monotonic() - self._took_at if self.waits else 0.0

    def keep_what_waits(self) -> None:
        """Tensors are about to change where they lie: keep copies of what is not sent."""
        self._going = Pieces(*self._going).copied().stretches
        self._queue = deque(message.copied() for message in self._queue)

    def send_all(self, head: bytes, tensors: Pieces | None = None, *, vanished_after: float) -> None:
        """Send a message, waiting until the socket has taken all of it or the line has ended."""
        self.send(head, tensors)
        while self.waits and not self.ended:
            self._poll.modify(self._socket, select.POLLOUT)
            self._poll.poll(500)
            if self.silence.seconds(time.monotonic()) > vanished_after:
                self.give_up()
            self.flush()
        if not self.ended:
            self._poll.modify(self._socket, select.POLLIN)

    # Receiving -----------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """Whether more has been read than the messages that were given."""
        return self._start < self._stop or self._stream.has_more

    @property
    def drained(self) -> bool:
        """Whether the last look found less than it had room for."""
        return self._stream.drained

    def receive(self, into: Pieces | None = None) -> Received | None:
        """The next message, or None if it has not all come; ``into`` is where tensors go that begin now.

        ``WireError``: it is refused. If nothing behind it can be understood either, the line has ended.
        """
        while True:
            if self._targets is None:
                if (message := self._begin(into)) is not None:
                    return message
            elif not self._targets:
                if (message := self._end()) is not None:
                    return message
                continue
            if self._targets and self._start < self._stop:
                self._fill(self._targets)
            elif self._targets != [] and not self._read():
                return None

    def _begin(self, into: Pieces | None) -> Received | None:
        """Take a head if it is there; a message that has no tensors is whole."""
        have = self._stop - self._start
        if have < LENGTHS.size:
            return None
        length, tensors = LENGTHS.unpack_from(self._buffer, self._start)
        longest = MAX_HEAD if self._opened else MAX_FIRST
        if length > longest or (tensors != NO_TENSORS and not self._opened):
            self.give_up()
            raise WireError(f"wanted a head of at most {longest} bytes, found {length} announced, or tensors too early")
        stop = LENGTHS.size + length
        padding = 0 if tensors == NO_TENSORS else -stop % ALIGNMENT
        if have < stop + padding:
            self._make_room(stop + padding)
            return None
        head = bytes(self._buffer[self._start + LENGTHS.size : self._start + stop])
        self._start += stop + padding
        if tensors == NO_TENSORS:
            return Received(head, None)
        if into is None or into.nbytes != tensors:
            self._message, self._targets, self._unwanted = None, [], tensors
            wanted = "no tensors" if into is None else f"{into.nbytes} bytes of tensors"
            raise WireError(f"wanted {wanted}, found {tensors} announced")
        self._message, self._targets = Received(head, into), into.stretches
        return None

    def _end(self) -> Received | None:
        """The targets are filled: give the message, unless nobody wants it."""
        if self._unwanted:
            size = min(self._unwanted, _READ)
            self._unwanted -= size
            self._targets = [_NOWHERE[:size]]
            return None
        self._targets = None
        return self._message

    def _fill(self, targets: list[memoryview]) -> None:
        """Put what has been read too far where it belongs."""
        size = min(len(targets[0]), self._stop - self._start)
        targets[0][:size] = self._buffer[self._start : self._start + size]
        self._start += size
        self._targets = without(targets, size)

    def _read(self) -> bool:
        """Read what has come; False if nothing has."""
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
            return False
        if self._targets:
            self._targets = without(self._targets, count)
        else:
            self._stop += count
        return True

    def _room(self) -> memoryview:
        """Where a head goes that is to come."""
        if self._start == self._stop:
            self._start = self._stop = 0
            if len(self._buffer) > _READ:
                self._buffer = memoryview(bytearray(_READ))
        elif self._stop == len(self._buffer):
            self._make_room(self._stop - self._start + 1)
        return self._buffer[self._stop :]

    def _make_room(self, size: int) -> None:
        """Have room for so many bytes from ``start`` on."""
        if self._start + size <= len(self._buffer):
            return
        have = self._stop - self._start
        old = self._buffer[self._start : self._stop]
        buffer = self._buffer if size <= len(self._buffer) else memoryview(bytearray(size))
        buffer[:have] = bytes(old)
        self._buffer, self._start, self._stop = buffer, 0, have

    def wait(self, seconds: float) -> None:
        """Wait until something may have come, at most so long."""
        if not self.ended:
            self._poll.poll(math.ceil(seconds * 1000))

    # The end -------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Nothing goes or comes any more."""
        self.ended = True
        self._going, self._queue = [], deque()

    def close(self, linger: float = 0.0) -> None:
        """Close, after the other end has so many seconds to take what waits and close its own."""
        if self._socket.fileno() < 0:
            return
        end = time.monotonic() + linger
        for _ in self._until(end):
            self.flush()
        if linger and not self.ended:
            self._say_goodbye(end)
        self.give_up()
        self._socket.close()

    def _until(self, end: float) -> Iterator[None]:
        self._poll.modify(self._socket, select.POLLOUT)
        while self.waits and not self.ended and (left := end - time.monotonic()) > 0:
            self._poll.poll(math.ceil(left * 1000))
            yield

    def _say_goodbye(self, end: float) -> None:
        """A socket closed with something unread would take back what the other end has not read."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
            self._poll.modify(self._socket, select.POLLIN)
            while (left := end - time.monotonic()) > 0 and self._poll.poll(math.ceil(left * 1000)):
                if not self._socket.recv_into(_NOWHERE):
                    return
        except OSError:
            return
