"""The slowest of many workers, as in the deck's simulation of X = 1 + Exp(0.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.delays.delay import parse_delay
from paceline.errors import UsageError
from paceline.report.series import Axis, Series
from paceline.studies.cases import Runs, run_cases
from paceline.studies.checks import check_different
from paceline.studies.outcomes import record_of
from paceline.studies.study import Cell, Column, Study, StudyContext, StudyResult, option
from paceline.threads import one_thread
from paceline.virtual.formulas import NoFormulaError, order_statistic
from paceline.virtual.plan import TrainingOutcome
from paceline.virtual.simulate import Scenario


@dataclass(frozen=True, kw_only=True)
class StragglersStudy(Study):
    """Measure the cost of waiting for the slowest of n workers, for all but a few, and for the fastest.

    The policies run on the virtual cluster: sync waits for all, k-sync with k = 1 for the fastest, and k-sync with a
    few backup workers for all but the slowest.
    """

    name: ClassVar[str] = "stragglers"
    title: ClassVar[str] = "Waiting for the slowest of n workers"

    workers: tuple[int, ...] = option((10, 100, 1000, 10_000), "Numbers of workers.")
    delay: str = option("1+exp(0.5)", "How long a worker computes on a mini-batch.")
    iterations: int = option(1000, "Rounds of every run.")
    backup: float = option(4.0, "Per cent of the workers that need not be waited for; at least one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_delay(self.delay)
        check_different(self, "workers", least=2)
        if self.iterations < 2:
            raise UsageError(f"study {self.name!r}: iterations must be at least 2, got {self.iterations}")
        if not 0 < self.backup < 100:
            raise UsageError(f"study {self.name!r}: backup is a percentage between 0 and 100, got {self.backup:g}")

    def run(self, context: StudyContext) -> StudyResult:
        numbers = sorted(self.workers)
        cases = [
            Scenario(policy=policy, workers=workers, delay=self.delay, seed=context.seed)
            for workers in numbers
            for policy in ("sync", f"k-sync(k={workers - self._spare(workers)})", "k-sync(k=1)")
        ]
        with one_thread():
            runs = run_cases(cases, context, commits=self.iterations)
        measured = self._by_number(runs)
        if not measured:
            raise KeyboardInterrupt(runs.interrupted_at)
        rows = tuple(self._row(workers, *found) for workers, found in measured.items())
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=(
                Column(name="workers"),
                Column(name="slowest"),
                Column(name="+-"),
                Column(name="formula"),
                Column(name="off %", decimals=1),
                Column(name="slowest/mean"),
                Column(name="waiting %", decimals=1),
                Column(name="backup workers"),
                Column(name="without them"),
                Column(name="formula"),
                Column(name="fastest"),
                Column(name="slowest/fastest"),
            ),
            rows=rows,
            x_axis=Axis(label="workers", scale="log"),
            y_axis=Axis(label="time of a round"),
            series=self._series(measured),
            notes=self._notes(),
            records=tuple(record_of(outcome) for _, outcome in runs.done),
            missing="interrupted: the larger numbers of workers are missing" if runs.interrupted else None,
            interrupted=runs.interrupted,
        )

    def _spare(self, workers: int) -> int:
        return max(1, round(workers * self.backup / 100))

    def _by_number(self, runs: Runs) -> dict[int, tuple[TrainingOutcome, TrainingOutcome, TrainingOutcome]]:
        """The three runs for each number of workers, if all three were made."""
        done = [outcome for _, outcome in runs.done]
        whole = [tuple(done[index : index + 3]) for index in range(0, len(done) - 2, 3)]
        return {trio[0].run.workers: (trio[0], trio[1], trio[2]) for trio in whole}

    def _row(
        self, workers: int, all_of_them: TrainingOutcome, most: TrainingOutcome, first: TrainingOutcome
    ) -> tuple[Cell, ...]:
        slowest, spare = all_of_them.run, self._spare(workers)
        exact, mean = self._formula(workers, workers), parse_delay(self.delay).mean(0)
        return (
            workers,
            slowest.iteration,
            slowest.iteration_error,
            exact,
            None if exact is None else 100 * abs(slowest.iteration / exact - 1),
            slowest.iteration / mean,
            100 * slowest.waiting,
            spare,
            most.run.iteration,
            self._formula(workers - spare, workers),
            first.run.iteration,
            slowest.iteration / first.run.iteration,
        )

    def _formula(self, k: int, workers: int) -> float | None:
        try:
            return order_statistic(parse_delay(self.delay), k, workers)
        except NoFormulaError:
            return None

    def _series(
        self, measured: dict[int, tuple[TrainingOutcome, TrainingOutcome, TrainingOutcome]]
    ) -> tuple[Series, ...]:
        numbers = tuple(measured)
        labels = ("slowest", f"all but {self.backup:g} %", "fastest")
        found = [
            Series(
                label=label,
                panel=self.delay,
                x=numbers,
                y=tuple(trio[index].run.iteration for trio in measured.values()),
            )
            for index, label in enumerate(labels)
        ]
        exact = [(workers, value) for workers in numbers if (value := self._formula(workers, workers)) is not None]
        if exact:
            x, y = zip(*exact, strict=True)
            found.append(Series(label="slowest, formula", panel=self.delay, x=x, y=y))
        return tuple(found)

    def _notes(self) -> tuple[str, ...]:
        return (
            'After "Simulation" in the lecture on parallel SGD, X = 1 + Exp(0.5) for n = 10 to 10,000. Its remark that '
            "the slowest is log n times slower than the fastest is loose: with D + Exp(rate), the slowest takes "
            "D + H_n/rate and the fastest D + 1/(n rate) on average, H_n being the n-th harmonic number.",
            f"{self.iterations:,} rounds of the policies on the virtual cluster; +- is the standard error of the mean.",
            "Backup workers: k-sync commits when all but those have answered, and cancels them (Chen et al., 2016).",
        )
