"""Error against time for policies at one learning rate, as in the deck's "Error-Runtime Tradeoff in SGD Variants"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.problems import ProblemOptions, load_problem
from paceline.studies.cases import run_cases
from paceline.studies.outcomes import curve_series, finite, record_of
from paceline.studies.study import Axis, Cell, Column, Study, StudyContext, StudyResult, one_thread, option
from paceline.virtual.learning import Course, Learned
from paceline.virtual.simulate import Scenario


@dataclass(frozen=True, kw_only=True)
class TradeOffStudy(Study):
    """Train one network under several policies at one learning rate, with real gradients on a virtual clock.

    Every policy starts from the same parameters. Async falls first and ends on a higher floor, sync falls last, and
    those that wait for k fall in between; who is lowest when the time is up depends on how long it was.
    """

    name: ClassVar[str] = "trade-off"
    title: ClassVar[str] = "Error against time at one learning rate"

    problem: str = option("mnist", "What to train on; digits needs no data.")
    model: str = option("net2", "The network.")
    policies: tuple[str, ...] = option(("sync", "k-sync(k=4)", "k-async(k=4)", "async"), "With commas between.")
    workers: int = option(8, "Virtual workers.")
    delay: str = option("1+exp(4)", "How long a worker computes on a mini-batch.")
    rate: float = option(0.1, "Learning rate of plain SGD, for all.")
    batch_size: int = option(1, "Examples in a worker's mini-batch.")
    seconds: float = option(12_000.0, "Virtual seconds.")
    points: int = option(100, "Evaluations in that time, more often at first.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policies:
            raise UsageError(f"study {self.name!r}: no policy was named; e.g. --policies sync,async")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"study {self.name!r}: seconds must be above 0 and finite, got {self.seconds:g}")
        if not 0 < self.rate < math.inf:
            raise UsageError(f"study {self.name!r}: rate must be above 0 and finite, got {self.rate:g}")

    def run(self, context: StudyContext) -> StudyResult:
        options = ProblemOptions(data=context.data, model=self.model, seed=context.seed)
        course = Course(
            problem=load_problem(self.problem, options),
            optimizer=f"sgd(lr={self.rate!r})",
            batch_size=self.batch_size,
            points=self.points,
            dense_start=True,
        )
        cases = [
            Scenario(policy=policy, workers=self.workers, delay=self.delay, seed=context.seed)
            for policy in self.policies
        ]
        with one_thread():
            runs = run_cases(cases, context, seconds=self.seconds, course=course)
        if not runs.done:
            raise KeyboardInterrupt
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=(
                Column(name="policy"),
                Column(name="commits"),
                Column(name="s/commit", decimals=3),
                Column(name="staleness"),
                Column(name="s to half the loss", decimals=1),
                Column(name="last loss", decimals=4),
                Column(name=f"last {course.problem.metric.name}", decimals=4),
            ),
            rows=tuple(_row(learned) for _, learned in runs.done),
            x_axis=Axis(label="virtual seconds", scale="log"),
            y_axis=Axis(label="test loss", scale="log"),
            series=tuple(curve_series(case, learned) for case, learned in runs.done if learned.curve),
            notes=self._notes(),
            records=tuple(record_of(learned) for _, learned in runs.done),
            missing=f"interrupted in run {len(runs.done)} of {len(cases)}" if runs.interrupted else None,
            interrupted=runs.interrupted,
        )

    def _notes(self) -> tuple[str, ...]:
        return (
            'After "Error-Runtime Tradeoff in SGD Variants" in DS-UA 301, lecture 10 (Dutta et al., 2018).',
            f"{self.problem}, {self.model}, plain SGD with rate {self.rate:g}, {self.workers} workers with batches of "
            f"{self.batch_size}, compute times {self.delay}, messages for nothing, one run a line.",
            "Half the loss is half of that at the start. The last values are means over the last fifth of the time. "
            "Whether a floor is reached by then depends on the rate: with a smaller one all are lower and later.",
        )


def _row(learned: Learned) -> tuple[Cell, ...]:
    run, curve = learned.run, learned.curve
    if not curve:
        return run.policy, run.commits, run.iteration, run.staleness, None, None, None
    halved = next((point.seconds for point in curve if point.loss <= curve[0].loss / 2), None)
    last = [point for point in curve if point.seconds >= 0.8 * curve[-1].seconds]
    loss = sum(point.loss for point in last) / len(last)
    value = sum(point.value for point in last) / len(last)
    return run.policy, run.commits, run.iteration, run.staleness, halved, finite(loss), finite(value)
