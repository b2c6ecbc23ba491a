"""Bytes to and from a socket that does not block: as they are, or encrypted.

Both kinds of stream send as much as the socket takes and receive as much as has come; ``BlockingIOError``: nothing
now. An encrypted one is a row of Noise messages, each behind its length in two bytes, big endian.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

from paceline.errors import WireError
from paceline.transport.noise import MOST, TAG, Ciphers
from paceline.transport.pieces import first, joined, without

RECORD = MOST // 64 * 64 - 64  # bytes of one message, in whole lines of the cache
_LENGTH = 2
_SEALED = _LENGTH + RECORD + TAG
_AT_ONCE = 4 * _SEALED  # bytes that are encrypted while the network has the last ones
_LEAST = 2**8  # bytes of a stretch of memory that has messages of its own: copying it to others takes longer
_MOST_STRETCHES = 512  # of memory in one call
_MOST_PLAIN = 2**20  # bytes in one call


class PlainStream:
    """Bytes as they are, from where they lie and to where they belong."""

    waits = has_more = False

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.drained = False  # the last look found less than it had room for

    def send(self, stretches: list[memoryview]) -> int:
        """Send, and give how many bytes the socket took."""
        return self._socket.sendmsg(first(stretches[:_MOST_STRETCHES], _MOST_PLAIN))

    def receive(self, into: list[memoryview]) -> int:
        """Fill memory with what has come, and give how many bytes; 0 at the end of the stream."""
        into = first(into[:_MOST_STRETCHES], _MOST_PLAIN)
        room = sum(map(len, into))
        count = self._socket.recv_into(into[0]) if len(into) == 1 else self._socket.recvmsg_into(into)[0]
        self.drained = count < room
        return count


class SealedStream:
    """Bytes under the keys of a handshake; ``came`` is what the socket has given already."""

    def __init__(self, connection: socket.socket, ciphers: Ciphers, came: memoryview) -> None:
        self._socket, self._ciphers = connection, ciphers
        self.drained = False
        self._sealed, self._coming, self._scratch = (
            memoryview(bytearray(size)) for size in (_AT_ONCE + _SEALED, max(_AT_ONCE, len(came)), RECORD)
        )
        self._going = self._opened = memoryview(b"")  # what the socket is to take; what is read of the last message
        self._start, self._stop = 0, len(came)  # of what has come
        self._coming[: len(came)] = came

    @property
    def waits(self) -> bool:
        """Whether the socket has not taken all that was encrypted."""
        return bool(self._going)

    @property
    def has_more(self) -> bool:
        """Whether more has been read than was given."""
        return bool(self._opened) or self._start < self._stop

    def send(self, stretches: list[memoryview]) -> int:
        """Encrypt and send, and give how many bytes were encrypted: those need not be kept."""
        if self._going:
            self._flush()
            return 0
        taken = stop = 0
        while stretches and stop < _AT_ONCE:
            plain = stretches[0][:RECORD]
            if len(plain) < _LEAST:
                plain = joined(first(stretches, RECORD))
            stretches = without(stretches, len(plain))
            stop = self._seal(plain, stop)
            taken += len(plain)
        self._going = self._sealed[:stop]
        with contextlib.suppress(BlockingIOError):
            self._flush()
        return taken

    def _seal(self, plain: memoryview, start: int) -> int:
        length, begin = len(plain) + TAG, start + _LENGTH
        self._sealed[start:begin] = length.to_bytes(_LENGTH, "big")
        self._ciphers.send.encrypt_into(plain, self._sealed[begin : begin + length])
        return begin + length

    def _flush(self) -> None:
        self._going = self._going[self._socket.send(self._going) :]

    def receive(self, into: Sequence[memoryview]) -> int:
        """Fill memory with what has come, and give how many bytes; 0 at the end of the stream.

        ``WireError``: the other end did not encrypt it. Nothing behind it can be read.
        """
        place = into[0]
        while (filled := self._open_next(place)) == 0:
            if self._read() == 0:
                return 0
        with contextlib.suppress(WireError):  # what came before it is given first; the next call meets it again
            while filled < len(place) and (count := self._open_next(place[filled:])):
                filled += count
        return filled

    def _open_next(self, place: memoryview) -> int:
        """Decrypt the next message into memory, and give how many bytes; 0 if it has not all come.

        A message that is longer than the memory is decrypted elsewhere, and copied part by part.
        """
        if not self._opened:
            message = self._message()
            if message is None:
                return 0
            size = len(message) - TAG
            fits = size <= len(place)
            opened = place[:size] if fits else self._scratch[:size]
            self._ciphers.receive.decrypt_into(message, opened)
            self._start += _LENGTH + len(message)
            if fits:
                return size
            self._opened = opened
        size = min(len(place), len(self._opened))
        place[:size] = self._opened[:size]
        self._opened = self._opened[size:]
        return size

    def _message(self) -> memoryview | None:
        """The next message, if all of it has come."""
        begin = self._start + _LENGTH
        if begin > self._stop:
            return None
        length = int.from_bytes(self._coming[self._start : begin], "big")
        if not TAG < length <= RECORD + TAG:
            raise WireError(f"wanted an encrypted message of {TAG + 1} to {RECORD + TAG} bytes, found {length}")
        return self._coming[begin : begin + length] if begin + length <= self._stop else None

    def _read(self) -> int:
        if len(self._coming) - self._stop < _SEALED:
            left = self._stop - self._start
            self._coming[:left] = self._coming[self._start : self._stop]
            self._start, self._stop = 0, left
        room = self._coming[self._stop :]
        count = self._socket.recv_into(room)
        self.drained = count < len(room)
        self._stop += count
        return count
