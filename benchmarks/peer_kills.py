"""Workers of a peers policy killed at random moments, one after the other, while others take their places.

    python benchmarks/peer_kills.py [--kills 100] [--workers 3] [--policies all-reduce "local-sgd(every=8)"] [--json]

Real workers train digits with respawning; a worker that has made a step is killed (SIGKILL) every now and then, if
another is left that has the state of the run. A pause is the time between the last step before a death and the next one
after it, as the metrics of the run tell. Under all-reduce the model also has one number per training sample, whose
averaged gradient is 1 for each sample of a step: at the end it tells, independently of all accounting, how often every
sample was used. The exit code is 1 if one was not used once per epoch, if the target accuracy was missed, or if a
worker was started again that nobody had killed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from live_kills import BATCH, Counting, Killer, look_at
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.problems import ProblemOptions, load_problem
from paceline.report.table import print_table

POLICIES = ("all-reduce", "local-sgd(every=8)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in each run")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--worker", nargs=2, metavar=("POLICY", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        be_worker(arguments.worker[0], Path(arguments.worker[1]))
        return
    if arguments.quick:
        arguments.kills, arguments.workers, arguments.policies = 1, 2, ["all-reduce"]
    rows = [measure(policy, arguments) for policy in arguments.policies]
    if arguments.json:
        print(json.dumps({"rows": rows}))
    else:
        columns = {"policy": "", "kills": "d", "starts": "d", "seconds": ".0f", "epochs": "d", "steps": "d"}
        pauses = {"median_pause": ".2f", "worst_pause": ".2f"}
        print_table(rows, {**columns, **pauses, "accuracy": ".4f", "target": ".2f", "exactly_once": ""})
    sys.exit(0 if all(row["good"] for row in rows) else 1)


def measure(policy: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        directory = Path(name)
        killer = Killer(directory, arguments.kills, arguments.seed, spared=1)
        killer.start()
        began = time.monotonic()
        code = supervise(
            [__file__, "--worker", policy, name], workers=arguments.workers, server=ServerOptions(respawn=True)
        )
        killer.finished.set()
        killer.join()
        if code != 0:
            sys.exit(code)
        found = look_at(directory)
        pauses = pauses_of(directory / "run" / "metrics.jsonl")
        starts = len(list(directory.glob("process-*")))
        exactly_once = found["exactly_once"] if policy == "all-reduce" else None
        return {
            "policy": policy,
            "kills": killer.kills,
            "starts": starts,
            "seconds": time.monotonic() - began,
            "epochs": found["epochs"],
            "steps": found["commits"],
            "median_pause": statistics.median(pauses) if pauses else None,
            "worst_pause": max(pauses, default=None),
            "accuracy": found["accuracy"],
            "target": found["target"],
            "exactly_once": exactly_once,
            "good": exactly_once is not False
            and found["accuracy"] >= found["target"]
            and starts <= arguments.workers + killer.kills,
        }


def pauses_of(metrics: Path) -> list[float]:
    """Seconds between the last step before each death and the first after it."""
    pauses: list[float] = []
    last, died = 0.0, False
    for line in map(json.loads, metrics.read_text().splitlines()):
        died = died or (line["event"] == "re-formed" and bool(line["died"]))
        if line["event"] == "step":
            if died and last:
                pauses.append(line["time"] - last)
            last, died = line["time"], False
    return pauses


def be_worker(policy: str, directory: Path) -> None:
    """Train until the killer has had enough and the epoch under way is done."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (directory / f"process-{os.getpid()}").touch()
    train = load_problem("digits", ProblemOptions()).train
    assert isinstance(train, TensorDataset)
    inputs, targets = train.tensors
    data = TensorDataset(inputs, targets, torch.arange(len(inputs)))
    model = Counting(len(inputs))
    counting: dict[str, Any] = {"params": [model.count], "lr": 1.0, "momentum": 0.0}
    learning: dict[str, Any] = {"params": model.classifier.parameters()}
    optimizer = torch.optim.SGD([learning, counting], lr=0.05, momentum=0.9)
    with paceline.join(model, optimizer, policy=policy, seed=0, run=directory / "run", save_every=200) as session:
        for _ in session.epochs(1_000_000):
            for x, y, places in session.batches(data, batch_size=BATCH):
                # The average weighs a worker by its share of the step's samples. Other policies count nothing.
                total = min(session.world_size * BATCH, len(data) - session.consumed)
                share = len(x) / total if policy == "all-reduce" else 1.0
                with session.step():
                    outputs, count = model(x, places)
                    (nn.functional.cross_entropy(outputs, y) + count / share).backward()
                (directory / f"worker-{os.getpid()}").write_text(str(os.getpid()))
            if session.mean(float((directory / "enough").exists())) > 0:
                break


if __name__ == "__main__":
    main()
