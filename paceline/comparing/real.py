"""One training of a comparison on real workers, evaluated after its end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.comparing.figures import write_evaluations
from paceline.comparing.options import POINTS, CompareOptions
from paceline.errors import PacelineError
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.policies import PeersPolicy, ServerPolicy, parse_policy
from paceline.problems import Problem
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint
from paceline.record.metrics import read_metrics
from paceline.training.threads import wants_one_thread
from paceline.training.train import TrainConfig, evaluate, make_model


class TrainingFailed(PacelineError):
    """A training of a comparison has failed; the others go on."""


def train_real(
    options: CompareOptions, problem: Problem, arm: str, seed: int, run: Path, tell: Callable[[float], None]
) -> float:
    """Train one arm with one seed into the directory ``run``; return its seconds. ``tell`` hears the share done."""
    config = options.config(arm, seed, str(run))
    config = dataclasses.replace(config, save_every=max(1, options.updates(arm, problem) // POINTS))
    seconds = _train(options, problem, arm, config, tell)
    _evaluate(config, problem, run)
    return seconds


def _train(
    options: CompareOptions, problem: Problem, arm: str, config: TrainConfig, tell: Callable[[float], None]
) -> float:
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    stopped: list[bool] = []

    def hear(rank: int, report: dict[str, Any]) -> None:
        if report["event"] == "result":
            results.append(report["result"])
        elif report["event"] == "progress" and "progress" in report:
            tell(report["progress"]["step"] / max(1, report["progress"]["total_steps"]))
        elif report["event"] == "failed":
            failures.append(" ".join(str(report["first_message"]).split()))

    policy = parse_policy(config.policy)
    small = wants_one_thread(config.problem, problem, config.batch_size or problem.recipe.batch_size)
    code = supervise(
        ["-m", "paceline", "train-worker", json.dumps(dataclasses.asdict(config))],
        workers=options.workers_of(arm),
        per_device=policy.processes_per_worker if isinstance(policy, PeersPolicy) else 1,
        environment={**os.environ, "OMP_NUM_THREADS": "1"} if small else None,
        on_report=hear,
        on_stop=lambda: stopped.append(True),
        server=ServerOptions(needed=isinstance(policy, ServerPolicy), delay=options.real_delay),
    )
    if stopped:
        raise KeyboardInterrupt
    if code != 0 or not results:
        raise TrainingFailed(failures[0] if failures else f"its processes ended with code {code}")
    sys.stdout.flush()
    return float(results[0]["seconds"])


def _evaluate(config: TrainConfig, problem: Problem, run: Path) -> None:
    """Evaluate the run's checkpoints into ``evaluations.jsonl``, and remove all but the last of them."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["event"] in ("step", "commit")]
    examples, moved = (
        list(itertools.accumulate(line.get(name) or 0 for line in lines)) for name in ("examples", "bytes")
    )
    made = {line["step"]: place for place, line in enumerate(lines)}
    model = make_model(config, problem)
    points = []

    def look(**where: Any) -> None:
        loss, value, _ = evaluate(model, problem)
        points.append({**where, "test_loss": loss, problem.metric.name: value})

    start = min([line["time"] for line in read_metrics(run / "metrics.jsonl")], default=0.0)
    look(time=start, step=0, examples=0, bytes=0)
    files = CheckpointFolder(run / "checkpoints").files()
    for file in files:
        state = read_checkpoint(file)
        place = made.get(state["session"]["steps"])
        if place is not None:
            model.load_state_dict(state["trainee"]["model"])
            look(
                time=lines[place]["time"],
                step=state["session"]["steps"],
                examples=examples[place],
                bytes=moved[place],
            )
    write_evaluations(run, points)
    for file in files[:-1]:
        file.unlink()
