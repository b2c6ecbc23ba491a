"""The base of studies that train a problem in several ways and compare them."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

from paceline.problems import Problem, ProblemOptions, load_problem
from paceline.report.series import Axis, Series
from paceline.studies.arms import Arm, Trials, error, first, run_arms
from paceline.studies.checks import check_counts
from paceline.studies.kept import KeptTrials
from paceline.studies.study import Cell, Column, Study, StudyContext, StudyResult, option


@dataclass(frozen=True, kw_only=True)
class ArmStudy(Study):
    """Train every arm with every seed; a subclass says which arms, and reads a table and verdicts from the trials.

    The options here are those of all such studies; a subclass repeats one where its default or its help is another.
    """

    problem: str = option("mnist", "What to train on; digits needs no data.")
    model: str | None = option("net2", "The network.")
    examples: int | None = option(None, "Training examples to use, the first ones.  [default: all]")
    batch_size: int = option(16, "Of each worker.")
    seeds: int = option(5, "Runs of every line.")
    keep: str | None = option(None, "File to which finished trainings are added; those in it are not made again.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "batch_size", "seeds")

    @abstractmethod
    def arms(self, problem: Problem) -> list[Arm]:
        """The ways to train, in the order of the table."""

    @abstractmethod
    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        """Those of the table; a name stands for a column with two decimals."""

    @abstractmethod
    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        """The row of an arm that has trials."""

    @abstractmethod
    def notes(self) -> tuple[str, ...]:
        """On the source and the settings."""

    @abstractmethod
    def verdicts(self, trials: Trials) -> list[str]:
        """What holds of the claims, as far as the trials show it."""

    def rows(self, trials: Trials) -> list[tuple[Cell, ...]]:
        """One for every arm, unless a study has other rows."""
        return [self.row(arm, trials) for arm in trials.arms()]

    def axes(self) -> tuple[Axis, Axis]:
        """Of the plot, x first."""
        return Axis(label="epoch"), Axis(label="test error (%)", scale="log")

    def series(self, trials: Trials) -> list[Series]:
        """The curves of the plot: the test error over the epochs, unless a study has others."""
        return [trials.curve(arm, error) for arm in trials.arms()]

    def problem_options(self, context: StudyContext) -> ProblemOptions:
        """How to load the problem."""
        return ProblemOptions(data=context.data, model=self.model, seed=context.seed)

    def missing(self, trials: Trials) -> str | None:
        """What could not be found out; None: nothing."""
        return None

    def run(self, context: StudyContext) -> StudyResult:
        problem = load_problem(self.problem, self.problem_options(context))
        if self.examples is not None:
            problem = dataclasses.replace(problem, train=first(problem.train, self.examples))
        trials = run_arms(self.arms(problem), problem, self.seeds, context, self._kept(context))
        columns, (x_axis, y_axis) = self.columns(trials), self.axes()
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=tuple(Column(name=column) if isinstance(column, str) else column for column in columns),
            rows=tuple(self.rows(trials)),
            x_axis=x_axis,
            y_axis=y_axis,
            series=tuple(self.series(trials)),
            notes=(*self.notes(), *self.verdicts(trials)),
            records=tuple(trial.as_record() for trial in trials.done),
            missing=trials.interrupted_at or self.missing(trials),
            interrupted=trials.interrupted_at is not None,
        )

    def _kept(self, context: StudyContext) -> KeptTrials | None:
        if self.keep is None:
            return None
        loaded = {"problem": self.problem, "model": self.model, "examples": self.examples, "first seed": context.seed}
        return KeptTrials(Path(self.keep), loaded)

    def note_on_seeds(self) -> str:
        """Say what the intervals and verdicts are made of."""
        return (
            f"Seeds: {self.seeds}. Numbers are means over them, +- half the 95 % interval. A claim holds if that of "
            "the paired differences is above 0."
        )
