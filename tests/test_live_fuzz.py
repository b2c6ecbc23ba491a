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
from typing import get_args

import pytest
from led_by_hand import DATA, Hand
from live import DEADLINE, TOKEN, Cluster, Weights, host_and_port
from quick import quick
from test_channel import in_line, receive
from test_wire import EXAMPLES, mutated

from paceline.errors import WireError
from paceline.store.layout import ModelLayouts
from paceline.transport.channel import Channel, Sealing
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
from paceline.transport.wire import encode

Frames = list[bytes]
MODEL = tuple(Described(*entry) for entry in ModelLayouts.describe(Weights()))
UP = ModelLayouts(Weights()).up.nbytes
HUGE = 2**64 - 1
GOOD_RANK = 7777
SEALINGS: tuple[Sealing, ...] = get_args(Sealing)
HELLOS = [Opening(token, sealing).hello() for token in (TOKEN, TOKEN[::-1]) for sealing in SEALINGS]


def resident() -> float:
    """The memory of this process in MB: the server's and that of who attacks it."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Attacker:
    """Has the token and makes use of it: knows what number the server expects, and which step is under way."""

    def __init__(self, cluster: Cluster, source: random.Random) -> None:
        self._state, self._source = cluster.server._state, source
        self._mirror = Channel("none", b"", b"")  # takes what the server's takes

    def hello(self) -> Frames:
        return self._framed(encode(Hello(-1, 0, os.getpid(), "here", False, MODEL)), None)

    def frames(self) -> Frames:
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
            tensors = struct.pack("<f", self._real() if source.random() < 0.3 else 1.0) * (UP // 4)
        return self._framed(head, tensors)

    def _framed(self, head: bytes, tensors: bytes | None) -> Frames:
        source, number = self._source, self._mirror._received
        length = HUGE if tensors is None else len(tensors)
        if source.random() < 0.05:
            number, length = source.choice([0, number, number + 1, HUGE]), source.choice([0, UP - 1, UP, 2**20, HUGE])
        frames = [struct.pack("<QQ", number, length) + head, *([] if tensors is None else [tensors])]
        if source.random() < 0.03:
            frames = [*(mutated(frame, source) for frame in frames), *[b"more"] * source.randrange(3)]
        with contextlib.suppress(WireError):
            receive(self._mirror, frames, memoryview(bytearray(UP)))
        return frames

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


def nonsense(source: random.Random) -> Frames:
    """What a stranger may send."""
    hello = source.choice(HELLOS)
    frame = source.choice([source.randbytes(source.randrange(200)), mutated(hello, source), mutated(hello[:4], source)])
    return [frame, *[source.randbytes(3)] * source.choice([0, 0, 0, 1, 7])]


def knock(cluster: Cluster, source: random.Random) -> socket.socket:
    """Connect as another host would, or as a process of this one and the same user."""
    if source.random() < 0.5:
        knocker = socket.socket(socket.AF_UNIX)
        knocker.connect("\0" + cluster.address.removeprefix("ipc://@"))
        return knocker
    return socket.create_connection(host_and_port(cluster.tcp_address))


def attack_as_stranger(cluster: Cluster, source: random.Random, count: int) -> int:
    for _ in range(count):
        with contextlib.suppress(OSError), knock(cluster, source) as knocker:
            knocker.sendall(in_line(nonsense(source)[:2]))
            if source.random() < 0.05:
                knocker.recv(100)  # a refusal, or the end
    return count


def attack_with_token(cluster: Cluster, source: random.Random, count: int) -> int:
    """Until the server hangs up, which it does when a line cannot be understood any more."""
    with knock(cluster, source) as knocker:
        attacker = Attacker(cluster, source)
        knocker.sendall(in_line([Opening(TOKEN, "none").hello()]) + in_line(attacker.hello()))
        knocker.settimeout(DEADLINE)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < count:
                data = in_line(attacker.frames()[:2])
                knocker.sendall(mutated(data, source) if source.random() < 0.005 else data)
                sent += 1
    return sent


@pytest.mark.parametrize("count", quick([20_000, 100_000], 20_000))
def test_messages_that_no_worker_should_send(count: int) -> None:
    source = random.Random(11)
    logging.disable(logging.CRITICAL)
    try:
        with Cluster("k-batch-async(k=2)", workers=2) as cluster:
            good = Hand(cluster, GOOD_RANK)
            good.say(DATA)
            sent = turns = 0
            while sent < count:
                if turns == 20:
                    before = resident()
                sent += attack_as_stranger(cluster, source, 10)
                sent += attack_with_token(cluster, source, 300)
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
