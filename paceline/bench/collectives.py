"""Times an all-reduce on this host: our backend of ``torch.distributed`` against Gloo, in one run.

All ways are synchronous float32 sums through ``torch.distributed`` (MPI, if installed, through mpi4py in a separate
run). They take turns of a few calls, so that the scheduler treats all alike: on busy cores a call takes microseconds,
or milliseconds if a rank must wait for its core. A barrier before each call keeps the wait for late ranks out of the
times, which are medians on rank 0. ``hot`` buffers are reduced repeatedly; before each call with ``cold`` buffers every
rank writes 64 MB of other memory.

An all-reduce of N bytes on P ranks must read at least P x N bytes and write as many. ``bandwidth_share`` is the time in
which all ranks at once copy buffers of that size, over the time of the all-reduce.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.bench.measuring import Row

KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 64 * KB, MB, 25 * MB, 100 * MB)
_SWEPT = 64 * MB  # writing this much evicts everything else from the cache

_WARM_UPS, _CALLS = 2, 5  # of one turn
_LEAST_TURNS, _ENOUGH_TURNS = 3, 10
_LONGEST = 10  # times the seconds asked for, to make enough turns

Way = Callable[[], object]


def measure(sizes: Sequence[int], seconds: float) -> list[Row]:
    """Measure every size for about ``seconds`` per way; called on all ranks of the default group."""
    gloo = dist.new_group(backend="gloo")
    sweep = torch.zeros(_SWEPT // 4)
    return [
        _row(size, buffers, gloo, sweep if buffers == "cold" else None, seconds)
        for size in sizes
        for buffers in ("hot", "cold")
    ]


def _row(size: int, buffers: str, gloo: dist.ProcessGroup, sweep: Tensor | None, seconds: float) -> Row:
    count = size // 4
    ours = dist.group.WORLD.allocate(count, torch.float32)  # type: ignore[union-attr]
    other, copied = torch.zeros(count), torch.zeros(count)

    ways: dict[str, Way] = {
        "ours": lambda: dist.all_reduce(ours),
        "any": lambda: dist.all_reduce(other),
        "gloo": lambda: dist.all_reduce(other, group=gloo),
        "copy": lambda: copied.copy_(other),
    }
    times = _take_turns(ways, sweep, seconds)
    median = {way: statistics.median(taken) for way, taken in times.items()}
    # A copy reads and writes N bytes on every rank; the all-reduce must do as much on every rank.
    return {
        "ranks": dist.get_world_size(),
        "bytes": size,
        "buffers": buffers,
        **{f"{way}_us": median[way] * 1e6 for way in ("ours", "any", "gloo")},
        "ours_ratio": median["gloo"] / median["ours"],
        "any_ratio": median["gloo"] / median["any"],
        "bandwidth_share": median["copy"] / median["ours"],
    }


def _take_turns(ways: dict[str, Way], sweep: Tensor | None, seconds: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    start, turns = time.perf_counter(), 0
    while turns < _LEAST_TURNS or _goes_on(turns, time.perf_counter() - start, seconds * len(ways)):
        for name, way in ways.items():
            times[name] += [_timed(way, sweep) for _ in range(_WARM_UPS + _CALLS)][_WARM_UPS:]
        turns += 1
    return times


def _goes_on(turns: int, elapsed: float, seconds: float) -> bool:
    """Whether all ranks make another turn, by the clock of rank 0."""
    wanted = elapsed < seconds or (turns < _ENOUGH_TURNS and elapsed < _LONGEST * seconds)
    decision = torch.tensor([int(wanted)])
    dist.broadcast(decision, 0)
    return bool(decision)


def _timed(way: Way, sweep: Tensor | None) -> float:
    if sweep is not None:
        sweep.add_(1.0)
    dist.barrier()
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


# MPI ------------------------------------------------------------------------------------------------------------------

_MPI_PROGRAM = """
import json, statistics, sys, time
import numpy
from mpi4py import MPI
world = MPI.COMM_WORLD
medians = []
for size in json.loads(sys.argv[1]):
    data, times = numpy.zeros(size // 4, numpy.float32), []
    for _ in range(int(sys.argv[2]) if size > 1 << 20 else 200):
        world.Barrier()
        start = time.perf_counter()
        world.Allreduce(MPI.IN_PLACE, data)
        times.append(time.perf_counter() - start)
    medians.append(statistics.median(times[3:]) * 1e6)
if world.rank == 0:
    print(json.dumps(medians))
"""


def measure_mpi(ranks: int, sizes: Sequence[int]) -> list[float] | None:
    """Measure MPI with hot buffers: medians in microseconds; None without mpi4py or mpiexec."""
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpiexec") is None:
        return None
    command = ["mpiexec", "-n", str(ranks), sys.executable, "-c", _MPI_PROGRAM, json.dumps(list(sizes)), "20"]
    medians: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return medians
