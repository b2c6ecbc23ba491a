"""What exchanging gradients costs: ours and PyTorch's DDP against a step with only a barrier, on two workers.

    python benchmarks/step_time.py [--models mlp net3 cnn gpt] [--json]

One run, the same two processes of one thread each, the same data and optimizer: the ways take turns in rounds, each
on a copy of the model of its own. A way's time is the median over the rounds of its median step; ratios are taken
round by round, and their median given. `over_ddp` is against PyTorch's DDP as it comes, `over_views` against the one
with `gradient_as_bucket_view=True`; below 1 is faster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Callable

import torch.distributed as dist
from measuring import Row, arguments_of, be_worker, median_ratio, median_seconds, print_table, run_workers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import WORKLOADS, Batch, Workload, optimizer_for

import paceline

Step = Callable[[Batch], None]
NUM_BATCHES = 4


def main() -> None:
    parser = arguments_of(__doc__, ["mlp", "net3", "cnn", "gpt"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10, help="steps per round and way")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.models = 2, 2, arguments.models[1:2]
    if arguments.worker is not None:
        be_worker(lambda: measure(arguments), arguments.worker)
        return
    rows = run_workers(2)
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "steps": arguments.steps, "rows": rows}))
        return
    ratios = {"over_barrier": ".3f", "over_ddp": ".3f", "over_views": ".3f"}
    print_table(rows, {"model": "", "megabytes": ".1f", "batch": "d", "way": "", "step_ms": ".2f", **ratios})


def measure(arguments: argparse.Namespace) -> list[Row]:
    return [row for name in arguments.models for row in compare(name, arguments.rounds, arguments.steps)]


def compare(name: str, rounds: int, steps: int) -> list[Row]:
    """Measure all ways to take a step of one model."""
    workload = WORKLOADS[name]
    batches = [workload.examples(workload.batch, seed=NUM_BATCHES * dist.get_rank() + i) for i in range(NUM_BATCHES)]
    with contextlib.ExitStack() as sessions:
        ways = all_ways(workload, sessions)
        times = take_turns(ways, batches, rounds, steps)
    return [
        {
            "model": name,
            "megabytes": workload.megabytes(),
            "batch": workload.batch,
            "way": way,
            "step_ms": statistics.median(times[way]) * 1e3,
            "over_barrier": median_ratio(times[way], times["barrier"]),
            "over_ddp": median_ratio(times[way], times["torch ddp"]),
            "over_views": median_ratio(times[way], times["torch ddp, views"]),
        }
        for way in ways
    ]


def all_ways(workload: Workload, sessions: contextlib.ExitStack) -> dict[str, Step]:
    return {
        "barrier": by_hand(workload, lambda model: model, before_update=dist.barrier),
        "paceline session": with_session(workload, sessions),
        "paceline ddp": by_hand(workload, paceline.DistributedDataParallel),
        "torch ddp": by_hand(workload, DistributedDataParallel),
        "torch ddp, views": by_hand(
            workload, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True)
        ),
    }


def by_hand(
    workload: Workload, wrap: Callable[[nn.Module], nn.Module], before_update: Callable[[], object] = lambda: None
) -> Step:
    """The loop as it is written with a wrapped model."""
    model = wrap(workload.model())
    optimizer = optimizer_for(model)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        before_update()
        optimizer.step()

    return step


def with_session(workload: Workload, sessions: contextlib.ExitStack) -> Step:
    model = workload.model()
    session = sessions.enter_context(paceline.join(model, optimizer_for(model), policy="all-reduce", seed=0))

    def step(batch: Batch) -> None:
        with session.step(examples=len(batch[0])):
            workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]

    return step


def take_turns(ways: dict[str, Step], batches: list[Batch], rounds: int, steps: int) -> dict[str, list[float]]:
    """The median step of every way in every round; a round before the first, for warming up, is not counted."""
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        first = number % len(names)  # each way follows each other equally often
        for name in names[first:] + names[:first]:
            way = ways[name]
            dist.barrier()
            seconds = median_seconds(lambda i, way=way: way(batches[i % len(batches)]), steps)  # type: ignore[misc]
            if number > 0:
                times[name].append(seconds)
    return times


if __name__ == "__main__":
    main()
