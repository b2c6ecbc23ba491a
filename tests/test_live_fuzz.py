"""Messages that no worker should send, with and without the token; the server goes on serving a good worker."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from led_by_hand import DATA, Hand
from live import DEADLINE, TOKEN, Cluster, Weights, host_and_port
from quick import quick
from test_connections import in_line
from test_wire import EXAMPLES, mutated

from paceline.codecs import Parts, parse_codec
from paceline.store.layout import ModelLayouts
from paceline.transport.connections import LENGTHS
from paceline.transport.handshake import Opening
from paceline.transport.messages import (
    Alive,
    Ask,
    Data,
    Described,
    Finished,
    Hello,
    Leave,
    Mean,
    Message,
    More,
    PushMessage,
    Record,
    Save,
    Skip,
)
from paceline.transport.noise import Ciphers
from paceline.transport.wire import encode

MODEL = tuple(Described(*entry) for entry in ModelLayouts.describe(Weights()))
UP = ModelLayouts(Weights()).up.nbytes
CODEC = "sign(feedback=false)"
PACKET = bytes(parse_codec(CODEC).new_state(Parts.one(3), seed=0).encode(torch.ones(3), step=0).numpy())
GOOD_RANK = 7777
HELLOS = [Opening(token, sealed=sealed).hello() for token in (TOKEN, TOKEN[::-1]) for sealed in (False, True)]
STRANGE = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(501), b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"]


def resident() -> float:
    """The memory of this process in MB: the server's and that of who attacks it."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Attacker:
    """Has the token and makes use of it: knows which step is under way."""

    def __init__(self, cluster: Cluster, source: random.Random) -> None:
        self._state, self._source = cluster.server._state, source
        self._packet = PACKET if cluster.rule.codec is not None else None

    def hello(self) -> bytes:
        return in_line(encode(Hello(-1, 0, os.getpid(), "here", False, MODEL)))

    def data(self) -> bytes:
        """A message, which may be none of ours."""
        source = self._source
        chance = source.random()
        if chance < 0.35:  # most of what it does costs it its place
            return self.hello()
        message = self._message()
        head = encode(message)
        if chance < 0.55:
            head = mutated(head, source)
        tensors = None
        if source.random() < (0.9 if isinstance(message, PushMessage) else 0.03):
            count = UP // 4 if source.random() < 0.95 else source.randrange(100)
            tensors = struct.pack("<f", self._real() if source.random() < 0.3 else 1.0) * count
            if self._packet is not None:
                tensors = mutated(self._packet, source) if source.random() < 0.7 else self._packet
        data = in_line(head, tensors)
        if source.random() < 0.003:  # nothing behind it is where it should be
            lengths = LENGTHS.pack(source.choice([0, 7, 2**20, 2**32 - 1]), source.choice([0, UP, 2**40, 2**64 - 2]))
            return lengths + data[LENGTHS.size :]
        return data

    def _message(self) -> Message:
        """A message that can be read, and says what it likes."""
        source = self._source
        step, version = (max(0, now - source.randrange(3)) for now in (self._state.step, self._state.version))
        makers: list[Callable[[], Message]] = [
            lambda: Hello(self._number(63), self._number(), self._number(), self._text(), False, MODEL),
            lambda: Hello(-1, 0, os.getpid(), "", source.random() < 0.5, MODEL * source.randrange(3)),
            lambda: Data(self._number(), self._number(), source.choice(["short", "drop", "pad"]), True),
            lambda: Ask(source.choice([-1, 0, 1, 2**40, self._number(63)]), self._number()),
            lambda: Ask(2**40, 0),
            lambda: PushMessage(step, version, 1, self._real(), self._real(), False, 0, b"\1"),
            lambda: PushMessage(
                step, version, self._number(), 0.0, 0.0, True, self._number(), source.randbytes(source.randrange(3))
            ),
            lambda: PushMessage(self._number(), self._number(), 1, 0.0, 0.0, True, 7, b"\1"),
            lambda: Skip(source.choice([step, self._number()])),
            lambda: More(source.choice([step, self._number()])),
            lambda: Mean(self._number(), self._text(), self._real(), (self._real(),) * source.randrange(5)),
            lambda: Save(self._text()),
            lambda: Record(self._text(), self._text()),
            lambda: Leave(False) if source.random() < 0.1 else Alive(),
            lambda: source.choice(EXAMPLES),
        ]
        return source.choice(makers)()

    def _number(self, bits: int = 64) -> int:
        numbers: list[int] = [0, 1, 7, 2**31, 2**32, 2**53, 2**bits - 1, self._source.getrandbits(bits)]
        return self._source.choice(numbers)

    def _real(self) -> float:
        return self._source.choice([0.0, -1.0, 1e38, math.nan, math.inf, -math.inf, self._source.random()])

    def _text(self) -> str:
        return self._source.choice(
            ["", "0/1", "\0", "é" * 300, "x" * 3000, '{"event": 1, "self": 2}', "[]", "[" * 2000]
        )


def nonsense(source: random.Random) -> bytes:
    """What a stranger may send."""
    hello = source.choice(HELLOS)
    frame = source.choice([source.randbytes(source.randrange(200)), mutated(hello, source), mutated(hello[:4], source)])
    data = in_line(frame, source.choice([None, None, None, source.randbytes(3)]))
    return source.choice([data, data, mutated(data, source), source.randbytes(300), *STRANGE])


def knock(cluster: Cluster, source: random.Random, sealed_address: str | None) -> socket.socket:
    """Connect as another host would, or as a process of this one and the same user."""
    if sealed_address is not None:
        return socket.create_connection(host_and_port(sealed_address))
    if source.random() < 0.5:
        knocker = socket.socket(socket.AF_UNIX)
        knocker.connect("\0" + cluster.address.removeprefix("ipc://@"))
        return knocker
    return socket.create_connection(host_and_port(cluster.tcp_address))


def proved(knocker: socket.socket, *, sealed: bool) -> Ciphers | None:
    """Go through the handshake with the token."""
    opening = Opening(TOKEN, sealed=sealed)
    knocker.sendall(in_line(opening.hello()))
    reply = b""
    while len(reply) < len(in_line(bytes(48))):
        reply += knocker.recv(100)
    proof, ciphers = opening.finish(reply[LENGTHS.size :])
    knocker.sendall(in_line(proof))
    return ciphers


def attack_as_stranger(cluster: Cluster, source: random.Random, count: int, sealed_address: str | None) -> int:
    """Before, during and after the handshake, of which the hello may be a copy of a true one."""
    for _ in range(count):
        with contextlib.suppress(OSError), knock(cluster, source, sealed_address) as knocker:
            if source.random() < 0.3:
                knocker.sendall(in_line(HELLOS[sealed_address is not None]))
            knocker.sendall(nonsense(source))
            if source.random() < 0.05:
                knocker.settimeout(0.05)
                knocker.recv(100)  # a refusal, or the end
    return count


def attack_with_token(cluster: Cluster, source: random.Random, count: int, sealed_address: str | None) -> int:
    """Until the server hangs up, which it does when a line cannot be understood any more."""
    with knock(cluster, source, sealed_address) as knocker:
        knocker.settimeout(DEADLINE)
        ciphers = proved(knocker, sealed=sealed_address is not None)
        attacker = Attacker(cluster, source)
        knocker.sendall(under(ciphers, attacker.hello()))
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < count:
                data = under(ciphers, attacker.data())
                knocker.sendall(mutated(data, source) if source.random() < 0.003 else data)
                sent += 1
    return sent


def under(ciphers: Ciphers | None, data: bytes) -> bytes:
    """Data as it is sent under keys, if there are some."""
    if ciphers is None:
        return data
    sealed = ciphers.send.encrypt(data)
    return len(sealed).to_bytes(2, "big") + sealed


@pytest.mark.parametrize(
    "case",
    quick([(20_000, None), (100_000, None), (10_000, CODEC), (100_000, CODEC)], (20_000, None), (10_000, CODEC)),
)
def test_messages_that_no_worker_should_send(case: tuple[int, str | None]) -> None:
    count, codec = case
    source = random.Random(11)
    logging.disable(logging.CRITICAL)
    try:
        with Cluster("k-batch-async(k=2)", workers=2, codec=codec) as cluster:
            good = Hand(cluster, GOOD_RANK)
            sealed_address = cluster.listener.bind("tcp://127.0.0.1:0", sealed=True)
            good.say(DATA)
            sent = turns = 0
            while sent < count:
                if turns == 20:
                    cluster.until(lambda: len(cluster.host.commits) > 0)  # the first one imports 200 MB of torch
                    before = resident()
                where = sealed_address if turns % 2 else None
                sent += attack_as_stranger(cluster, source, 10, where)
                sent += attack_with_token(cluster, source, 300, where)
                good.ask()
                good.push(0.0)
                turns += 1
            assert resident() - before < 50
            assert cluster.listener.strangers > 3 * turns
            serves_a_good_worker(cluster)
    finally:
        logging.disable(logging.NOTSET)


def serves_a_good_worker(cluster: Cluster) -> None:
    """Whoever attacked is gone, and a worker that comes has all to itself."""
    cluster.until(lambda: len(cluster.server._members) == 1)
    worker = Hand(cluster, GOOD_RANK + 1)
    assert worker.welcome.rank == GOOD_RANK + 1
    worker.say(DATA)
    epoch = worker.ask(2**40).epoch
    for number in range(6):
        before = len(cluster.host.commits)
        worker.push(1.0)
        worker.go()
        worker.push(1.0)
        worker.go()
        assert len(cluster.host.commits) > before, number
    worker.say(Ask(epoch, 3))
    assert isinstance(worker.hear(Finished), Finished)
