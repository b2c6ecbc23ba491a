"""One training of a comparison on real workers, evaluated after its end."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.comparing.evaluations import write_evaluations
from paceline.comparing.options import POINTS, CompareOptions
from paceline.launch.service import ServerOptions
from paceline.policies import ServerPolicy, parse_policy
from paceline.problems import Problem
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint
from paceline.record.metrics import read_metrics
from paceline.training.on_workers import train_on_workers
from paceline.training.threads import wants_one_thread
from paceline.training.train import TrainConfig, evaluate, make_model


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
    small = wants_one_thread(config.problem, problem, config.batch_size or problem.recipe.batch_size)
    result = train_on_workers(
        config,
        options.workers_of(arm),
        ServerOptions(needed=isinstance(parse_policy(config.policy), ServerPolicy), delay=options.real_delay(arm)),
        environment={**os.environ, "OMP_NUM_THREADS": "1"} if small else None,
        watch=lambda progress: tell(progress.step / max(1, progress.total_steps)),
    )
    return float(result["seconds"])


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
