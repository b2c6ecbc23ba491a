"""How training scales with the number of workers: weak (batch per worker fixed) and strong (joined batch fixed).

    python benchmarks/scaling.py [--models net3 mlp cnn gpt] [--workers 1 2 4] [--backend paceline] [--json]

One run for all numbers of workers, which take turns in rounds: as many processes as the largest, of one thread each,
and those that a round does not need sleep. `scaling_efficiency` is the run time of an iteration on one worker over that
on n, the median over the rounds; at best it is 1 for weak and n for strong scaling. `speedup` is the ratio of examples
per second, and `parallel_efficiency` is the speedup over n, at best 1 for both. The joined batch of strong scaling is
the smallest multiple of weak scaling's that all numbers of workers divide. More workers than cores, as 4 on 2, are
marked: they can at best be as fast as as many workers as there are cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
from typing import Literal

import torch.distributed as dist

import paceline
from paceline.bench.measuring import (
    Row,
    arguments_of,
    be_worker,
    median_ratio,
    median_seconds,
    run_workers,
)
from paceline.bench.workloads import WORKLOADS, Workload, optimizer_for
from paceline.launch.process_environment import threads_per_worker
from paceline.report.table import print_table

Kind = Literal["weak", "strong"]
Case = tuple[int, int]  # number of workers, batch of each

RATIOS = ("scaling_efficiency", "speedup", "parallel_efficiency")


def main() -> None:
    parser = arguments_of(__doc__, ["net3", "mlp", "cnn", "gpt"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--backend", choices=["paceline", "gloo"], default="paceline")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="steps per round and number of workers")
    arguments = parser.parse_args()
    arguments.workers = sorted({1, *arguments.workers})
    if arguments.quick:
        arguments.workers, arguments.rounds, arguments.steps, arguments.models = [1, 2], 2, 2, ["net3"]
    if arguments.worker is not None:
        be_worker(lambda: measure(arguments), arguments.worker, backend=arguments.backend)
        return
    rows, cores = run_workers(arguments.workers[-1]), threads_per_worker(1)
    for row in rows:
        row["shared_cores"] = row["workers"] > cores
    if arguments.json:
        print(json.dumps({"cores": cores, "rounds": arguments.rounds, "steps": arguments.steps, "rows": rows}))
        return
    figures = {"step_ms": ".2f", "examples_per_s": ".0f", **dict.fromkeys(RATIOS, ".2f")}
    print_table(rows, {"model": "", "scaling": "", "workers": "d", "batch": "d", **figures, "shared_cores": ""})
    if any(row["shared_cores"] for row in rows):
        print(f"this machine has {cores} cores: where workers share them, parallel efficiency cannot reach 1")


def measure(arguments: argparse.Namespace) -> list[Row]:
    groups = {workers: dist.new_group(range(workers)) for workers in arguments.workers}
    return [row for name in arguments.models for row in scale(name, groups, arguments.rounds, arguments.steps)]


def scale(name: str, groups: dict[int, dist.ProcessGroup], rounds: int, steps: int) -> list[Row]:
    workload = WORKLOADS[name]
    joined = workload.batch * math.lcm(*groups)
    plan: list[tuple[Kind, Case]] = [("weak", (workers, workload.batch)) for workers in groups]
    plan += [("strong", (workers, joined // workers)) for workers in groups]
    times = take_turns(workload, sorted({case for _, case in plan}), groups, rounds, steps)
    if dist.get_rank() != 0:
        return []  # it was not part of every case
    return [
        describe(name, kind, case, times[case], alone=times[1, joined if kind == "strong" else workload.batch])
        for kind, case in plan
    ]


def describe(name: str, kind: Kind, case: Case, times: list[float], alone: list[float]) -> Row:
    workers, batch = case
    seconds, efficiency = statistics.median(times), median_ratio(alone, times)
    speedup = efficiency if kind == "strong" else workers * efficiency
    return {
        "model": name,
        "scaling": kind,
        "workers": workers,
        "batch": batch,
        "step_ms": seconds * 1e3,
        "examples_per_s": workers * batch / seconds,
        "scaling_efficiency": efficiency,
        "speedup": speedup,
        "parallel_efficiency": speedup / workers,
    }


def take_turns(
    workload: Workload, cases: list[Case], groups: dict[int, dist.ProcessGroup], rounds: int, steps: int
) -> dict[Case, list[float]]:
    """The median step of every case that this worker is part of, in every round after one for warming up."""
    rank = dist.get_rank()
    times: dict[Case, list[float]] = {case: [] for case in cases}
    with contextlib.ExitStack() as sessions:
        trainers = {workers: Trainer(workload, group, sessions) for workers, group in groups.items() if rank < workers}
        for number in range(rounds + 1):
            for workers, batch in cases:
                dist.barrier()
                if rank < workers:
                    seconds = trainers[workers].median_step(batch, steps)
                    if number > 0:
                        times[workers, batch].append(seconds)
    return times


class Trainer:
    """This worker's part in training on the workers of one group."""

    def __init__(self, workload: Workload, group: dist.ProcessGroup, sessions: contextlib.ExitStack) -> None:
        self._workload = workload
        self._model = workload.model()
        joining = paceline.join(self._model, optimizer_for(self._model), policy="all-reduce", seed=0, group=group)
        self._session = sessions.enter_context(joining)

    def median_step(self, batch: int, steps: int) -> float:
        data = self._workload.examples(batch, seed=self._session.rank)

        def step(_: int) -> None:
            with self._session.step(examples=batch):
                self._workload.loss(self._model, data).backward()  # type: ignore[no-untyped-call]

        return median_seconds(step, steps)


if __name__ == "__main__":
    main()
