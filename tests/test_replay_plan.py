"""What a trace comes to, from records made up by hand."""

from __future__ import annotations

import pytest

from paceline.record.trace import (
    Began,
    Chose,
    Committed,
    Ended,
    Given,
    GivenMore,
    Hashed,
    Joined,
    Late,
    Pushed,
    Record,
    TraceError,
)
from paceline.replay.plan import RecordedBatch, read_plan


def given(rank: int, step: int, batch: int, version: int = 0, *, fresh: bool = True) -> Given:
    return Given(rank, step, version, fresh, 0, batch)


def pushed(rank: int, step: int, version: int = 0) -> Pushed:
    return Pushed(rank, step, version, 8, 0.5, 1, 0.0)


def committed(version: int, pushes: int) -> Committed:
    return Committed(version, pushes, 0.0)


BEGUN: list[Record] = [Began(0), given(0, 0, 0)]


def test_commits_are_made_of_the_pushes_before_them_in_their_order() -> None:
    plan = read_plan(
        [
            Began(0),
            *(Joined(rank, 0, 0.0) for rank in range(3)),
            *(given(rank, rank, rank) for rank in range(3)),
            pushed(2, 2),
            pushed(0, 0),
            committed(1, 2),
            given(2, 3, 3, 1),
            pushed(1, 1),  # stale by now
            pushed(2, 3, 1),
            committed(2, 2),
            Hashed(2, bytes(16)),
            Ended(True),
        ]
    )
    assert [[(push.told.rank, *push.batches) for push in commit.pushes] for commit in plan.commits] == [
        [(2, RecordedBatch(0, 2)), (0, RecordedBatch(0, 0))],
        [(1, RecordedBatch(0, 1)), (2, RecordedBatch(0, 3))],
    ]
    assert {version: len(pushes) for version, pushes in plan.computed_from().items()} == {0: 3, 1: 1}
    assert (plan.first, plan.last, dict(plan.hashes), plan.ended) == (0, 2, {2: [bytes(16)]}, Ended(True))


def test_a_step_may_have_several_batches() -> None:
    more = [GivenMore(0, 0, 0, 4), GivenMore(0, 0, 1, 0), GivenMore(0, 0, -1, -1)]
    plan = read_plan([Began(0), given(0, 0, 3), *more, pushed(0, 0), committed(1, 1)])
    assert plan.commits[0].pushes[0].batches == (RecordedBatch(0, 3), RecordedBatch(0, 4), RecordedBatch(1, 0))


def test_pushes_that_were_not_committed_are_lost_when_a_server_begins_again() -> None:
    lost: list[Record] = [given(0, 1, 1, 1), pushed(0, 1, 1), Ended(False)]
    again: list[Record] = [Began(1), Joined(0, 0, 0.0), given(0, 0, 1, 1), Late(0, 7, 0), pushed(0, 0, 1)]
    plan = read_plan([*BEGUN, pushed(0, 0), committed(1, 1), *lost, *again, committed(2, 1)])
    assert [len(commit.pushes) for commit in plan.commits] == [1, 1]
    assert plan.last == 2 and plan.ended is None


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        ([], "does not say that a server began"),
        ([*BEGUN, pushed(0, 0), committed(1, 1), Began(3)], "went on from version 3, .* made version 1"),
        ([*BEGUN, pushed(0, 0), committed(2, 1)], "version 2 was made of 1 pushes, and there are 1 after version 0"),
        ([*BEGUN, pushed(0, 0), committed(1, 2)], "version 1 was made of 2 pushes, and there are 1 after version 0"),
        ([*BEGUN, pushed(0, 1)], "worker 0 pushed step 1, and the trace does not say what batch"),
        ([*BEGUN, Joined(0, 1, 0.0), pushed(0, 0)], "worker 0 pushed step 0, and the trace does not say what batch"),
        ([Began(0), given(0, 0, -1), pushed(0, 0)], "worker 0 pushed step 0, and the trace does not say what batch"),
        ([*BEGUN, pushed(0, 0, 1)], "worker 0 pushed step 0 on version 1, which it cannot have had"),
        ([Began(0), given(0, 0, 0, fresh=False), pushed(0, 0)], "step 0 on version 0, which it cannot have had"),
    ],
)
def test_a_trace_that_cannot_be_true(records: list[Record], wanted: str) -> None:
    with pytest.raises(TraceError, match=wanted):
        read_plan(records)


def test_pushes_are_computed_in_the_order_in_which_they_came() -> None:
    """A step that goes on with its worker's own buffers needs those of the step before it, which is committed later."""
    plan = read_plan(
        [
            Began(0),
            given(0, 0, 0),
            pushed(0, 0),
            given(0, 1, 1, fresh=False),
            pushed(0, 1),
            Chose(0, 1, 1.0),
            committed(1, 1),
            given(0, 2, 2, 1),
            pushed(0, 2, 1),
            Chose(0, 2, 1.0),
            committed(2, 1),
        ]
    )
    assert [[push.told.step for push in commit.pushes] for commit in plan.commits] == [[1], [2]]
    assert [push.told.step for push in plan.computed_from()[0]] == [0, 1], "though the first is in no commit"
