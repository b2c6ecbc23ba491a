"""Scenarios run one after the other, so that what is known when the user breaks off is not lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.studies.study import StudyContext
from paceline.virtual.simulate import Scenario, summary
from paceline.virtual.training import SimulatedTraining, TrainingOutcome, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What came of scenarios; fewer than were asked for, the last one cut short, if the user broke off."""

    done: tuple[tuple[Scenario, TrainingOutcome], ...]  # without a problem, the curves are empty
    broken_off: str | None  # where, if so

    @property
    def interrupted(self) -> bool:
        return self.broken_off is not None


def run_cases(
    cases: Sequence[Scenario],
    context: StudyContext,
    *,
    commits: int | None = None,
    seconds: float | None = None,
    course: TrainingPlan | None = None,
) -> Runs:
    """Run the scenarios for so many commits, or with a course for so many seconds; Ctrl-C ends with what is known.

    If nothing is known of even the first one, the ``KeyboardInterrupt`` that is raised says how far it was.
    """
    for case in cases:
        case.check(has_loss=course is not None)
    done: list[tuple[Scenario, TrainingOutcome]] = []
    with context.interrupts.collected() as stop:
        for number, case in enumerate(cases):
            context.tell(f"{case.policy} x {case.workers}", number, len(cases))
            try:
                done.append((case, _run(case, commits, seconds, course, stop)))
            except _CutShort as cut:
                where = f"interrupted in run {number + 1} of {len(cases)}, {cut}"
                if cut.known is not None:
                    done.append((case, cut.known))
                if not done:
                    raise KeyboardInterrupt(where) from None
                return Runs(done=tuple(done), broken_off=where)
    context.tell("done", len(cases), len(cases))
    return Runs(done=tuple(done), broken_off=None)


class _CutShort(Exception):
    """The user broke off; ``known`` is what there was by then."""

    def __init__(self, known: TrainingOutcome | None, now: float) -> None:
        super().__init__(
            f"at {now:,.6g} virtual seconds, {'before its first commit' if known is None else 'cut short'}"
        )
        self.known = known


def _run(
    case: Scenario, commits: int | None, seconds: float | None, course: TrainingPlan | None, stop: Sequence[object]
) -> TrainingOutcome:
    run: _TimesOnly | SimulatedTraining | None = None
    try:
        if course is None:
            run = _TimesOnly(case, commits)
        else:
            assert seconds is not None
            run = SimulatedTraining(case, course, seconds=seconds)
        run.finish(stop)
        if not stop:
            return run.outcome()
    except KeyboardInterrupt:
        pass
    raise _CutShort(None, 0.0) if run is None else _CutShort(_known(run.outcome), run.now)


class _TimesOnly:
    """A scenario without a problem, asked as a lesson is."""

    def __init__(self, case: Scenario, commits: int | None) -> None:
        self._case, self._cluster = case, case.cluster()
        self._commits = commits

    @property
    def now(self) -> float:
        return self._cluster.now

    def finish(self, stop: Sequence[object]) -> None:
        self._cluster.run(commits=self._commits, stop=stop)

    def outcome(self) -> TrainingOutcome:
        return TrainingOutcome(run=summary(self._case, self._cluster), curve=())


def _known(ask: Callable[[], TrainingOutcome]) -> TrainingOutcome | None:
    try:
        return ask()
    except UsageError:  # not one commit yet
        return None
