"""Lines: what is sent arrives, encrypted or not, and nothing that was changed on its way does."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from paceline.errors import WireError
from paceline.transport.connections import ALIGNMENT, LENGTHS, MAX_FIRST, NO_TENSORS, Connection
from paceline.transport.handshake import Answer, Opening
from paceline.transport.messages import PushMessage
from paceline.transport.pieces import Pieces
from paceline.transport.streams import RECORD
from paceline.transport.wire import MAX_HEAD, encode

TOKEN = bytes.fromhex("5e" * 32)
HEAD = encode(PushMessage(3, 2, 64, 0.5, 0.01, True, 7, b"\xff\x01"))
LARGE = 2**20

both = pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])


def numbered(count: int) -> bytes:
    """Bytes in which hardly any two places are alike."""
    return random.Random(count).randbytes(count)


def in_line(head: bytes, tensors: bytes | None = None) -> bytes:
    """A message as a plain line has it."""
    if tensors is None:
        return LENGTHS.pack(len(head), NO_TENSORS) + head
    front = LENGTHS.pack(len(head), len(tensors)) + head
    return front + bytes(-len(front) % ALIGNMENT) + tensors


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


def meet(ends: Ends, *, sealed: bool) -> None:
    """Open both lines, as a handshake over them does."""
    opening, answer = Opening(TOKEN, sealed=sealed), Answer(TOKEN, sealed=sealed)
    ends.worker.send(opening.hello())
    ends.server.send(answer.reply(carried(ends.worker, ends.server)[0]))
    proof, ciphers = opening.finish(carried(ends.server, ends.worker)[0])
    ends.worker.send(proof)
    ends.worker.open(ciphers)
    ends.server.open(answer.finish(carried(ends.worker, ends.server)[0]))


def on_the_wire(ends: Ends) -> bytes:
    """Take away what the worker has sent, before the server reads it."""
    ends.server.wait(5)
    return ends.server._socket.recv(2**22)


def carried(sender: Connection, receiver: Connection, into: Pieces | None = None) -> tuple[bytes, bool]:
    """What arrives next; the sender sends on meanwhile."""
    while (received := receiver.receive(into)) is None:
        assert not receiver.ended and not sender.ended
        sender.flush()
        receiver.wait(0.01)
    return received.head, received.tensors is not None


@both
@pytest.mark.parametrize(
    "size", [0, 1, *(size + more for size in (RECORD, LARGE) for more in (-1, 0, 1)), 9 * LARGE // 2]
)
def test_tensors_of_any_size_arrive_both_ways(ends: Ends, sealed: bool, size: int) -> None:
    meet(ends, sealed=sealed)
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


@both
def test_tensors_in_pieces_arrive_in_other_pieces(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    source = random.Random(5)
    for _ in range(20):
        sizes = [source.choice([0, 1, 3, 100, RECORD, 2 * RECORD + 1, LARGE]) for _ in range(source.randrange(1, 8))]
        sent_pieces = [numbered(size) for size in sizes]
        source.shuffle(sizes)
        places = [bytearray(size) for size in sizes]
        ends.worker.send(HEAD, Pieces(*(memoryview(piece) for piece in sent_pieces)))
        assert carried(ends.worker, ends.server, Pieces(*(memoryview(place) for place in places))) == (HEAD, True)
        assert b"".join(places) == b"".join(sent_pieces)


@both
def test_very_many_small_pieces(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    memory, into = numbered(3000), bytearray(3000)
    views = [[memoryview(whole)[place : place + 1] for place in range(3000)] for whole in (memory, into)]
    ends.worker.send(HEAD, Pieces(*views[0]))
    assert carried(ends.worker, ends.server, Pieces(*views[1])) == (HEAD, True)
    assert bytes(into) == memory


@both
def test_what_waits_can_be_kept_while_its_memory_changes(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    tensors = numbered(10 * LARGE)
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


@both
def test_what_is_overtaken_before_it_has_begun_is_not_sent(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    tensors = Pieces(memoryview(bytes(10 * LARGE)))
    for head in (b"first", b"second", b"third"):
        ends.server.send(head, tensors, overtakes=True)
        ends.server.send(b"after " + head)
    into = Pieces(memoryview(bytearray(tensors.nbytes)))
    heard = [carried(ends.server, ends.worker, into)[0] for _ in range(5)]
    assert heard == [b"first", b"after first", b"after second", b"third", b"after third"]


@both
def test_a_peer_that_reads_nothing_is_given_up(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    for _ in range(100_000):
        ends.server.send(bytes(2000))
        if ends.server.ended:
            assert not ends.server.waits
            return
    raise AssertionError("messages pile up without end")


def test_the_longest_head_arrives_and_a_longer_one_ends_the_line(ends: Ends) -> None:
    meet(ends, sealed=False)
    ends.worker.send(bytes(MAX_HEAD))
    assert carried(ends.worker, ends.server) == (bytes(MAX_HEAD), False)
    ends.worker._socket.send(LENGTHS.pack(MAX_HEAD + 1, NO_TENSORS))
    ends.server.wait(5)
    with pytest.raises(WireError, match="wanted a head of at most"):
        ends.server.receive()
    assert ends.server.ended


@pytest.mark.parametrize("lengths", [(MAX_FIRST + 1, NO_TENSORS), (0, MAX_FIRST + 1), (100, 1), (0, 0)])
def test_a_first_message_that_is_too_long_or_has_tensors_ends_the_line(ends: Ends, lengths: tuple[int, int]) -> None:
    ends.worker._socket.send(LENGTHS.pack(*lengths) + bytes(MAX_FIRST))
    ends.server.wait(5)
    with pytest.raises(WireError, match="wanted"):
        ends.server.receive()
    assert ends.server.ended


@pytest.mark.parametrize("room", [None, 0, 99, 101, 2 * LARGE])
def test_an_announced_length_that_is_not_wanted_is_refused(ends: Ends, room: int | None) -> None:
    meet(ends, sealed=True)
    ends.worker.send(HEAD, Pieces(memoryview(bytes(100))))
    ends.server.wait(5)
    wanted = "no tensors" if room is None else f"{room} bytes of tensors"
    with pytest.raises(WireError, match=f"wanted {wanted}, found 100 announced"):
        ends.server.receive(None if room is None else Pieces(memoryview(bytearray(room))))


def test_a_refused_message_leaves_the_line_as_it_was(ends: Ends) -> None:
    """All of it is skipped, wherever it is cut."""
    meet(ends, sealed=False)
    data = in_line(HEAD, numbered(LARGE)) + in_line(HEAD, numbered(100)) + in_line(HEAD)
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


def test_tensors_without_end_that_nobody_wants_take_no_memory(ends: Ends) -> None:
    meet(ends, sealed=False)
    ends.worker._socket.send(LENGTHS.pack(0, NO_TENSORS - 1).ljust(ALIGNMENT, b"\0"))
    ends.server.wait(5)
    with pytest.raises(WireError, match=f"wanted no tensors, found {NO_TENSORS - 1} announced"):
        ends.server.receive()
    for _ in range(100):
        ends.worker._socket.send(bytes(5000))
        assert ends.server.receive() is None
    assert len(ends.server._buffer) == 2**16


@both
def test_messages_byte_by_byte(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    into = memoryview(bytearray(300))
    tensors = numbered(300)
    for head in (b"a", b"b"):
        ends.worker.send(head, Pieces(memoryview(tensors)))
    data, heard = on_the_wire(ends), []
    for place in range(len(data)):
        ends.worker._socket.send(data[place : place + 1])
        ends.server.wait(5)
        if (received := ends.server.receive(Pieces(into))) is not None:
            heard.append(received.head)
            assert bytes(into) == tensors
    assert heard == [b"a", b"b"]


@both
def test_only_what_should_be_is_readable_on_the_wire(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    ends.worker.send(b"the head is readable", Pieces(memoryview(b"the tensors are readable")))
    data = on_the_wire(ends)
    assert (b"the head is readable" in data, b"the tensors are readable" in data) == (not sealed, not sealed)


def test_no_two_messages_look_alike_when_sealed(ends: Ends) -> None:
    meet(ends, sealed=True)
    seen = []
    for _ in range(5):
        ends.worker.send(bytes(50))
        seen.append(on_the_wire(ends))
    assert len(set(seen)) == 5


def test_whatever_is_changed_of_a_sealed_line_ends_it(ends: Ends) -> None:
    """A bit, a message less, one twice, one of another connection, or one that was sent the other way."""
    meet(ends, sealed=True)
    ends.worker.send(HEAD, Pieces(memoryview(b"gradients")))
    data, source = on_the_wire(ends), random.Random(3)
    ends.worker.send(HEAD)
    behind = on_the_wire(ends)
    place = source.randrange(len(data))
    changed = bytearray(data)
    changed[place] ^= 1 << source.randrange(8)
    for wrong in (bytes(changed), behind, b"\0\0" + data, b"\xff\xff" + data, source.randbytes(1000)):
        assert_ends_a_line(wrong)
    assert_ends_a_line(data)  # it is true on its own line alone
    ends.worker._socket.send(data)
    into = memoryview(bytearray(9))
    assert carried(ends.worker, ends.server, Pieces(into)) == (HEAD, True)
    assert bytes(into) == b"gradients"
    ends.worker._socket.send(data)
    ends.server.wait(5)
    with pytest.raises(WireError, match="not encrypted by the peer"):
        ends.server.receive(Pieces(into))
    assert ends.server.ended


def test_true_messages_in_front_of_a_forged_one_are_received(ends: Ends) -> None:
    meet(ends, sealed=True)
    sealed = b""
    for head in (b"first", b"second"):
        ends.worker.send(head)
        sealed += on_the_wire(ends)
    ends.worker._socket.send(sealed + bytes(2**10))
    ends.server.wait(5)
    received = [ends.server.receive(), ends.server.receive()]
    assert [message.head for message in received if message is not None] == [b"first", b"second"]
    with pytest.raises(WireError, match="wanted an encrypted message"):
        ends.server.receive()


def assert_ends_a_line(data: bytes) -> None:
    ends = Ends(*map(Connection, socket.socketpair()))
    meet(ends, sealed=True)
    ends.worker._socket.send(data + bytes(2**17))
    ends.server.wait(5)
    with pytest.raises(WireError, match=r"wanted an encrypted message|not encrypted by the peer"):
        ends.server.receive(Pieces(memoryview(bytearray(9))))
    assert ends.server.ended and ends.server.receive() is None
    for line in ends:
        line.close()


@both
def test_what_came_before_the_end_is_heard_though_sending_fails(ends: Ends, sealed: bool) -> None:
    meet(ends, sealed=sealed)
    ends.worker.send(b"unread")
    ends.server.send(b"last words")
    ends.server.close()
    for _ in range(3):
        ends.worker.send(b"to nobody")
    assert carried(ends.worker, ends.worker) == (b"last words", False)
    assert ends.worker.receive() is None
    assert ends.worker.ended
