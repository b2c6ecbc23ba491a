"""A line between a worker and the server: messages over a stream socket, of one host or between two.

Each message is the lengths of its two frames, of which the second may be none, and the frames, which
``paceline.transport.channel`` makes and opens. What has come in part is kept until the rest comes, and what the socket
does not take waits. Tensors are sent from where they lie and received where they belong.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

from paceline.errors import WireError
from paceline.transport.channel import MAX_FRAME, Channel, Received
from paceline.transport.pieces import Pieces
from paceline.transport.sockets import Silence, connect, is_tcp, prepare

MAX_FIRST = 512  # bytes of a message before the token is proved
LENGTHS = struct.Struct("<II")
NO_FRAME = 2**32 - 1
TIME_TO_TAKE = 60.0  # seconds that the other end may take nothing of what waits for it
MOST_WAITING = 2**24  # bytes of messages without tensors that may wait
_READ = 2**16
_MOST_PARTS = 512  # of memory in one call
_NOWHERE = memoryview(bytearray(_READ))  # what is refused goes there


class Waiting:
    """A message of which not all is sent."""

    def __init__(self, head: bytes, tensors: Pieces | None, *, overtaken_by_next: bool) -> None:
        self.head, self.tensors, self.overtaken_by_next = head, tensors, overtaken_by_next
        self.next = 0  # byte of the tensors
        self.begun = False

    def keep(self) -> None:
        """The tensors are about to change: copy those that are not sent."""
        if self.tensors is not None:
            self.tensors.keep(self.next)

    def frames(self, channel: Channel | None) -> tuple[bytes, list[memoryview] | None, bool]:
        """The next frames to send, and whether they are the last."""
        if channel is None:
            return self.head, None, True
        if self.tensors is None:
            return *channel.message(self.head, 0, None), True
        start, total = self.next, self.tensors.nbytes
        self.next = min(start + channel.chunk, total)
        chunk = self.tensors.between(start, self.next)
        if self.begun:
            frames = channel.message(b"", start, chunk)
        else:
            frames = channel.message(self.head, total, chunk)
        self.begun = True
        return *frames, self.next == total


class Connection:
    """One end of a connection. It has no ``channel`` until the handshake is done; its messages are one short frame."""

    def __init__(self, connection: socket.socket) -> None:
        prepare(connection)
        self._socket = connection
        self.remote = is_tcp(connection)
        self.channel: Channel | None = None
        self.ended = False
        self.silence = Silence(connection)
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        # Of what comes: the bytes from start to stop are not understood yet.
        self._buffer = memoryview(bytearray(_READ))
        self._start = self._stop = 0
        self._targets: list[memoryview] | None = None  # for the second frame, while it comes
        self._refused = False  # ... which nobody wants
        self.drained = False  # the last look found less than it had room for
        # Of what goes: what the socket is to take next, and messages behind it.
        self._going: list[bytes | memoryview] = []
        self._queue: deque[Waiting] = deque()
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

    def fileno(self) -> int:
        return self._socket.fileno()

    # Sending -------------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._going or self._queue)

    def send(self, head: bytes, tensors: Pieces | None = None, *, overtakes: bool = False) -> None:
        """Send a message as far as the socket takes it; the rest waits for ``flush``.

        A message that ``overtakes`` makes earlier such ones needless, of which nothing has been sent.
        """
        if self.ended or self._deaf:
            return
        if self._queue and overtakes:
            self._queue = deque(message for message in self._queue if message.begun or not message.overtaken_by_next)
        if not self.waits:
            self._took_at = time.monotonic()
        self._queue.append(Waiting(head, tensors, overtaken_by_next=overtakes))
        self.flush()
        self._waiting_bytes = self._waiting_bytes + len(head) if self._queue else 0
        if self._waiting_bytes > MOST_WAITING:
            self.give_up()

    def flush(self) -> None:
        """Send as much of what waits as the socket takes."""
        while self.waits and not self.ended:
            if not self._going:
                self._go_on()
            try:
                taken = self._socket.sendmsg(self._going[:_MOST_PARTS])
            except BlockingIOError:
                if self.stuck_for() > TIME_TO_TAKE:
                    self.give_up()
                return
            except OSError:  # what has come before can still be read
                self._going, self._queue, self._deaf = [], deque(), True
                return
            self._took_at = time.monotonic()
            self._going = _without(self._going, taken)

    def _go_on(self) -> None:
        first, second, last = self._queue[0].frames(self.channel)
        if last:
            self._queue.popleft()
        length = NO_FRAME if second is None else sum(map(len, second))
        self._going = [LENGTHS.pack(len(first), length) + first, *(second or ())]

    def stuck_for(self) -> float:
        """For how many seconds the other end has taken nothing of what waits."""
        return time.monotonic() - self._took_at if self.waits else 0.0

    def keep_what_waits(self) -> None:
        """Tensors are about to change where they lie: keep copies of what is not sent."""
        if self.waits:
            self._going = [bytes(part) for part in self._going]
            for message in self._queue:
                message.keep()

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
        return self._start < self._stop

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
                self._fill()
            elif self._targets != [] and not self._read():
                return None

    def _begin(self, into: Pieces | None) -> Received | None:
        """Take a first frame if it is there; a message that has no second is whole."""
        have = self._stop - self._start
        if have < LENGTHS.size:
            return None
        first, second = LENGTHS.unpack_from(self._buffer, self._start)
        longest = MAX_FRAME if self.channel is not None else MAX_FIRST
        if first > longest or (second > longest and second != NO_FRAME):
            self.give_up()
            raise WireError(f"wanted frames of at most {longest} bytes, found {first} and {second} announced")
        start = self._start + LENGTHS.size
        if have < LENGTHS.size + first:
            self._make_room(LENGTHS.size + first)
            return None
        frame = self._buffer[start : start + first]
        self._start = start + first
        if self.channel is None:
            return self._first_message(frame, second)
        try:
            self._targets = self.channel.begin(frame, None if second == NO_FRAME else second, into)
        except WireError:
            if second != NO_FRAME:
                self._refused = True
                self._targets = [_NOWHERE] * (second // _READ) + [_NOWHERE[: second % _READ]] * (second % _READ > 0)
            raise
        return self._end() if second == NO_FRAME else None

    def _first_message(self, frame: memoryview, second: int) -> Received:
        if second != NO_FRAME:
            self.give_up()
            raise WireError("wanted a handshake of 1 frame, found 2")
        return Received(bytes(frame), None)

    def _end(self) -> Received | None:
        assert self.channel is not None
        self._targets = None
        if self._refused:
            self._refused = False
            return None
        return self.channel.end()

    def _fill(self) -> None:
        """Put what has been read too far where it belongs."""
        assert self._targets
        target = self._targets[0]
        size = min(len(target), self._stop - self._start)
        target[:size] = self._buffer[self._start : self._start + size]
        self._start += size
        self._targets = _without(self._targets, size)

    def _read(self) -> bool:
        """Read what has come; False if nothing has."""
        if self.ended:
            return False
        try:
            if self._targets:
                count, room = self._read_targets(self._targets)
            else:
                count, room = self._read_more()
        except BlockingIOError:
            return False
        except OSError:
            count = room = 0
        if count == 0:
            self.give_up()
            return False
        self.drained = count < room
        return True

    def _read_targets(self, targets: list[memoryview]) -> tuple[int, int]:
        if len(targets) == 1:
            count, room = self._socket.recv_into(targets[0]), len(targets[0])
        else:
            count, room = self._socket.recvmsg_into(targets[:_MOST_PARTS])[0], sum(map(len, targets))
        self._targets = _without(targets, count)
        return count, room

    def _read_more(self) -> tuple[int, int]:
        if self._start == self._stop:
            self._start = self._stop = 0
            if len(self._buffer) > _READ:
                self._buffer = memoryview(bytearray(_READ))
        elif self._stop == len(self._buffer):
            self._make_room(self._stop - self._start + 1)
        end = len(self._buffer)
        if self.channel is not None and (first := self.channel.next_first) is not None:
            end = min(
                end, self._start + LENGTHS.size + first
            )  # and not of the tensors, which are read into their own memory
        count = self._socket.recv_into(self._buffer[self._stop : end])
        self._stop += count
        return count, end - self._stop + count

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


def _without(parts: list, count: int) -> list:  # type: ignore[type-arg]
    """Parts of memory without the first so many bytes of them."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [memoryview(part)[count:] if count else part, *parts[index + 1 :]]
        count -= len(part)
    return []
