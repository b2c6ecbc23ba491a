"""Error against time for policies at one learning rate, as in the deck's "Error-Runtime Tradeoff in SGD Variants"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.problems import ProblemOptions, load_problem
from paceline.report.series import Axis
from paceline.studies.cases import run_cases
from paceline.studies.checks import check_positive
from paceline.studies.outcomes import curve_series, finite, record_of
from paceline.studies.study import Cell, Column, Study, StudyContext, StudyResult, option
from paceline.threads import one_thread
from paceline.virtual.plan import Point, TrainingOutcome, TrainingPlan
from paceline.virtual.simulate import Scenario


@dataclass(frozen=True, kw_only=True)
class TradeOffStudy(Study):
    """Train one network under several policies at one learning rate, with real gradients on a virtual clock.

    Every policy starts from the same parameters. The loss of async should fall first and end highest, that of sync
    fall last and end lowest, and policies that wait for k lie between. The last note says whether the order holds.
    """

    name: ClassVar[str] = "trade-off"
    title: ClassVar[str] = "Error against time at one learning rate"

    problem: str = option("mnist", "What to train on; digits needs no data.")
    model: str = option("net2", "The network.")
    policies: tuple[str, ...] = option(("sync", "k-sync(k=2)", "k-async(k=2)", "async"), "With commas between.")
    workers: int = option(8, "Virtual workers.")
    delay: str = option("1+exp(4)", "How long a worker computes on a mini-batch.")
    rate: float = option(0.05, "Learning rate of plain SGD, for all.")
    weight_decay: float = option(0.005, "Weight decay, for all; without it the loss goes on falling for very long.")
    batch_size: int = option(1, "Examples in a worker's mini-batch.")
    seconds: float = option(12_000.0, "Virtual seconds.")
    points: int = option(200, "Evaluations in that time, more often at first.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policies:
            raise UsageError(f"study {self.name!r}: no policy was named; e.g. --policies sync,async")
        check_positive(self, "seconds", "rate")
        if not 0 <= self.weight_decay < math.inf:
            raise UsageError(
                f"study {self.name!r}: weight decay must be at least 0 and finite, got {self.weight_decay:g}"
            )

    def run(self, context: StudyContext) -> StudyResult:
        options = ProblemOptions(data=context.data, model=self.model, seed=context.seed)
        plan = TrainingPlan(
            problem=load_problem(self.problem, options),
            optimizer=f"sgd(lr={self.rate!r}, weight_decay={self.weight_decay!r})",
            batch_size=self.batch_size,
            points=self.points,
            dense_start=True,
        )
        cases = [
            Scenario(policy=policy, workers=self.workers, delay=self.delay, seed=context.seed)
            for policy in self.policies
        ]
        with one_thread():
            runs = run_cases(cases, context, seconds=self.seconds, plan=plan)
        falls = [fall_of(outcome) for _, outcome in runs.done]
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=(
                Column(name="policy"),
                Column(name="commits"),
                Column(name="s/commit", decimals=3),
                Column(name="staleness"),
                Column(name="s to half the loss", decimals=1),
                Column(name="loss, fifth before", decimals=4),
                Column(name="loss, last fifth", decimals=4),
                Column(name=f"{plan.problem.metric.name}, last fifth", decimals=4),
            ),
            rows=tuple(_row(outcome, fall) for (_, outcome), fall in zip(runs.done, falls, strict=True)),
            x_axis=Axis(label="virtual seconds", scale="log"),
            y_axis=Axis(label="test loss", scale="log"),
            series=tuple(curve_series(case, outcome) for case, outcome in runs.done if outcome.curve),
            notes=(*self._notes(), *([] if runs.interrupted else order_of(falls))),
            records=tuple(record_of(outcome) for _, outcome in runs.done),
            missing=f"interrupted in run {len(runs.done)} of {len(cases)}" if runs.interrupted else None,
            interrupted=runs.interrupted,
        )

    def _notes(self) -> tuple[str, ...]:
        return (
            'After "Error-Runtime Tradeoff in SGD Variants" in DS-UA 301, lecture 10 (Dutta et al., 2018).',
            f"{self.problem}, {self.model}, plain SGD with rate {self.rate:g} and weight decay {self.weight_decay:g}, "
            f"{self.workers} workers with batches of {self.batch_size}, compute times {self.delay}, messages "
            "free, one run a line.",
            "Losses are on the test data, without the weight decay's term. Half the loss is half of that at the start. "
            "The floor is the mean over the last fifth of the time; the fifth before shows whether it was reached.",
        )


@dataclass(frozen=True, kw_only=True)
class Fall:
    """The time at which a policy's loss was halved, and its final level; None if never, or not finite."""

    policy: str
    halved: float | None = None  # virtual seconds
    before: float | None = None  # mean loss over the fifth of the time before the last
    floor: float | None = None  # mean loss over the last fifth
    value: float | None = None  # of the problem's metric, over the last fifth


def fall_of(outcome: TrainingOutcome) -> Fall:
    """Read from a curve the time at which the loss was halved, and its final level."""
    policy, curve = outcome.run.policy, outcome.curve
    if not curve:
        return Fall(policy=policy)
    end = curve[-1].seconds
    before = [point.loss for point in curve if 0.6 * end <= point.seconds < 0.8 * end]
    last = [point for point in curve if point.seconds >= 0.8 * end]
    return Fall(
        policy=policy,
        halved=_time_to(curve, curve[0].loss / 2),
        before=_mean(before),
        floor=_mean([point.loss for point in last]),
        value=_mean([point.value for point in last]),
    )


def order_of(falls: Sequence[Fall]) -> list[str]:
    """Say whether async is first and highest, and sync last and lowest; empty if one of them was not run."""
    named = {fall.policy: fall for fall in falls}
    if not {"sync", "async"} <= named.keys():
        return []
    fallen = [fall.policy for fall in falls if fall.halved is None or fall.floor is None]
    if fallen:
        return [f"Whether the order holds is unknown: {', '.join(fallen)} did not reach half the loss."]
    by_time = sorted(named, key=lambda policy: named[policy].halved or 0.0)
    by_floor = sorted(named, key=lambda policy: -(named[policy].floor or 0.0))
    holds = all(order[0] == "async" and order[-1] == "sync" for order in (by_time, by_floor))
    return [
        f"The order {'holds' if holds else 'does not hold'} (async first and highest, sync last and lowest). "
        f"To half the loss: {', '.join(by_time)}. Floors from the highest: {', '.join(by_floor)}."
    ]


def _row(outcome: TrainingOutcome, fall: Fall) -> tuple[Cell, ...]:
    run = outcome.run
    return run.policy, run.commits, run.iteration, run.staleness, fall.halved, fall.before, fall.floor, fall.value


def _time_to(curve: Sequence[Point], loss: float) -> float | None:
    """The time at which the curve first reaches the loss, interpolated linearly between its points."""
    for above, below in itertools.pairwise(curve):
        if below.loss <= loss < above.loss:
            share = (above.loss - loss) / (above.loss - below.loss)
            return above.seconds + share * (below.seconds - above.seconds)
    return None


def _mean(values: Sequence[float]) -> float | None:
    return finite(sum(values) / len(values)) if values else None
