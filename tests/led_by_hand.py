"""A worker that does one thing when it is told to: for what the server answers, message by message."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from live import DEADLINE, TOKEN, Cluster, Weights
from torch import Tensor, nn

from paceline.codecs import parse_codec
from paceline.policies.server import ServerPolicy
from paceline.store.layout import ModelLayouts, memory_of
from paceline.store.packets import PartPackets
from paceline.transport.calling import prove
from paceline.transport.connections import Connection, Received
from paceline.transport.messages import Alive, Ask, Data, Described, Finished, Go, Hello, Message, PushMessage, Welcome
from paceline.transport.pieces import Pieces
from paceline.transport.wire import decode, encode

M = TypeVar("M", bound=Message)

NO_LOSS = float("nan")
DATA = Data(num_samples=6, batch_size=1, last="short", shuffle=False)  # batches 0 to 5


class Hand:
    """A worker that does one thing when it is told to, also what no worker should."""

    def __init__(
        self,
        cluster: Cluster,
        rank: int = -1,
        *,
        token: bytes = TOKEN,
        model: nn.Module | None = None,
        process: int | None = None,
        address: str | None = None,
        hello: bool = True,
        sealed: bool = False,
    ) -> None:
        self._cluster = cluster
        self.model = model or Weights()
        self.layouts = ModelLayouts(self.model)
        self.line = Connection.to(address or cluster.address, DEADLINE)
        cluster.lines.append(self.line)
        self.parameters = torch.zeros(self.layouts.down.nbytes, dtype=torch.uint8)
        prove(self.line, token, sealed=sealed, wait=self._wait)
        self.step = self.version = 0
        if hello:
            self.welcome = self.join(rank, process)

    def hello(self, rank: int = -1, process: int | None = None) -> Hello:
        model = tuple(Described(*entry) for entry in ModelLayouts.describe(self.model))
        return Hello(rank, 0, process or os.getpid(), "here", False, model)

    def join(self, rank: int = -1, process: int | None = None) -> Welcome:
        self.say(self.hello(rank, process))
        return self.hear(Welcome)

    def say(self, message: Message, tensors: bytes | None = None) -> None:
        """Send a message; the server reads it before it reads anything that is said later, by another hand too."""
        tensors_there = None if tensors is None else Pieces(memoryview(tensors))
        self.line.send_all(encode(message), tensors_there, vanished_after=DEADLINE)
        wait_until_read(self.line)

    def hear(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        while True:
            message = decode(self._next().head)
            if not isinstance(message, Alive):
                assert isinstance(message, kind), f"wanted {kind.__name__}, heard {message}"
                return message

    def hears_nothing(self) -> bool:
        """Whether nothing has come after the server has had time for it."""
        self.line.wait(0.03)
        return self.line.receive(self._into()) is None

    def ask(self, epochs: int = -1) -> Go:
        self.request(epochs)
        return self.answer()

    def request(self, epochs: int = -1) -> None:
        self.asked = self.step + 100
        self.say(Ask(epochs, self.asked))

    def answer(self) -> Go:
        while (go := self.go()).ask != self.asked:
            pass  # it was on its way
        return go

    def go(self) -> Go:
        """The step that comes next."""
        go = self.hear(Go)
        self.step, self.version = go.step, go.version
        return go

    def finish(self) -> Finished:
        return self.hear(Finished)

    def push(self, *gradients: float | None, examples: int = 1, loss: float = NO_LOSS, **changes: Any) -> None:
        """Push gradients that have these numbers everywhere; None: there is no gradient."""
        message = PushMessage(self.step, self.version, examples, loss, 0.0, False, 0, self._bits(gradients))
        self.say(message._replace(**changes), self.gradients(*gradients))

    def gradients(self, *values: float | None) -> bytes:
        if self.welcome.codec:
            return self.packet(*values)
        memory = torch.zeros(self.layouts.up.nbytes, dtype=torch.uint8)
        for view, value in zip(self.layouts.up.views(memory), values, strict=False):
            view.fill_(value or 0.0)
        return memory.numpy().tobytes()

    def packet(self, *values: float | None) -> bytes:
        """The same as a packet, of a codec that remembers nothing."""
        packing = PartPackets(parse_codec(self.welcome.codec), self.layouts)
        for parameter, value in zip(self.layouts.trained, values, strict=False):
            parameter.grad = torch.full_like(parameter, value or 0.0)
        return b"".join(packing.pieces(packing.encode(step=0)).stretches)

    def _bits(self, gradients: Sequence[float | None]) -> bytes:
        bits = sum(1 << place for place, value in enumerate(gradients) if value is not None)
        return bits.to_bytes(-(-len(self.layouts.trained) // 8), "little")

    @property
    def value(self) -> float:
        """The first weight, as it came last."""
        view: Tensor = self.layouts.down.views(self.parameters)[0]
        return float(view.flatten()[0])

    def _into(self) -> Pieces:
        return Pieces(memory_of(self.parameters))

    def _next(self) -> Received:
        end = time.monotonic() + DEADLINE
        while (received := self.line.receive(self._into())) is None:
            self._wait()
            assert time.monotonic() < end, "the server says nothing"
        return received

    def _wait(self) -> None:
        self.line.wait(0.1)
        self._cluster.check()
        assert not self.line.ended, "the server has hung up"

    def close(self) -> None:
        self.line.close()


@contextlib.contextmanager
def cluster_of_hands(policy: str | ServerPolicy, hands: int, **options: Any) -> Iterator[tuple[Cluster, list[Hand]]]:
    """A server with so many workers led by hand, who all have joined and asked for nothing yet."""
    with Cluster(policy, workers=hands, **options) as cluster:
        yield cluster, [Hand(cluster, rank) for rank in range(hands)]


def batches(*hands: Hand, epochs: int = 1) -> list[int]:
    """All ask for batches, in turn."""
    for hand in hands:
        hand.say(DATA)
    for hand in hands:
        hand.request(epochs)
    return [hand.answer().batch for hand in hands]


def wait_until_read(line: Connection | None) -> None:
    """Wait until the server has read all that was sent on a line; what others send now comes after it."""
    end = time.monotonic() + DEADLINE
    while line is not None and not line.remote and not line.ended and _unread(line):
        assert time.monotonic() < end, "the server does not read"
        time.sleep(0.0001)


def _unread(line: Connection) -> int:
    """How many bytes the other end has not read yet."""
    (unread,) = struct.unpack("i", fcntl.ioctl(line.fileno(), termios.TIOCOUTQ, bytes(4)))
    return int(unread)
