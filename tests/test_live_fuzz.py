"""100,000 messages that no worker should send, with and without the token; the server goes on serving a good worker."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import zmq
from led_by_hand import DATA, Hand
from live import TOKEN, Cluster, Weights
from test_wire import EXAMPLES, mutated

from paceline.errors import WireError
from paceline.server.channel import Channel, Sealing
from paceline.server.handshake import Opening
from paceline.server.layout import ModelLayouts
from paceline.server.lines import abstract_name
from paceline.server.messages import (
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
    Push,
    Record,
    Save,
    Skip,
)
from paceline.server.wire import encode

pytestmark = pytest.mark.timeout(100)

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
        if source.random() < (0.9 if isinstance(message, Push) else 0.03):
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
            self._mirror.receive(frames, memoryview(bytearray(UP)))
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
            lambda: Push(step, version, 1, self._real(), self._real(), b"\1"),
            lambda: Push(step, version, self._number(), 0.0, 0.0, source.randbytes(source.randrange(3))),
            lambda: Push(self._number(), self._number(), 1, 0.0, 0.0, b"\1"),
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


@contextlib.contextmanager
def knocking(context: zmq.Context[Any], address: str) -> Iterator[zmq.Socket[bytes]]:
    knocker: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    knocker.set(zmq.LINGER, 0)
    knocker.connect(address)
    yield knocker
    knocker.close()


def attack_as_stranger(cluster: Cluster, context: zmq.Context[Any], source: random.Random, count: int) -> int:
    with knocking(context, cluster.tcp_address) as knocker:
        for _ in range(count):
            knocker.send_multipart(nonsense(source))
        while knocker.poll(0):
            knocker.recv_multipart()
    return count


def attack_with_token(cluster: Cluster, context: zmq.Context[Any], source: random.Random, count: int) -> int:
    with knocking(context, cluster.tcp_address) as knocker:
        opening = Opening(TOKEN, "none")
        knocker.send(opening.hello())
        opening.finish(knocker.recv())
        attacker = Attacker(cluster, source)
        knocker.send_multipart(attacker.hello())
        for _ in range(count):
            knocker.send_multipart(attacker.frames())
        while knocker.poll(0):
            knocker.recv_multipart()
    return count


def attack_on_this_host(cluster: Cluster, source: random.Random, count: int) -> int:
    """Over the socket of workers of the server's host, by one of the same user."""
    with socket.socket(socket.AF_UNIX) as knocker:
        knocker.connect(abstract_name(cluster.address))
        attacker = Attacker(cluster, source)
        if with_token := source.random() < 0.8:
            knocker.sendall(in_line([Opening(TOKEN, "none").hello()]) + in_line(attacker.hello()))
        sent = 0
        with contextlib.suppress(OSError):  # hung up
            while sent < count:
                data = in_line((attacker.frames() if with_token else nonsense(source))[:2])
                knocker.sendall(mutated(data, source) if source.random() < 0.005 else data)
                sent += 1
    return sent


def in_line(frames: Frames) -> bytes:
    lengths = [*map(len, frames), 2**32 - 1][:2]
    return struct.pack("<II", *lengths) + b"".join(frames)


def test_messages_that_no_worker_should_send() -> None:
    source = random.Random(11)
    logging.disable(logging.CRITICAL)
    context: zmq.Context[Any] = zmq.Context()
    try:
        with Cluster("k-batch-async(k=2)", workers=2) as cluster:
            good = Hand(cluster, GOOD_RANK)
            good.say(DATA)
            sent = 0
            for turn in range(260):
                if turn == 20:
                    before = resident()
                sent += attack_as_stranger(cluster, context, source, 160)
                sent += attack_with_token(cluster, context, source, 200)
                sent += attack_on_this_host(cluster, source, 50)
                good.ask()
                good.push(0.0)
            assert sent >= 100_000
            assert resident() - before < 50
            assert cluster.listener.strangers > 20_000
            serves_a_good_worker(cluster)
    finally:
        context.destroy(linger=0)
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
