"""The handshake of every connection: worker and server prove the join token to each other.

::

    worker    PL, protocol version, 1 if messages will be encrypted or 0, the initiator's Noise message
    server    the responder's Noise message; or PL, protocol version, the reason of a refusal
    worker    an empty message, encrypted with the new keys

``paceline.transport.noise`` makes the Noise messages. Their pre-shared key is the token's SHA-256, their prologue the
fields before the first one. The third message proves that the first one is not a replay.
"""

from __future__ import annotations

import hashlib
import struct

from paceline.errors import UsageError, WireError
from paceline.transport.noise import Ciphers, Handshake
from paceline.transport.wire import MAGIC, PROTOCOL

_FIELDS = struct.Struct("<2sBB")
_LEAST_TOKEN = 16

_WRONG_TOKEN, _OTHER_SEALING, _OTHER_PROTOCOL, _GARBLED = 128, 129, 130, 131
_REASONS = {
    _WRONG_TOKEN: "the token is not the server's; give both the same --token-file or PACELINE_TOKEN",
    _OTHER_SEALING: "worker and server do not agree on encryption; --trusted-network is for both or for none",
    _OTHER_PROTOCOL: "worker and server speak different protocols; both hosts need the same Paceline",
    _GARBLED: "the first message is not that of a worker",
}


class HandshakeRefused(WireError):
    """The server refuses a worker's message; ``reply`` tells the worker why."""

    def __init__(self, code: int) -> None:
        super().__init__(_REASONS[code])
        self.reply = _FIELDS.pack(MAGIC, PROTOCOL, code)


class Opening:
    """The worker's side: send ``hello()``, then the first result of ``finish``; the second is the keys.

    >>> opening, answer = Opening(bytes(32), sealed=True), Answer(bytes(32), sealed=True)
    >>> proof, ciphers = opening.finish(answer.reply(opening.hello()))
    >>> _ = answer.finish(proof)
    """

    def __init__(self, token: bytes, *, sealed: bool) -> None:
        fields = _FIELDS.pack(MAGIC, PROTOCOL, sealed)
        self._noise, self._sealed = Handshake(_secret(token), fields, initiator=True), sealed
        self._hello = fields + self._noise.write()

    def hello(self) -> bytes:
        return self._hello

    def finish(self, reply: bytes) -> tuple[bytes, Ciphers | None]:
        """Check the server's reply; raise ``WireError`` if it is a refusal or made without the token."""
        if len(reply) == _FIELDS.size:
            magic, _, code = _FIELDS.unpack(reply)
            if magic == MAGIC and code in _REASONS:
                raise WireError(f"the server refused this worker: {_REASONS[code]}")
        try:
            self._noise.read(reply)
        except WireError:
            raise WireError(
                "the server did not prove that it has the token: it is another server, or something in between that "
                "answers in its place; look at the address, and give both the same --token-file or PACELINE_TOKEN"
            ) from None
        ciphers = self._noise.split()
        return ciphers.send.encrypt(b""), ciphers if self._sealed else None


class Answer:
    """The server's side: send ``reply(hello)``; ``finish(proof)`` gives the keys, if messages are encrypted.

    Both raise ``HandshakeRefused``. A hello made without the token costs a few hashes and no key exchange.
    """

    def __init__(self, token: bytes, *, sealed: bool) -> None:
        self._fields = _FIELDS.pack(MAGIC, PROTOCOL, sealed)
        self._secret, self._sealed = _secret(token), sealed
        self._ciphers: Ciphers | None = None

    @property
    def given(self) -> bool:
        """Whether the reply was made."""
        return self._ciphers is not None

    def reply(self, hello: bytes) -> bytes:
        fields, message = hello[: _FIELDS.size], hello[_FIELDS.size :]
        if len(fields) < _FIELDS.size or not fields.startswith(MAGIC):
            raise HandshakeRefused(_GARBLED)
        if fields != self._fields:
            raise HandshakeRefused(_OTHER_SEALING if fields[2] == PROTOCOL else _OTHER_PROTOCOL)
        noise = Handshake(self._secret, fields, initiator=False)
        reason = _WRONG_TOKEN
        try:
            noise.read(message)
            reason = _GARBLED  # the token is right, the key is not
            reply = noise.write()
        except WireError:
            raise HandshakeRefused(reason) from None
        self._ciphers = noise.split()
        return reply

    def finish(self, proof: bytes) -> Ciphers | None:
        assert self._ciphers is not None, "the reply comes first"
        try:
            self._ciphers.receive.decrypt(proof)
        except WireError:
            raise HandshakeRefused(_WRONG_TOKEN) from None
        return self._ciphers if self._sealed else None


def _secret(token: bytes) -> bytes:
    if len(token) < _LEAST_TOKEN:
        raise UsageError(
            f"a join token has at least {_LEAST_TOKEN} bytes ({2 * _LEAST_TOKEN} hexadecimal digits), since whoever"
            f" overhears a worker can try all short ones; got {len(token)}. For example: openssl rand -hex 32"
        )
    return hashlib.sha256(token).digest()
