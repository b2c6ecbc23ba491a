"""A live server in a thread, and workers in threads beside it, or led by hand: all in one process, in milliseconds."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from conftest import ABANDONED
from torch import nn
from torch.optim import SGD

from paceline.codecs import read_codec
from paceline.policies import parse_policy
from paceline.policies.server import ServerPolicy
from paceline.record.trace import TraceWriter
from paceline.server.client import Client
from paceline.server.live import CommitSummary, Host, LiveServer
from paceline.server.work_queue import WorkQueue
from paceline.sessions.nan_guard import OnNaN
from paceline.sessions.worker import WorkerSession
from paceline.store.commit_rule import CommitRule
from paceline.train_state import TrainState
from paceline.transport.connections import Connection
from paceline.transport.listening import Heard, Listener, Peer
from paceline.transport.messages import Message

T = TypeVar("T")
M = TypeVar("M", bound=Message)

TOKEN = bytes(range(32))
DEADLINE = 100.0  # seconds: who takes longer hangs
NO_LOSS = float("nan")


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``tcp://host:port``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


class Weights(nn.Module):
    """The least model; a hand makes up its gradients."""

    def __init__(self, *shapes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes or (3,))

    @property
    def value(self) -> float:
        """The first weight."""
        return float(self.weights[0].detach().flatten()[0])


def weights_state(*shapes: int, **options: Any) -> TrainState:
    """Weights that a step moves by minus their gradient."""
    model = Weights(*shapes)
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=1.0)], **options)


class Recorder:
    """Stands for the server's session: remembers what the server tells it."""

    def __init__(self) -> None:
        self.commits: list[CommitSummary] = []
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.saves: list[Path | None] = []

    def rate(self) -> float:
        return 1.0

    def committed(self, commit: CommitSummary) -> None:
        self.commits.append(commit)

    def write_down(self) -> None:
        pass

    def save(self, path: Path | None) -> Path | None:
        self.saves.append(path)
        return path or Path("somewhere")

    def note(self, event: str, values: dict[str, Any]) -> None:
        self.notes.append((event, values))


class _Killed(Exception):
    pass


class Cluster:
    """A server in a thread of its own while the block lasts; what it fails of, the block fails of."""

    def __init__(
        self,
        policy: str | ServerPolicy,
        train_state: TrainState | None = None,
        *,
        workers: int = 2,
        host: Host | None = None,
        queue: WorkQueue | None = None,
        version: int = 0,
        seed: int = 0,
        in_place_of: Cluster | None = None,
        trace: TraceWriter | None = None,
        codec: str | None = None,
        codec_state: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy = cast(ServerPolicy, parse_policy(policy))
        self.rule = CommitRule.of(self.policy, read_codec(codec))
        self.train_state = self.rule.remembering(train_state or weights_state())
        self.host: Any = host or Recorder()
        self.queue = queue or WorkQueue()
        self.workers = workers
        self.listener = Listener(TOKEN)
        local, remote = f"ipc://@paceline-test-{secrets.token_hex(8)}", "tcp://127.0.0.1:0"
        if in_place_of is not None:
            local, remote = in_place_of.address, in_place_of.tcp_address
        self.address: str = self.listener.bind(local)
        self.tcp_address: str = self.listener.bind(remote)
        self.memory = os.memfd_create("test")
        self.server = self.make_server(
            workers=workers, version=version, seed=seed, trace=trace, codec_state=codec_state
        )
        self.lines: list[Connection] = []  # are closed in the end
        self.failure: BaseException | None = None
        self.ended_well: bool | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def make_server(self, **options: Any) -> LiveServer:
        return LiveServer(
            self.train_state,
            self.policy,
            memory=self.memory,
            queue=self.queue,
            listener=self.listener,
            host=self.host,
            codec=self.rule.codec,
            **options,
        )

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
        self.stop()
        self._rouse()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the server hangs"
        for line in self.lines:
            line.close()
        self.listener.close()
        os.close(self.memory)
        if self.failure is not None:
            raise self.failure

    def stop(self) -> None:
        """Ask the server to stop, as a signal does."""
        self._stop.set()

    def _rouse(self) -> None:
        """Have the server look at once whether it is to stop."""
        with contextlib.suppress(OSError), socket.create_connection(host_and_port(self.tcp_address)):
            pass

    def die(self) -> None:
        """Be gone without a word, as a process that is killed."""

        def no_more(seconds: float) -> Iterator[tuple[Peer, Heard]]:
            raise _Killed

        self.listener.hear = no_more  # type: ignore[method-assign]
        self._rouse()
        self._thread.join(DEADLINE)
        assert isinstance(self.failure, _Killed)
        self.failure = None
        self.listener.close()

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
        return cast(Weights, self.train_state.model).value

    def client(self, model: nn.Module, rank: int = -1, *, address: str | None = None, here: bool = False) -> Client:
        return Client(
            model,
            address=address or self.address,
            token=TOKEN,
            sealed=False,
            rank=rank,
            incarnation=0,
            memory=self.memory if here else None,
        )

    def session(
        self, train_state: TrainState, rank: int = -1, *, on_nan: OnNaN = "stop", **options: Any
    ) -> WorkerSession:
        """Join as a worker, in this thread."""
        client = self.client(train_state.model, rank, **options)
        return WorkerSession(
            train_state, model=train_state.model, policy=self.policy, client=client, injected_delays=None, on_nan=on_nan
        )

    def run(
        self, trainees: Sequence[TrainState], work: Callable[[WorkerSession, TrainState], T], **options: Any
    ) -> list[T]:
        """Let every train_state be trained by a worker in a thread of its own, and give what each has returned."""

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
        try:
            while any(thread.is_alive() for thread in threads) and not failures and time.monotonic() < end:
                self.check()
                time.sleep(0.001)
            if failures:
                raise failures[0]
        except BaseException:
            for thread in threads:
                thread.name = ABANDONED
            raise
        assert len(results) == len(works), f"workers {sorted(set(range(len(works))) - set(results))} hang"
        return [results[place] for place in range(len(works))]
