"""The protocol ``Noise_NNpsk0_25519_AESGCM_SHA256`` of the Noise Protocol Framework, revision 34.

Names and section numbers are those of https://noiseprotocol.org/noise.html. Both sides know a secret of 32 bytes::

    -> psk, e        the initiator's message: a public key of 32 bytes, the encrypted payload, a tag of 16 bytes
    <- e, ee         the responder's message, of the same form

Then each side has two ``CipherState``, one to send and one to receive.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from paceline.errors import WireError

MOST = 65535  # bytes of a message (section 3)
TAG = 16
_NAME = b"Noise_NNpsk0_25519_AESGCM_SHA256"  # as long as a hash, so it is the first hash (5.2)
_DH = 32


class CipherState:
    """A key, and the number of the next message that it encrypts or decrypts (5.1)."""

    def __init__(self, key: bytes) -> None:
        self._aead = AESGCM(key)
        self._number = 0

    def encrypt(self, plain: bytes, ad: bytes = b"") -> bytes:
        self._number += 1
        return self._aead.encrypt(_nonce(self._number - 1), plain, ad)

    def encrypt_into(self, plain: memoryview, into: memoryview) -> None:
        """Encrypt into memory that is longer by a tag."""
        self._number += 1
        self._aead.encrypt_into(_nonce(self._number - 1), plain, None, into)

    def decrypt(self, sealed: bytes, ad: bytes = b"") -> bytes:
        into = bytearray(max(0, len(sealed) - TAG))
        self.decrypt_into(memoryview(sealed), memoryview(into), ad)
        return bytes(into)

    def decrypt_into(self, sealed: memoryview, into: memoryview, ad: bytes = b"") -> None:
        """Decrypt into memory that is shorter by a tag; raise ``WireError`` unless it is the peer's next message."""
        if len(sealed) < TAG:
            raise WireError(f"wanted an encrypted message of at least {TAG} bytes, found {len(sealed)}")
        try:
            self._aead.decrypt_into(_nonce(self._number), sealed, ad, into)
        except InvalidTag:
            raise WireError("a message was not encrypted by the peer, or has been changed on its way") from None
        self._number += 1


class Ciphers(NamedTuple):
    """The result of a handshake, on each side."""

    send: CipherState
    receive: CipherState


class Handshake:
    """One side of the handshake: the initiator writes, then reads; the responder reads, then writes; both ``split``.

    >>> worker, server = (Handshake(bytes(32), b"prologue", initiator=first) for first in (True, False))
    >>> server.read(worker.write(b"payload"))
    b'payload'
    >>> worker.read(server.write())
    b''
    >>> server.split().receive.decrypt(worker.split().send.encrypt(b"message"))
    b'message'
    """

    def __init__(
        self, psk: bytes, prologue: bytes, *, initiator: bool, private: X25519PrivateKey | None = None
    ) -> None:
        self._initiator, self._private = initiator, private
        self._theirs = b""
        self._chaining_key = self.hash = _NAME
        self._mix_hash(prologue)
        self._chaining_key, mixed, key = _hkdf(self._chaining_key, psk, 3)  # the token psk: MixKeyAndHash (5.2, 9.2)
        self._mix_hash(mixed)
        self._cipher = CipherState(key)

    def write(self, payload: bytes = b"") -> bytes:
        """The next message to the other side (5.3)."""
        self._private = self._private or X25519PrivateKey.generate()
        public = self._private.public_key().public_bytes_raw()
        self._mix_public(public)
        if not self._initiator:
            self._mix_key(self._shared())
        sealed = self._cipher.encrypt(payload, self.hash)
        self._mix_hash(sealed)
        return public + sealed

    def read(self, message: bytes) -> bytes:
        """The payload of the other side's message; raise ``WireError`` if that side has another secret."""
        self._theirs, sealed = message[:_DH], message[_DH:]
        self._mix_public(self._theirs)
        if self._initiator:
            self._mix_key(self._shared())
        payload = self._cipher.decrypt(sealed, self.hash)
        self._mix_hash(sealed)
        return payload

    def split(self) -> Ciphers:
        first, second = (CipherState(key) for key in _hkdf(self._chaining_key, b"", 2))
        return Ciphers(first, second) if self._initiator else Ciphers(second, first)

    def _mix_public(self, public: bytes) -> None:
        """The token e; with a psk it is mixed into the key too (9.2)."""
        self._mix_hash(public)
        self._mix_key(public)

    def _mix_hash(self, data: bytes) -> None:
        self.hash = hashlib.sha256(self.hash + data).digest()

    def _mix_key(self, material: bytes) -> None:
        self._chaining_key, key = _hkdf(self._chaining_key, material, 2)
        self._cipher = CipherState(key)

    def _shared(self) -> bytes:
        assert self._private is not None, "the own key comes first"
        try:
            return self._private.exchange(X25519PublicKey.from_public_bytes(self._theirs))
        except ValueError:
            raise WireError("wanted an X25519 key, found none, or one that makes every secret zero") from None


_nonce = struct.Struct(">4xQ").pack  # of AES-GCM: four bytes of zero and the number, big endian (12.4)


def _hkdf(chaining_key: bytes, material: bytes, count: int) -> list[bytes]:
    """Make two or three keys (4.3)."""
    key, found = hmac.digest(chaining_key, material, "sha256"), [b""]
    for number in range(1, count + 1):
        found.append(hmac.digest(key, found[-1] + bytes([number]), "sha256"))
    return found[1:]
