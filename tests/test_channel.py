"""Channels: what is sent arrives, and nothing that was changed, replayed or sent without the token does."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError, WireError
from paceline.transport.channel import MAX_FRAME, OPEN_CHUNK, SEALED_CHUNK, Channel, Sealing
from paceline.transport.connections import LENGTHS, MAX_FIRST, NO_FRAME, Connection, Waiting
from paceline.transport.handshake import HandshakeRefused, Opening, answer, fresh_token
from paceline.transport.messages import PushMessage
from paceline.transport.pieces import Pieces
from paceline.transport.wire import MAX_HEAD, encode

TOKEN = bytes.fromhex("5e" * 32)
SEALINGS: tuple[Sealing, ...] = get_args(Sealing)
HEAD = encode(PushMessage(3, 2, 64, 0.5, 0.01, True, 7, b"\xff\x01"))


def channels(sealing: Sealing) -> tuple[Channel, Channel]:
    """Give both ends, the worker's first."""
    opening = Opening(TOKEN, sealing)
    server, reply = answer(opening.hello(), TOKEN, sealing)
    return opening.finish(reply), server


def sent(channel: Channel, head: bytes, tensors: bytes | None = None) -> list[list[bytes]]:
    """The frames of the messages that are made of a head and its tensors."""
    waiting = Waiting(head, None if tensors is None else Pieces(memoryview(tensors)), overtaken_by_next=False)
    messages, last = [], False
    while not last:
        first, second, last = waiting.frames(channel)
        messages.append([first] if second is None else [first, b"".join(second)])
    return messages


def receive(channel: Channel, frames: list[bytes], into: memoryview | None = None) -> tuple[bytes, bool] | None:
    """Have a channel take a message; give its head, and whether tensors came with it."""
    if not 1 <= len(frames) <= 2:
        raise WireError("a line cannot carry this")
    second = len(frames[1]) if len(frames) == 2 else None
    places = channel.begin(memoryview(frames[0]), second, None if into is None else Pieces(into))
    start = 0
    for place in places:
        place[:] = frames[1][start : start + len(place)]
        start += len(place)
    received = channel.end()
    return None if received is None else (received.head, received.tensors is not None)


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
        assert receive(receiver, message, memoryview(into)) == (head, tensors is not None)
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
        receive(other_server, sent(worker, HEAD)[0])


@pytest.mark.parametrize("sealing", ["heads", "all"])
def test_an_own_message_sent_back_is_refused(sealing: Sealing) -> None:
    worker, _ = channels(sealing)
    with pytest.raises(WireError, match="not sealed by the peer"):
        receive(worker, sent(worker, HEAD)[0])


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
        receive(server, [bytes(changed) if place == index else part for place, part in enumerate(message)], into)
    assert receive(server, message, into) == (HEAD, True)
    assert bytes(into) == b"gradients"


@pytest.mark.parametrize("sealing", SEALINGS)
def test_replayed_lost_or_reordered_messages_are_refused(sealing: Sealing) -> None:
    worker, server = channels(sealing)
    first, second, third = (sent(worker, head)[0] for head in (b"first", b"second", b"third"))
    with pytest.raises(WireError, match="wanted message 0, found 1"):
        receive(server, second)
    assert receive(server, first) == (b"first", False)
    with pytest.raises(WireError, match="wanted message 1, found 0"):
        receive(server, first)
    with pytest.raises(WireError, match="wanted message 1, found 2"):
        receive(server, third)
    assert receive(server, second) == (b"second", False)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_chunks_out_of_order_or_without_end_are_refused(sealing: Sealing) -> None:
    worker, server = channels(sealing)
    chunk = SEALED_CHUNK if sealing == "all" else OPEN_CHUNK
    tensors = numbered(2 * chunk + 5)
    into = memoryview(bytearray(len(tensors)))
    chunks = sent(worker, HEAD, tensors)
    assert [len(part[-1]) for part in chunks] == [size + 16 * (sealing == "all") for size in (chunk, chunk, 5)]
    later = sent(worker, b"later")[0]
    assert receive(server, chunks[0], into) is None
    for other in (chunks[0], chunks[2], later):
        with pytest.raises(WireError):
            receive(server, other, into)
    assert receive(server, chunks[1], into) is None
    assert receive(server, chunks[2], into) == (HEAD, True)
    assert bytes(into) == tensors
    assert receive(server, later) == (b"later", False)


@pytest.mark.parametrize(("place", "head"), [(0, b""), (OPEN_CHUNK - 1, b""), (OPEN_CHUNK, b"new"), (2**64 - 1, b"")])
def test_a_peer_that_goes_on_elsewhere_in_its_tensors_is_refused(place: int, head: bytes) -> None:
    worker, server = channels("none")
    into = memoryview(bytearray(OPEN_CHUNK + 5))
    first, second = sent(worker, HEAD, bytes(OPEN_CHUNK + 5))
    assert receive(server, first, into) is None
    with pytest.raises(WireError):
        receive(server, [second[0][:8] + struct.pack("<Q", place) + head, second[1]], into)
    with pytest.raises(WireError):
        receive(server, [second[0][:8] + struct.pack("<Q", place) + head], into)
    assert receive(server, second, into) == (HEAD, True)


@pytest.mark.parametrize("sealing", SEALINGS)
@pytest.mark.parametrize("room", [None, 0, 99, 101, 2 * OPEN_CHUNK])
def test_an_announced_length_that_is_not_wanted_is_refused(sealing: Sealing, room: int | None) -> None:
    worker, server = channels(sealing)
    into = None if room is None else memoryview(bytearray(room))
    message = sent(worker, HEAD, bytes(100))[0]
    wanted = "no tensors" if room is None else f"{room} bytes of tensors"
    with pytest.raises(WireError, match=f"wanted {wanted}, found 100 announced"):
        receive(server, message, into)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_a_message_without_its_tensors_or_with_others_is_refused(sealing: Sealing) -> None:
    worker, server = channels(sealing)
    head, tensors = sent(worker, HEAD, b"gradients")[0]
    into = memoryview(bytearray(9))
    for frames in ([], [head], [head, tensors, tensors], [head, tensors[:-1]], [head, tensors + b"x"], [tensors, head]):
        with pytest.raises(WireError):
            receive(server, frames, into)
    alone = sent(channels(sealing)[0], HEAD)[0]
    with pytest.raises(WireError):
        receive(server, [*alone, tensors], into)
    assert receive(server, [head, tensors], into) == (HEAD, True)


def test_a_head_that_is_too_long_is_not_sent() -> None:
    worker, server = channels("all")
    with pytest.raises(WireError, match="wanted a head of at most"):
        sent(worker, bytes(MAX_HEAD + 1))
    (longest,) = sent(worker, bytes(MAX_HEAD))[0]
    assert len(longest) == MAX_FRAME
    assert receive(server, [longest]) == (bytes(MAX_HEAD), False)


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
                receive(server, mutated_frames(true, source), into)
            except WireError:
                refused += 1
            else:  # frames in clear can be changed unnoticed
                worker, server = channels(sealing)
                true = sent(worker, HEAD, source.randbytes(64))[0]
        assert receive(server, true, into) == (HEAD, True)
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
        patched.setattr("paceline.transport.handshake._key_pair", lambda _: (None, bytes(32)))
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


class Ends(NamedTuple):
    """Both ends of a connection."""

    worker: Connection
    server: Connection


@pytest.fixture(params=["tcp", "unix"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    if request.param == "unix":
        ends = Ends(*map(Connection, socket.socketpair()))
    else:
        with socket.create_server(("127.0.0.1", 0)) as door:
            worker = socket.create_connection(door.getsockname())
            ends = Ends(Connection(worker), Connection(door.accept()[0]))
    yield ends
    for line in ends:
        line.close()


def meet(ends: Ends, sealing: Sealing) -> None:
    """Give both lines their channels, as a handshake over them does."""
    opening = Opening(TOKEN, sealing)
    ends.worker.send(opening.hello())
    hello = carried(ends.worker, ends.server)
    channel, reply = answer(hello[0], TOKEN, sealing)
    ends.server.send(reply)
    ends.server.channel = channel
    ends.worker.channel = opening.finish(carried(ends.server, ends.worker)[0])


def carried(sender: Connection, receiver: Connection, into: Pieces | None = None) -> tuple[bytes, bool]:
    """What arrives next; the sender sends on meanwhile."""
    while (received := receiver.receive(into)) is None:
        assert not receiver.ended and not sender.ended
        sender.flush()
        receiver.wait(0.01)
    return received.head, received.tensors is not None


@pytest.mark.parametrize("sealing", SEALINGS)
@pytest.mark.parametrize(
    "size", [0, 1, *(chunk + more for chunk in (SEALED_CHUNK, OPEN_CHUNK) for more in (-1, 0, 1)), 9 * OPEN_CHUNK // 2]
)
def test_tensors_of_any_size_arrive_both_ways(ends: Ends, sealing: Sealing, size: int) -> None:
    meet(ends, sealing)
    tensors = numbered(size)
    there, back = memoryview(bytearray(size)), memoryview(bytearray(size))
    ends.worker.send(HEAD, Pieces(memoryview(tensors)))
    ends.worker.send(b"behind it")
    assert carried(ends.worker, ends.server, Pieces(there)) == (HEAD, True)
    assert bytes(there) == tensors
    assert carried(ends.worker, ends.server) == (b"behind it", False)
    ends.server.send(b"back", Pieces(there))
    assert carried(ends.server, ends.worker, Pieces(back)) == (b"back", True)
    assert bytes(back) == tensors


@pytest.mark.parametrize("sealing", SEALINGS)
def test_tensors_in_pieces_arrive_in_other_pieces(ends: Ends, sealing: Sealing) -> None:
    meet(ends, sealing)
    source = random.Random(5)
    for _ in range(20):
        ends_of_chunks = (SEALED_CHUNK, 2 * SEALED_CHUNK + 1, OPEN_CHUNK)
        sizes = [source.choice([0, 1, 3, 100, *ends_of_chunks]) for _ in range(source.randrange(1, 8))]
        sent_pieces = [numbered(size) for size in sizes]
        source.shuffle(sizes)
        places = [bytearray(size) for size in sizes]
        ends.worker.send(HEAD, Pieces(*(memoryview(piece) for piece in sent_pieces)))
        assert carried(ends.worker, ends.server, Pieces(*(memoryview(place) for place in places))) == (HEAD, True)
        assert b"".join(places) == b"".join(sent_pieces)


@pytest.mark.parametrize("sealing", SEALINGS)
def test_what_waits_can_be_kept_while_its_memory_changes(ends: Ends, sealing: Sealing) -> None:
    meet(ends, sealing)
    tensors = numbered(10 * OPEN_CHUNK)
    memory = bytearray(tensors)
    for head in (b"first", b"second"):
        ends.server.send(head, Pieces(memoryview(memory)))
    assert ends.server.waits
    ends.server.keep_what_waits()
    memory[:] = bytes(len(memory))
    for head in (b"first", b"second"):
        into = memoryview(bytearray(len(tensors)))
        assert carried(ends.server, ends.worker, Pieces(into)) == (head, True)
        assert bytes(into) == tensors


def test_what_is_overtaken_before_it_has_begun_is_not_sent(ends: Ends) -> None:
    meet(ends, "none")
    tensors = Pieces(memoryview(bytes(10 * OPEN_CHUNK)))
    for head in (b"first", b"second", b"third"):
        ends.server.send(head, tensors, overtakes=True)
        ends.server.send(b"after " + head)
    into = Pieces(memoryview(bytearray(tensors.nbytes)))
    heard = [carried(ends.server, ends.worker, into)[0] for _ in range(5)]
    assert heard == [b"first", b"after first", b"after second", b"third", b"after third"]


def test_a_peer_that_reads_nothing_is_given_up(ends: Ends) -> None:
    meet(ends, "none")
    for _ in range(100_000):
        ends.server.send(bytes(2000))
        if ends.server.ended:
            return
    raise AssertionError("messages pile up without end")


@pytest.mark.parametrize("lengths", [(MAX_FRAME + 1, NO_FRAME), (5, MAX_FRAME + 1), (NO_FRAME, NO_FRAME)])
def test_a_frame_longer_than_any_of_ours_ends_the_line(ends: Ends, lengths: tuple[int, int]) -> None:
    meet(ends, "all")
    ends.worker._socket.send(LENGTHS.pack(*lengths))
    ends.server.wait(5)
    with pytest.raises(WireError, match="wanted frames of at most"):
        ends.server.receive()
    assert ends.server.ended


@pytest.mark.parametrize("lengths", [(MAX_FIRST + 1, NO_FRAME), (0, MAX_FIRST + 1), (100, 1)])
def test_a_first_message_that_is_too_long_or_too_many_ends_the_line(ends: Ends, lengths: tuple[int, int]) -> None:
    ends.worker._socket.send(LENGTHS.pack(*lengths) + bytes(MAX_FIRST))
    ends.server.wait(5)
    with pytest.raises(WireError, match="wanted"):
        ends.server.receive()
    assert ends.server.ended


def test_a_refused_message_leaves_the_line_as_it_was(ends: Ends) -> None:
    """All of it is skipped, wherever it is cut."""
    meet(ends, "none")
    chunk = numbered(OPEN_CHUNK)
    first, second, alone = (sent(channels("none")[0], HEAD, tensors)[0] for tensors in (chunk, chunk[:100], None))
    data = b"".join(in_line(message) for message in (first, second, alone))
    refused, heard, start = 0, None, 0
    while heard is None:
        ends.worker._socket.send(data[start : start + 7777])
        start += 7777
        ends.server.wait(0.01)
        try:
            heard = ends.server.receive(Pieces(memoryview(bytearray(9))))
        except WireError:
            refused += 1
    assert (heard.head, refused) == (HEAD, 2)


def in_line(message: list[bytes]) -> bytes:
    lengths = [len(message[0]), len(message[1]) if len(message) > 1 else NO_FRAME]
    return LENGTHS.pack(*lengths) + b"".join(message)


def test_messages_byte_by_byte(ends: Ends) -> None:
    opening = Opening(TOKEN, "all")
    channel, reply = answer(opening.hello(), TOKEN, "all")
    worker = opening.finish(reply)
    ends.server.channel = channel
    into = memoryview(bytearray(300))
    tensors = numbered(300)
    data = b"".join(in_line(sent(worker, head, tensors)[0]) for head in (b"a", b"b"))
    heard = []
    for place in range(len(data)):
        ends.worker._socket.send(data[place : place + 1])
        ends.server.wait(5)
        if (received := ends.server.receive(Pieces(into))) is not None:
            heard.append(received.head)
            assert bytes(into) == tensors
    assert heard == [b"a", b"b"]


def test_what_came_before_the_end_is_heard_though_sending_fails(ends: Ends) -> None:
    meet(ends, "none")
    ends.worker.send(b"unread")
    ends.server.send(b"last words")
    ends.server.close()
    for _ in range(3):
        ends.worker.send(b"to nobody")
    assert carried(ends.worker, ends.worker) == (b"last words", False)
    assert ends.worker.receive() is None
    assert ends.worker.ended
