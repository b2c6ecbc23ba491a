"""Bucket sizes and overlap: the time of an iteration and where it goes, as in figures 6 to 8 of Li et al. (2020).

    python benchmarks/bucket_sweep.py [--models mlp gpt deep] [--caps 0 1 5 10 25 50 100] [--json]
    python benchmarks/bucket_sweep.py --two-hosts [--rate 1gbit]      (as root, on Linux with iproute2)

Two workers of one thread each. For every cap (in MB; 0 is a bucket per parameter) training with overlap and without
take turns in rounds, so their ratio is of one run. The parts of an iteration are medians over all of worker 0's steps:
`communication` is what backward did not hide, without `waited`, the time in which the other worker still computed.

On one host the workers' sockets take the very cores that backward wants, so overlap cannot save much there. With
`--two-hosts` each worker is in a network namespace of its own, and the link between them has the rate of a network.
Where that is not allowed or not possible, the script says so and ends well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

import paceline
from paceline.bench.measuring import (
    Row,
    arguments_of,
    be_worker,
    median_ratio,
    read_rows,
    result_file,
    run_workers,
)
from paceline.bench.two_hosts import NotPossibleError, run_on, two_hosts
from paceline.bench.workloads import WORKLOADS, Workload, optimizer_for
from paceline.report.table import print_table

CAPS = (0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0)
PARTS = ("forward", "backward", "communication", "waited", "optimizer")
PROBE_BYTES = 16_000_000


def main() -> None:
    parser = arguments_of(__doc__, ["mlp", "gpt", "deep"])
    parser.add_argument("--caps", type=float, nargs="+", default=list(CAPS), metavar="MB")
    parser.add_argument("--rounds", type=int, help="default: 4 on one host, 2 on two, where a step takes longer")
    parser.add_argument("--steps", type=int, default=2, help="steps per round and way")
    parser.add_argument("--two-hosts", action="store_true", help="over a link between two network namespaces")
    parser.add_argument("--rate", type=rate, default="1gbit", help="of that link (default: %(default)s)")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (2 if arguments.two_hosts else 4)
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.models, arguments.caps = 1, 2, ["net3"], [0.0, 25.0]
    if arguments.worker is not None:
        be_worker(lambda: measure(arguments), arguments.worker)
        return
    try:
        rows = run_on_two_hosts(arguments.rate) if arguments.two_hosts else run_workers(2)
    except NotPossibleError as error:
        print(json.dumps({"skipped": str(error)}) if arguments.json else f"skipped: {error}")
        return
    show(rows, arguments)


def rate(text: str) -> str:
    """A rate as ``tc`` reads it."""
    if not re.fullmatch(r"[0-9]+[kmg]bit", text):
        raise argparse.ArgumentTypeError(f"wanted a rate such as 1gbit or 500mbit, got {text!r}")
    return text


def run_on_two_hosts(rate: str) -> list[Row]:
    with two_hosts(rate) as hosts, result_file() as file:
        code = run_on(hosts, [*sys.argv, "--worker", str(file)])
        if code != 0:
            sys.exit(code)
        return read_rows(file)


def show(rows: list[Row], arguments: argparse.Namespace) -> None:
    where = {"hosts": 2, "rate": arguments.rate} if arguments.two_hosts else {"hosts": 1, "rate": None}
    if arguments.json:
        print(json.dumps({**where, "rounds": arguments.rounds, "steps": arguments.steps, "rows": rows}))
        return
    parts = {f"{part}_ms": ".1f" for part in PARTS}
    print_table(rows, {"model": "", "cap_mb": "g", "overlap": "", "step_ms": ".1f", **parts, "over_no_overlap": ".3f"})
    print(f"an all-reduce of {PROBE_BYTES / 1e6:.0f} MB by itself: {rows[0]['link_mb_per_s']:.0f} MB/s")
    for name in dict.fromkeys(row["model"] for row in rows):
        print(verdict([row for row in rows if row["model"] == name]))


def verdict(rows: list[Row]) -> str:
    """The best cap, and what overlap saves there."""
    best = min((row for row in rows if row["overlap"]), key=lambda row: row["step_ms"])
    plain = min((row for row in rows if not row["overlap"]), key=lambda row: row["step_ms"])
    return (
        f"{best['model']} ({best['megabytes']:.0f} MB): best with a cap of {best['cap_mb']:g} MB, "
        f"{best['step_ms']:.1f} ms; without overlap at best {plain['step_ms']:.1f} ms (cap {plain['cap_mb']:g} MB), "
        f"so overlap saves {100 * (1 - best['step_ms'] / plain['step_ms']):.0f} %"
    )


# A worker's part ----------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> list[Row]:
    link = link_speed()
    return [
        {"model": name, "link_mb_per_s": link, **row}
        for name in arguments.models
        for cap in arguments.caps
        for row in compare(WORKLOADS[name], cap, arguments.rounds, arguments.steps)
    ]


def compare(workload: Workload, cap: float, rounds: int, steps: int) -> list[Row]:
    """Take turns with overlap and without; rows for both."""
    with contextlib.ExitStack() as sessions:
        trainings = [Training(workload, cap, overlap, sessions) for overlap in (True, False)]
        for training in trainings:
            training.run(2)  # the buckets get their final order in the second step
            training.rounds.clear()
        for number in range(rounds):
            for training in trainings if number % 2 == 0 else trainings[::-1]:
                training.run(steps)
    medians = [training.round_medians() for training in trainings]
    return [
        {
            "megabytes": workload.megabytes(),
            "cap_mb": cap,
            "overlap": training.overlap,
            **training.medians(),
            "over_no_overlap": median_ratio(own, medians[1]),
        }
        for training, own in zip(trainings, medians, strict=True)
    ]


class Training:
    """A model in training with one setting, and the times of its steps."""

    def __init__(self, workload: Workload, cap: float, overlap: bool, sessions: contextlib.ExitStack) -> None:
        self.overlap = overlap
        self.rounds: list[list[dict[str, float]]] = []
        self._workload = workload
        self._model = workload.model()
        self._data = workload.examples(workload.batch, seed=dist.get_rank())
        policy = paceline.AllReduce(bucket_cap_mb=cap, overlap=overlap)
        joining = paceline.join(self._model, optimizer_for(self._model), policy=policy, seed=0)
        self._session = sessions.enter_context(joining)

    def run(self, steps: int) -> None:
        dist.barrier()
        self.rounds.append([self._step() for _ in range(steps)])

    def round_medians(self) -> list[float]:
        return [statistics.median(step["step_ms"] for step in steps) for steps in self.rounds]

    def medians(self) -> dict[str, float]:
        """The median of the whole step and of each of its parts, in milliseconds."""
        steps = [step for steps in self.rounds for step in steps]
        return {name: statistics.median(step[name] for step in steps) for name in steps[0]}

    def _step(self) -> dict[str, float]:
        start = time.perf_counter()
        with self._session.step(examples=self._workload.batch):
            self._workload.loss(self._model, self._data).backward()  # type: ignore[no-untyped-call]
        seconds = {"step": time.perf_counter() - start, **asdict(self._session.timing)}
        return {f"{name}_ms": value * 1e3 for name, value in seconds.items()}


def link_speed() -> float:
    """Megabytes per second of an all-reduce with nothing beside it, the best of three."""
    tensor, times = torch.zeros(PROBE_BYTES // 4), []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return PROBE_BYTES / 1e6 / min(times)


if __name__ == "__main__":
    main()
