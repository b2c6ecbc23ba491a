"""Workers killed at random moments, one after the other, while others take their places: what is left of the run?

    python benchmarks/live_kills.py [--kills 200] [--workers 4] [--policy async] [--json]

Real workers train digits under a server with respawning; a worker that has made a step is killed (SIGKILL)
every now and then. Beside the weights the model has one number per training sample, whose gradient is 1 for each sample
of a batch and which plain SGD adds up: at the end it tells, independently of all accounting, how often every sample's
gradient was committed. The exit code is 1 if one was not committed once per epoch, or the target accuracy was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.problems import ProblemOptions, load_problem
from paceline.record.checkpoint import read_checkpoint

BATCH = 32


class Counting(nn.Module):
    """A classifier, and a count of the samples whose gradients were committed."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.count = nn.Parameter(torch.zeros(num_samples, dtype=torch.float64))

    def forward(self, inputs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.classifier(inputs), self.count[places].sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--policy", choices=["async", "ssp(bound=2)"], default="async", help="one push a commit")
    parser.add_argument(
        "--delay-unit", type=float, default=0.02, help="seconds that a step sleeps on average, at least"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")
    parser.add_argument("--worker", metavar="DIRECTORY", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        be_worker(arguments.policy, arguments.worker)
        return
    if arguments.quick:
        arguments.kills, arguments.workers = 2, 2
    result = measure(arguments)
    good = result["code"] == 0 and result["exactly_once"] and result["accuracy"] >= result["target"]
    if arguments.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['kills']} kills in {result['seconds']:.0f} s, {result['epochs']} epochs, {result['commits']} "
            f"commits: accuracy {result['accuracy']:.4f} (target {result['target']}), "
            f"{'every sample committed once an epoch' if result['exactly_once'] else 'NOT every sample once an epoch'}"
        )
    sys.exit(0 if good else 1)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as name:
        directory = Path(name)
        killer = Killer(directory, arguments.kills, arguments.seed)
        killer.start()
        began = time.monotonic()
        command = [__file__, "--worker", name, "--policy", arguments.policy]
        code = supervise(
            command,
            workers=arguments.workers,
            server=ServerOptions(needed=True, respawn=True, delay=("1+exp(1)", arguments.delay_unit)),
        )
        killer.finished.set()
        killer.join()
        result = {"code": code, "kills": killer.kills, "seconds": time.monotonic() - began}
        return {**result, **look_at(directory)} if code == 0 else result


class Killer(threading.Thread):
    """Kills workers at random, each after it has made a step; then lets the run end."""

    def __init__(self, directory: Path, kills: int, seed: int, *, spared: int = 0) -> None:
        super().__init__()
        self._directory, self._wanted, self._random = directory, kills, random.Random(seed)
        self._spared = spared  # workers that must be left
        self.kills = 0
        self.finished = threading.Event()

    def run(self) -> None:
        killed: set[int] = set()
        while self.kills < self._wanted and not self.finished.wait(self._random.expovariate(1 / 0.5)):
            ready = [process for process in self._processes() if process not in killed]
            if len(ready) > self._spared:
                process = self._random.choice(ready)
                killed.add(process)
                os.kill(process, signal.SIGKILL)
                self.kills += 1
        (self._directory / "enough").touch()

    def _processes(self) -> Iterator[int]:
        for file in self._directory.glob("worker-*"):
            text = file.read_text()
            if text:
                yield int(text)


def be_worker(policy: str, directory: Path) -> None:
    """Train until the killer has had enough and the epoch under way is done."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train = load_problem("digits", ProblemOptions()).train
    assert isinstance(train, TensorDataset)
    inputs, targets = train.tensors
    samples = len(inputs) // BATCH * BATCH  # all batches are whole
    data = TensorDataset(inputs[:samples], targets[:samples], torch.arange(samples))
    model = Counting(samples)
    counting: dict[str, Any] = {"params": [model.count], "lr": 1.0, "momentum": 0.0}
    learning: dict[str, Any] = {"params": model.classifier.parameters()}
    optimizer = torch.optim.SGD([learning, counting], lr=0.05, momentum=0.9)
    with paceline.join(model, optimizer, policy=policy, seed=0, run=directory / "run") as session:
        for epoch in session.epochs(1_000_000):
            for x, y, places in session.batches(data, batch_size=BATCH):
                with session.step():
                    outputs, count = model(x, places)
                    (nn.functional.cross_entropy(outputs, y) + count).backward()
                me = directory / f"worker-{session.rank}"
                me.write_text(str(os.getpid()))
            if agreed_to_end(session, directory, epoch):
                break


def agreed_to_end(session: paceline.Session, directory: Path, epoch: int) -> bool:
    """All workers leave after the same epoch: the first one to see that there were enough kills says which."""
    last = directory / "last-epoch"
    if (directory / "enough").exists() and not last.exists():
        with last.open("x") as file:
            file.write(str(epoch + 1))
    return last.exists() and last.read_text() != "" and epoch >= int(last.read_text())


def look_at(directory: Path) -> dict[str, Any]:
    problem = load_problem("digits", ProblemOptions())
    file = max((directory / "run" / "checkpoints").glob("*.safetensors"))
    state = read_checkpoint(file)
    model = Counting(len(state["trainee"]["model"]["count"]))
    model.load_state_dict(state["trainee"]["model"])
    assert isinstance(problem.test, TensorDataset)
    inputs, targets = problem.test.tensors
    with torch.no_grad():
        accuracy = float((model.classifier(inputs).argmax(1) == targets).double().mean())
    epochs = state["data"]["epoch"]
    counted = -model.count.detach()
    return {
        "epochs": epochs,
        "commits": state["session"]["steps"],
        "accuracy": accuracy,
        "target": problem.target,
        "exactly_once": bool(torch.isclose(counted, torch.full_like(counted, epochs), rtol=0, atol=1e-6).all()),
        "least": float(counted.min()),
        "most": float(counted.max()),
    }


if __name__ == "__main__":
    main()
