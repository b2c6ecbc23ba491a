"""What threads gain on idle cores, and cost beside other work, with OpenMP's waiting threads spinning or not.

    python benchmarks/threads.py [--models digits net2 net3 gpt cnn mlp] [--spins default 0 1000] [--seconds 1] [--json]

Each way is a process of its own, since OpenMP reads its environment when it is loaded: one thread, and as many threads
as there are cores with each number of turns that a waiting thread spins before it sleeps (`GOMP_SPINCOUNT`). Each is
measured on idle cores and beside as many busy loops as there are cores. `step_ms` is the time of all steps over their
number: a median would hide the steps in which a thread had lost its core. `over_one` is the same over that of one
thread, and `over_idle` over that on idle cores. `mflop` are the operations of a step in millions, by which
`paceline train` chooses.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from paceline.bench.measuring import Row
from paceline.bench.workloads import WORKLOADS, Workload, optimizer_for
from paceline.launch.process_environment import threads_per_worker
from paceline.problems import MODELS
from paceline.report.table import print_table
from paceline.training.threads import step_operations

DIGITS = (1, 8, 8)
KNOWN = {"digits": Workload(make=lambda: MODELS["cnn"](DIGITS, 10), input_shape=DIGITS, batch=32), **WORKLOADS}
BUSY_LOOP = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small_to_large = ["digits", "net2", "net3", "gpt", "cnn", "mlp"]
    parser.add_argument("--models", nargs="+", choices=sorted(KNOWN), default=small_to_large, metavar="MODEL")
    parser.add_argument("--spins", nargs="+", default=["default", "0", "1000"], metavar="TURNS")
    parser.add_argument("--seconds", type=float, default=1.0, help="of every measurement")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # this process is one of the ways
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.spins, arguments.seconds = ["digits"], ["0"], 0.1
    if arguments.alone:
        print(json.dumps([measure(name, arguments.seconds) for name in arguments.models]))
        return
    cores = threads_per_worker(1)
    ways = [(1, "default"), *((cores, spin) for spin in arguments.spins)]
    rows = [row for way in ways for row in both_times(*way, arguments)]
    add_ratios(rows)
    rows.sort(key=lambda row: (row["mflop"], row["model"], row["beside"]))
    if arguments.json:
        print(json.dumps({"cores": cores, "seconds": arguments.seconds, "rows": rows}))
        return
    figures = {"mflop": ".1f", "threads": "d", "spin": "", "beside": "d"}
    print_table(rows, {"model": "", **figures, "step_ms": ".3f", "over_one": ".2f", "over_idle": ".2f"})


def both_times(threads: int, spin: str, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one way, on idle cores and beside busy loops."""
    idle = run_alone(threads, spin, arguments)
    with busy_loops(threads_per_worker(1)) as loops:
        busy = run_alone(threads, spin, arguments)
    way = {"threads": threads, "spin": spin}
    return [{**row, **way, "beside": beside} for beside, rows in ((0, idle), (loops, busy)) for row in rows]


def run_alone(threads: int, spin: str, arguments: argparse.Namespace) -> list[Row]:
    """Measure all models in a process with so many threads."""
    waiting = {} if spin == "default" else {"GOMP_SPINCOUNT": spin}
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    options = ["--alone", "--seconds", str(arguments.seconds), "--models", *arguments.models]
    done = subprocess.run(
        [sys.executable, __file__, *options],
        env={**kept, "OMP_NUM_THREADS": str(threads), **waiting},
        stdout=subprocess.PIPE,
        check=True,
    )
    rows: list[Row] = json.loads(done.stdout)
    return rows


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[int]:
    """Keep so many cores busy."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield count
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure(name: str, seconds: float) -> Row:
    workload = KNOWN[name]
    model = workload.model()
    optimizer, batch = optimizer_for(model), workload.examples(workload.batch, seed=0)

    def step() -> None:
        optimizer.zero_grad()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    operations = step_operations(model, batch[0][0], workload.batch)
    run_for(step, seconds / 4)  # to warm up
    return {"model": name, "mflop": operations / 1e6, "step_ms": 1e3 * run_for(step, seconds)}


def run_for(step: Callable[[], None], seconds: float) -> float:
    """Take steps for so long, and give the time of one."""
    steps, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or steps == 0:
        step()
        steps += 1
    return passed / steps


def add_ratios(rows: list[Row]) -> None:
    found = {(row["model"], row["threads"], row["spin"], row["beside"]): row["step_ms"] for row in rows}
    for row in rows:
        row["over_one"] = row["step_ms"] / found[row["model"], 1, "default", row["beside"]]
        row["over_idle"] = row["step_ms"] / found[row["model"], row["threads"], row["spin"], 0]


if __name__ == "__main__":
    main()
