"""What helps asynchronous SGD against stale gradients: smaller weights, or a correction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.problems import Problem
from paceline.report.series import Axis, Series
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trial, Trials
from paceline.studies.checks import check_counts
from paceline.studies.intervals import interval, verdict
from paceline.studies.measures import final_error, final_loss, run_seconds, staleness
from paceline.studies.study import Cell, Column, option

ALONE, TOGETHER, PLAIN = "one worker", "sync", "async"
WEIGHTED, CONSTANT, ADAPTIVE = "staleness-aware", "DC-ASGD-c", "DC-ASGD-a"
# With the scales and the momentum of the papers.
POLICIES = {
    ALONE: "async",
    TOGETHER: "sync",
    PLAIN: "async",
    WEIGHTED: "async(weights=staleness(power=1.0))",
    CONSTANT: "async(aggregator=delay-compensated(scale=0.04))",
    ADAPTIVE: "async(aggregator=delay-compensated(scale=2.0, momentum=0.95))",
}
# Test errors in % of ResNet-20 on CIFAR-10 with 8 workers (Zheng et al., 2017, table 1).
PUBLISHED = {ALONE: 8.65, TOGETHER: 10.10, PLAIN: 10.26, CONSTANT: 9.27, ADAPTIVE: 8.57}


@dataclass(frozen=True, kw_only=True)
class StalenessStudy(ArmStudy):
    """Train by asynchronous SGD at several rates: plain, with weights by staleness, and with delay compensation.

    Stale gradients should make plain async unstable at rates that one worker bears. Weights that fall with staleness
    (Zhang et al., 2015) and delay compensation (Zheng et al., 2017) should lower the error of the best rate. The last
    notes say what holds.
    """

    name: ClassVar[str] = "staleness"
    title: ClassVar[str] = "What helps against stale gradients"

    examples: int | None = option(5000, "Training examples to use, the first ones.")
    workers: int = option(8, "Of all but the line of one worker.")
    rates: tuple[float, ...] = option((0.1, 0.2, 0.4, 0.8, 1.6), "Learning rates of plain SGD, from the lowest.")
    batch_size: int = option(8, "Of each worker.")
    epochs: int = option(3, "Of every run.")
    delay: str = option("1+exp(1)", "How long a worker computes on a mini-batch.")
    judges: int | None = option(2000, "Examples to evaluate on, the first ones.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "epochs")
        if not self.rates or min(self.rates) <= 0 or sorted(set(self.rates)) != list(self.rates):
            raise UsageError(f"study {self.name!r}: rates are numbers above 0 that grow, got {self.rates}")

    def arms(self, problem: Problem) -> list[Arm]:
        return [self._arm(name, rate) for name in POLICIES for rate in self.rates]

    def _arm(self, name: str, rate: float) -> Arm:
        return Arm(
            name=name,
            group=f"rate {rate:g}",
            optimizer=f"sgd(lr={rate!r})",
            epochs=self.epochs,
            batch_size=self.batch_size,
            workers=1 if name == ALONE else self.workers,
            policy=POLICIES[name],
            delay=self.delay,
            judges=self.judges,
        )

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        measured = "staleness", Column(name="virtual s", decimals=0), "test loss", "error %", "unstable runs"
        return "algorithm", "rate", *measured, "published error %"

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        loss = trials.mean(arm, final_loss)
        return (
            arm.name,
            arm.group.removeprefix("rate "),
            trials.mean(arm, staleness).mean,
            trials.mean(arm, run_seconds).mean,
            loss.show(3) if math.isfinite(loss.mean) else None,
            trials.mean(arm, final_error).show(),
            f"{sum(map(bool, trials.of(arm, is_unstable)))} of {len(trials.of(arm, is_unstable))}",
            PUBLISHED.get(arm.name),
        )

    def _arms_of(self, name: str, trials: Trials) -> list[tuple[float, Arm]]:
        """The arms with a trial, with their rates."""
        return [(rate, arm) for rate in self.rates if (arm := self._arm(name, rate)) in trials.arms()]

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="learning rate", scale="log"), Axis(label="test error (%)", scale="log")

    def series(self, trials: Trials) -> list[Series]:
        return [
            Series(
                label=name,
                panel=f"{self.problem}, {self.model}, {self.workers} workers",
                x=tuple(rate for rate, _ in found),
                y=tuple(trials.mean(arm, final_error).mean for _, arm in found),
            )
            for name in POLICIES
            if (found := self._arms_of(name, trials))
        ]

    def _best(self, name: str, trials: Trials) -> tuple[float, Arm] | None:
        """The rate with the lowest error, and its arm."""
        found = self._arms_of(name, trials)
        return min(found, key=lambda pair: trials.mean(pair[1], final_error).mean, default=None)

    def verdicts(self, trials: Trials) -> list[str]:
        claims = ((PLAIN, ALONE), (PLAIN, WEIGHTED), (PLAIN, CONSTANT), (PLAIN, ADAPTIVE), (CONSTANT, ADAPTIVE))
        found = []
        for worse, better in claims:
            one, other = self._best(worse, trials), self._best(better, trials)
            if one is not None and other is not None:
                claim = f"{better} (rate {other[0]:g}) has a lower error than {worse} (rate {one[0]:g})"
                found.append(verdict(claim, trials.differences(one[1], other[1], final_error), "points"))
        helped = (WEIGHTED, CONSTANT, ADAPTIVE)
        found += [self._by_rate(name, trials) for name in helped if self._arms_of(name, trials)]
        return [*found, *(self._stability(name, trials) for name in POLICIES if self._arms_of(name, trials))]

    def _by_rate(self, name: str, trials: Trials) -> str:
        """At which rates the error is lower than that of plain async, and at which higher."""
        found: dict[str, list[str]] = {"lower at": [], "higher at": [], "not shown to differ at": []}
        for rate, arm in self._arms_of(name, trials):
            gains = interval(trials.differences(self._arm(PLAIN, rate), arm, final_error))
            sure = gains.half is not None and abs(gains.mean) > gains.half
            word = ("lower at" if gains.mean > 0 else "higher at") if sure else "not shown to differ at"
            found[word].append(f"{rate:g}")
        parts = [f"{word} {', '.join(rates)}" for word, rates in found.items() if rates]
        return f"Beside async at the same rate, the error of {name} is {'; '.join(parts)}."

    def _stability(self, name: str, trials: Trials) -> str:
        unstable = [rate for rate, arm in self._arms_of(name, trials) if any(trials.of(arm, is_unstable))]
        return f"{name} turns unstable at rate {unstable[0]:g}." if unstable else f"{name} is stable at all rates."

    def notes(self) -> tuple[str, ...]:
        return (
            "After Zhang et al. (2015), who divide a gradient by its staleness, and Zheng et al. (2017), who correct "
            "it: DC-ASGD-c with the constant 0.04, DC-ASGD-a with 2 and a moving mean of 0.95. The published errors "
            "are of ResNet-20 on CIFAR-10 with 8 workers, each with the rates of its paper.",
            f"{self.problem}, {self.model}, the first {self.examples} training examples, {self.epochs} epochs; plain "
            f"SGD with constant rates, batches of {self.batch_size} per worker, compute times {self.delay}, messages "
            "free. All lines of async make equally many commits in the same time.",
            "A run is unstable if its test loss at the end is not finite, or above half of that at the start. Claims "
            "are about the rate with the lowest error.",
            self.note_on_seeds(),
        )


def is_unstable(trial: Trial) -> float:
    """1 if the loss at the end is not finite, or above half of that at the start; else 0."""
    return float(not trial.last.loss < trial.outcome.curve[0].loss / 2)
