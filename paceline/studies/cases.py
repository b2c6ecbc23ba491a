"""Scenarios run one after the other, so that what is known when the user breaks off is not lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.studies.study import StudyContext
from paceline.virtual.learning import Course, Learned, Lesson
from paceline.virtual.simulate import Scenario, summary


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What came of scenarios; fewer than were asked for, the last one cut short, if the user broke off."""

    done: tuple[tuple[Scenario, Learned], ...]  # without a problem, the curves are empty
    interrupted: bool


def run_cases(
    cases: Sequence[Scenario],
    context: StudyContext,
    *,
    commits: int | None = None,
    seconds: float | None = None,
    course: Course | None = None,
) -> Runs:
    """Run the scenarios for so many commits, or with a course for so many seconds; Ctrl-C ends with what is known."""
    for case in cases:
        case.check(has_loss=course is not None)
    done: list[tuple[Scenario, Learned]] = []
    for number, case in enumerate(cases):
        context.tell(f"{case.policy} x {case.workers}", number, len(cases))
        try:
            done.append((case, _run(case, commits, seconds, course)))
        except _CutShort as cut:
            return Runs(done=tuple([*done, (case, cut.known)] if cut.known else done), interrupted=True)
    context.tell("done", len(cases), len(cases))
    return Runs(done=tuple(done), interrupted=False)


class _CutShort(Exception):
    """The user broke off; ``known`` is what there was by then."""

    def __init__(self, known: Learned | None) -> None:
        self.known = known


def _run(case: Scenario, commits: int | None, seconds: float | None, course: Course | None) -> Learned:
    if course is not None:
        assert seconds is not None
        lesson = Lesson(case, course, seconds=seconds)
        try:
            lesson.finish()
        except KeyboardInterrupt:
            raise _CutShort(_known(lesson.learned)) from None
        return lesson.learned()
    cluster = case.cluster()
    try:
        cluster.run(commits=commits)
    except KeyboardInterrupt:
        raise _CutShort(_known(lambda: Learned(run=summary(case, cluster), curve=()))) from None
    return Learned(run=summary(case, cluster), curve=())


def _known(ask: Callable[[], Learned]) -> Learned | None:
    try:
        return ask()
    except UsageError:  # not one commit yet
        return None
