"""A live server with others beside it, each in a thread, that hold parts of the parameters; and workers of theirs."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from live import DEADLINE, TOKEN, Cluster
from torch import nn

from paceline.policies.server import ServerPolicy
from paceline.server.client import Client
from paceline.server.live import LiveServer
from paceline.server.shard_server import ShardServer
from paceline.server.shards import Shards
from paceline.train_state import TrainState
from paceline.transport.listening import Listener


class _Beside:
    """One of the other servers, in a thread of its own."""

    def __init__(self, train_state: TrainState, *, shard: int, servers: int, sealed: bool) -> None:
        self.train_state = train_state
        self.memory = os.memfd_create("test")
        self.listener = Listener(TOKEN)
        self.address = self.listener.bind(f"ipc://@paceline-test-{secrets.token_hex(8)}")
        self.server = ShardServer(
            train_state,
            shard=shard,
            servers=servers,
            file=self.memory,
            listener=self.listener,
            address=self.listener.bind("tcp://127.0.0.1:0", sealed=sealed),
        )
        self.failure: BaseException | None = None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            self.server.serve(self.stopped.is_set)
        except BaseException as error:
            self.failure = error
        finally:
            self.listener.close()

    def close(self) -> None:
        self.stopped.set()
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive(), "a server beside the first hangs"
        os.close(self.memory)


class ShardedCluster(Cluster):
    """A cluster of ``servers`` servers; of one it is a ``Cluster``."""

    def __init__(
        self,
        policy: str | ServerPolicy,
        make: Callable[[], TrainState],
        *,
        servers: int,
        sealed: bool = False,
        train_state: TrainState | None = None,
        **options: Any,
    ) -> None:
        self.shards: Shards | None = None
        self.beside = [
            _Beside(_scrambled(make()), shard=shard, servers=servers, sealed=sealed) for shard in range(1, servers)
        ]
        self._sealed = sealed
        super().__init__(policy, train_state or make(), **options)
        if sealed:
            self.tcp_address = self.listener.bind("tcp://127.0.0.1:0", sealed=sealed)

    def make_server(self, **options: Any) -> LiveServer:
        if self.beside:
            self.shards = Shards(
                self.train_state,
                memories=[each.memory for each in self.beside],
                addresses=[each.address for each in self.beside],
                token=TOKEN,
                workers=options["workers"],
                version=options["version"],
                rule=self.rule,
            )
        return super().make_server(**options, shards=self.shards)

    def until_quiet(self) -> None:
        """Wait until the first server gives no more orders by itself."""
        shards = self.shards
        self.until(lambda: shards is None or not shards._undecided)

    def collect(self) -> None:
        """Have the whole state in our train_state."""
        self.until_quiet()
        if self.shards is not None:
            self.shards.collect()

    def __exit__(self, *exception: Any) -> None:
        try:
            super().__exit__(*exception)
        finally:
            if self.shards is not None:
                self.shards.close()
            for each in self.beside:
                each.close()
        for each in self.beside:
            if each.failure is not None:
                raise each.failure

    def check(self) -> None:
        super().check()
        for each in self.beside:
            if each.failure is not None:
                raise AssertionError("a server beside the first has failed") from each.failure

    def client(self, model: nn.Module, rank: int = -1, *, address: str | None = None, here: bool = False) -> Client:
        return Client(
            model,
            address=address or self.address,
            token=TOKEN,
            sealed=self._sealed and address is not None,
            rank=rank,
            incarnation=0,
            memory=self.memory if here else None,
        )


def _scrambled(train_state: TrainState) -> TrainState:
    """The same with other parameters, as a script without a seed makes them in another process."""
    for parameter in train_state.model.parameters():
        parameter.data.fill_(77)
    return train_state


class Pusher:
    """A worker whose gradients come from a number, and from the parameters that it has."""

    def __init__(self, cluster: Cluster, model: nn.Module, rank: int, **options: Any) -> None:
        self.model = model
        self.client = cluster.client(model, rank, **options)
        self.has_step = False
        self.saves_to = "there"
        self.client.ask(-1)

    def look(self) -> None:
        """Begin the step that has come, if one has."""
        if self.client.cancelled():
            self.client.next_step(-1)
            self.has_step = True

    def push(self, seed: int) -> None:
        """Push; when this returns, the server has done all that follows from it."""
        dice = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=dice) + 0.1 * parameter.detach()
            used = parameter.requires_grad and float(torch.rand((), generator=dice)) < 0.8
            parameter.grad = gradient if used else None
        for buffer in self.model.buffers():
            buffer += torch.randint(1, 5, buffer.shape, generator=dice)
        self.client.push(examples=1 + seed % 4, loss=None, seconds=0.0)
        self.has_step = False
        self.settle()

    def settle(self) -> None:
        """Wait until the server has heard all that was said: it answers in order."""
        self.client.save(self.saves_to)


@contextlib.contextmanager
def pushers(cluster: Cluster, models: Sequence[nn.Module], **options: Any) -> Iterator[list[Pusher]]:
    """Workers that have joined and asked for a step."""
    with cluster, contextlib.ExitStack() as stack:
        made = []
        for rank, model in enumerate(models):
            made.append(Pusher(cluster, model, rank, **options))
            stack.callback(made[-1].client.close)
        yield made


def lead(workers: Sequence[Pusher], turns: range) -> None:
    """Let workers that have a step push, one after the other, in an order that the numbers of the turns decide."""
    for worker in workers:
        worker.settle()
    for turn in turns:
        for worker in workers:
            worker.look()
        able = [worker for worker in workers if worker.has_step]
        able[turn * 7 % len(able)].push(turn)
    for worker in workers:
        worker.look()
