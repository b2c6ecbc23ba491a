"""Error against real time with stragglers: eight real workers, mnist, under several policies at one learning rate.

    python benchmarks/live_trade_off.py --data DIR [--policies sync "k-sync(k=4)"] [--seconds 30] [--out DIR] [--json]

Compute times X = 1 + Exp(0.5), in units of 80 ms, are injected before the gradient. The server saves a checkpoint every
few commits; afterwards each is evaluated on the test data. `to_TARGET` is the time from the first commit to the first
checkpoint that reaches the target; `speedup` that of `sync` over it. Test error against time is drawn into `--out`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

import paceline
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.problems import Problem, ProblemOptions, load_problem
from paceline.record.checkpoint import read_checkpoint
from paceline.report import plots
from paceline.report.series import Axis, Series
from paceline.report.table import print_table

DELAY, UNIT = "1+exp(0.5)", 0.08
POLICIES = ["sync", "k-sync(k=4)", "k-sync(k=2)", "k-async(k=4)", "k-async(k=2)", "async"]
WORKERS = 8
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where mnist lies")
    parser.add_argument("--model", default="net2")
    parser.add_argument("--policies", nargs="+", default=POLICIES, metavar="POLICY")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run, from the first commit on")
    parser.add_argument("--target", type=float, default=0.7, help="accuracy")
    parser.add_argument("--out", type=Path, help="directory for trade-off.png")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--worker", nargs=2, metavar=("POLICY", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    problem = load_problem("mnist", ProblemOptions(data=arguments.data, model=arguments.model))
    if arguments.worker is not None:
        be_worker(problem, arguments.worker[0], Path(arguments.worker[1]), arguments.rate, arguments.seconds)
        return
    if arguments.quick:
        arguments.policies, arguments.seconds = ["sync", "async"], 1.0
    curves = {policy: curve(problem, policy, arguments) for policy in arguments.policies}
    rows = table(curves, arguments.target)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        draw(curves, arguments.out / "trade-off.png")
    if arguments.json:
        print(json.dumps({"target": arguments.target, "rows": rows, "curves": curves}))
    else:
        print_table(rows, {"policy": "", "commits": "d", "seconds_to_target": ".1f", "speedup": ".2f", "error": ".4f"})


def curve(problem: Problem, policy: str, arguments: argparse.Namespace) -> list[tuple[float, int, float]]:
    """Train once; seconds, commits and test error of every checkpoint."""
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as directory:
        command = [__file__, "--data", str(arguments.data), "--model", arguments.model, "--rate", str(arguments.rate)]
        command += ["--seconds", str(arguments.seconds), "--worker", policy, directory]
        code = supervise(command, workers=WORKERS, server=ServerOptions(needed=True, delay=(DELAY, UNIT)))
        if code != 0:
            sys.exit(code)
        run = Path(directory) / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        at = {line["step"]: line["time"] for line in lines if line["event"] == "commit"}
        states = (read_checkpoint(file) for file in sorted((run / "checkpoints").glob("*.safetensors")))
        points = [(state["session"]["steps"], error(problem, state["trainee"]["model"])) for state in states]
        return [(at[step] - at[1], step, wrong) for step, wrong in points]


def error(problem: Problem, parameters: dict[str, torch.Tensor]) -> float:
    model = problem.make_model()
    model.load_state_dict(parameters)
    model.eval()
    assert isinstance(problem.test, TensorDataset)
    inputs, targets = problem.test.tensors
    with torch.no_grad():
        return float((model(inputs).argmax(1) != targets).double().mean())


def table(curves: dict[str, list[tuple[float, int, float]]], target: float) -> list[dict[str, Any]]:
    reached = {
        policy: next((seconds for seconds, _, wrong in points if 1 - wrong >= target), None)
        for policy, points in curves.items()
    }
    slow = reached.get("sync")
    return [
        {
            "policy": policy,
            "commits": points[-1][1],
            "seconds_to_target": seconds,
            "speedup": slow / seconds if slow and seconds else None,
            "error": points[-1][2],
        }
        for (policy, points), seconds in zip(curves.items(), reached.values(), strict=True)
    ]


def draw(curves: dict[str, list[tuple[float, int, float]]], file: Path) -> None:
    series = [
        Series(label=policy, panel="", x=tuple(x for x, _, _ in points), y=tuple(y for _, _, y in points))
        for policy, points in curves.items()
    ]
    title = "Error against time, eight workers, stragglers"
    plots.draw(title, series, Axis(label="seconds"), Axis(label="test error", scale="log"), file)


def be_worker(problem: Problem, policy: str, directory: Path, rate: float, seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = problem.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    run = directory / "run"
    with paceline.join(
        model, optimizer, policy=policy, seed=0, run=run, save_every=saves(policy), keep=10_000
    ) as session:
        for inputs, targets in session.batches(problem.train, batch_size=BATCH, epochs=1000):
            if over(directory, seconds):
                break
            with session.step() as step:
                loss = problem.loss(model(inputs), targets)
                step.record(loss=loss)
                torch.autograd.backward(loss)


def saves(policy: str) -> int:
    """Commits between checkpoints: about five a second, whatever the policy."""
    return {"sync": 1, "k-sync(k=4)": 1, "k-sync(k=2)": 2, "k-async(k=4)": 2, "k-async(k=2)": 4}.get(policy, 8)


def over(directory: Path, seconds: float) -> bool:
    """Whether the time is up, counted from the moment at which a worker first asked."""
    first = directory / "first"
    try:
        with first.open("x") as file:
            file.write(repr(time.time()))
    except FileExistsError:
        text = first.read_text()
        return bool(text) and time.time() > float(text) + seconds
    return False


if __name__ == "__main__":
    main()
