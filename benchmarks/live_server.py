"""The live server against known values: time per commit and staleness of the K family on eight real workers.

    python benchmarks/live_server.py [--k 1 2 4 8] [--policies k-sync ...] [--seconds 25] [--unit 80ms] [--json]

Each case is a run of its own: eight worker processes and a server, compute times X = 1 + Exp(1) injected as sleep
before the gradient. `interval` is the mean time from commit to commit, in the unit; `expected` is the known value,
`virtual` that of the virtual cluster. `restart_ms` is the median time from a commit to the beginning of the next step
of a worker whose step it cancelled. The exit code is 1 if an interval is off by more than 10 % or a staleness by more
than 3 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from oracle import POLICIES, WORKERS, compare, expected_time
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.delays.injected import parse_unit
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.report.table import print_table
from paceline.virtual.formulas import mean_staleness
from paceline.virtual.simulate import Scenario, simulate

DELAY = "1+exp(1)"
WARM_UP = 10  # commits that are not counted


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is run of every case."""

    workers: int = WORKERS
    seconds: float
    virtual_commits: int = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each run, without its beginning")
    parser.add_argument("--unit", default="80ms", help="what 1 of the compute time stands for")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--worker", nargs=3, metavar=("POLICY", "COMMITS", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        policy, commits, directory = arguments.worker
        be_worker(policy, int(commits), Path(directory))
        return
    size = Size(seconds=arguments.seconds)
    if arguments.quick:
        arguments.k, arguments.policies = [2], ["k-sync"]
        size = Size(workers=3, seconds=1.0, virtual_commits=500)
    unit = parse_unit(arguments.unit)
    rows = [measure(policy, k, size, unit) for k in arguments.k for policy in arguments.policies]
    within = all(row["off"] <= 10 and (row["stale_off"] or 0) <= 3 for row in rows)
    if arguments.json:
        print(json.dumps({"unit": unit, "within": within, "rows": rows}))
    else:
        times = {"expected": ".3f", "virtual": ".3f", "interval": ".3f", "off": ".1f"}
        stale = {"stale_expected": ".3f", "stale_virtual": ".3f", "staleness": ".3f", "stale_off": ".1f"}
        print_table(rows, {"policy": "", "k": "d", "commits": "d", **times, **stale, "restart_ms": ".2f"})
        print(f"{'all' if within else 'NOT all'} within 10 % and 3 %")
    sys.exit(0 if within or arguments.quick else 1)


def measure(policy: str, k: int, size: Size, unit: float) -> dict[str, Any]:
    """Run one case on real workers."""
    expected, _ = expected_time(DELAY, policy, k, size.workers)
    commits = WARM_UP + max(5, round(size.seconds / (expected * unit)))
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as directory:
        code = supervise(
            [__file__, "--worker", f"{policy}(k={k})", str(commits), directory],
            workers=size.workers,
            server=ServerOptions(needed=True, delay=(DELAY, unit)),
        )
        if code != 0:
            sys.exit(code)
        return {"policy": policy, "k": k, **figures(Path(directory), policy, k, size, commits, unit)}


def figures(directory: Path, policy: str, k: int, size: Size, commits: int, unit: float) -> dict[str, Any]:
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    done = [line for line in lines if line["event"] == "commit"][WARM_UP:commits]
    interval = (done[-1]["time"] - done[0]["time"]) / (len(done) - 1) / unit
    staleness = statistics.mean(stale for line in done for stale in line["staleness"])
    expected, _ = expected_time(DELAY, policy, k, size.workers)
    scenario = Scenario(policy=f"{policy}(k={k})", workers=size.workers, delay=DELAY)
    virtual = simulate(scenario, commits=size.virtual_commits)
    stale = mean_staleness(policy, size.workers, k)
    return {
        "commits": len(done),
        "expected": expected,
        "virtual": virtual.iteration,
        "interval": interval,
        "off": compare(expected, interval, 10)["off"],
        "stale_expected": stale,
        "stale_virtual": virtual.staleness,
        "staleness": staleness,
        "stale_off": compare(stale, staleness, 3)["off"] if stale else None,
        "restart_ms": restart(directory, done),
    }


def restart(directory: Path, commits: list[dict[str, Any]]) -> float | None:
    """Milliseconds from a commit to the next step of those whose step it cancelled."""
    at = {line["step"]: line["time"] for line in commits}
    begun = [json.loads(file.read_text()) for file in directory.glob("begun-*.json")]
    late = [1e3 * (time - at[version]) for steps in begun for version, time in steps if version in at]
    return statistics.median(late) if late else None


def be_worker(policy: str, commits: int, directory: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    data = TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
    after_cancel = []
    was_cancelled = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with paceline.join(model, optimizer, policy=policy, seed=0, run=directory / "run") as session:
        for inputs, targets in session.batches(data, batch_size=16, epochs=1_000_000):
            if session.steps >= commits:
                break
            with session.step() as step:
                if was_cancelled:
                    after_cancel.append((session.steps, time.time()))
                loss = nn.functional.cross_entropy(model(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
            was_cancelled = step.cancelled
        (directory / f"begun-{session.rank}.json").write_text(json.dumps(after_cancel))


if __name__ == "__main__":
    main()
