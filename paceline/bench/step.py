"""Measures the cost of exchanging gradients: ours and PyTorch's DDP against a step with only a barrier, on two workers.

One run has two processes of one thread each, with the same data and optimizer. The ways take turns in rounds, each
on its own copy of the model. A way's time is the median over the rounds of its median step. Ratios are medians of the
ratios of each round: ``over_barrier`` against a step with a barrier instead of the exchange, ``over_gloo`` against
PyTorch's DDP on Gloo; below 1 is faster.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.bench.measuring import Row, median_ratio, median_seconds
from paceline.bench.workloads import WORKLOADS, Batch, Workload, optimizer_for

Step = Callable[[Batch], None]
NUM_BATCHES = 4


def measure(models: Sequence[str], rounds: int, steps: int) -> list[Row]:
    """Measure all ways for every model; called on all workers of the default group, which is ours."""
    gloo = dist.new_group(backend="gloo")
    return [row for name in models for row in compare(name, gloo, rounds, steps)]


def compare(name: str, gloo: dist.ProcessGroup, rounds: int, steps: int) -> list[Row]:
    """Measure all ways to take a step of one model."""
    workload = WORKLOADS[name]
    batches = [workload.examples(workload.batch, seed=NUM_BATCHES * dist.get_rank() + i) for i in range(NUM_BATCHES)]
    with contextlib.ExitStack() as sessions:
        ways = all_ways(workload, gloo, sessions)
        times = take_turns(ways, batches, rounds, steps)
    return [
        {
            "model": name,
            "megabytes": workload.megabytes(),
            "batch": workload.batch,
            "way": way,
            "step_ms": statistics.median(times[way]) * 1e3,
            "over_barrier": median_ratio(times[way], times["barrier"]),
            "over_gloo": median_ratio(times[way], times["torch ddp on gloo"]),
        }
        for way in ways
    ]


def all_ways(workload: Workload, gloo: dist.ProcessGroup, sessions: contextlib.ExitStack) -> dict[str, Step]:
    def torch_ddp(group: dist.ProcessGroup | None) -> Step:
        return by_hand(workload, lambda model: DistributedDataParallel(model, process_group=group))

    return {
        "barrier": by_hand(workload, lambda model: model, before_update=dist.barrier),
        "session": with_session(workload, None, sessions),
        "our ddp": by_hand(workload, paceline.DistributedDataParallel),
        "torch ddp": torch_ddp(None),
        "session on gloo": with_session(workload, gloo, sessions),
        "our ddp on gloo": by_hand(workload, lambda model: paceline.DistributedDataParallel(model, process_group=gloo)),
        "torch ddp on gloo": torch_ddp(gloo),
    }


def by_hand(
    workload: Workload, wrap: Callable[[nn.Module], nn.Module], before_update: Callable[[], object] = lambda: None
) -> Step:
    """A step of a hand-written loop with a wrapped model."""
    model = wrap(workload.model())
    optimizer = optimizer_for(model)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        before_update()
        optimizer.step()

    return step


def with_session(workload: Workload, group: dist.ProcessGroup | None, sessions: contextlib.ExitStack) -> Step:
    model = workload.model()
    joining = paceline.join(model, optimizer_for(model), policy="all-reduce", seed=0, group=group)
    session = sessions.enter_context(joining)

    def step(batch: Batch) -> None:
        with session.step(examples=len(batch[0])):
            workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]

    return step


def take_turns(ways: dict[str, Step], batches: list[Batch], rounds: int, steps: int) -> dict[str, list[float]]:
    """The median step of every way in every round, after a warm-up round that is not counted."""
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)  # another way begins each round
        for name in names[first:] + names[:first]:
            way = ways[name]
            dist.barrier()
            seconds = median_seconds(lambda i, way=way: way(batches[i % len(batches)]), steps)  # type: ignore[misc]
            if number > 0:
                times[name].append(seconds)
    return times
