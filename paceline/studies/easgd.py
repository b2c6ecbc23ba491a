"""Elastic averaging against DOWNPOUR over long periods, and what ways to exchange cost, as in the deck on EASGD."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.problems import Problem, ProblemOptions
from paceline.report.series import Axis, Series
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials, error
from paceline.studies.checks import check_counts
from paceline.studies.intervals import agreement, verdict
from paceline.studies.measures import final_error, run_seconds, waits
from paceline.studies.study import Cell, Column, StudyContext, option

DOWNPOUR, EASGD, EAMSGD = "DOWNPOUR", "EASGD", "EAMSGD"
ROUND_ROBIN, FIRST_COME, TREE, RING = "round-robin", "first-come", "all by a tree", "all by a ring"
WAYS = (ROUND_ROBIN, FIRST_COME, TREE, RING)
_BETA = 0.9  # alpha times the number of workers
_CLOSE = 2.0  # points of error


@dataclass(frozen=True, kw_only=True)
class EASGDStudy(ArmStudy):
    """Train with DOWNPOUR, EASGD and EAMSGD over periods of several lengths, and EASGD with several ways to exchange.

    DOWNPOUR should turn unstable as the period grows, EASGD should not, and EAMSGD should be best (Zhang et al., 2015).
    Exchanges with one worker after the other should cost most of the time, and one exchange of all together little (You
    et al., 2017). The last notes say what holds.
    """

    name: ClassVar[str] = "easgd"
    title: ClassVar[str] = "Elastic averaging over long periods"

    examples: int | None = option(6000, "Training examples to use, the first ones.")
    workers: int = option(4, "Of the lines with periods.")
    periods: tuple[int, ...] = option((1, 4, 16, 64), "Local steps between two exchanges.")
    momenta: tuple[float, ...] = option((0.99, 0.9), "Of EAMSGD; 0.99 is published.")
    crowds: tuple[int, ...] = option((4, 16), "Numbers of workers that exchange in every step, in several ways.")
    epochs: int = option(8, "Of every run.")
    target: float = option(0.88, "Accuracy to reach.")
    delay: str = option("1+exp(4)", "How long a worker computes on a mini-batch.")
    link: str = option("1ms 600kB/s", "Of the server, or of every peer.")
    judges: int | None = option(2000, "Examples to evaluate on, the first ones.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "epochs")
        for name in ("periods", "crowds", "momenta"):
            numbers = getattr(self, name)
            if len(set(numbers)) < len(numbers) or min(numbers, default=1) <= 0:
                raise UsageError(f"study {self.name!r}: {name} are different numbers above 0, got {numbers}")

    def problem_options(self, context: StudyContext) -> ProblemOptions:
        return dataclasses.replace(super().problem_options(context), normalise=True, xavier=True)

    def arms(self, problem: Problem) -> list[Arm]:
        return [*self._periods_of()]

    def _periods_of(self) -> dict[Arm, int]:
        """All arms, with their periods: those with several periods, then those that exchange in several ways."""
        periodic = {
            self._arm(name, period): period
            for period in self.periods
            for name in (DOWNPOUR, EASGD, *map(_with_momentum, self.momenta))
        }
        return {**periodic, **{self._way(name, crowd): 1 for crowd in self.crowds for name in WAYS}}

    def _arm(self, name: str, period: int) -> Arm:
        options = f"period={period}"
        if name != DOWNPOUR:
            options += f", alpha={_BETA / self.workers!r}"
        if name.startswith(EAMSGD):
            options += f", momentum={name.removeprefix(EAMSGD)}"
        policy = f"{'downpour' if name == DOWNPOUR else 'easgd'}({options})"
        return self._trained(name, policy, self.workers, f"period {period}")

    def _way(self, name: str, workers: int) -> Arm:
        alpha = f"alpha={_BETA / workers!r}"
        policy = f"sync-easgd({alpha})" if name in (RING, TREE) else f"easgd(period=1, {alpha}, order={name})"
        arm = self._trained(f"{EASGD}, {name}", policy, workers, f"{workers} workers")
        return dataclasses.replace(arm, topology="tree" if name == TREE else "ring")

    def _trained(self, name: str, policy: str, workers: int, group: str) -> Arm:
        return Arm(
            name=name,
            group=group,
            optimizer=f"sgd(lr={_rate_of(name)!r})",
            epochs=self.epochs,
            batch_size=self.batch_size,
            workers=workers,
            policy=policy,
            delay=self.delay,
            link=self.link,
            points=4 * self.epochs,
            judges=self.judges,
        )

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        times = Column(name="virtual s", decimals=0), f"s to {self.target:g}", Column(name="waits %", decimals=1)
        return "algorithm", "workers", "period", "rate", "error %", *times

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="virtual seconds"), Axis(label="test error (%)", scale="log")

    def series(self, trials: Trials) -> list[Series]:
        return [trials.curve(arm, error, by_time=True) for arm in trials.arms()]

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        seconds = trials.mean(arm, trials.time_to(self.target))
        return (
            arm.name,
            arm.workers,
            self._periods_of()[arm],
            _rate_of(arm.name),
            trials.mean(arm, final_error).show(),
            trials.mean(arm, run_seconds).mean,
            seconds.show(0) if math.isfinite(seconds.mean) else None,
            trials.mean(arm, waits).mean,
        )

    def verdicts(self, trials: Trials) -> list[str]:
        return [*self._on_periods(trials), *self._on_ways(trials)]

    def _on_periods(self, trials: Trials) -> list[str]:
        first, last = min(self.periods, default=1), max(self.periods, default=1)
        found = []
        if first < last and (rises := self._rises(DOWNPOUR, trials)):
            claim = f"{DOWNPOUR} has a higher error with a period of {last} than of {first}"
            found.append(verdict(claim, rises, "points"))
        if first < last and (rises := self._rises(EASGD, trials)):
            claim = f"{EASGD} has the same error with a period of {last} as of {first}"
            found.append(agreement(claim, rises, "points", within=_CLOSE))
        for name in map(_with_momentum, self.momenta):
            for period in self.periods:
                gains = trials.differences(self._arm(EASGD, period), self._arm(name, period), final_error)
                if gains:
                    claim = f"{name} has a lower error than {EASGD}, period {period}"
                    found.append(verdict(claim, gains, "points"))
        return found

    def _rises(self, name: str, trials: Trials) -> list[float]:
        """By how much the error of the longest period is higher than that of the shortest, with each seed."""
        return trials.differences(self._arm(name, max(self.periods)), self._arm(name, min(self.periods)), final_error)

    def _on_ways(self, trials: Trials) -> list[str]:
        found = []
        for crowd in self.crowds:
            slow = self._way(ROUND_ROBIN, crowd)
            for name in (FIRST_COME, TREE, RING):
                arm = self._way(name, crowd)
                times = [trials.of(each, trials.time_to(self.target)) for each in (slow, arm)]
                faster = [
                    math.log(one / other)
                    for one, other in zip(*times, strict=False)
                    if 0 < one < math.inf and 0 < other < math.inf
                ]
                if faster:
                    claim = f"{name} reaches {self.target:g} before {ROUND_ROBIN}, {crowd} workers"
                    found.append(verdict(claim, faster, "in the logarithm of the time"))
            shares = [
                f"{trials.mean(arm, waits).mean:.0f} % ({name})"
                for name in WAYS
                if (arm := self._way(name, crowd)) in trials.arms()
            ]
            if shares:
                found.append(f"Of their time, {crowd} workers wait {', '.join(shares)}.")
        return found

    def notes(self) -> tuple[str, ...]:
        return (
            "After Zhang et al. (2015), where DOWNPOUR trained networks on CIFAR-10 well with periods of 1 and 4 only, "
            "and You et al. (2017), where communication took 87 % of the time with round-robin exchanges, and 14 % "
            "with exchanges of all together that also overlapped with computing: 5.3 times faster in all.",
            f"{self.problem} normalised, {self.model} with Xavier's weights, the first {self.examples} training "
            f"examples, {self.epochs} epochs, batches of {self.batch_size} per worker, plain SGD, alpha = {_BETA:g} / "
            "workers. Each algorithm has the rate with the lowest error of one seed at a period of 1, of several in "
            "steps of about 2; that of EAMSGD is 2 (1 - momentum).",
            f"Compute times are {self.delay}; messages cross a link of {self.link} at the server, or at every peer. "
            "Lines with periods exchange in the order in which workers come. Waits are the share of the time in which "
            "workers do not compute.",
            self.note_on_seeds(),
        )


def _with_momentum(momentum: float) -> str:
    return f"{EAMSGD} {momentum:g}"


def _rate_of(name: str) -> float:
    """The best of a small sweep with a period of 1, for all periods."""
    if name.startswith(EAMSGD):
        return round(2 * (1 - float(name.removeprefix(EAMSGD))), 9)
    return 0.4 if name == DOWNPOUR else 0.8
