"""Training modules on two workers that share parameters without locks, against other policies, in one run.

    python benchmarks/hogwild_modules.py [--models digits net3 embedding] [--policies ...] [--rounds 3] [--json]

Each case is a run of its own: two worker processes of one thread each, and a server under `async`. The policies take
turns in rounds; a figure is the median over the rounds. `examples_per_s` is that of all workers together, after the
first epoch; `accuracy` that of the answer at the end. `torn` is the fraction of steps during which another worker has
changed the parameters, `between` the mean number of such updates, and `lost` the fraction of updates that were lost.
`digits` is the built-in problem, `net3` its data on a larger network, and `embedding` sorts bags of 20 of 20,000 words,
whose gradients are sparse. `start_s` is the seconds from the start of the processes to the end of the first epoch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.policies import ServerPolicy, parse_policy
from paceline.problems import MODELS, load_problem
from paceline.report.table import print_table

WORKERS = 2
POLICIES = ["hogwild", "hogwild(record=true)", "hogwild-easgd(period=4, alpha=0.3)", "all-reduce", "async"]
WORDS, WORDS_IN_BAG, CLASSES = 20_000, 20, 10


class Case(NamedTuple):
    """A model, its data for training and tests, and how it is trained."""

    model: nn.Module
    train: TensorDataset
    test: TensorDataset
    rate: float
    epochs: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES), metavar="MODEL")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="POLICY")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "EPOCHS", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        name, epochs, directory = arguments.worker
        be_worker(name, int(epochs), Path(directory))
        return
    if arguments.quick:
        arguments.models, arguments.policies, arguments.rounds = ["digits"], ["hogwild"], 1
    rows = []
    for name in arguments.models:
        epochs = 2 if arguments.quick else CASES[name]().epochs
        found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in arguments.policies}
        for _ in range(arguments.rounds):
            for policy in arguments.policies:
                found[policy].append(measure(name, policy, epochs))
        rows += [{"model": name, "policy": policy, **median_of(figures)} for policy, figures in found.items()]
    if arguments.json:
        print(json.dumps({"workers": WORKERS, "rounds": arguments.rounds, "rows": rows}))
        return
    figures = {"examples_per_s": ",.0f", "accuracy": ".4f", "torn": ".3f", "between": ".2f", "lost": ".1e"}
    print_table(rows, {"model": "", "policy": "", **figures, "start_s": ".1f"})


def median_of(figures: list[dict[str, Any]]) -> dict[str, float | None]:
    return {
        name: None if value is None else statistics.median(each[name] for each in figures)
        for name, value in figures[0].items()
    }


def measure(name: str, policy: str, epochs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as directory:
        began = time.time()
        code = supervise(
            [__file__, "--worker", name, str(epochs), directory],
            workers=WORKERS,
            policy=policy,
            server=ServerOptions(needed=isinstance(parse_policy(policy), ServerPolicy)),
        )
        if code != 0:
            sys.exit(code)
        told = json.loads((Path(directory) / "told.json").read_text())
        races = told.pop("races") or {}
        updates = races.get("updates")
        return {
            "examples_per_s": told["examples"] / (told["ended"] - told["warm"]),
            "accuracy": told["accuracy"],
            "torn": updates and races["torn"] / updates,
            "between": updates and races["between"] / updates,
            "lost": updates and races["lost"] / updates,
            "start_s": told["warm"] - began,
        }


def be_worker(name: str, epochs: int, directory: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, train, test, rate, _ = CASES[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = directory / "run"
    with paceline.join(model, optimizer, seed=0, run=run, log_every=50) as session:
        for epoch in session.epochs(epochs):
            for inputs, targets in session.batches(train, batch_size=32):
                with session.step():
                    F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            session.mean(0.0)  # all have ended the epoch
            if epoch == 0:
                warm = time.time()
        ended = time.time()
        with session.averaged():
            accuracy = evaluate(model, test)
    if session.rank == 0:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        races = next((line["races"] for line in reversed(lines) if "races" in line), None)
        told = {"warm": warm, "ended": ended, "examples": len(train) * (epochs - 1), "accuracy": accuracy}
        (directory / "told.json").write_text(json.dumps({**told, "races": races}))


def evaluate(model: nn.Module, test: TensorDataset) -> float:
    inputs, targets = test.tensors
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).float().mean())


def digits(model: nn.Module | None = None, rate: float = 0.1) -> Case:
    problem = load_problem("digits")
    train, test = (TensorDataset(*_stacked(data)) for data in (problem.train, problem.test))
    return Case(model or problem.make_model(), train, test, rate, epochs=60)


def net3() -> Case:
    return digits(MODELS["net3"]((64,), CLASSES), rate=0.5)._replace(epochs=100)


def embedding() -> Case:
    """Each word counts for one class, and a bag is of the class that most of its words count for."""
    torch.manual_seed(0)
    bags = torch.randint(WORDS, (84_000, WORDS_IN_BAG))
    votes = F.one_hot(torch.randint(CLASSES, (WORDS,))[bags], CLASSES).sum(1)
    train, test = (TensorDataset(bags[part], votes[part].argmax(1)) for part in (slice(80_000), slice(80_000, None)))
    words = nn.EmbeddingBag(WORDS, 32, mode="sum", sparse=True)
    nn.init.normal_(words.weight, std=0.1)
    return Case(nn.Sequential(words, nn.Linear(32, CLASSES)), train, test, rate=0.5, epochs=4)


def _stacked(data: Any) -> tuple[Tensor, ...]:
    return tuple(torch.stack([torch.as_tensor(row[column]) for row in data]) for column in (0, 1))


CASES = {"digits": digits, "net3": net3, "embedding": embedding}

if __name__ == "__main__":
    main()
