"""Bytes to and from a non-blocking socket, in clear or encrypted.

``send`` sends what the socket takes, ``receive`` gives what has come. If that is nothing, both raise
``BlockingIOError``. The encrypted stream is a sequence of Noise messages, each after its length: two bytes, big endian.
"""

from __future__ import annotations

import contextlib
import socket

from paceline.errors import WireError
from paceline.transport.noise import MOST, TAG, Ciphers
from paceline.transport.pieces import first, without

RECORD = MOST // 64 * 64 - 64  # plain bytes of one Noise message, in whole cache lines
_LENGTH = 2
_SEALED = _LENGTH + RECORD + TAG
_AT_ONCE = 4 * _SEALED  # bytes that are encrypted while the network sends the last ones
_LEAST = 2**8  # bytes of a stretch of memory that gets a message of its own; shorter ones are joined
_MOST_STRETCHES = 512  # of memory in one call
_MOST_PLAIN = 2**21  # bytes in one call: of 1 MB, the rest behind the head would be a call of its own


class PlainStream:
    """Bytes in clear, sent from and received into the caller's memory."""

    waits = False

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.sent = self.received = 0  # bytes that the socket has taken and given
        self.exhausted = False  # the last call of receive got less than it had room for

    def send(self, stretches: list[memoryview]) -> int:
        """Send, and return the number of bytes that the socket took."""
        count = self._socket.sendmsg(first(stretches[:_MOST_STRETCHES], _MOST_PLAIN))
        self.sent += count
        return count

    def receive(self, into: list[memoryview]) -> int:
        """Fill the memory with what has come, and return the number of bytes; 0 at the end of the stream."""
        into = first(into[:_MOST_STRETCHES], _MOST_PLAIN)
        count = self._socket.recv_into(into[0]) if len(into) == 1 else self._socket.recvmsg_into(into)[0]
        self.exhausted = count < sum(map(len, into))
        self.received += count
        return count


class SealedStream:
    """Bytes encrypted with the keys of a handshake; ``came`` are encrypted bytes that were read before."""

    def __init__(self, connection: socket.socket, ciphers: Ciphers, came: memoryview) -> None:
        self._socket, self._ciphers = connection, ciphers
        self.sent = self.received = 0  # bytes that the socket has taken and given, encrypted
        self._sealed, self._coming, self._scratch = (
            memoryview(bytearray(size)) for size in (_AT_ONCE + _SEALED, max(_AT_ONCE, len(came)), RECORD)
        )
        self._going = memoryview(b"")  # encrypted, for the socket to take
        self._opened = memoryview(b"")  # decrypted, for the caller to take
        self._coming[: len(came)] = came
        self._start, self._stop = 0, len(came)  # of the encrypted bytes that have come
        self._drained = False  # the last read got less than it had room for

    @property
    def waits(self) -> bool:
        """Whether encrypted bytes wait for the socket."""
        return bool(self._going)

    @property
    def exhausted(self) -> bool:
        """Whether all that has come was given."""
        return self._drained and not self._opened and self._start == self._stop

    def send(self, stretches: list[memoryview]) -> int:
        """Encrypt and send, and return the number of bytes that were encrypted; the caller need not keep them."""
        if self._going:
            self._flush()
            return 0
        taken = stop = 0
        while stretches and stop < _AT_ONCE:
            plain = stretches[0][:RECORD]
            if len(plain) < _LEAST:
                plain = memoryview(b"".join(first(stretches, RECORD)))
            stretches = without(stretches, len(plain))
            start, taken = stop + _LENGTH, taken + len(plain)
            self._sealed[stop:start] = (len(plain) + TAG).to_bytes(_LENGTH, "big")
            stop = start + len(plain) + TAG
            self._ciphers.send.encrypt_into(plain, self._sealed[start:stop])
        self._going = self._sealed[:stop]
        with contextlib.suppress(BlockingIOError):
            self._flush()
        return taken

    def _flush(self) -> None:
        count = self._socket.send(self._going)
        self.sent += count
        self._going = self._going[count:]

    def receive(self, into: list[memoryview]) -> int:
        """Fill the memory with what has come, and return the number of bytes; 0 at the end of the stream.

        Raise ``WireError`` if the peer did not encrypt it; nothing after it can be decrypted.
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
        """The next Noise message, or None if it is not complete."""
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
        self._drained = count < len(room)
        self._stop += count
        self.received += count
        return count
