"""Runs scenarios one after the other; an interrupt keeps the results so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.studies.study import StudyContext
from paceline.virtual.plan import TrainingOutcome, TrainingPlan
from paceline.virtual.simulate import Scenario, begin, summary
from paceline.virtual.training import SimulatedTraining, begin_training


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The outcomes of scenarios; after an interrupt there are fewer, and the last one may be incomplete."""

    done: tuple[tuple[Scenario, TrainingOutcome], ...]  # without a problem, the curves are empty
    interrupted_at: str | None  # None if it was not

    @property
    def interrupted(self) -> bool:
        return self.interrupted_at is not None


def run_cases(
    cases: Sequence[Scenario],
    context: StudyContext,
    *,
    commits: int | None = None,
    seconds: float | None = None,
    plan: TrainingPlan | None = None,
) -> Runs:
    """Run the scenarios for ``commits``, or with a plan for ``seconds``; Ctrl-C returns the results so far.

    If there are none, a ``KeyboardInterrupt`` is raised that says how far the first scenario was.
    """
    for case in cases:
        if plan is not None:
            case.check_training()
        else:
            case.check(has_loss=False)
    done: list[tuple[Scenario, TrainingOutcome]] = []
    with context.interrupts.collected() as stop:
        for number, case in enumerate(cases):
            context.tell(f"{case.policy} x {case.workers}", number, len(cases))
            try:
                done.append((case, _run(case, commits, seconds, plan, stop)))
            except _CutShort as cut:
                where = f"interrupted in run {number + 1} of {len(cases)}, {cut}"
                if cut.outcome is not None:
                    done.append((case, cut.outcome))
                if not done:
                    raise KeyboardInterrupt(where) from None
                return Runs(done=tuple(done), interrupted_at=where)
    context.tell("done", len(cases), len(cases))
    return Runs(done=tuple(done), interrupted_at=None)


class _CutShort(Exception):
    """The user interrupted a run; ``outcome`` is that of the run so far, None before its first commit."""

    def __init__(self, outcome: TrainingOutcome | None, now: float) -> None:
        super().__init__(
            f"at {now:,.6g} virtual seconds, {'before its first commit' if outcome is None else 'cut short'}"
        )
        self.outcome = outcome


def _run(
    case: Scenario, commits: int | None, seconds: float | None, plan: TrainingPlan | None, stop: Sequence[object]
) -> TrainingOutcome:
    run: _TimesOnly | SimulatedTraining | None = None
    try:
        if plan is None:
            run = _TimesOnly(case, commits)
        else:
            assert seconds is not None
            run = begin_training(case, plan, seconds=seconds)
        run.finish(stop)
        if not stop:
            return run.outcome()
    except KeyboardInterrupt:
        pass
    raise _CutShort(None, 0.0) if run is None else _CutShort(_outcome_if_any(run.outcome), run.now)


class _TimesOnly:
    """A scenario without a problem, with the interface of ``SimulatedTraining``."""

    def __init__(self, case: Scenario, commits: int | None) -> None:
        self._case, self._cluster = case, begin(case)
        self._commits = commits

    @property
    def now(self) -> float:
        return self._cluster.now

    def finish(self, stop: Sequence[object]) -> None:
        self._cluster.run(commits=self._commits, stop=stop)

    def outcome(self) -> TrainingOutcome:
        return TrainingOutcome(run=summary(self._case, self._cluster), curve=())


def _outcome_if_any(outcome: Callable[[], TrainingOutcome]) -> TrainingOutcome | None:
    try:
        return outcome()
    except UsageError:  # no commit yet
        return None
