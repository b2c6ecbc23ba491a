"""Heads and tensors over a stream, numbered and, between hosts, sealed with AES-256-GCM.

A channel is what a handshake leaves at each end of a connection. Every message it sends is one or two frames::

    number (u64) · total or offset (u64) · head        sealed unless the sealing is "none"
    a chunk of tensors                                 sealed if the sealing is "all"

The first message of some tensors has the head and their total length, those that follow have no head and say where
their bytes belong; a message without tensors says ``2**64 - 1``. Numbers count the messages of one direction, so one
that is replayed, left out or out of order is refused; they also make the nonces. Sealed chunks are small, 256 KiB, for
two reasons: one is sealed while the network has the last one, and all that happens to it happens in the processor's
cache. Open ones, to which nothing happens, are of 1 MiB.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.errors import WireError
from paceline.transport.pieces import Pieces
from paceline.transport.wire import MAX_HEAD

Sealing: TypeAlias = Literal["none", "heads", "all"]  # same host; trusted network; between hosts

SEALED_CHUNK, OPEN_CHUNK = 2**18, 2**20
_PREAMBLE = struct.Struct("<QQ")
_NONCE = struct.Struct("<QI")  # message, frame of it
_TAG = 16
_NO_TENSORS = 2**64 - 1
MAX_FRAME = max(OPEN_CHUNK, MAX_HEAD) + _PREAMBLE.size + _TAG


class Received(NamedTuple):
    """A message that has come; ``tensors`` is where those with it were put."""

    head: bytes
    tensors: Pieces | None


class _Partial(NamedTuple):
    """Tensors of which not all have come."""

    head: bytes
    into: Pieces
    come: int


class _Open(NamedTuple):
    """A message whose first frame has come."""

    number: int
    preamble: bytes
    head: bytes
    partial: _Partial | None  # with tensors: those before this message's
    sealed: memoryview | None  # where its sealed chunk is being put


class Channel:
    """One end of an authenticated connection; made by ``paceline.transport.handshake``."""

    def __init__(self, sealing: Sealing, send_key: bytes, receive_key: bytes) -> None:
        self._seal_heads, self._seal_tensors = sealing != "none", sealing == "all"
        if self._seal_heads:
            self._sealer, self._opener = AESGCM(send_key), AESGCM(receive_key)
        self._sent = self._received = 0  # messages
        self._partial: _Partial | None = None
        self._open: _Open | None = None
        self.chunk = SEALED_CHUNK if self._seal_tensors else OPEN_CHUNK  # bytes of tensors in a message
        room = SEALED_CHUNK + _TAG if self._seal_tensors else 0
        self._going, self._coming, self._whole = (memoryview(bytearray(room)) for _ in range(3))

    # Sending -------------------------------------------------------------------------------------------------

    def message(
        self, head: bytes, offset: int, chunk: list[memoryview] | None
    ) -> tuple[bytes, list[memoryview] | None]:
        """Make the frames of a message, of a head and a chunk of tensors or none; the second lies in several parts.

        ``offset`` is the total length of the tensors in their first message, and where the chunk belongs in the others.
        A sealed chunk lies in a buffer that the next one takes.
        """
        if len(head) > MAX_HEAD:
            raise WireError(f"wanted a head of at most {MAX_HEAD} bytes, found {len(head)}")
        number = self._sent
        self._sent = number + 1  # also if sending fails: a nonce is used once
        preamble = _PREAMBLE.pack(number, _NO_TENSORS if chunk is None else offset)
        if self._seal_heads:
            head = self._sealer.encrypt(_NONCE.pack(number, 0), head, preamble)
        if not self._seal_tensors or chunk is None:
            return preamble + head, chunk
        size = sum(map(len, chunk))
        sealed = self._going[: size + _TAG]
        self._sealer.encrypt_into(_NONCE.pack(number, 1), self._in_one(chunk, size), preamble, sealed)
        return preamble + head, [sealed]

    def _in_one(self, chunk: list[memoryview], size: int) -> memoryview:
        if len(chunk) == 1:
            return chunk[0]
        start = 0
        for part in chunk:
            self._whole[start : start + len(part)] = part
            start += len(part)
        return self._whole[:size]

    # Receiving -----------------------------------------------------------------------------------------------

    @property
    def next_first(self) -> int | None:
        """The length of the next message's first frame, if more of some tensors are to come."""
        return None if self._partial is None else _PREAMBLE.size + (_TAG if self._seal_heads else 0)

    def begin(self, frame: memoryview, second: int | None, into: Pieces | None) -> list[memoryview]:
        """Take a message's first frame, and give where its second one belongs, whose length is ``second``.

        ``into`` is where tensors go that begin with this message; it must be of the length that the peer announces. A
        message that is refused here or by ``end`` (``WireError``) leaves the channel as it was, though not always the
        bytes of ``into``.
        """
        number, offset, head = self._open_head(frame)
        preamble = bytes(frame[: _PREAMBLE.size])
        if self._partial is None and offset == _NO_TENSORS and second is None:
            self._open = _Open(number, preamble, head, None, None)
            return []
        if offset == _NO_TENSORS or second is None:
            raise WireError(f"wanted tensors with a head that announces them, found {1 + (second is not None)} frames")
        partial = self._partial
        if partial is None:
            if into is None or into.nbytes != offset:
                wanted = "no tensors" if into is None else f"{into.nbytes} bytes of tensors"
                raise WireError(f"wanted {wanted}, found {offset} announced")
            partial = _Partial(head, into, come=0)
        elif head or offset != partial.come:
            raise WireError(f"wanted bytes {partial.come} on of tensors under way, found those from {offset} on")
        size = min(self.chunk, partial.into.nbytes - partial.come)
        length = size + (_TAG if self._seal_tensors else 0)
        if second != length:
            raise WireError(f"wanted a frame of {length} bytes of tensors, found {second}")
        sealed = self._coming[:length] if self._seal_tensors else None
        self._open = _Open(number, preamble, head, partial, sealed)
        return partial.into.between(partial.come, partial.come + size) if sealed is None else [sealed]

    def end(self) -> Received | None:
        """The message that has begun has come as a whole: give it, or None if more of its tensors are to come."""
        message, self._open = self._open, None
        assert message is not None, "no message has begun"
        if message.partial is None:
            self._received += 1
            return Received(message.head, None)
        head, into, come = message.partial
        end = min(come + self.chunk, into.nbytes)
        if message.sealed is not None:
            self._open_chunk(message, message.sealed, into.between(come, end))
        self._received += 1
        self._partial = None if end == into.nbytes else _Partial(head, into, end)
        return Received(head, into) if self._partial is None else None

    def _open_head(self, frame: memoryview) -> tuple[int, int, bytes]:
        least = _PREAMBLE.size + (_TAG if self._seal_heads else 0)
        if not least <= len(frame) <= least + MAX_HEAD:
            raise WireError(f"wanted a frame of {least} to {least + MAX_HEAD} bytes, found {len(frame)}")
        number, offset = _PREAMBLE.unpack_from(frame)
        if number != self._received:
            raise WireError(f"wanted message {self._received}, found {number}: replayed, lost or out of order")
        body = frame[_PREAMBLE.size :]
        if not self._seal_heads:
            return number, offset, bytes(body)
        try:
            return number, offset, self._opener.decrypt(_NONCE.pack(number, 0), body, frame[: _PREAMBLE.size])
        except InvalidTag:
            raise WireError(f"message {number} was not sealed by the peer, or has been changed since") from None

    def _open_chunk(self, message: _Open, sealed: memoryview, targets: list[memoryview]) -> None:
        size = len(sealed) - _TAG
        opened = targets[0] if len(targets) == 1 else self._whole[:size]
        try:
            self._opener.decrypt_into(_NONCE.pack(message.number, 1), sealed, message.preamble, opened)
        except InvalidTag:
            raise WireError(f"the tensors of message {message.number} have been changed on their way") from None
        start = 0
        for target in targets if len(targets) > 1 else []:
            target[:] = opened[start : start + len(target)]
            start += len(target)
