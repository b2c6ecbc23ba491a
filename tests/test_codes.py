"""Codes of gradients: whichever workers are enough, the weights make the sum of all parts of their pushes."""

from __future__ import annotations

from itertools import combinations

import pytest
from hand import Hand
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.policies import Draco, GradientCoding
from paceline.policies.coded import Code, CodedState
from paceline.policies.draco import groups_of
from paceline.policies.gradient_coding import MOST_CANCELLED, Cyclic, code_for, most_stragglers


def error_of(code: Code, places: list[int]) -> float:
    """How far the weighted sum of these rows is from ones."""
    weights = code.weights(places)
    assert weights is not None
    sums = [0.0] * len(code.rows)
    for weight, place in zip(weights, places, strict=True):
        for part, coefficient in code.rows[place]:
            sums[part] += weight * coefficient
    return max(abs(total - 1) for total in sums)


@pytest.mark.parametrize("workers", range(1, 13))
def test_any_workers_but_the_stragglers_are_enough(workers: int) -> None:
    for stragglers in range(workers):
        code = code_for(workers, stragglers)
        assert {len(row) for row in code.rows} == {stragglers + 1}
        for places in combinations(range(workers), workers - stragglers):
            assert code.enough(places)
            assert error_of(code, [*places]) < 1e-10


@given(data=st.data(), workers=st.integers(13, 32))
def test_larger_codes_decode_as_well(data: st.DataObject, workers: int) -> None:
    stragglers = most_stragglers(workers, data.draw(st.integers(1, workers - 1)))
    code = code_for(workers, stragglers)
    places = data.draw(st.permutations(range(workers)))[: workers - stragglers]
    assert error_of(code, places) < 1e-10
    if isinstance(code, Cyclic):
        assert code.cancelled(places) <= MOST_CANCELLED, "stragglers in a row are the worst"


def test_codes_that_lose_the_digits_of_doubles_are_not_used() -> None:
    assert Cyclic(26, 24).amiss([9, 10]) > 1e-10
    assert most_stragglers(26, 24) < 24


@given(workers=st.integers(2, 12), data=st.data())
def test_fewer_are_not_enough(workers: int, data: st.DataObject) -> None:
    stragglers = data.draw(st.integers(0, workers - 1))
    code = code_for(workers, stragglers)
    places = data.draw(st.lists(st.integers(0, workers - 1), unique=True, max_size=workers))
    if code.enough(places):
        assert error_of(code, places) < 1e-10
    else:
        assert code.weights(places) is None and len(places) < workers - stragglers


def test_groups_that_compute_the_same_need_one_worker_each() -> None:
    code = code_for(6, 2)
    assert [{part for part, _ in row} for row in code.rows] == [{0, 1, 2}] * 3 + [{3, 4, 5}] * 3
    assert code.enough([2, 4]) and not code.enough([0, 1, 2])
    assert code.weights([2, 1, 4, 5]) == [1.0, 0.0, 1.0, 0.0]


def test_worker_i_has_the_parts_from_i_on() -> None:
    rows = code_for(7, 2).rows
    assert [sorted(part for part, _ in row) for row in rows] == [
        sorted((i + k) % 7 for k in range(3)) for i in range(7)
    ]


# The policy ----------------------------------------------------------------------------------------------------------


def test_the_first_of_each_group_are_committed_and_the_rest_cancelled() -> None:
    hand = Hand(GradientCoding(stragglers=1), 4)
    assert hand.push(1) == []
    assert hand.push(2) == ["commit 1 2", "cancel 0 3", "send 0 1 2 3"]
    assert hand.commits[0].weights == (1.0, 1.0)
    assert hand.push(0) == hand.push(1) == []
    assert hand.push(3) == ["commit 0 1 3", "cancel 2", "send 0 1 2 3"]
    assert hand.commits[1].weights == (1.0, 0.0, 1.0)


def test_any_n_minus_s_are_committed() -> None:
    hand = Hand(GradientCoding(stragglers=1), 3)
    assert hand.push(2) == []
    assert hand.push(0) == ["commit 0 2", "cancel 1", "send 0 1 2"]


def test_a_newcomer_takes_part_from_the_next_round_on() -> None:
    hand = Hand(GradientCoding(stragglers=1), 3)
    hand.join(7)
    assert hand.ask(7) == []
    hand.push(0)
    assert hand.push(1) == ["commit 0 1", "cancel 2", "send 0 1 2 7"]
    assert hand.work[7, hand.workers[7].step or 0].num_parts == 4


def test_those_who_wait_do_what_more_dead_than_stragglers_leave() -> None:
    hand = Hand(GradientCoding(stragglers=1), 3)
    assert hand.leave(0) == []
    assert hand.push(1) == []
    assert hand.leave(2) == ["send 1"]
    assert hand.push(1) == ["commit 1 1", "send 1"]
    assert hand.work[1, hand.workers[1].step or 0].num_parts == 1


def test_a_newcomer_does_what_is_missing() -> None:
    hand = Hand(GradientCoding(stragglers=1), 3)
    hand.push(1)
    for worker in (0, 1, 2):
        assert hand.leave(worker) == []
    hand.join(5)
    assert hand.ask(5) == ["send 5"]
    assert hand.push(5) == ["commit 5 1", "send 5"]


def test_one_that_comes_back_does_its_own_part() -> None:
    hand = Hand(GradientCoding(stragglers=1), 3)
    before = hand.work[2, 2]
    hand.leave(2)
    hand.join(2, incarnation=1)
    assert hand.ask(2) == ["send 2"]
    assert hand.work[2, 3] == before


def test_a_round_that_cannot_be_decoded_changes_nothing() -> None:
    hand = Hand(GradientCoding(stragglers=1), 3)
    assert hand.skip(0) == []
    assert hand.push(2) == []
    assert hand.skip(1) == ["commit 2", "send 0 1 2"]
    assert hand.commits[0].weights == (0.0,)
    for worker in (0, 1):
        assert hand.skip(worker) == []
    assert hand.skip(2) == ["send 0 1 2"], "nothing was pushed"
    assert isinstance(hand.state, CodedState) and hand.state.round == 3


def test_places_without_a_batch_are_not_waited_for() -> None:
    hand = Hand(GradientCoding(stragglers=1), 3)
    assert hand.idle(1) == []  # only part 0 has a batch, which workers 0 and 2 have
    assert hand.push(2) == ["commit 2", "cancel 0", "send 0 1 2"]


@pytest.mark.parametrize("stragglers", [0, -1])
def test_at_least_one_straggler(stragglers: int) -> None:
    with pytest.raises(UsageError, match="stragglers must be at least 1"):
        GradientCoding(stragglers=stragglers)


def test_more_stragglers_than_workers_are_refused() -> None:
    with pytest.raises(UsageError, match="use at most stragglers=2, or more workers"):
        GradientCoding(stragglers=3).begin(3)


def test_inaccurate_codes_are_refused_at_the_start_and_not_used_later() -> None:
    with pytest.raises(UsageError, match=r"use stragglers=5, or a number of workers that is a multiple of 7"):
        GradientCoding(stragglers=6).begin(20)
    with pytest.raises(UsageError, match=r"use stragglers=1, or a number of workers that is a multiple of 3"):
        GradientCoding(stragglers=2).begin(1000)
    assert {len(row) for row in GradientCoding(stragglers=6).code(20).rows} == {6}


# DRACO's groups ------------------------------------------------------------------------------------------------------


@given(workers=st.integers(1, 40), faulty=st.integers(1, 4))
def test_groups_share_out_all_parts_and_are_large_enough(workers: int, faulty: int) -> None:
    code = groups_of(workers, faulty)
    groups = [code.group(place) for place in range(workers)]
    sizes = [groups.count(group) for group in range(groups[-1] + 1)]
    assert min(sizes) >= min(workers, 2 * faulty + 1) and max(sizes) - min(sizes) <= 1
    assert [part for group in range(len(sizes)) for part, _ in code.rows[groups.index(group)]] == [*range(workers)]
    assert workers <= faulty or error_of(code, [*range(workers)]) < 1e-12


def test_all_workers_are_waited_for_and_each_group_has_the_weight_1() -> None:
    hand = Hand(Draco(faulty=1), 7)
    for worker in (6, 3, 1, 0, 5, 4):
        assert hand.push(worker) == []
    assert hand.push(2) == ["commit 0 1 2 3 4 5 6", "send 0 1 2 3 4 5 6"]
    assert hand.commits[0].groups == (0, 0, 0, 1, 1, 1, 1)
    assert hand.commits[0].weights == pytest.approx([1 / 3] * 3 + [1 / 4] * 4)


def test_the_rest_of_a_group_votes_without_its_dead() -> None:
    hand = Hand(Draco(faulty=1), 3)
    hand.push(0)
    assert hand.leave(1) == []
    assert hand.push(2) == ["commit 0 2", "send 0 2"]
    assert hand.commits[0].weights == (0.5, 0.5)


def test_a_worker_of_another_group_takes_the_place_of_the_dead() -> None:
    hand = Hand(Draco(faulty=1), 6)
    for worker in (0, 1):
        hand.push(worker)
    assert hand.leave(2) == [], "nobody votes twice in a group"
    assert hand.push(3) == ["send 3"]
    assert hand.work[3, hand.workers[3].step or 0].parts == hand.work[0, 0].parts
    assert hand.push(3) == hand.push(4) == []
    assert hand.push(5) == ["commit 0 1 3 3 4 5", "send 0 1 3 4 5"]
    assert hand.commits[0].groups == (0, 0, 0, 1, 1, 1)


def test_a_group_that_cannot_have_a_majority_changes_nothing() -> None:
    hand = Hand(Draco(faulty=1), 3)
    hand.push(0)
    assert hand.leave(1) == []
    assert hand.leave(2) == ["commit 0", "send 0"]
    assert hand.commits[0].weights == (0.0,)


def test_one_whose_gradients_are_not_finite_has_no_vote() -> None:
    hand = Hand(Draco(faulty=1), 3)
    hand.push(0)
    assert hand.skip(1) == []
    assert hand.push(2) == ["commit 0 2", "send 0 1 2"]


def test_too_few_workers_for_a_majority_are_refused() -> None:
    with pytest.raises(UsageError, match="use at least 5 workers, or at most faulty=1"):
        Draco(faulty=2).begin(4)
    with pytest.raises(UsageError, match="faulty must be at least 1, got 0"):
        Draco(faulty=0)
