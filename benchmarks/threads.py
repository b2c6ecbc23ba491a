"""What threads gain on idle cores, and cost beside other work, with OpenMP's waiting threads spinning or not.

    python benchmarks/threads.py [--models digits net2 net3 gpt cnn mlp] [--spins default 0 1000] [--seconds 1] [--json]
    python benchmarks/threads.py --script [--models tiny net2 digits net3] [--rounds 5]

Each way is a process of its own, since OpenMP reads its environment when it is loaded: one thread, and as many threads
as there are cores with each number of turns that a waiting thread spins before it sleeps (`GOMP_SPINCOUNT`). Each is
measured on idle cores and beside as many busy loops as there are cores. `step_ms` is the time of all steps over their
number: a median would hide the steps in which a thread had lost its core. `over_one` is the same over that of one
thread, and `over_idle` over that on idle cores. `mflop` are the operations of a step in millions, by which
`paceline train` and `paceline run` choose.

With `--script` the same models are trained by a script under `paceline run --workers 1`, with the threads that it
chooses (0 in the column) and with as many as there are cores (`OMP_NUM_THREADS`), in turns, each in a new process.
`over_one` is then over the former. Each process is measured idle and beside busy loops; figures are medians of the
rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from torch import nn

import paceline
from paceline.bench.measuring import Row
from paceline.bench.workloads import WORKLOADS, Workload, optimizer_for
from paceline.launch.process_environment import threads_per_worker
from paceline.problems import MODELS
from paceline.report.table import print_table
from paceline.threads import step_operations

DIGITS = (1, 8, 8)
KNOWN = {
    "tiny": Workload(
        make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        input_shape=DIGITS,
        batch=32,
    ),
    "digits": Workload(make=lambda: MODELS["cnn"](DIGITS, 10), input_shape=DIGITS, batch=32),
    **WORKLOADS,
}
BUSY_LOOP = "while True: pass"
CHOSEN_BY_RUN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    small_to_large = ["digits", "net2", "net3", "gpt", "cnn", "mlp"]
    parser.add_argument("--models", nargs="+", choices=sorted(KNOWN), default=small_to_large, metavar="MODEL")
    parser.add_argument("--spins", nargs="+", default=["default", "0", "1000"], metavar="TURNS")
    parser.add_argument("--seconds", type=float, default=1.0, help="of every measurement")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--script", action="store_true", help="measure a script under paceline run")
    parser.add_argument("--rounds", type=int, default=5, help="of the measurements of scripts")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # this process is one of the ways
    parser.add_argument("--joined", action="store_true", help=argparse.SUPPRESS)  # this process is the script
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.spins, arguments.seconds, arguments.rounds = ["digits"], ["0"], 0.1, 1
    if arguments.joined:
        print(json.dumps([train_joined(name, arguments) for name in arguments.models]))
        return
    if arguments.script:
        show(measure_scripts(arguments), arguments)
        return
    if arguments.alone:
        print(json.dumps([measure(name, arguments.seconds) for name in arguments.models]))
        return
    cores = threads_per_worker(1)
    ways = [(1, "default"), *((cores, spin) for spin in arguments.spins)]
    rows = [row for way in ways for row in both_times(*way, arguments)]
    add_ratios(rows)
    rows.sort(key=lambda row: (row["mflop"], row["model"], row["beside"]))
    show(rows, arguments)


def show(rows: list[Row], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps({"cores": threads_per_worker(1), "seconds": arguments.seconds, "rows": rows}))
        return
    figures = {"mflop": ".1f", "threads": "d", "spin": "", "beside": "d"}
    print_table(rows, {"model": "", **figures, "step_ms": ".3f", "over_one": ".2f", "over_idle": ".2f"})


def measure_scripts(arguments: argparse.Namespace) -> list[Row]:
    """The rows of a script under ``paceline run``, with the threads that it chooses and with all."""
    cores = threads_per_worker(1)
    found: dict[tuple[str, int, int], list[Row]] = {}
    for _ in range(arguments.rounds):
        for threads in (0, cores):
            for rows in run_script(threads, arguments):
                for row in rows:
                    found.setdefault((row["model"], threads, row["beside"]), []).append(row)
    table: list[Row] = []
    for (_, threads, beside), rows in sorted(found.items(), key=lambda item: item[0]):
        middle = statistics.median(row["step_ms"] for row in rows)
        table.append({**rows[0], "threads": threads, "spin": "run", "beside": beside, "step_ms": middle})
    times = {(row["model"], row["threads"], row["beside"]): row["step_ms"] for row in table}
    for row in table:
        row["over_one"] = row["step_ms"] / times[row["model"], 0, row["beside"]]
        row["over_idle"] = row["step_ms"] / times[row["model"], row["threads"], 0]
    return table


def run_script(threads: int, arguments: argparse.Namespace) -> list[list[Row]]:
    """Run this file as a script under ``paceline run``; 0 threads: as many as it chooses."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOSEN_BY_RUN}
    options = ["--joined", "--seconds", str(arguments.seconds), "--models", *arguments.models]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--workers", "1", __file__, *options],
        env={**kept, **({"OMP_NUM_THREADS": str(threads)} if threads else {})},
        stdout=subprocess.PIPE,
        check=True,
    )
    rows: list[list[Row]] = json.loads(done.stdout)
    return rows


def train_joined(name: str, arguments: argparse.Namespace) -> list[Row]:
    """Train a model by the steps of a session, idle and beside busy loops in turns."""
    workload = KNOWN[name]
    model = workload.model()
    batch = workload.examples(workload.batch, seed=0)
    with paceline.join(model, optimizer_for(model)) as session:

        def step() -> None:
            with session.step():
                workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]

        run_for(step, arguments.seconds / 4)  # to warm up
        idle = run_for(step, arguments.seconds)
        with busy_loops(threads_per_worker(1)) as loops:
            busy = run_for(step, arguments.seconds)
    about = {"model": name, "mflop": step_operations(model, batch[0][0], workload.batch) / 1e6}
    return [{**about, "beside": beside, "step_ms": 1e3 * spent} for beside, spent in ((0, idle), (loops, busy))]


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
