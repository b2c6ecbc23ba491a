"""Which groups follow from the log of a run, however its readers read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.launch.roster import Doing, Formation, Member, Roster, RunLog, Status, make_run_log, open_run_log


@pytest.fixture
def log() -> Iterator[int]:
    with open_run_log() as file:
        assert file is not None
        yield file


def line(event: str, worker: int, incarnation: int = 0, **values: Any) -> dict[str, Any]:
    return {"event": event, "member": [worker, incarnation], "session": 0, **values}


def here(
    worker: int, incarnation: int = 0, *, steps: int = 0, operations: int = 0, doing: Doing = "turn", new: bool = False
) -> dict[str, Any]:
    return line("here", worker, incarnation, status=Status(steps, operations, doing, not new))


def formed(roster: Roster, *lines: dict[str, Any]) -> list[Formation]:
    return [found for each in lines if (found := roster.hear(each)) is not None]


def begun(workers: int) -> Roster:
    """A run that all have begun together."""
    roster = Roster(0, workers)
    (first,) = formed(roster, *(here(worker, new=True) for worker in range(workers)))
    assert first.source is None and [member.worker for member in first.members] == list(range(workers))
    roster.hear(line("begun", 0))
    return roster


def test_all_begin_together_in_the_order_of_their_numbers() -> None:
    roster = Roster(0, 3)
    assert formed(roster, here(2, new=True), here(0, new=True)) == []
    assert [member.worker for member in roster.missing] == [1]
    (found,) = formed(roster, here(1, new=True))
    assert found.members == (Member(0), Member(1), Member(2))


def test_who_has_died_or_left_is_not_waited_for() -> None:
    roster = begun(4)
    assert formed(roster, here(3), line("died", 1), here(0)) == []
    (found,) = formed(roster, line("left", 2))
    assert (found.number, found.members) == (2, (Member(0), Member(3)))


def test_another_session_is_another_matter() -> None:
    roster = begun(2)
    assert formed(roster, {**here(0), "session": 1}, {**line("left", 1), "session": 1}, here(1)) == []


@pytest.mark.parametrize("doing", ["turn", "step", "exchange", "other"])
def test_others_join_where_a_step_begins_and_come_last(doing: Doing) -> None:
    """The replacement of worker 0 too: the rank 0 of before has the run's directory."""
    roster = begun(3)
    assert formed(roster, line("died", 0), here(0, 1, new=True), here(1, doing=doing)) == []
    assert roster.newcomers
    (found,) = formed(roster, here(2, doing=doing))
    expected = [Member(1), Member(2), *([Member(0, 1)] if doing == "turn" else [])]
    assert list(found.members) == expected and roster.newcomers == (doing != "turn")
    (later,) = formed(roster, here(1), here(2), *([here(0, 1)] if doing == "turn" else []))
    assert later.members == (Member(1), Member(2), Member(0, 1))


@pytest.mark.parametrize(
    ("own", "furthest", "behind", "copies"),
    [
        (Status(4, 9, "step", True), Status(4, 9, "step", True), False, False),
        (Status(4, 9, "step", True), Status(5, 10, "step", True), True, True),
        (Status(5, 9, "exchange", True), Status(5, 10, "other", True), True, True),
        (Status(5, 9, "other", True), Status(5, 10, "step", True), True, False),
        (Status(5, 9, "other", True), Status(7, 10, "exchange", True), True, False),
        (Status(5, 9, "other", True), Status(7, 11, "exchange", True), True, True),
        (Status(), Status(5, 10, "step", True), True, True),
        (Status(5, 9, "other", True, catches_up=True), Status(8, 13, "exchange", True), True, False),
        (Status(5, 9, "exchange", True, catches_up=True), Status(5, 10, "other", True), True, False),
        (Status(5, 9, "end", True, catches_up=True), Status(5, 10, "other", True), True, True),
        (Status(catches_up=True), Status(5, 10, "turn", True), True, True),
    ],
)
def test_who_copies(own: Status, furthest: Status, behind: bool, copies: bool) -> None:
    formation = Formation(2, (Member(0), Member(1)), (own, furthest))
    assert (formation.is_behind(0), formation.copies(0)) == (behind, copies)
    assert not formation.copies(1) and not formation.is_behind(1)


def test_an_invitation_holds_until_the_next_group() -> None:
    roster = begun(2)
    roster.hear(line("invite", 0, after=7))
    roster.hear(line("invite", 0, after=9))
    assert roster.invited_after == 7
    assert len(formed(roster, here(0), here(1))) == 1
    assert roster.invited_after is None


@pytest.mark.parametrize("ending", ["died", "left"])
def test_who_comes_when_nobody_has_the_state_finds_no_group(ending: str) -> None:
    roster = begun(2)
    assert formed(roster, line("died", 0), here(0, 1, new=True), line(ending, 1)) == []
    assert roster.abandoned and roster.left == ({Member(1)} if ending == "left" else set())


def test_a_run_that_had_not_begun_begins_again() -> None:
    roster = Roster(0, 2)
    formed(roster, here(0, new=True), here(1, new=True))
    (found,) = formed(roster, line("died", 0), here(1, new=True))
    assert found.source is None and found.members == (Member(1),)


events = st.one_of(
    st.builds(here, st.integers(0, 3), st.integers(0, 2), steps=st.integers(0, 3), new=st.booleans()),
    st.builds(line, st.sampled_from(["died", "left", "begun"]), st.integers(0, 3), st.integers(0, 2)),
    st.builds(lambda after: line("invite", 0, after=after), st.integers(0, 9)),
)


@given(st.lists(events, max_size=40), st.data())
def test_all_readers_find_the_same_groups(lines: list[dict[str, Any]], data: st.DataObject) -> None:
    """Each reads as many lines at a time as there are; nobody who has died or left is in a group, and nobody twice."""
    file = make_run_log()
    try:
        logs = [RunLog(file) for _ in range(2)]
        rosters = [Roster(0, 4) for _ in logs]
        found: list[list[Formation]] = [[], []]

        def read(reader: int) -> None:
            found[reader] += formed(rosters[reader], *logs[reader].read())

        gone: set[Member] = set()
        for each in lines:
            member = Member(*each["member"])
            if each["event"] == "here" and (
                member in gone or (not each["status"].has_state and member in rosters[0]._since)
            ):
                continue  # the dead do not write; who has had the state comes with it
            if each["event"] == "here" and each["status"].has_state and member not in rosters[0]._since:
                continue
            gone |= {member} if each["event"] in ("died", "left") else set()
            values = {name: value for name, value in each.items() if name not in ("event", "member")}
            logs[0].append(each["event"], member, **values)
            read(0)
            if data.draw(st.booleans()):
                read(1)
            if found[0]:
                assert len({*found[0][-1].members}) == len(found[0][-1].members)
        read(1)
        assert found[0] == found[1]
        assert [formation.number for formation in found[0]] == list(range(1, len(found[0]) + 1))
    finally:
        os.close(file)


def test_a_line_that_was_cut_off_is_left_out(log: int) -> None:
    writer, reader = RunLog(log), RunLog(log)
    os.write(log, b'\n{"event": "he')
    assert reader.read() == []
    writer.append("died", Member(2, 1))
    assert reader.read() == [{"event": "died", "member": [2, 1]}]
    assert reader.read() == []
