"""Channels: what is sent arrives, and nothing that was changed, replayed or sent without the token does."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias, get_args

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError, WireError
from paceline.server.channel import CHUNK, MAX_FRAME, Channel, Sealing
from paceline.server.handshake import HandshakeRefused, Opening, answer, fresh_token
from paceline.server.messages import Push
from paceline.server.wire import MAX_HEAD, encode

TOKEN = bytes.fromhex("5e" * 32)
SEALINGS: tuple[Sealing, ...] = get_args(Sealing)
Sockets: TypeAlias = tuple[zmq.Socket[bytes], list[zmq.Socket[bytes]]]
HEAD = encode(Push(3, 2, 64, 0.5, 0.01, b"\xff\x01"))


class Wire:
    """Stands for a socket: keeps the messages that were sent on it."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []

    def send_multipart(self, parts: list[Any], copy: bool = True) -> None:
        self.messages.append([bytes(part) for part in parts])


def channels(sealing: Sealing) -> tuple[Channel, Channel]:
    """Give both ends, the worker's first."""
    opening = Opening(TOKEN, sealing)
    server, reply = answer(opening.hello(), TOKEN, sealing)
    return opening.finish(reply), server


def sent(channel: Channel, head: bytes, tensors: bytes | None = None) -> list[list[bytes]]:
    wire: Any = Wire()
    channel.send(wire, head, None if tensors is None else memoryview(tensors))
    return list(wire.messages)


def numbered(count: int) -> bytes:
    """Bytes in which no two chunks, and hardly any two places, are alike."""
    return random.Random(count).randbytes(count)


@given(
    sealing=st.sampled_from(SEALINGS),
    both_ways=st.lists(st.tuples(st.booleans(), st.binary(max_size=200), st.none() | st.binary(max_size=300))),
)
def test_what_is_sent_arrives(sealing: Sealing, both_ways: list[tuple[bool, bytes, bytes | None]]) -> None:
    worker, server = channels(sealing)
    for from_worker, head, tensors in both_ways:
        sender, receiver = (worker, server) if from_worker else (server, worker)
        into = bytearray(len(tensors or b""))
        (message,) = sent(sender, head, tensors)
        assert receiver.receive(message, memoryview(into)) == (head, tensors is not None)
        assert bytes(into) == (tensors or b"")


@pytest.mark.parametrize("sealing", SEALINGS)
def test_only_what_should_be_is_readable_on_the_wire(sealing: Sealing) -> None:
    worker, _ = channels(sealing)
    (message,) = sent(worker, b"the head is readable", b"the tensors are readable")
    joined = b"".join(message)
    assert (b"the head is readable" in joined) == (sealing == "none")
    assert (b"the tensors are readable" in joined) == (sealing != "all")


def test_no_two_messages_look_alike_when_sealed() -> None:
    worker, server = channels("all")
    frames = [frame for channel in (worker, server) for _ in range(5) for frame in sent(channel, b"", bytes(50))[0]]
    assert len({frame[16:] for frame in frames}) == len(frames)


def test_channels_of_two_connections_do_not_understand_each_other() -> None:
    (worker, _), (_, other_server) = channels("all"), channels("all")
    with pytest.raises(WireError, match="not sealed by the peer"):
        other_server.receive(sent(worker, HEAD)[0])


@pytest.mark.parametrize("sealing", ["heads", "all"])
def test_an_own_message_sent_back_is_refused(sealing: Sealing) -> None:
    worker, _ = channels(sealing)
    with pytest.raises(WireError, match="not sealed by the peer"):
        worker.receive(sent(worker, HEAD)[0])


@settings(max_examples=300)
@given(sealing=st.sampled_from(["heads", "all"]), data=st.data())
def test_a_changed_bit_is_refused_and_the_true_message_still_arrives(sealing: Sealing, data: st.DataObject) -> None:
    worker, server = channels(sealing)
    (message,) = sent(worker, HEAD, b"gradients")
    frames = 2 if sealing == "all" else 1  # on a trusted network tensors are not protected
    index = data.draw(st.integers(0, frames - 1))
    bit = data.draw(st.integers(0, 8 * len(message[index]) - 1))
    changed = bytearray(message[index])
    changed[bit // 8] ^= 1 << bit % 8
    into = memoryview(bytearray(9))
    with pytest.raises(WireError):
        server.receive([bytes(changed) if place == index else part for place, part in enumerate(message)], into)
    assert server.receive(message, into) == (HEAD, True)
    assert bytes(into) == b"gradients"


@pytest.mark.parametrize("sealing", SEALINGS)
def test_replayed_lost_or_reordered_messages_are_refused(sealing: Sealing) -> None:
    worker, server = channels(sealing)
    first, second, third = (sent(worker, head)[0] for head in (b"first", b"second", b"third"))
    with pytest.raises(WireError, match="wanted message 0, found 1"):
        server.receive(second)
    assert server.receive(first) == (b"first", False)
    with pytest.raises(WireError, match="wanted message 1, found 0"):
        server.receive(first)
    with pytest.raises(WireError, match="wanted message 1, found 2"):
        server.receive(third)
    assert server.receive(second) == (b"second", False)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_chunks_out_of_order_or_without_end_are_refused(sealing: Sealing) -> None:
    worker, server = channels(sealing)
    tensors = numbered(2 * CHUNK + 5)
    into = memoryview(bytearray(len(tensors)))
    chunks = sent(worker, HEAD, tensors)
    assert [len(part[-1]) for part in chunks] == [size + 16 * (sealing == "all") for size in (CHUNK, CHUNK, 5)]
    later = sent(worker, b"later")[0]
    assert server.receive(chunks[0], into) is None
    for other in (chunks[0], chunks[2], later):
        with pytest.raises(WireError):
            server.receive(other, into)
    assert server.receive(chunks[1], into) is None
    assert server.receive(chunks[2], into) == (HEAD, True)
    assert bytes(into) == tensors
    assert server.receive(later) == (b"later", False)


@pytest.mark.parametrize(("place", "head"), [(0, b""), (CHUNK - 1, b""), (CHUNK, b"new"), (2**64 - 1, b"")])
def test_a_peer_that_goes_on_elsewhere_in_its_tensors_is_refused(place: int, head: bytes) -> None:
    worker, server = channels("none")
    into = memoryview(bytearray(CHUNK + 5))
    first, second = sent(worker, HEAD, bytes(CHUNK + 5))
    assert server.receive(first, into) is None
    with pytest.raises(WireError):
        server.receive([second[0][:8] + struct.pack("<Q", place) + head, second[1]], into)
    with pytest.raises(WireError):
        server.receive([second[0][:8] + struct.pack("<Q", place) + head], into)
    assert server.receive(second, into) == (HEAD, True)


@pytest.mark.parametrize("sealing", SEALINGS)
@pytest.mark.parametrize("room", [None, 0, 99, 101, 2 * CHUNK])
def test_an_announced_length_that_is_not_wanted_is_refused(sealing: Sealing, room: int | None) -> None:
    worker, server = channels(sealing)
    into = None if room is None else memoryview(bytearray(room))
    message = sent(worker, HEAD, bytes(100))[0]
    wanted = "no tensors" if room is None else f"{room} bytes of tensors"
    with pytest.raises(WireError, match=f"wanted {wanted}, found 100 announced"):
        server.receive(message, into)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_a_message_without_its_tensors_or_with_others_is_refused(sealing: Sealing) -> None:
    worker, server = channels(sealing)
    head, tensors = sent(worker, HEAD, b"gradients")[0]
    into = memoryview(bytearray(9))
    for frames in ([], [head], [head, tensors, tensors], [head, tensors[:-1]], [head, tensors + b"x"], [tensors, head]):
        with pytest.raises(WireError):
            server.receive(frames, into)
    alone = sent(channels(sealing)[0], HEAD)[0]
    with pytest.raises(WireError):
        server.receive([*alone, tensors], into)
    assert server.receive([head, tensors], into) == (HEAD, True)


def test_a_head_that_is_too_long_is_not_sent() -> None:
    worker, server = channels("all")
    with pytest.raises(WireError, match="wanted a head of at most"):
        sent(worker, bytes(MAX_HEAD + 1))
    (longest,) = sent(worker, bytes(MAX_HEAD))[0]
    assert len(longest) == MAX_FRAME
    assert server.receive([longest]) == (bytes(MAX_HEAD), False)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_mutated_and_random_frames_are_refused_and_the_channel_goes_on(sealing: Sealing) -> None:
    source = random.Random(11)
    worker, server = channels(sealing)
    into = memoryview(bytearray(64))
    refused = 0
    for _ in range(340):
        true = sent(worker, HEAD, source.randbytes(64))[0]
        for _ in range(100):
            try:
                server.receive(mutated_frames(true, source), into)
            except WireError:
                refused += 1
            else:  # frames in clear can be changed unnoticed
                worker, server = channels(sealing)
                true = sent(worker, HEAD, source.randbytes(64))[0]
        assert server.receive(true, into) == (HEAD, True)
    assert refused == 34_000 or (sealing == "none" and refused > 15_000)


def mutated_frames(true: list[bytes], source: random.Random) -> list[bytes]:
    """Frames of which the first, that every sealing but "none" protects, is never as it was."""
    if source.random() < 0.1:
        return [source.randbytes(source.randrange(100)) for _ in range(source.randrange(4))]
    head = bytearray(true[0])
    kind = source.randrange(4)
    if kind == 0:
        head[source.randrange(len(head))] ^= 1 << source.randrange(8)
    elif kind == 1:
        del head[source.randrange(len(head)) :]
    elif kind == 2:
        head += source.randbytes(source.randint(1, 20))
    else:
        place = source.randrange(16)
        head[place : place + 8] = source.randbytes(8)
    rest = true[1:] if source.random() < 0.8 else [source.randbytes(source.randrange(100))] * source.randrange(3)
    return [bytes(head), *rest]


def test_mutated_and_random_openings_are_refused() -> None:
    source = random.Random(13)
    for sealing in SEALINGS:
        opening = Opening(TOKEN, sealing)
        hello = opening.hello()
        _, reply = answer(hello, TOKEN, sealing)
        for turn in range(34_000):
            bad = bytearray(hello if turn % 2 else reply)
            if turn % 7 == 0:
                bad = bytearray(source.randbytes(source.randrange(150)))
            elif turn % 7 == 1:
                del bad[source.randrange(len(bad)) :]
            else:
                bad[source.randrange(len(bad))] ^= 1 << source.randrange(8)
            with pytest.raises(HandshakeRefused):
                answer(bytes(bad), TOKEN, sealing)
            with pytest.raises(WireError):
                opening.finish(bytes(bad))
        opening.finish(reply)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_a_worker_without_the_token_is_refused_and_told(sealing: Sealing) -> None:
    opening = Opening(bytes(32), sealing)
    with pytest.raises(HandshakeRefused, match="the token is not the server's") as refused:
        answer(opening.hello(), TOKEN, sealing)
    with pytest.raises(WireError, match="the server refused this worker: the token is not the server's"):
        opening.finish(refused.value.reply)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_a_server_without_the_token_is_not_believed(sealing: Sealing) -> None:
    opening = Opening(TOKEN, sealing)
    _, reply = answer(Opening(bytes(32), sealing).hello(), bytes(32), sealing)
    with pytest.raises(WireError, match="did not prove that it has the token"):
        opening.finish(reply)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_a_reply_to_another_worker_and_a_hello_sent_back_are_refused(sealing: Sealing) -> None:
    opening, other = Opening(TOKEN, sealing), Opening(TOKEN, sealing)
    _, reply = answer(other.hello(), TOKEN, sealing)
    for wrong in (reply, opening.hello()):
        with pytest.raises(WireError, match="did not prove that it has the token"):
            opening.finish(wrong)
    with pytest.raises(HandshakeRefused):
        answer(reply, TOKEN, sealing)


@pytest.mark.parametrize("workers", SEALINGS)
@pytest.mark.parametrize("servers", SEALINGS)
def test_both_ends_must_agree_on_what_is_sealed(workers: Sealing, servers: Sealing) -> None:
    opening = Opening(TOKEN, workers)
    if workers == servers:
        opening.finish(answer(opening.hello(), TOKEN, servers)[1])
        return
    with pytest.raises(HandshakeRefused, match="do not agree on what is encrypted") as refused:
        answer(opening.hello(), TOKEN, servers)
    with pytest.raises(WireError, match="do not agree on what is encrypted"):
        opening.finish(refused.value.reply)


def test_a_key_that_makes_every_secret_zero_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("paceline.server.handshake._key_pair", lambda _: (None, bytes(32)))
        hello = Opening(TOKEN, "all").hello()
    with pytest.raises(HandshakeRefused):
        answer(hello, TOKEN, "all")


def test_tokens_are_fresh_and_short_ones_are_refused() -> None:
    assert len({fresh_token() for _ in range(100)}) == 100
    assert len(bytes.fromhex(fresh_token())) == 32
    with pytest.raises(UsageError, match="at least 16 bytes"):
        Opening(b"secret", "all")
    with pytest.raises(UsageError, match="at least 16 bytes"):
        answer(Opening(TOKEN, "all").hello(), b"", "all")


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """A server's socket and those of two workers, over TCP."""
    context = zmq.Context()
    server: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    server.maxmsgsize = MAX_FRAME
    port = server.bind_to_random_port("tcp://127.0.0.1")
    workers: list[zmq.Socket[bytes]] = [context.socket(zmq.DEALER) for _ in range(2)]
    for worker in workers:
        worker.maxmsgsize = MAX_FRAME
        worker.connect(f"tcp://127.0.0.1:{port}")
    for socket in (server, *workers):
        socket.rcvtimeo = 30_000
    yield server, workers
    for socket in (server, *workers):
        socket.close(linger=0)
    context.term()


def connect(server: zmq.Socket[bytes], worker: zmq.Socket[bytes], sealing: Sealing) -> tuple[bytes, Channel, Channel]:
    """Give the worker's route, its channel and the server's for it."""
    opening = Opening(TOKEN, sealing)
    worker.send(opening.hello())
    route, hello = server.recv_multipart()
    channel, reply = answer(hello, TOKEN, sealing)
    server.send_multipart([route, reply])
    return route, opening.finish(worker.recv()), channel


@pytest.mark.parametrize("sealing", SEALINGS)
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK // 2])
def test_tensors_of_any_size_arrive_over_tcp_both_ways(sockets: Sockets, sealing: Sealing, size: int) -> None:
    server, (worker, _) = sockets
    route, workers_end, servers_end = connect(server, worker, sealing)
    tensors = numbered(size)
    workers_end.send(worker, HEAD, memoryview(tensors))
    there = memoryview(bytearray(size))
    result = None
    while result is None:
        result = servers_end.receive(server.recv_multipart(copy=False)[1:], there)
    assert result == (HEAD, True)
    assert bytes(there) == tensors
    servers_end.send(server, b"back", there, route=route)
    back = memoryview(bytearray(size))
    result = None
    while result is None:
        result = workers_end.receive(worker.recv_multipart(copy=False), back)
    assert result == (b"back", True)
    assert bytes(back) == tensors


@pytest.mark.parametrize("sealing", SEALINGS)
def test_chunks_of_two_workers_may_be_interleaved(sockets: Sockets, sealing: Sealing) -> None:
    server, workers = sockets
    tensors = [numbered(3 * CHUNK + place) for place in (1, 2)]
    connected = [connect(server, worker, sealing) for worker in workers]
    routes = [route for route, _, _ in connected]
    for (_, workers_end, _), worker, own in zip(connected, workers, tensors, strict=True):
        workers_end.send(worker, HEAD, memoryview(own))
    waiting: dict[bytes, list[list[zmq.Frame]]] = {route: [] for route in routes}
    while any(len(messages) < 4 for messages in waiting.values()):
        frames = server.recv_multipart(copy=False)
        waiting[frames[0].bytes].append(frames[1:])
    ends = {route: servers_end for route, _, servers_end in connected}
    buffers = {route: memoryview(bytearray(len(own))) for route, own in zip(routes, tensors, strict=True)}
    results = [ends[route].receive(waiting[route][turn], buffers[route]) for turn in range(4) for route in routes]
    assert results == [None] * 6 + [(HEAD, True)] * 2
    assert [bytes(buffers[route]) for route in routes] == tensors


def test_a_frame_longer_than_any_of_ours_never_reaches_the_server(
    sockets: Sockets,
) -> None:
    server, (hostile, worker) = sockets
    hostile.send(bytes(MAX_FRAME + 1))
    assert server.poll(300) == 0
    connect(server, worker, "all")
