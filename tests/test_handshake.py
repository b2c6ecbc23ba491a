"""The handshake: it is the published one, and nobody without the token gets through it, or is believed."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from paceline.errors import UsageError, WireError
from paceline.transport.handshake import Answer, HandshakeRefused, Opening
from paceline.transport.noise import Ciphers, Handshake

TOKEN = bytes.fromhex("5e" * 32)


# The published pattern ---------------------------------------------------------------------------------------------


class Vector(NamedTuple):
    """A published conversation; messages are (payload, ciphertext), the initiator's and the responder's in turn."""

    psk: str
    prologue: str
    initiator: str
    responder: str
    hash: str  # after the first message
    messages: tuple[tuple[str, str], ...]


# Noise_NNpsk0_25519_AESGCM_SHA256 of the vectors of cacophony, which most implementations of Noise test themselves by.
CACOPHONY = Vector(
    psk="54686973206973206d7920417573747269616e20706572737065637469766521",
    prologue="4a6f686e2047616c74",
    initiator="893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a",
    responder="bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b",
    hash="29d92c13649b5d28b41afd8dc5d6ce7f46df2348e4061c09f1c354b593e13add",
    messages=(
        (
            "4c756477696720766f6e204d69736573",
            "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
            "7c37a89fc17813788d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
        ),
        (
            "4d757272617920526f746862617264",
            "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
            "2f29d79368ef9de4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
        ),
        ("462e20412e20486179656b", "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6"),
        ("4361726c204d656e676572", "a9ff535aace3db6a1da1a7fb00fe2de2622bb373abad9fb42c00e0"),
        (
            "4a65616e2d426170746973746520536179",
            "6cfc49a3e65472edc2d0152abe5ce950170a8a47c959f30bd48b5f0aacf29adbfd",
        ),
        (
            "457567656e2042f6686d20766f6e2042617765726b",
            "9bc86e6d974ed21ba04604a94aa68de21677eb409ead070c0cd569b069ee19ba142aa4c1a9",
        ),
    ),
)


def side(vector: Vector, private: str, *, initiator: bool) -> Handshake:
    return Handshake(
        bytes.fromhex(vector.psk),
        bytes.fromhex(vector.prologue),
        initiator=initiator,
        private=X25519PrivateKey.from_private_bytes(bytes.fromhex(private)),
    )


def test_the_published_vectors() -> None:
    worker = side(CACOPHONY, CACOPHONY.initiator, initiator=True)
    server = side(CACOPHONY, CACOPHONY.responder, initiator=False)
    messages = [(bytes.fromhex(payload), bytes.fromhex(sealed)) for payload, sealed in CACOPHONY.messages]
    assert worker.write(messages[0][0]) == messages[0][1]
    assert server.read(messages[0][1]) == messages[0][0]
    assert worker.hash == server.hash == bytes.fromhex(CACOPHONY.hash)
    assert server.write(messages[1][0]) == messages[1][1]
    assert worker.read(messages[1][1]) == messages[1][0]
    of_worker, of_server = worker.split(), server.split()
    for turn, (payload, sealed) in enumerate(messages[2:]):
        sender, receiver = (of_server, of_worker) if turn % 2 else (of_worker, of_server)
        assert sender.send.encrypt(payload) == sealed
        assert receiver.receive.decrypt(sealed) == payload


def test_memory_is_encrypted_as_bytes_are() -> None:
    worker, server = ciphers()
    into, back = memoryview(bytearray(25)), memoryview(bytearray(9))
    worker.send.encrypt_into(memoryview(b"gradients"), into)
    assert bytes(into) == ciphers()[0].send.encrypt(b"gradients")
    server.receive.decrypt_into(into, back)
    assert bytes(back) == b"gradients"


def ciphers() -> tuple[Ciphers, Ciphers]:
    """Of a worker and a server, the same ones every time."""
    worker = side(CACOPHONY, CACOPHONY.initiator, initiator=True)
    server = side(CACOPHONY, CACOPHONY.responder, initiator=False)
    server.read(worker.write())
    worker.read(server.write())
    return worker.split(), server.split()


def test_a_message_that_is_changed_replayed_left_out_or_sent_back_is_refused_and_the_true_one_is_not() -> None:
    worker, server = ciphers()
    first, second = worker.send.encrypt(b"first"), worker.send.encrypt(b"second")
    changed = [first[:place] + bytes([first[place] ^ 1]) + first[place + 1 :] for place in range(len(first))]
    for wrong in (*changed, second, first[:-1], first + b"\0", b"", bytes(16), server.send.encrypt(b"first")):
        with pytest.raises(WireError):
            server.receive.decrypt(wrong)
    with pytest.raises(WireError, match="not encrypted by the peer"):
        worker.receive.decrypt(first)
    assert server.receive.decrypt(first) == b"first"
    with pytest.raises(WireError, match="not encrypted by the peer"):
        server.receive.decrypt(first)
    assert server.receive.decrypt(second) == b"second"


# The token ---------------------------------------------------------------------------------------------------------


def opened(sealed: bool) -> tuple[Opening, Answer, bytes]:
    """Both sides, and the server's reply."""
    opening, answer = Opening(TOKEN, sealed=sealed), Answer(TOKEN, sealed=sealed)
    return opening, answer, answer.reply(opening.hello())


@pytest.mark.parametrize("sealed", [False, True])
def test_both_prove_the_token_and_have_keys_if_they_want_some(sealed: bool) -> None:
    opening, answer, reply = opened(sealed)
    proof, of_worker = opening.finish(reply)
    of_server = answer.finish(proof)
    assert (of_worker is not None, of_server is not None) == (sealed, sealed)
    if of_worker is not None and of_server is not None:
        assert of_server.receive.decrypt(of_worker.send.encrypt(b"up")) == b"up"
        assert of_worker.receive.decrypt(of_server.send.encrypt(b"down")) == b"down"


@pytest.mark.parametrize("sealed", [False, True])
def test_a_worker_without_the_token_is_refused_and_told(sealed: bool) -> None:
    opening = Opening(bytes(32), sealed=sealed)
    with pytest.raises(HandshakeRefused, match="the token is not the server's; give both the same") as refused:
        Answer(TOKEN, sealed=sealed).reply(opening.hello())
    with pytest.raises(WireError, match="the server refused this worker: the token is not the server's"):
        opening.finish(refused.value.reply)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_server_without_the_token_is_not_believed(sealed: bool) -> None:
    """Nor is anybody else who stands in between."""
    opening, stranger = Opening(TOKEN, sealed=sealed), Answer(bytes(32), sealed=sealed)
    reply = stranger.reply(Opening(bytes(32), sealed=sealed).hello())
    _, _, to_another = opened(sealed)
    for wrong in (reply, to_another, opening.hello(), opening.hello()[4:], b"", bytes(48), bytes(1000)):
        with pytest.raises(WireError, match=r"did not prove that it has the token: .*; look at the address"):
            Opening(TOKEN, sealed=sealed).finish(wrong)


@pytest.mark.parametrize("sealed", [False, True])
def test_who_has_recorded_a_worker_is_no_worker(sealed: bool) -> None:
    """The first message of an old connection is answered, but nobody without its key can go on."""
    recorded = Opening(TOKEN, sealed=sealed)
    hello = recorded.hello()
    first, again = Answer(TOKEN, sealed=sealed), Answer(TOKEN, sealed=sealed)
    proof, _ = recorded.finish(first.reply(hello))
    first.finish(proof)
    again.reply(hello)
    for wrong in (proof, b"", bytes(16)):
        with pytest.raises(HandshakeRefused):
            again.finish(wrong)


@pytest.mark.parametrize("workers", [False, True])
def test_both_must_agree_on_encryption(workers: bool) -> None:
    opening = Opening(TOKEN, sealed=workers)
    with pytest.raises(HandshakeRefused, match="--trusted-network is for both or for none") as refused:
        Answer(TOKEN, sealed=not workers).reply(opening.hello())
    with pytest.raises(WireError, match="the server refused this worker: worker and server do not agree on encryption"):
        opening.finish(refused.value.reply)


@pytest.mark.parametrize("workers", [False, True])
def test_nobody_in_between_can_make_them_agree(workers: bool) -> None:
    """What was said about encryption is part of what is proved."""
    hello = bytearray(Opening(TOKEN, sealed=workers).hello())
    hello[3] ^= 1
    with pytest.raises(HandshakeRefused, match="token"):
        Answer(TOKEN, sealed=not workers).reply(bytes(hello))


def test_another_protocol_is_told_of() -> None:
    opening = Opening(TOKEN, sealed=True)
    hello = bytearray(opening.hello())
    hello[2] += 1
    with pytest.raises(HandshakeRefused, match="both hosts need the same Paceline") as refused:
        Answer(TOKEN, sealed=True).reply(bytes(hello))
    with pytest.raises(WireError, match="both hosts need the same Paceline"):
        opening.finish(refused.value.reply)


def test_a_key_that_makes_every_secret_zero_is_refused() -> None:
    noise = Handshake(TOKEN, b"", initiator=True)
    noise._mix_public(bytes(32))
    message = bytes(32) + noise._cipher.encrypt(b"", noise.hash)
    server = Handshake(TOKEN, b"", initiator=False)
    server.read(message)
    with pytest.raises(WireError, match="X25519"):
        server.write()


@pytest.mark.parametrize("sealed", [False, True])
def test_mutated_and_random_messages_are_refused(sealed: bool) -> None:
    source = random.Random(13)
    opening, answer, reply = opened(sealed)
    hello = Opening(TOKEN, sealed=sealed).hello()
    for turn in range(3000):
        bad = bytearray((hello, reply, bytes(16))[turn % 3])
        if turn % 7 == 0:
            bad = bytearray(source.randbytes(source.randrange(150)))
        elif turn % 7 == 1:
            del bad[source.randrange(len(bad)) :]
        else:
            bad[source.randrange(len(bad))] ^= 1 << source.randrange(8)
        with pytest.raises(HandshakeRefused):
            Answer(TOKEN, sealed=sealed).reply(bytes(bad))
        with pytest.raises(WireError):
            Opening(TOKEN, sealed=sealed).finish(bytes(bad))
        with pytest.raises(HandshakeRefused):
            answer.finish(bytes(bad))
    answer.finish(opening.finish(reply)[0])


def test_short_tokens_are_refused() -> None:
    for side in (Opening, Answer):
        with pytest.raises(UsageError, match="at least 16 bytes"):
            side(b"secret", sealed=True)
