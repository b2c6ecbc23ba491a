"""How two processes prove the join token to each other and agree on keys.

The worker sends ``Opening.hello()``, the server replies by ``answer``, and ``Opening.finish`` takes the reply. Each
then has a ``Channel``. Both messages have one layout::

    PL · protocol version · sealing · X25519 public key · nonce · HMAC-SHA256 by the token

The server's HMAC covers the worker's message too. Keys come by HKDF from the X25519 secret, the token and both
messages, so whoever learns the token later cannot read what was recorded before. Without sealing there are no keys to
agree on. A refusal is the first three fields, with a reason in the place of the sealing.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from paceline.errors import UsageError, WireError
from paceline.transport.channel import Channel, Sealing
from paceline.transport.wire import MAGIC, PROTOCOL

_LAYOUT = struct.Struct("<2sBB32s32s32s")
_MAC = 32
_SEALINGS: dict[Sealing, int] = {"none": 0, "heads": 1, "all": 2}
_REFUSAL = struct.Struct("<2sBB")
_NO_KEY = bytes(32)
_LEAST_TOKEN = 16

_WRONG_TOKEN, _OTHER_SEALING, _OTHER_PROTOCOL, _GARBLED = 128, 129, 130, 131
_REASONS = {
    _WRONG_TOKEN: "the token is not the server's",
    _OTHER_SEALING: "worker and server do not agree on what is encrypted; --trusted-network is for both or for none",
    _OTHER_PROTOCOL: "worker and server speak different protocols; both hosts need the same Paceline",
    _GARBLED: "the first message is not that of a worker",
}


class HandshakeRefused(WireError):
    """A worker's first message is not accepted; ``reply`` is what to tell it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"refused: {_REASONS[code]}")
        self.reply = _REFUSAL.pack(MAGIC, PROTOCOL, code)


def fresh_token() -> str:
    """Make a join token, as hexadecimal digits."""
    return secrets.token_hex(32)


class Opening:
    """The worker's side: send ``hello()``, then ``finish(reply)`` gives the channel.

    >>> token = bytes.fromhex(fresh_token())
    >>> opening = Opening(token, "all")
    >>> servers_channel, reply = answer(opening.hello(), token, "all")
    >>> workers_channel = opening.finish(reply)
    """

    def __init__(self, token: bytes, sealing: Sealing) -> None:
        _check_token(token)
        self._token, self._sealing = token, sealing
        self._private, public = _key_pair(sealing)
        self._hello = _signed(token, sealing, public, b"worker")

    def hello(self) -> bytes:
        """Give the message that opens the connection."""
        return self._hello

    def finish(self, reply: bytes) -> Channel:
        """Check the server's reply and give the channel; raise ``WireError`` if it refuses or has not the token."""
        if len(reply) == _REFUSAL.size:
            magic, _, code = _REFUSAL.unpack(reply)
            if magic == MAGIC and code in _REASONS:
                raise WireError(f"the server refused this worker: {_REASONS[code]}")
        if len(reply) != _LAYOUT.size:
            raise WireError(f"wanted a server's reply of {_LAYOUT.size} bytes, found {len(reply)}")
        if not _is_signed(self._token, reply, b"server" + self._hello):
            raise WireError("the server did not prove that it has the token: another server, or another token")
        public = _LAYOUT.unpack(reply)[3]
        worker_key, server_key = _keys(self._private, public, self._token, self._hello + reply)
        return Channel(self._sealing, send_key=worker_key, receive_key=server_key)


def answer(hello: bytes, token: bytes, sealing: Sealing) -> tuple[Channel, bytes]:
    """The server's side: give the channel and the reply to a worker's first message.

    Raise ``HandshakeRefused`` if it is not a worker's or lacks the token, which costs one HMAC and nothing else.
    """
    _check_token(token)
    if len(hello) != _LAYOUT.size or not hello.startswith(MAGIC):
        raise HandshakeRefused(_GARBLED)
    _, protocol, code, their_public, _, _ = _LAYOUT.unpack(hello)
    if protocol != PROTOCOL:
        raise HandshakeRefused(_OTHER_PROTOCOL)
    if not _is_signed(token, hello, b"worker"):
        raise HandshakeRefused(_WRONG_TOKEN)
    if code != _SEALINGS[sealing]:
        raise HandshakeRefused(_OTHER_SEALING)
    private, public = _key_pair(sealing)
    reply = _signed(token, sealing, public, b"server" + hello)
    try:
        worker_key, server_key = _keys(private, their_public, token, hello + reply)
    except WireError:
        raise HandshakeRefused(_GARBLED) from None
    return Channel(sealing, send_key=server_key, receive_key=worker_key), reply


def _check_token(token: bytes) -> None:
    if len(token) < _LEAST_TOKEN:
        raise UsageError(
            f"a join token has at least {_LEAST_TOKEN} bytes ({2 * _LEAST_TOKEN} hexadecimal digits), since whoever"
            f" overhears a worker can try all short ones; got {len(token)}. For example: openssl rand -hex 32"
        )


def _key_pair(sealing: Sealing) -> tuple[X25519PrivateKey | None, bytes]:
    if sealing == "none":
        return None, _NO_KEY
    private = X25519PrivateKey.generate()
    return private, private.public_key().public_bytes_raw()


def _signed(token: bytes, sealing: Sealing, public: bytes, context: bytes) -> bytes:
    fields = _LAYOUT.pack(MAGIC, PROTOCOL, _SEALINGS[sealing], public, secrets.token_bytes(32), b"")[:-_MAC]
    return fields + hmac.digest(token, context + fields, "sha256")


def _is_signed(token: bytes, message: bytes, context: bytes) -> bool:
    return hmac.compare_digest(hmac.digest(token, context + message[:-_MAC], "sha256"), message[-_MAC:])


def _keys(private: X25519PrivateKey | None, public: bytes, token: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """Derive the keys of the worker's messages and of the server's."""
    if private is None:
        return b"", b""
    try:
        secret = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise WireError("wanted an X25519 key, found one of the few that make every secret zero") from None
    info = b"paceline channel" + hashlib.sha256(transcript).digest()
    keys = HKDF(SHA256(), length=64, salt=token, info=info).derive(secret)
    return keys[:32], keys[32:]
