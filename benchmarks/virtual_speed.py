"""How fast the virtual cluster is: seconds of one core and megabytes for many workers and commits, times only.

    python benchmarks/virtual_speed.py [--workers 10000 100000] [--commits 1000] [--json]

Each case runs in a process of its own, so that its memory is its own. `seconds` are of processor time, without starting
Python; `allowed` is the aim: 10 s for k-sync with k = P/2 and 60 s for k-async with k = 100 at 10,000 workers and 1,000
commits, in proportion for other numbers, and 1 GB. The exit code is 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from typing import Any

from paceline.report.table import print_table
from paceline.virtual.simulate import Scenario, simulate

AIMS = {"k-sync": 10.0, "k-async": 60.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[10_000, 100_000], metavar="N")
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)  # policy, workers, commits: this process measures
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case[0], int(arguments.case[1]), int(arguments.case[2]))))
        return
    if arguments.quick:
        arguments.workers, arguments.commits = [1000], 20
    cases = [
        (policy, workers)
        for workers in arguments.workers
        for policy in (f"k-sync(k={workers // 2})", f"k-async(k={workers // 100})")
    ]
    rows = [in_own_process(policy, workers, arguments.commits) for policy, workers in cases]
    reached = all(row["seconds"] <= row["allowed"] and row["megabytes"] <= 1000 for row in rows)
    if arguments.json:
        print(json.dumps({"reached": reached, "rows": rows}))
    else:
        figures = {"seconds": ".1f", "allowed": ".1f", "megabytes": ".0f", "pushes": "d"}
        print_table(rows, {"policy": "", "workers": "d", "commits": "d", **figures})
    sys.exit(0 if reached or arguments.quick else 1)


def in_own_process(policy: str, workers: int, commits: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", policy, str(workers), str(commits)]
    row: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return row


def measure(policy: str, workers: int, commits: int) -> dict[str, Any]:
    start = time.process_time()
    found = simulate(Scenario(policy=policy, workers=workers, delay="1+exp(0.5)"), commits=commits)
    return {
        "policy": policy,
        "workers": workers,
        "commits": commits,
        "seconds": time.process_time() - start,
        "allowed": AIMS[policy.partition("(")[0]] * workers * commits / 1e7,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "pushes": found.pushes,
    }


if __name__ == "__main__":
    main()
