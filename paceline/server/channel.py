"""Heads and tensors over a ZeroMQ socket, numbered and, between hosts, sealed with AES-256-GCM.

A channel is what a handshake leaves at each end of a connection. Every message it sends is one or two frames::

    number (u64) · total or offset (u64) · head        sealed unless the sealing is "none"
    up to 1 MiB of tensors                             sealed if the sealing is "all"

The first message of some tensors has the head and their total length, those that follow have no head and say where
their bytes belong; a message without tensors says ``2**64 - 1``. Numbers count the messages of one direction, so one
that is replayed, left out or out of order is refused; they also make the nonces. Chunks are small for two reasons: one
is sealed while ZeroMQ's own thread sends the last one, and a socket can refuse any frame longer than ``MAX_FRAME``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import zmq
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.errors import WireError
from paceline.server.wire import MAX_HEAD

Sealing: TypeAlias = Literal["none", "heads", "all"]  # same host; trusted network; between hosts

CHUNK = 2**20
_PREAMBLE = struct.Struct("<QQ")
_NONCE = struct.Struct("<QI")  # message, frame of it
_TAG = 16
_NO_TENSORS = 2**64 - 1
MAX_FRAME = max(CHUNK, MAX_HEAD) + _PREAMBLE.size + _TAG  # for ZMQ_MAXMSGSIZE


class _Partial(NamedTuple):
    """Tensors of which not all have come."""

    head: bytes
    total: int
    come: int


class Sender(Protocol):
    """A socket of ZeroMQ, or what sends messages as one does."""

    def send_multipart(self, parts: Sequence[Any], /, *, copy: bool = ...) -> object: ...


class Channel:
    """One end of an authenticated connection; made by ``paceline.server.handshake``."""

    def __init__(self, sealing: Sealing, send_key: bytes, receive_key: bytes) -> None:
        self._seal_heads, self._seal_tensors = sealing != "none", sealing == "all"
        if self._seal_heads:
            self._sealer, self._opener = AESGCM(send_key), AESGCM(receive_key)
        self._sent = self._received = 0  # messages
        self._partial: _Partial | None = None
        self._buffer = memoryview(b"")  # holds a sealed chunk while it is sent

    def send(
        self,
        socket: Sender,
        head: bytes,
        tensors: memoryview | None = None,
        *,
        route: bytes | None = None,
        stay: bool = False,
    ) -> None:
        """Send a head, and tensors if there are any; on a ROUTER socket ``route`` is the peer's.

        Tensors that ``stay`` as they are until the peer has answered are sent from where they lie, if they are not
        sealed. Both they and the ``into`` of ``receive`` are memory of format "B".
        """
        if len(head) > MAX_HEAD:
            raise WireError(f"wanted a head of at most {MAX_HEAD} bytes, found {len(head)}")
        if tensors is None:
            self._send(socket, route, head, _NO_TENSORS, None)
            return
        self._send(socket, route, head, len(tensors), tensors[:CHUNK], stay)
        for start in range(CHUNK, len(tensors), CHUNK):
            self._send(socket, route, b"", start, tensors[start : start + CHUNK], stay)

    def _send(
        self,
        socket: Sender,
        route: bytes | None,
        head: bytes,
        place: int,
        chunk: memoryview | None,
        stay: bool = False,
    ) -> None:
        number = self._sent
        self._sent = number + 1  # also if sending fails: a nonce is used once
        preamble = _PREAMBLE.pack(number, place)
        if self._seal_heads:
            head = self._sealer.encrypt(_NONCE.pack(number, 0), head, preamble)
        routed = [] if route is None else [route]
        if chunk is None:
            socket.send_multipart([*routed, preamble + head])
        elif self._seal_tensors:
            # ZeroMQ copies the one buffer: a fresh one per chunk, sent where it lies, costs more in page faults.
            socket.send_multipart([*routed, preamble + head, self._sealed_chunk(number, chunk, preamble)])
        else:
            socket.send_multipart([*routed, preamble + head, chunk], copy=not stay)

    def _sealed_chunk(self, number: int, chunk: memoryview, preamble: bytes) -> memoryview:
        size = len(chunk) + _TAG
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        sealed = self._buffer[:size]
        self._sealer.encrypt_into(_NONCE.pack(number, 1), chunk, preamble, sealed)
        return sealed

    def receive(self, parts: Sequence[zmq.Frame | bytes], into: memoryview | None = None) -> tuple[bytes, bool] | None:
        """Take a message's frames, without the route, and give its head and whether tensors came with it.

        None: they have not all come yet. ``into`` is where they go, the same for all their messages; it must be of the
        length that the peer announces. A message that is refused (``WireError``) leaves the channel as it was, though
        not always the bytes of ``into``.
        """
        if not 1 <= len(parts) <= 2:
            raise WireError(f"wanted a message of 1 or 2 frames, found {len(parts)}")
        frames = [part.buffer if isinstance(part, zmq.Frame) else memoryview(part) for part in parts]
        head, place = self._open_head(frames[0])
        if self._partial is None and place == _NO_TENSORS and len(frames) == 1:
            self._received += 1
            return head, False
        if place == _NO_TENSORS or len(frames) == 1:
            raise WireError(f"wanted tensors with a head that announces them, found {len(frames)} frames")
        if self._partial is None:
            partial = _Partial(head, total=place, come=0)
        elif head or place != self._partial.come:
            raise WireError(f"wanted bytes {self._partial.come} on of tensors under way, found those from {place} on")
        else:
            partial = self._partial
        return self._take_chunk(partial, frames, into)

    def _take_chunk(
        self, partial: _Partial, frames: list[memoryview], into: memoryview | None
    ) -> tuple[bytes, bool] | None:
        if into is None or into.nbytes != partial.total:
            wanted = "no tensors" if into is None else f"{into.nbytes} bytes of tensors"
            raise WireError(f"wanted {wanted}, found {partial.total} announced")
        end = min(partial.come + CHUNK, partial.total)
        self._open_chunk(frames, into[partial.come : end])
        self._received += 1
        self._partial = None if end == partial.total else partial._replace(come=end)
        return (partial.head, True) if self._partial is None else None

    def _open_head(self, frame: memoryview) -> tuple[bytes, int]:
        least = _PREAMBLE.size + (_TAG if self._seal_heads else 0)
        if not least <= len(frame) <= least + MAX_HEAD:
            raise WireError(f"wanted a frame of {least} to {least + MAX_HEAD} bytes, found {len(frame)}")
        number, place = _PREAMBLE.unpack_from(frame)
        if number != self._received:
            raise WireError(f"wanted message {self._received}, found {number}: replayed, lost or out of order")
        body = frame[_PREAMBLE.size :]
        if not self._seal_heads:
            return bytes(body), place
        try:
            return self._opener.decrypt(_NONCE.pack(number, 0), body, frame[: _PREAMBLE.size]), place
        except InvalidTag:
            raise WireError(f"message {number} was not sealed by the peer, or has been changed since") from None

    def _open_chunk(self, frames: list[memoryview], into: memoryview) -> None:
        first, chunk = frames
        wanted = len(into) + (_TAG if self._seal_tensors else 0)
        if len(chunk) != wanted:
            raise WireError(f"wanted a frame of {wanted} bytes of tensors, found {len(chunk)}")
        if not self._seal_tensors:
            into[:] = chunk
            return
        try:
            self._opener.decrypt_into(_NONCE.pack(self._received, 1), chunk, first[: _PREAMBLE.size], into)
        except InvalidTag:
            raise WireError(f"the tensors of message {self._received} have been changed on their way") from None
