"""A live server in a thread, and workers in threads beside it, or led by hand: all in one process, in milliseconds."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
import zmq
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.guard import OnNaN
from paceline.policies import parse_policy
from paceline.policies.server import ServerPolicy
from paceline.served import ServedSession
from paceline.server.channel import Channel
from paceline.server.client import Client
from paceline.server.handshake import Opening
from paceline.server.layout import ModelLayouts, memory_of
from paceline.server.listening import Listener
from paceline.server.live import Committed, Host, LiveServer
from paceline.server.messages import Alive, Ask, Described, Finished, Go, Hello, Message, Push, Welcome
from paceline.server.wire import decode, encode
from paceline.server.work_queue import WorkQueue
from paceline.trainee import Trainee

T = TypeVar("T")
M = TypeVar("M", bound=Message)

TOKEN = bytes(range(32))
DEADLINE = 20.0  # seconds: who takes longer hangs
NO_LOSS = float("nan")


class Weights(nn.Module):
    """The least model; a hand makes up its gradients."""

    def __init__(self, *shapes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes or (3,))

    @property
    def value(self) -> float:
        """The first weight."""
        return float(self.weights[0].flatten()[0])


def weights_trainee(*shapes: int, **options: Any) -> Trainee:
    """Weights that a step moves by minus their gradient."""
    model = Weights(*shapes)
    return Trainee(model=model, optimizers=[SGD(model.parameters(), lr=1.0)], **options)


class Recorder:
    """Stands for the server's session: remembers what the server tells it."""

    def __init__(self) -> None:
        self.commits: list[Committed] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.saves: list[Path | None] = []

    def rate(self) -> float:
        return 1.0

    def committed(self, commit: Committed) -> None:
        self.commits.append(commit)

    def save(self, path: Path | None) -> Path | None:
        self.saves.append(path)
        return path or Path("somewhere")

    def note(self, event: str, values: dict[str, Any]) -> None:
        self.notes.append((event, values))


class Cluster:
    """A server in a thread of its own while the block lasts; what it fails of, the block fails of."""

    def __init__(
        self,
        policy: str,
        trainee: Trainee | None = None,
        *,
        workers: int = 2,
        host: Host | None = None,
        queue: WorkQueue | None = None,
        version: int = 0,
        seed: int = 0,
    ) -> None:
        self.trainee = trainee or weights_trainee()
        self.policy = cast(ServerPolicy, parse_policy(policy))
        self.host: Any = host or Recorder()
        self.queue = queue or WorkQueue()
        self.workers = workers
        self.listener = Listener(TOKEN)
        self.address = self.listener.bind(f"ipc://@paceline-test-{secrets.token_hex(8)}", remote=False)
        self.tcp_address = self.listener.bind("tcp://127.0.0.1:0", remote=True)
        self._memory = os.memfd_create("test")
        self.server = LiveServer(
            self.trainee,
            self.policy,
            workers=workers,
            waits_for_all=True,
            memory=self._memory,
            queue=self.queue,
            version=version,
            seed=seed,
            listener=self.listener,
            host=self.host,
        )
        self.context = zmq.Context()
        self.failure: BaseException | None = None
        self.ended_well: bool | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        try:
            self.ended_well = self.server.serve(self._stop.is_set)
        except BaseException as error:
            self.failure = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the server hangs"
        self.context.destroy(linger=0)
        self.listener.close()
        os.close(self._memory)
        if self.failure is not None:
            raise self.failure

    def wait_for_end(self) -> None:
        """Wait until the server ends by itself."""
        self._thread.join(DEADLINE)
        assert self.ended_well or self.failure, "the server does not end"

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is so that another thread brings about."""
        end = time.monotonic() + DEADLINE
        while not condition():
            self.check()
            assert time.monotonic() < end, "waited for in vain"
            time.sleep(0.001)

    def check(self) -> None:
        if self.failure is not None:
            raise AssertionError("the server has failed") from self.failure

    @property
    def value(self) -> float:
        """The first weight of ``Weights``."""
        return cast(Weights, self.trainee.model).value

    def client(self, model: nn.Module, rank: int = -1, *, address: str | None = None) -> Client:
        return Client(
            model,
            address=address or self.address,
            token=TOKEN,
            sealing="none",
            rank=rank,
            incarnation=0,
            memory=None,
        )

    def session(self, trainee: Trainee, rank: int = -1, *, on_nan: OnNaN = "stop", **options: Any) -> ServedSession:
        """Join as a worker, in this thread."""
        client = self.client(trainee.model, rank, **options)
        return ServedSession(
            trainee, model=trainee.model, policy=self.policy, client=client, pauses=None, on_nan=on_nan
        )

    def run(self, trainees: Sequence[Trainee], work: Callable[[ServedSession, Trainee], T], **options: Any) -> list[T]:
        """Let every trainee be trained by a worker in a thread of its own, and give what each has returned."""

        def worker(rank: int) -> T:
            with self.session(trainees[rank], rank, **options) as session:
                return work(session, trainees[rank])

        return self.together([lambda rank=rank: worker(rank) for rank in range(len(trainees))])  # type: ignore[misc]

    def together(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Do several things at once; the first failure is raised, and so is that one does not end."""
        results: dict[int, T] = {}
        failures: list[BaseException] = []

        def do(place: int) -> None:
            try:
                results[place] = works[place]()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=do, args=(place,), daemon=True) for place in range(len(works))]
        for thread in threads:
            thread.start()
        end = time.monotonic() + DEADLINE
        while any(thread.is_alive() for thread in threads) and not failures and time.monotonic() < end:
            self.check()
            time.sleep(0.001)
        if failures:
            raise failures[0]
        assert len(results) == len(works), f"workers {sorted(set(range(len(works))) - set(results))} hang"
        return [results[place] for place in range(len(works))]

    def hands(self, count: int, **options: Any) -> list[Hand]:
        """Several workers led by hand, of the ranks from 0 on; all have joined."""
        return [Hand(self, rank, **options) for rank in range(count)]


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
    ) -> None:
        self._cluster = cluster
        self.model = model or Weights()
        self.layouts = ModelLayouts(self.model)
        self.socket: zmq.Socket[bytes] = cluster.context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(address or cluster.address)
        opening = Opening(token, "none")
        self.socket.send(opening.hello())
        self.channel: Channel = opening.finish(self._frames()[0].bytes)
        self.parameters = torch.zeros(self.layouts.down.nbytes, dtype=torch.uint8)
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
        self.channel.send(self.socket, encode(message), None if tensors is None else memoryview(tensors))

    def hear(self, kind: type[M]) -> M:
        """The next message, which must be of this kind."""
        while True:
            received = self.channel.receive(self._frames(), memory_of(self.parameters))
            message = decode(received[0]) if received is not None else None
            if message is not None and not isinstance(message, Alive):
                assert isinstance(message, kind), f"wanted {kind.__name__}, heard {message}"
                return message

    def hears_nothing(self) -> bool:
        """Whether nothing has come after the server has had time for it."""
        return not self.socket.poll(30)

    def ask(self, epochs: int = -1) -> Go:
        self.say(Ask(epochs))
        return self.go()

    def go(self) -> Go:
        """The step that comes next."""
        go = self.hear(Go)
        self.step, self.version = go.step, go.version
        return go

    def finish(self) -> Finished:
        return self.hear(Finished)

    def push(self, *gradients: float | None, examples: int = 1, loss: float = NO_LOSS, **changes: Any) -> None:
        """Push gradients that have these numbers everywhere; None: there is no gradient."""
        message = Push(self.step, self.version, examples, loss, 0.0, self._bits(gradients))
        self.say(message._replace(**changes), self.gradients(*gradients))

    def gradients(self, *values: float | None) -> bytes:
        memory = torch.zeros(self.layouts.up.nbytes, dtype=torch.uint8)
        for view, value in zip(self.layouts.up.views(memory), values, strict=False):
            view.fill_(value or 0.0)
        return memory.numpy().tobytes()

    def _bits(self, gradients: Sequence[float | None]) -> bytes:
        bits = sum(1 << place for place, value in enumerate(gradients) if value is not None)
        return bits.to_bytes(-(-len(self.layouts.trained) // 8), "little")

    @property
    def value(self) -> float:
        """The first weight, as it came last."""
        view: Tensor = self.layouts.down.views(self.parameters)[0]
        return float(view.flatten()[0])

    def _frames(self) -> list[zmq.Frame]:
        end = time.monotonic() + DEADLINE
        while not self.socket.poll(100):
            self._cluster.check()
            assert time.monotonic() < end, "the server says nothing"
        return self.socket.recv_multipart(copy=False)

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def cluster_of_hands(policy: str, hands: int, **options: Any) -> Iterator[tuple[Cluster, list[Hand]]]:
    """A server with so many workers led by hand, who all have joined and asked for nothing yet."""
    with Cluster(policy, workers=hands, **options) as cluster:
        yield cluster, cluster.hands(hands)


def sgd(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1, **options)]
