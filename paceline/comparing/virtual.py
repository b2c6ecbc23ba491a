"""One training of a comparison on the virtual cluster, with real gradients, in the files of a real run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.comparing.figures import write_evaluations
from paceline.comparing.options import POINTS, CompareOptions
from paceline.problems import Problem
from paceline.threads import one_thread
from paceline.version import __version__
from paceline.virtual.plan import TrainingPlan
from paceline.virtual.recording import RunRecord
from paceline.virtual.training import begin_training


def train_virtually(
    options: CompareOptions,
    problem: Problem,
    arm: str,
    seed: int,
    run: Path,
    tell: Callable[[float], None],
    stop: Sequence[object] = (),
) -> float:
    """Train one arm with one seed into the directory ``run``; return its virtual seconds.

    ``tell`` hears the share done. The training ends with a ``KeyboardInterrupt`` when ``stop`` is not empty.
    """
    config, scenario, updates = options.config(arm, seed), options.scenario(arm, seed), options.updates(arm, problem)
    described = {
        "paceline": __version__,
        "policy": config.policy,
        "codec": config.codec,
        "seed": seed,
        "world_size": scenario.workers,
        "virtual": True,
        "delay": str(scenario.delay),
        "train": asdict(config),
    }
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    record = _Told(run, scenario.workers, updates, tell)
    plan = TrainingPlan(
        problem=problem,
        optimizer=config.optimizer,
        batch_size=config.batch_size,
        codec=config.codec,
        epochs=config.epochs or problem.recipe.epochs,
        points=min(POINTS, updates),
    )
    with one_thread():
        training = begin_training(scenario, plan, commits=updates, record=record)
        training.finish(stop)
    record.close(training.now, training.dead)
    if stop:
        raise KeyboardInterrupt
    points = {point.commits: point for point in training.outcome().curve}
    write_evaluations(
        run,
        [
            {
                "time": point.seconds,
                "step": point.commits,
                "examples": record.commits[point.commits][0],
                "bytes": record.commits[point.commits][1],
                "test_loss": point.loss,
                problem.metric.name: point.value,
            }
            for point in points.values()
        ],
    )
    return training.now


class _Told(RunRecord):
    """A record that tells how far the training has come."""

    def __init__(self, run: Path, workers: int, updates: int, tell: Callable[[float], None]) -> None:
        super().__init__(run, workers)
        self._updates, self._tell = updates, tell

    def committed(self, *args: object, **values: object) -> None:
        super().committed(*args, **values)  # type: ignore[arg-type]
        self._tell((len(self.commits) - 1) / self._updates)
