"""Times a worker's round trip to a parameter server: push a gradient, apply it by SGD, pull the parameters.

The worker and the server are two processes of one thread each. Our server through shared memory takes turns with
``torch.distributed.rpc``, which sends the gradients and returns the parameters of a model with its own optimizer. Then
the same over loopback TCP: ours in clear, as in a trusted network, and encrypted ("sealed"); rpc without shared memory.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from paceline.bench.measuring import Row, median_ratio
from paceline.policies import parse_policy
from paceline.policies.server import ServerPolicy
from paceline.record.trace import TraceWriter
from paceline.server.client import Client
from paceline.server.demand import OWN_DATA
from paceline.server.live import CommitSummary, LiveServer
from paceline.server.work_queue import WorkQueue
from paceline.train_state import TrainState
from paceline.transport.listening import Listener

KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, MB, 25 * MB)
LOCAL: dict[str, bool | None] = {"shared memory": None}
OVER_TCP: dict[str, bool | None] = {"tcp, trusted": False, "tcp, sealed": True}  # whether it is encrypted
_SERVER = 1  # its rank; the worker's is 0
_TENSORS = 8  # of a model larger than a page


def measure(sizes: Sequence[int], rounds: int, trips: int, over_tcp: bool) -> list[Row]:
    """Measure every size; called on two ranks of the default group, the first of which is the worker."""
    _init_rpc(over_tcp)
    ways = OVER_TCP if over_tcp else LOCAL
    rows = []
    for size in sizes:
        rows += _serve(size, ways) if dist.get_rank() == _SERVER else _compare(size, ways, rounds, trips)
    dist.barrier()
    rpc.shutdown()
    return rows


def measure_recording(seconds: float, rounds: int) -> list[Row]:
    """Measure the rate of small pushes with and without a trace, in turns; medians."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds + 1):  # the first is for warming up
        for traced, found in rates.items():
            (row,) = measure_rate(seconds, traced=traced)
            found += [row["pushes_per_second"]] if number else []
    return [
        {
            "rounds": rounds,
            "pushes_per_second": statistics.median(rates[False]),
            "recorded_per_second": statistics.median(rates[True]),
            "cost": median_ratio(rates[False], rates[True]) - 1,
        }
    ]


def measure_rate(seconds: float, *, traced: bool = False) -> list[Row]:
    """Measure the small pushes per second of all workers together; called on all ranks, the last is the server."""
    server = dist.get_world_size() - 1
    address, token, memory = _agree_on_address(server)
    if dist.get_rank() == server:
        listener = Listener(bytes(token))
        listener.bind(address)
        dist.barrier()
        with tempfile.TemporaryDirectory() as folder:
            trace = TraceWriter(Path(folder) / "trace.bin", {}) if traced else None
            _be_server(SIZES[0], listener, memory, workers=server, trace=trace)
        count = 0
    else:
        dist.barrier()
        count = _push_for(seconds, address, bytes(token), memory)
    pushes = torch.tensor([count])
    dist.all_reduce(pushes)
    return [{"bytes": SIZES[0], "workers": server, "pushes_per_second": int(pushes) / seconds}]


def _agree_on_address(server: int) -> tuple[str, list[int], int]:
    memory = os.memfd_create("paceline-bench") if dist.get_rank() == server else 0
    process, number, *token = _shared_numbers([os.getpid(), memory, *secrets.token_bytes(32)], server)
    if dist.get_rank() != server:
        memory = -1
    return f"ipc://@paceline-bench-{process}-{number}", token, memory if memory >= 0 else _opened(process, number)


def _opened(process: int, descriptor: int) -> int:
    """Open the file of another process's descriptor."""
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)


def _push_for(seconds: float, address: str, token: bytes, memory: int) -> int:
    model = _model(SIZES[0])
    _set_gradients(model)
    rank = dist.get_rank()
    client = Client(model, address=address, token=token, sealed=False, rank=rank, incarnation=0, memory=memory)
    client.ask(OWN_DATA)
    client.next_step(OWN_DATA)
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        client.push(examples=1, loss=None, seconds=0.0)
        client.next_step(OWN_DATA)
        count += 1
    client.leave(failed=False)
    return count


def _compare(size: int, ways_of_ours: dict[str, bool | None], rounds: int, trips: int) -> list[Row]:
    clients = {way: _Worker(size, sealed) for way, sealed in ways_of_ours.items()}
    ways: dict[str, Callable[[], None]] = {way: client.trip for way, client in clients.items()}
    ways["rpc"] = _WorkerOfRpc(size).trip
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):  # the first is for warming up
        for way, trip in ways.items():
            taken = statistics.median(_timed(trip) for _ in range(trips))
            times[way] += [taken] if number else []
    for client in clients.values():
        client.close()
    dist.barrier()
    return [
        {
            "bytes": size,
            "way": way,
            "trip_us": statistics.median(times[way]) * 1e6,
            "per_second": 1 / statistics.median(times[way]),
            "rpc_ratio": median_ratio(times["rpc"], times[way]),
        }
        for way in ways
    ]


def _timed(trip: Callable[[], None]) -> float:
    start = time.perf_counter()
    trip()
    return time.perf_counter() - start


def _model(size: int) -> nn.Module:
    count = 1 if size <= 4 * KB else _TENSORS
    return nn.ParameterList(nn.Parameter(torch.zeros(size // 4 // count)) for _ in range(count))


def _set_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-6)


class _Worker:
    """A worker of our server; the server's rank sends its address."""

    def __init__(self, size: int, sealed: bool | None) -> None:
        self._model = _model(size)
        _set_gradients(self._model)
        process, memory, port, *token = _shared_numbers([0] * 35)
        local = sealed is None
        self._client = Client(
            self._model,
            address=f"ipc://@paceline-bench-{process}-{memory}" if local else f"tcp://127.0.0.1:{port}",
            token=bytes(token),
            sealed=bool(sealed),
            rank=0,
            incarnation=0,
            memory=_opened(process, memory) if local else None,
        )
        self._client.ask(OWN_DATA)
        self._client.next_step(OWN_DATA)

    def trip(self) -> None:
        self._client.push(examples=1, loss=None, seconds=0.0)
        self._client.next_step(OWN_DATA)

    def close(self) -> None:
        self._client.leave(failed=False)


def _serve(size: int, ways: dict[str, bool | None]) -> list[Row]:
    """Run the servers that the worker's rank compares; only that rank has rows."""
    _ServerOfRpc.models[size] = _ServerOfRpc(size)
    threads = []
    for sealed in ways.values():
        token, memory = secrets.token_bytes(32), os.memfd_create("paceline-bench")
        listener = Listener(token)
        port = 0
        if sealed is None:
            listener.bind(f"ipc://@paceline-bench-{os.getpid()}-{memory}")
        else:
            port = int(listener.bind("tcp://127.0.0.1:0", sealed=sealed).rpartition(":")[2])
        threads.append(threading.Thread(target=_be_server, args=(size, listener, memory)))
        threads[-1].start()
        _shared_numbers([os.getpid(), memory, port, *token])
    for thread in threads:
        thread.join()
    dist.barrier()
    return []


def _be_server(size: int, listener: Listener, memory: int, workers: int = 1, trace: TraceWriter | None = None) -> None:
    model, policy = _model(size), parse_policy("async")
    assert isinstance(policy, ServerPolicy)
    train_state = TrainState(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    server = LiveServer(
        train_state,
        policy,
        workers=workers,
        memory=memory,
        queue=WorkQueue(),
        version=0,
        seed=0,
        listener=listener,
        host=_Host(),
        trace=trace,
    )
    server.serve(lambda: False)
    listener.close()
    if trace is not None:
        trace.close()


class _Host:
    """A host that records and saves nothing."""

    def rate(self) -> float:
        return 0.1

    def committed(self, commit: CommitSummary) -> None:
        pass

    def write_down(self) -> None:
        pass

    def save(self, path: Path | None) -> Path | None:
        return None

    def note(self, event: str, values: dict[str, Any]) -> None:
        pass


def _shared_numbers(numbers: list[int], server: int = _SERVER) -> list[int]:
    """Broadcast the numbers of the server's rank to all."""
    tensor = torch.tensor(numbers)
    dist.broadcast(tensor, server)
    return [int(number) for number in tensor.tolist()]


# The same by torch.distributed.rpc -----------------------------------------------------------------------------------


class _ServerOfRpc:
    models: dict[int, _ServerOfRpc] = {}  # noqa: RUF012  # by size, on the server's rank

    def __init__(self, size: int) -> None:
        self._parameters = list(_model(size).parameters())
        self._optimizer = torch.optim.SGD(self._parameters, lr=0.1)

    def step(self, gradients: list[Tensor]) -> list[Tensor]:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        return [parameter.detach() for parameter in self._parameters]


def step_by_rpc(size: int, gradients: list[Tensor]) -> list[Tensor]:
    """Apply gradients on the server and return its parameters; the worker calls it through rpc."""
    return _ServerOfRpc.models[size].step(gradients)


class _WorkerOfRpc:
    def __init__(self, size: int) -> None:
        self._size, self._model = size, _model(size)
        _set_gradients(self._model)

    def trip(self) -> None:
        gradients = [parameter.grad for parameter in self._model.parameters()]
        new = rpc.rpc_sync(f"rank{_SERVER}", step_by_rpc, args=(self._size, gradients))
        with torch.no_grad():
            for parameter, value in zip(self._model.parameters(), new, strict=True):
                parameter.copy_(value)


def _init_rpc(over_tcp: bool) -> None:
    rank = dist.get_rank()
    only_tcp: dict[str, Any] = {"_transports": ["uv"], "_channels": ["basic"]} if over_tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", **only_tcp)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)  # type: ignore[no-untyped-call]
