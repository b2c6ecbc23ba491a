"""Commits of the first k mini-batches against commits of the first k learners, as in the deck's SGD variants."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.problems import Problem
from paceline.report.series import Axis, Series
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trial, Trials
from paceline.studies.checks import check_counts
from paceline.studies.intervals import agreement
from paceline.studies.measures import final_loss, staleness
from paceline.studies.study import Cell, Column, option
from paceline.virtual.formulas import mean_staleness

PAIRS = (("k-sync", "k-batch-sync"), ("k-async", "k-batch-async"))  # by learners, by mini-batches
_WITHIN = 5.0  # per cent of the loss


@dataclass(frozen=True, kw_only=True)
class BatchesOrLearnersStudy(ArmStudy):
    """Train under policies that count learners and under those that count mini-batches, for equally many commits.

    The deck says that a commit of k mini-batches is worth one of k learners, with or without waiting. The staleness of
    k-batch-async is higher than that of k-async: (P - 1) / k against P / k - 1 with P workers. The last notes say
    whether losses agree all the same.
    """

    name: ClassVar[str] = "batches-or-learners"
    title: ClassVar[str] = "Commits of k mini-batches against commits of k learners"

    examples: int | None = option(10_000, "Training examples to use, the first ones.")
    workers: int = option(8, "P.")
    ks: tuple[int, ...] = option((2, 4), "Pushes of a commit.")
    rates: tuple[float, ...] = option((0.1, 0.4, 0.8), "Learning rates of plain SGD.")
    batch_size: int = option(8, "Of each worker.")
    epochs: int = option(3, "Of every run.")
    delay: str = option("exp(1)", "How long a worker computes on a mini-batch.")
    judges: int | None = option(2000, "Examples to evaluate on, the first ones.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "epochs")
        if not self.ks or not 1 <= min(self.ks) <= max(self.ks) <= self.workers or len(set(self.ks)) < len(self.ks):
            raise UsageError(f"study {self.name!r}: ks are different numbers from 1 to {self.workers}, got {self.ks}")
        if not self.rates or not 0 < min(self.rates) <= max(self.rates) < math.inf:
            raise UsageError(f"study {self.name!r}: rates are numbers above 0, got {self.rates}")

    def arms(self, problem: Problem) -> list[Arm]:
        return [self._arm(name, k, rate) for rate in self.rates for k in self.ks for pair in PAIRS for name in pair]

    def _arm(self, name: str, k: int, rate: float) -> Arm:
        return Arm(
            name=name,
            group=f"k = {k}, rate {rate:g}",
            optimizer=f"sgd(lr={rate!r})",
            epochs=self.epochs,
            batch_size=self.batch_size,
            workers=self.workers,
            policy=f"{name}(k={k})",
            delay=self.delay,
            points=8 * self.epochs,
            judges=self.judges,
        )

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        times = "commits", Column(name="s/commit", decimals=3), "staleness", "in theory"
        at_end = "loss at the end", f"{trials.problem.metric.name} at the end"
        return "policy", "rate", *times, "loss on the way", *at_end

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="epoch"), Axis(label="test loss", scale="log")

    def series(self, trials: Trials) -> list[Series]:
        return [trials.curve(arm, lambda point: point.loss) for arm in trials.arms()]

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        run = trials.done[[trial.arm for trial in trials.done].index(arm)].outcome.run
        k = int(arm.policy.partition("=")[2].rstrip(")"))
        return (
            arm.policy,
            arm.group.partition("rate ")[2],
            run.commits,
            trials.mean(arm, lambda trial: trial.outcome.run.iteration).mean,
            trials.mean(arm, staleness).show(),
            mean_staleness(arm.name, arm.workers, k),
            trials.mean(arm, on_the_way).show(4),
            trials.mean(arm, final_loss).show(4),
            trials.mean(arm, lambda trial: trial.last.value).show(4),
        )

    def verdicts(self, trials: Trials) -> list[str]:
        return [
            agreement(
                f"{batches}(k={k}) has the loss of {learners}(k={k}) on the way, at rate {rate:g}",
                [100 * (other / one - 1) for one, other in zip(*found, strict=False)],
                "%",
                within=_WITHIN,
            )
            for rate in self.rates
            for k in self.ks
            for learners, batches in PAIRS
            if all(found := [trials.of(self._arm(name, k, rate), on_the_way) for name in (learners, batches)])
        ]

    def notes(self) -> tuple[str, ...]:
        return (
            'After "Synchronous SGD Variants" and "Asynchronous SGD and Variants" in DS-UA 301, lecture 10 (Dutta et '
            "al., 2018), where the convergence of each policy per commit is said to be that of the other of its pair.",
            f"{self.problem}, {self.model}, the first {self.examples} training examples, {self.epochs} epochs; plain "
            f"SGD, {self.workers} workers with batches of {self.batch_size}, compute times {self.delay}, messages "
            "free. Policies of the same k make equally many commits.",
            f"Losses are on the test data. On the way is the mean over {8 * self.epochs} evaluations, after equally "
            "many commits each.",
            f"{self.note_on_seeds()} Losses agree if that is within {_WITHIN:g} % of 0.",
        )


def on_the_way(trial: Trial) -> float:
    """The mean loss over the curve, without its start."""
    return statistics.fmean(point.loss for point in trial.outcome.curve[1:])
