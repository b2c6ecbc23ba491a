"""Time to a target on more and more workers, as in the deck's "Superior scalability of Local SGD"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.problems import Problem
from paceline.report.series import Axis, Series
from paceline.schedules import ScheduleConfig
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trial, Trials
from paceline.studies.checks import check_counts, check_different, check_positive
from paceline.studies.intervals import Interval, verdict
from paceline.studies.measures import megabytes_sent, waits
from paceline.studies.study import Cell, Column, option

_POINTS = 24  # evaluations of every run


@dataclass(frozen=True, kw_only=True)
class ScalingStudy(ArmStudy):
    """Train to a target on one to many virtual workers over a slow link, averaging gradients or parameters.

    The batch of a worker stays the same, so more workers need fewer steps, and more messages for the same data. The
    fewer averages of local SGD should make it faster than all-reduce, the more so the more workers there are.
    """

    name: ClassVar[str] = "scaling"
    title: ClassVar[str] = "Time to a target on more workers"

    model: str | None = option("lenet", "The network.")
    examples: int | None = option(10_000, "Training examples to use, the first ones.")
    workers: tuple[int, ...] = option((1, 4, 16), "Numbers of workers.")
    policies: tuple[str, ...] = option(("all-reduce", "local-sgd(every=8)"), "With commas between.")
    rate: float = option(0.005, "Learning rate for a worker's batch, scaled linearly to that of all.")
    epochs: int = option(3, "Of every run.")
    target: float = option(0.92, "Accuracy to reach.")
    judges: int | None = option(2000, "Test examples to measure it on, the first ones.")
    delay: str = option("1+exp(4)", "How long a worker computes on a mini-batch.")
    link: str = option("1ms 500kB/s", "Of every worker.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "epochs")
        check_positive(self, "rate")
        check_different(self, "workers", least=1)
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise UsageError(f"study {self.name!r} needs different policies, as in --policies all-reduce,gossip")

    def arms(self, problem: Problem) -> list[Arm]:
        """One worker exchanges nothing, so it trains under the first policy only."""
        return [
            self._arm(policy, workers)
            for workers in sorted(self.workers)
            for policy in self.policies[: 1 if workers == 1 else None]
        ]

    def _arm(self, policy: str, workers: int) -> Arm:
        return Arm(
            name=f"{policy} x {workers}",
            optimizer=f"sgd(lr={self.rate!r}, momentum=0.9)",
            epochs=self.epochs,
            batch_size=self.batch_size,
            workers=workers,
            policy=policy,
            schedule=ScheduleConfig(warmup="gradual", warmup_epochs=0.5, base_batch=self.batch_size),
            delay=self.delay,
            link=self.link,
            points=_POINTS,
            judges=self.judges,
        )

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        measured = Column(name="s/step", decimals=3), Column(name="waits %", decimals=1), "MB sent"
        return "policy", "workers", *measured, f"epochs to {self.target:g}", f"s to {self.target:g}", "speed-up"

    def _seconds(self, arm: Arm, trials: Trials) -> Interval:
        """Infinite where a seed did not reach the target."""
        return trials.mean(arm, trials.time_to(self.target))

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        alone = self._seconds(self.arms(trials.problem)[0], trials).mean if 1 in self.workers else math.inf
        seconds = self._seconds(arm, trials)
        epochs = trials.mean(arm, trials.epochs_to(self.target))
        return (
            arm.policy,
            arm.workers,
            trials.mean(arm, lambda trial: trial.outcome.run.iteration).mean,
            trials.mean(arm, waits).mean,
            trials.mean(arm, megabytes_sent).mean,
            epochs.show() if math.isfinite(epochs.mean) else None,
            seconds.show(0) if math.isfinite(seconds.mean) else None,
            alone / seconds.mean if max(alone, seconds.mean) < math.inf else None,
        )

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="workers", scale="log"), Axis(label=f"virtual seconds to {self.target:g}", scale="log")

    def series(self, trials: Trials) -> list[Series]:
        return [self._curve(policy, trials) for policy in self.policies]

    def _curve(self, policy: str, trials: Trials) -> Series:
        found = {
            arm.workers: self._seconds(arm, trials).mean
            for arm in trials.arms()
            if arm.policy == policy or arm.workers == 1
        }
        reached = [(float(workers), seconds) for workers, seconds in found.items() if math.isfinite(seconds)]
        x, y = zip(*reached, strict=True) if reached else ((), ())
        return Series(label=policy, panel=f"{self.problem}, {self.model}, {self.link}", x=x, y=y)

    def missing(self, trials: Trials) -> str | None:
        late = [arm.name for arm in trials.arms() if not math.isfinite(self._seconds(arm, trials).mean)]
        if not late:
            return None
        return f"{self.target:g} was not reached by {', '.join(late)} with every seed; give more --epochs"

    def verdicts(self, trials: Trials) -> list[str]:
        """Each other policy against the first one, on each number of workers, by the logarithm of the times."""
        arms = {(arm.policy, arm.workers): arm for arm in trials.arms()}
        first, *others = self.policies

        def speed(trial: Trial) -> float:
            return -math.log2(trial.time_to(trials.problem, self.target))

        found = [
            (policy, workers, trials.differences(arms[policy, workers], arms[first, workers], speed))
            for policy in others
            for workers in sorted(self.workers)
            if (policy, workers) in arms
        ]
        return [
            verdict(f"{policy} reaches the target before {first} on {workers} workers", times, "doublings of speed")
            for policy, workers, times in found
            if times and all(map(math.isfinite, times))
        ]

    def notes(self) -> tuple[str, ...]:
        return (
            'After "Superior scalability of Local SGD over mini-batch SGD" in the lecture on local SGD (Lin et al., '
            "2020), whose figure has no numbers.",
            f"{self.problem}, {self.model}, the first {self.examples} training examples, batches of {self.batch_size} "
            f"per worker, momentum 0.9, rate {self.rate:g} scaled by the number of workers after half an epoch of "
            f"warm-up. Times are those of the virtual clock: compute times {self.delay}, links {self.link}, rings. "
            f"The accuracy is measured {_POINTS} times in {self.epochs} epochs, so times are rounded up to that.",
            self.note_on_seeds(),
        )
