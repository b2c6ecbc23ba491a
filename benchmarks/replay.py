"""Recorded runs under every server policy, replayed: are they equal to the last bit, and what does it cost?

    python benchmarks/replay.py [--runs 100] [--quick] [--json]

2 to 8 real workers train digits with random delays, under the policies in turn. In every second run workers
are killed (SIGKILL) at random moments and replaced, and the run is broken off by SIGTERM when they are back; the others
go on to their end. Each is replayed in this process. Then the rate of small pushes with and without a trace is taken.
The exit code is 1 if one replay differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.bench import run_bench
from paceline.record.trace import Committed, Joined, Trace
from paceline.replay.plan import read_plan
from paceline.report.table import print_table
from paceline.training.replay_environment import as_recorded, open_trace, train_config
from paceline.training.replay_problem import ProblemReplay
from paceline.training.train import load_config_problem

POLICIES = (
    "sync",
    "k-sync(k=2)",
    "k-batch-sync(k=4)",
    "async",
    "k-async(k=2)",
    "k-batch-async(k=3)",
    "ssp(bound=2)",
    "ada-sync(k0=1)",
)
WORKERS = (2, 2, 2, 3, 3, 4, 5, 6, 8)  # drawn from: mostly few, since each takes seconds to start
DEADLINE = 120.0  # seconds that a run may take
MARK = "PACELINE_BENCHMARK_MARK"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7, help="of the rates with and without a trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.rounds = 1, 1
    dice = random.Random(arguments.seed)
    rows = []
    for number in range(arguments.runs):
        rows.append(record_and_replay(number, dice, quick=arguments.quick))
        print(f"\r{number + 1} of {arguments.runs} runs", end="", file=sys.stderr)
    print(file=sys.stderr)
    processes, seconds = (2, 0.1) if arguments.quick else (4, 2.0)
    (recording,) = run_bench("server-recording", processes, seconds=seconds, rounds=arguments.rounds)
    show(rows, recording, as_json=arguments.json)
    sys.exit(0 if all(row["equal"] for row in rows) else 1)


def record_and_replay(number: int, dice: random.Random, *, quick: bool) -> dict[str, Any]:
    policy, workers = POLICIES[number % len(POLICIES)], 2 if quick else dice.choice(WORKERS)
    with_kills = not quick and (number + number // len(POLICIES)) % 2 == 1  # each policy with and without
    kills = dice.randint(1, 2) if with_kills else 0
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        run = Path(name) / "run"
        ended = record(run, policy, workers, kills, seed=number, dice=dice)
        if ended:
            sys.exit(f"a run under {policy} with {workers} workers failed:\n{ended}")
        return {"policy": policy, "workers": workers, "kills": kills, **replay(run)}


def record(run: Path, policy: str, workers: int, kills: int, *, seed: int, dice: random.Random) -> str | None:
    """Make a run; gives what it said if it failed."""
    mark = uuid.uuid4().hex
    delay = dice.choice(["exp(1)", "0.5+exp(2)", "pareto(0.5, 1.5)", f"1+exp(1) slow({dice.randrange(workers)}, 3)"])
    command = [
        *[sys.executable, "-m", "paceline", "train", "digits", "--json", "--run", str(run), "--seed", str(seed)],
        *["--workers", str(workers), "--policy", policy, "--delay", delay, "--delay-unit", "5ms", "--respawn"],
        *["--epochs", "1000" if kills else "1", "--save-every", "10"],
    ]
    process = subprocess.Popen(
        command, env={**os.environ, MARK: mark}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        wanted = 0
        if kills:
            disturb(process, run, mark, workers, kills, dice)
            process.send_signal(signal.SIGTERM)  # SIGINT is ignored by what a shell starts in the background
            wanted = 130  # as after Ctrl-C
        _, said = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    return None if process.returncode == wanted else said


def disturb(
    process: subprocess.Popen[str], run: Path, mark: str, workers: int, kills: int, dice: random.Random
) -> None:
    """Kill workers, one after the other, each when the run has got on and the one before is replaced."""
    wait(process, lambda: commits(run) > 5)
    for _ in range(kills):
        time.sleep(dice.uniform(0, 0.3))
        rank = dice.randrange(workers)
        joined = times_joined(run, rank)
        for victim in processes_of(mark, f"RANK={rank}"):
            os.kill(victim, signal.SIGKILL)
        wait(process, lambda rank=rank, joined=joined: times_joined(run, rank) > joined)  # type: ignore[misc]
    enough = commits(run) + 20
    wait(process, lambda: commits(run) > enough)


def wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)


def commits(run: Path) -> int:
    return sum(isinstance(one, Committed) for one in records(run))


def times_joined(run: Path, rank: int) -> int:
    return sum(isinstance(one, Joined) and one.rank == rank for one in records(run))


def records(run: Path) -> Iterator[Any]:
    file = run / "trace.bin"
    return iter(Trace(file)) if file.exists() and file.stat().st_size > 1000 else iter(())


def processes_of(mark: str, setting: str) -> list[int]:
    """The processes of a marked run that have this in their environment, such as ``RANK=1``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment and setting.encode() in environment:
            found.append(int(path.parent.name))
    return found


def replay(run: Path) -> dict[str, Any]:
    """Replay a run; the times are of computing, without starting and reading."""
    trace, config = open_trace(run)
    options, plan = train_config(run, config), read_plan(trace)
    with as_recorded(trace.about):
        problem = load_config_problem(options)
        replaying = ProblemReplay(options, problem, plan, seed=trace.about["seed"], workers=trace.about["world_size"])
        began = time.perf_counter()
        replayed = replaying.run()
        seconds = time.perf_counter() - began
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_workers = [line for line in told if line["event"] == "worker"]
    return {
        "equal": replayed.difference is None,
        "difference": replayed.difference,
        "commits": replayed.commits,
        "pushes": replayed.pushes,
        "hashes": replayed.hashes,
        "events": sum(1 for _ in trace),
        "trace_bytes": (run / "trace.bin").stat().st_size,
        "gradient_bytes": sum(line["bytes_in"] for line in of_workers),
        "replay_seconds": seconds,
        "computing_seconds": sum(line["computing_seconds"] for line in of_workers),
    }


def show(rows: list[dict[str, Any]], recording: dict[str, Any], *, as_json: bool) -> None:
    lines = [summary(policy, [row for row in rows if row["policy"] == policy]) for policy in POLICIES]
    table = [line for line in lines if line["runs"]] + [summary("all", rows)]
    if as_json:
        print(json.dumps({"rows": rows, "table": table, "recording": recording}))
        return
    columns = {"policy": "", "runs": "d", "equal": "d", "kills": "d", "events": "d", "bytes_per_event": ".1f"}
    shares = {"trace_over_gradients": ".5%", "replay_seconds": ".1f", "computing_seconds": ".1f", "ratio": ".2f"}
    print_table(table, {**columns, **shares})
    for row in rows:
        if not row["equal"]:
            print(f"{row['policy']}, {row['workers']} workers: {row['difference']}")
    print(
        f"recording costs {recording['cost']:.1%}: {recording['recorded_per_second']:.0f} small pushes a second, and "
        f"{recording['pushes_per_second']:.0f} without a trace"
    )


def summary(policy: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    total = {
        name: sum(row[name] for row in rows)
        for name in ("equal", "kills", "events", "trace_bytes", "gradient_bytes", "replay_seconds", "computing_seconds")
    }
    return {
        "policy": policy,
        "runs": len(rows),
        **total,
        "bytes_per_event": total["trace_bytes"] / max(1, total["events"]),
        "trace_over_gradients": total["trace_bytes"] / max(1, total["gradient_bytes"]),
        "ratio": total["replay_seconds"] / max(1e-9, total["computing_seconds"]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
