"""The study of ``paceline simulate``: policies x workers x delays on the virtual cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from paceline.attacks import attacked
from paceline.errors import UsageError, unknown_name
from paceline.problems import Problem, ProblemOptions, load_problem
from paceline.quantities import SIZES, read_quantity
from paceline.report.series import Axis, Series
from paceline.studies.cases import Runs, run_cases
from paceline.studies.outcomes import (
    TIMES,
    curve_series,
    finite,
    formula_of,
    record_of,
    series_over_workers,
    staleness_formula,
    staleness_series,
    times_row,
)
from paceline.studies.study import Cell, Column, Study, StudyContext, StudyResult, option
from paceline.threads import one_thread
from paceline.virtual.formulas import NoFormulaError
from paceline.virtual.plan import TrainingOutcome, TrainingPlan
from paceline.virtual.simulate import Scenario

Depth = Literal["formula", "time"]
COMMITS = 1000
SECONDS = 500.0
OF_A_PROBLEM = (
    "model", "normalise", "xavier", "attack", "hostile", "codec", "optimizer", "batch_size", "seconds", "target",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Simulation(Study):
    """Try policies on a virtual cluster of any size; with a problem, train it with real gradients."""

    name: ClassVar[str] = "simulate"
    title: ClassVar[str] = "Policies on a virtual cluster"

    policies: tuple[str, ...] = option(("sync", "k-sync(k=4)", "k-async(k=4)", "async"), "With commas between.")
    workers: tuple[int, ...] = option((8,), "Numbers of workers.")
    delays: tuple[str, ...] = option(("1+exp(0.5)",), "How long a worker computes on a mini-batch.")
    depth: str = option("time", "formula: closed forms only, where there are any.")
    commits: int | None = option(None, f"Commits of every run without a problem.  [default: {COMMITS}]")
    link: str = option("instant", "Of the server, or of every peer, such as 50us 10Gbit/s.")
    size: str | None = option(None, "Of the parameters, such as 25MB.  [default: the model's]")
    examples: int = option(1, "In a mini-batch; under strong scaling, in that of all workers.")
    scaling: str = option("weak", "weak, or strong: the workers share one mini-batch.")
    topology: str = option("ring", "Of collectives: ring, tree or two-level.")
    hosts: int = option(1, "Of a two-level topology; link is then between hosts.")
    inside: str = option("instant", "Link inside the hosts.")
    notice: float = option(10.0, "Seconds until a failed worker is noticed.")
    problem: str | None = option(None, "Train this with real gradients.")
    model: str | None = option(None, "Another model than the problem's own.")
    normalise: bool = option(False, "Give images the mean 0 and the deviation 1.")
    xavier: bool = option(False, "Fill the model's weights by Xavier's rule.")
    attack: str | None = option(None, "What hostile workers push, such as sign-flip(scale=10).")
    hostile: int = option(0, "Workers that attack, from worker 0.")
    codec: str | None = option(None, "Of what workers exchange, such as 'top-k(density=0.001)'.")
    optimizer: str | None = option(None, "Of the server, or of every peer.  [default: the problem's]")
    batch_size: int | None = option(None, "Of each worker.  [default: the problem's]")
    seconds: float | None = option(None, f"Virtual seconds of every run with a problem.  [default: {SECONDS:g}]")
    points: int = option(40, "Evaluations in that time.")
    target: float | None = option(None, "Value of the problem's metric; the table has the time to reach it.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth not in get_args(Depth):
            raise unknown_name("depth", self.depth, get_args(Depth))
        for name in ("policies", "workers", "delays"):
            if not getattr(self, name):
                raise UsageError(f"--{name} is empty: name at least one, as in {Simulation.__dict__[name]}")
        if self.commits is not None and self.commits < 1:
            raise UsageError(f"commits must be at least 1, got {self.commits}")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise UsageError(f"seconds must be above 0 and finite, got {self.seconds:g}")
        for name in OF_A_PROBLEM:
            if self.problem is None and getattr(self, name) != Simulation.__dict__[name]:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for runs with a problem: name the problem too, as in --problem "
                    "digits (--commits is the length of runs without one)"
                )
        if self.problem is not None and self.commits is not None:
            raise UsageError(
                "--commits is for runs without a problem; those with one last for --seconds of virtual time"
            )
        if self.hostile > min(self.workers):
            raise UsageError(f"wanted {self.hostile} hostile workers, found {min(self.workers)}; lower --hostile")
        if self.depth == "formula" and self.problem is not None:
            raise UsageError("--depth formula does not train a problem: leave out --depth formula or --problem")

    def run(self, context: StudyContext) -> StudyResult:
        cases = self._cases(context)
        if self.depth == "formula":
            return self._formulas(cases, context)
        with one_thread():
            problem, plan = self._plan(context)
            runs = run_cases(
                cases, context, commits=self.commits or COMMITS, seconds=self.seconds or SECONDS, plan=plan
            )
        return self._result(runs, problem, context)

    def _cases(self, context: StudyContext) -> list[Scenario]:
        shared: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("link", "examples", "scaling", "topology", "hosts", "inside", "notice")
        }
        nbytes = 0.0 if self.size is None else read_quantity(self.size, SIZES)
        return [
            Scenario(policy=policy, workers=workers, delay=delay, nbytes=nbytes, seed=context.seed, **shared)
            for delay in self.delays
            for workers in self.workers
            for policy in self.policies
        ]

    def _plan(self, context: StudyContext) -> tuple[Problem | None, TrainingPlan | None]:
        if self.problem is None:
            return None, None
        options = ProblemOptions(
            data=context.data, model=self.model, seed=context.seed, normalise=self.normalise, xavier=self.xavier
        )
        problem = attacked(load_problem(self.problem, options), self.attack, self.hostile)
        return problem, TrainingPlan(
            problem=problem,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            codec=self.codec,
            points=self.points,
        )

    def _formulas(self, cases: list[Scenario], context: StudyContext) -> StudyResult:
        found: list[tuple[Scenario, float | None]] = []
        for number, case in enumerate(cases):
            context.tell(str(case.policy), number, len(cases))
            case.check(has_loss=True)
            found.append((case, formula_of(case)))
        context.tell("done", len(cases), len(cases))
        if not series_over_workers(found):
            raise NoFormulaError("no formula is known for any of these; leave out --depth formula to simulate them")
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=(*TIMES[:3], Column(name="s/commit", decimals=4), Column(name="stale")),
            rows=tuple(
                (str(case.policy), case.workers, str(case.delay), seconds, staleness_formula(case))
                for case, seconds in found
            ),
            x_axis=Axis(label="workers", scale="log"),
            y_axis=Axis(label="seconds per commit", scale="log"),
            series=series_over_workers(found),
            notes=("Closed forms (Dutta et al., 2018); messages take no time. A - means that none is known.",),
        )

    def _result(self, runs: Runs, problem: Problem | None, context: StudyContext) -> StudyResult:
        columns, rows = list(TIMES), [times_row(case, outcome) for case, outcome in runs.done]
        if problem is not None:
            columns += [Column(name="loss", decimals=4), Column(name=problem.metric.name, decimals=4)]
            columns += [] if self.target is None else [Column(name=f"s to {self.target:g}", decimals=1)]
            rows = [(*row, *self._training_cells(problem, run)) for row, (_, run) in zip(rows, runs.done, strict=True)]
        x_axis, y_axis, series = self._plot(runs, problem)
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=tuple(columns),
            rows=tuple(rows),
            x_axis=x_axis,
            y_axis=y_axis,
            series=series,
            notes=self._notes(problem),
            records=tuple(record_of(outcome) for _, outcome in runs.done),
            missing=self._missing(runs, problem),
            interrupted=runs.interrupted,
        )

    def _training_cells(self, problem: Problem, outcome: TrainingOutcome) -> tuple[Cell, ...]:
        last = outcome.curve[-1] if outcome.curve else None
        shown = (None, None) if last is None else (finite(last.loss), finite(last.value))
        return shown if self.target is None else (*shown, outcome.time_to(problem, self.target))

    def _missing(self, runs: Runs, problem: Problem | None) -> str | None:
        if runs.interrupted:
            return runs.interrupted_at
        if self.target is None or problem is None:
            return None
        late = [str(case.policy) for case, outcome in runs.done if outcome.time_to(problem, self.target) is None]
        if not late:
            return None
        return (
            f"{problem.metric.name} {self.target:g} was not reached by {', '.join(late)} within "
            f"{self.seconds or SECONDS:g} virtual seconds; give more with --seconds, or an easier --target"
        )

    def _plot(self, runs: Runs, problem: Problem | None) -> tuple[Axis, Axis, tuple[Series, ...]]:
        if problem is not None:
            return (
                Axis(label="virtual seconds"),
                Axis(label="test loss", scale="log"),
                tuple(curve_series(case, outcome) for case, outcome in runs.done if outcome.curve),
            )
        if len(self.workers) > 1:
            throughput = [(case, finite(outcome.run.throughput)) for case, outcome in runs.done]
            axes = Axis(label="workers", scale="log"), Axis(label="examples per second", scale="log")
            return (*axes, series_over_workers(throughput))
        return (
            Axis(label="staleness in commits"),
            Axis(label="share of pushes", scale="log"),
            tuple(staleness_series(case, outcome) for case, outcome in runs.done),
        )

    def _notes(self, problem: Problem | None) -> tuple[str, ...]:
        notes = [
            "Seconds are those of the virtual clock: drawn compute times, and messages by the link's model. "
            "Scaling efficiency is the time of an iteration on one worker over the time per commit on all; it can be "
            "above 100 if a commit has fewer pushes than there are workers, and under strong scaling. Parallel "
            "efficiency is throughput over that of as many workers that never wait. Stale is the mean number of "
            "commits between read and use. Waits and wasted (cancelled, or too late) are shares of the workers' time.",
            "The formula is the closed form of the time per commit without messages, where one is known; +- is the "
            "standard error of the mean as if commits were independent.",
        ]
        if problem is not None:
            notes.append(
                f"{problem.name} with real gradients, each of its worker's own parameters; one process, the same "
                "bits for the same seed."
            )
        if self.attack is not None:
            notes.append(f"Hostile workers, from worker 0: {self.hostile}. Attack: {self.attack}.")
        return tuple(notes)
