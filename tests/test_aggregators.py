"""Aggregators: what each makes of the pushes of a commit, and what becomes of commits that are too small for it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from led_by_hand import cluster_of_hands

from paceline.aggregators import (
    AGGREGATORS,
    Aggregator,
    DelayCompensated,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    Needs,
    TrimmedMean,
    Vote,
    aggregator_of,
    parse_aggregator,
)
from paceline.errors import PacelineError, UsageError
from paceline.policies import ServerPolicy, parse_policy
from paceline.server import live
from paceline.store.pairs import compare_pushes, keep_apart, matrix_of

ALL_AGGREGATORS: list[Aggregator] = [
    Mean(),
    Median(),
    TrimmedMean(drop=1),
    Krum(faulty=0),
    MultiKrum(faulty=0, keep=2),
    GeometricMedian(),
    DelayCompensated(scale=0.5),
    DelayCompensated(scale=2.0, momentum=0.95),
    Vote(faulty=1),
]
every_aggregator = pytest.mark.parametrize("aggregator", ALL_AGGREGATORS, ids=str)
NUMBER = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)  # their rounding is coarse


def columns(least: int, most: int = 40) -> st.SearchStrategy[list[list[float]]]:
    """Pushes of two numbers each."""
    return st.lists(st.lists(NUMBER, min_size=2, max_size=2), min_size=least, max_size=most)


def combined(aggregator: Aggregator, pushes: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return weighted(aggregator, [torch.tensor(push, dtype=dtype) for push in pushes], [1 / len(pushes)] * len(pushes))


def weighted(aggregator: Aggregator, pushes: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """What the store makes of pushes of one tensor each."""
    if aggregator.needs is Needs.PAIRS:
        pairs = matrix_of([compare_pushes(aggregator, [[push] for push in pushes])], len(pushes))
        weights = [*aggregator.weigh(pairs, weights)]
    return aggregator.combine(pushes, weights)


def policy_of(text: str) -> ServerPolicy:
    policy = parse_policy(text)
    assert isinstance(policy, ServerPolicy)
    return policy


def test_the_table_of_this_suite_has_every_aggregator() -> None:
    assert {type(aggregator) for aggregator in ALL_AGGREGATORS} == set(AGGREGATORS.values())
    assert all(AGGREGATORS[aggregator.name] is type(aggregator) for aggregator in ALL_AGGREGATORS)


@every_aggregator
def test_text_reads_back_also_as_an_option_of_a_policy(aggregator: Aggregator) -> None:
    assert parse_aggregator(str(aggregator)) == aggregator
    policy = policy_of("draco(faulty=1)" if aggregator.whole else f"k-async(k=3, aggregator={aggregator})")
    assert aggregator_of(policy, workers=3) == aggregator
    assert policy_of(str(policy)) == policy


@every_aggregator
@given(push=st.lists(NUMBER, min_size=1, max_size=5), weights=st.lists(st.floats(-2, 2), min_size=3, max_size=6))
def test_of_equal_pushes_it_is_that_push_times_the_sum_of_the_weights(
    aggregator: Aggregator, push: list[float], weights: list[float]
) -> None:
    found = weighted(aggregator, [torch.tensor(push)] * len(weights), weights)
    wanted = np.array(push, dtype=np.float32) * sum(weights)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4, atol=1e-4 * max(map(abs, push)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_aggregator
def test_halves_are_combined_in_single_precision(aggregator: Aggregator, dtype: torch.dtype) -> None:
    assert combined(aggregator, [[1.0], [2.0], [3.0]], dtype).dtype == torch.float32


# median --------------------------------------------------------------------------------------------------------------


@given(pushes=columns(least=3))
def test_the_median_is_that_of_numpy(pushes: list[list[float]]) -> None:
    wanted = np.median(np.array(pushes, dtype=np.float32), axis=0)
    np.testing.assert_array_equal(combined(Median(), pushes).numpy(), wanted)


def test_the_median_of_long_vectors_is_that_of_numpy() -> None:
    pushes = torch.randn(5, 40_001, generator=torch.Generator().manual_seed(0))
    found = Median().combine(pushes.unbind(), [0.2] * 5)
    np.testing.assert_array_equal(found.numpy(), np.median(pushes.numpy(), axis=0))


@given(pushes=columns(least=3, most=9), bad=st.integers(1, 4), data=st.data())
def test_a_minority_of_wrong_pushes_leaves_the_median_among_the_right_ones(
    pushes: list[list[float]], bad: int, data: st.DataObject
) -> None:
    wrong = [[data.draw(st.sampled_from([-1e30, 1e30]))] * 2] * min(bad, (len(pushes) - 1) // 2)
    found = combined(Median(), pushes[len(wrong) :] + wrong).numpy()
    right = np.array(pushes[len(wrong) :], dtype=np.float32)
    assert (right.min(axis=0) <= found).all() and (found <= right.max(axis=0)).all()


def test_who_claims_more_examples_does_not_move_the_median() -> None:
    pushes = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([100.0])]
    assert Median().combine(pushes, [0.01, 0.01, 0.98]).tolist() == [2.0]


def test_fewer_than_three_pushes_have_no_median() -> None:
    with pytest.raises(UsageError, match="aggregator median needs at least 3 pushes in a commit, found 2"):
        combined(Median(), [[1.0], [2.0]])


# trimmed-mean --------------------------------------------------------------------------------------------------------


@given(drop=st.integers(1, 3), pushes=columns(least=7))
def test_the_trimmed_mean_is_that_of_numpy(drop: int, pushes: list[list[float]]) -> None:
    ranked = np.sort(np.array(pushes, dtype=np.float32).astype(np.float64), axis=0)
    wanted = ranked[drop : len(pushes) - drop].mean(axis=0)
    size = np.abs(ranked).max()
    np.testing.assert_allclose(combined(TrimmedMean(drop=drop), pushes), wanted, rtol=1e-5, atol=1e-5 * size)


@given(pushes=columns(least=3, most=9), data=st.data())
def test_the_order_of_pushes_does_not_matter_to_a_coordinate(pushes: list[list[float]], data: st.DataObject) -> None:
    mixed = data.draw(st.permutations(pushes))
    for aggregator in (Median(), TrimmedMean(drop=1)):
        assert torch.equal(combined(aggregator, mixed), combined(aggregator, pushes))


@given(pushes=columns(least=5, most=9), wrong=st.sampled_from([-1e30, 1e30]), drop=st.integers(1, 2))
def test_as_many_wrong_pushes_as_are_dropped_leave_the_mean_among_the_right_ones(
    pushes: list[list[float]], wrong: float, drop: int
) -> None:
    right = np.array(pushes[drop:], dtype=np.float32)
    found = combined(TrimmedMean(drop=drop), [[wrong] * 2] * drop + pushes[drop:]).numpy()
    slack = 1e-5 * np.abs(right).max()
    assert (right.min(axis=0) - slack <= found).all() and (found <= right.max(axis=0) + slack).all()


def test_a_trimmed_mean_needs_a_push_that_is_left() -> None:
    with pytest.raises(UsageError, match=r"trimmed-mean\(drop=2\) needs at least 5 pushes in a commit, found 4"):
        combined(TrimmedMean(drop=2), [[1.0]] * 4)
    with pytest.raises(UsageError, match=r"needs at least 5 pushes in a commit, but with 9 workers a commit has 4"):
        aggregator_of(policy_of("k-sync(k=4, aggregator=trimmed-mean(drop=2))"), workers=9)
    with pytest.raises(UsageError, match="drop must be at least 1, got 0"):
        TrimmedMean(drop=0)


# Aggregators that compare pushes in pairs ----------------------------------------------------------------------------


@given(pushes=columns(least=2, most=6), cut=st.integers(0, 2))
def test_pairs_of_pushes_are_the_same_bits_however_many_servers_compare_them(
    pushes: list[list[float]], cut: int
) -> None:
    tensors = [[torch.tensor([number]) for number in push] for push in pushes]
    whole = matrix_of([compare_pushes(Krum(faulty=0), tensors)], len(pushes))
    parts = [
        compare_pushes(Krum(faulty=0), part)
        for part in ([each[:cut] for each in tensors], [each[cut:] for each in tensors])
        if part[0]
    ]
    assert torch.equal(matrix_of(parts, len(pushes)), whole) and torch.equal(whole, whole.T)
    array = np.array(pushes, dtype=np.float32).astype(np.float64)
    np.testing.assert_allclose(whole, ((array[:, None] - array[None]) ** 2).sum(-1), rtol=1e-12)


def test_long_vectors_are_compared_in_blocks() -> None:
    pushes = torch.randn(3, 100_001, generator=torch.Generator().manual_seed(0))
    found = matrix_of([compare_pushes(Krum(faulty=0), [[push] for push in pushes])], 3)
    np.testing.assert_allclose(found, torch.cdist(pushes.double(), pushes.double()) ** 2, rtol=1e-6)


def krum_scores(pushes: list[list[float]], faulty: int) -> list[float]:
    """As the paper says it."""
    array = np.array(pushes, dtype=np.float32).astype(np.float64)
    scores = []
    for one in range(len(array)):
        others = sorted(((array[one] - array[other]) ** 2).sum() for other in range(len(array)) if other != one)
        scores.append(sum(others[: len(array) - faulty - 2]))
    return scores


@given(faulty=st.integers(0, 2), pushes=columns(least=7, most=12))
def test_krum_takes_the_push_with_the_smallest_score(faulty: int, pushes: list[list[float]]) -> None:
    scores = krum_scores(pushes, faulty)
    found = combined(Krum(faulty=faulty), pushes).tolist()
    best = min(scores)
    assert found in [push for push, score in zip(pushes, scores, strict=True) if score <= best * (1 + 1e-12)]


@given(faulty=st.integers(0, 2), keep=st.integers(1, 5), pushes=columns(least=7, most=12))
def test_multi_krum_takes_the_mean_of_the_pushes_with_the_smallest_scores(
    faulty: int, keep: int, pushes: list[list[float]]
) -> None:
    scores = krum_scores(pushes, faulty)
    order = sorted(range(len(pushes)), key=lambda place: scores[place])
    kept, dropped = order[:keep], order[keep:]
    assume(scores[kept[-1]] < (1 - 1e-9) * scores[dropped[0]])
    wanted = np.array(pushes, dtype=np.float32)[kept].astype(np.float64).mean(axis=0)
    found = combined(MultiKrum(faulty=faulty, keep=keep), pushes)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(pushes).max())


def test_of_equal_scores_the_first_push_counts() -> None:
    assert combined(Krum(faulty=0), [[3.0], [1.0], [1.0], [3.0]]).tolist() == [3.0]


@given(pushes=columns(least=3, most=12))
@example(pushes=[[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [3.0, 1.0]])  # two pushes are the median
@example(pushes=[[0.0, 198.5], [0.0, 198.5], [0.0, 198.5]])  # a third of it, three times, is rounded
def test_no_push_nor_their_mean_has_a_smaller_sum_of_distances_than_the_geometric_median(
    pushes: list[list[float]],
) -> None:
    array = np.array(pushes, dtype=np.float32).astype(np.float64)
    matrix = torch.from_numpy(((array[:, None] - array[None]) ** 2).sum(-1))
    weights = GeometricMedian().weigh(matrix, [1 / len(pushes)] * len(pushes))
    assert min(weights) >= 0 and abs(sum(weights) - 1) < 1e-12
    found, rest = sum_of_distances(array, np.array(weights) @ array), np.vstack([array, array.mean(axis=0)])
    rounding = 1e-14 * np.abs(array).sum()
    assert found <= min(sum_of_distances(array, point) for point in rest) * (1 + 1e-4) + rounding


def sum_of_distances(array: Any, point: Any) -> float:
    return float(np.linalg.norm(array - point, axis=1).sum())


@pytest.mark.parametrize(("pushes", "length"), [(3, 2), (8, 50), (11, 3), (4, 1)])
def test_the_geometric_median_is_that_of_a_numeric_minimiser(pushes: int, length: int) -> None:
    array = np.random.default_rng(pushes).normal(size=(pushes, length))
    point = np.zeros(length)
    for step in range(20_000):  # a subgradient method
        apart = point - array
        point = point - (apart / np.linalg.norm(apart, axis=1, keepdims=True)).sum(axis=0) / (1 + step)
    found = combined(GeometricMedian(), array.tolist()).numpy()
    assert sum_of_distances(array, found) <= sum_of_distances(array, point) * (1 + 1e-5)


@given(pushes=columns(least=5, most=9), data=st.data())
def test_the_order_of_pushes_matters_to_none_that_compares_them(pushes: list[list[float]], data: st.DataObject) -> None:
    mixed, size = data.draw(st.permutations(pushes)), np.abs(pushes).max()
    one, other = (combined(GeometricMedian(), each).numpy() for each in (pushes, mixed))
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * size)
    scores = sorted(krum_scores(pushes, 1))
    assume(scores[0] < (1 - 1e-9) * scores[1])
    assert torch.equal(combined(Krum(faulty=1), mixed), combined(Krum(faulty=1), pushes))


@pytest.mark.parametrize("wrong", [1e3, 1e9, 1e18, 3e38])
@pytest.mark.parametrize("aggregator", [Krum(faulty=2), MultiKrum(faulty=2), GeometricMedian()], ids=str)
def test_two_wrong_pushes_of_seven_leave_the_result_near_the_right_ones(aggregator: Aggregator, wrong: float) -> None:
    right = np.random.default_rng(0).normal(size=(5, 20))
    found = combined(aggregator, [[wrong] * 20, *right.tolist(), [wrong] * 20]).numpy()
    assert np.linalg.norm(found - right.mean(axis=0)) < 2 * np.linalg.norm(right - right.mean(axis=0), axis=1).max()


def test_distances_that_overflow_break_nothing() -> None:
    huge = [[1e200, 0.0], [-1e200, 0.0], [0.0, 1e200], [0.0, 0.0]]
    for aggregator in (Krum(faulty=0), GeometricMedian()):
        assert torch.isfinite(combined(aggregator, huge, torch.float64)).all()


@pytest.mark.parametrize("aggregator", [Krum(faulty=0), GeometricMedian()], ids=str)
def test_who_claims_more_examples_counts_for_no_more(aggregator: Aggregator) -> None:
    pushes = [torch.tensor([number]) for number in (1.0, 2.0, 2.5, 100.0)]
    even, uneven = ([0.25] * 4, [0.01, 0.01, 0.01, 0.97])
    assert torch.equal(weighted(aggregator, pushes, uneven), weighted(aggregator, pushes, even))


@pytest.mark.parametrize(
    ("aggregator", "least"),
    [("krum(faulty=2)", 7), ("multi-krum(faulty=1, keep=7)", 8), ("multi-krum(faulty=1)", 5), ("geometric-median", 3)],
)
def test_an_aggregator_that_compares_needs_so_many_pushes(aggregator: str, least: int) -> None:
    assert aggregator_of(policy_of(f"k-sync(k={least}, aggregator={aggregator})"), workers=9).least == least
    with pytest.raises(UsageError, match=f"needs at least {least} pushes in a commit, but .* has {least - 1}"):
        aggregator_of(policy_of(f"k-sync(k={least - 1}, aggregator={aggregator})"), workers=9)


def test_options_of_krum_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="faulty must be at least 0, got -1"):
        parse_aggregator("krum(faulty=-1)")
    with pytest.raises(UsageError, match="keep must be at least 1, got 0"):
        parse_aggregator("multi-krum(faulty=1, keep=0)")


# vote ----------------------------------------------------------------------------------------------------------------


@given(data=st.data(), faulty=st.integers(0, 2), groups=st.integers(1, 3))
def test_what_a_majority_of_each_group_has_is_added_whatever_the_others_push(
    data: st.DataObject, faulty: int, groups: int
) -> None:
    size, right = 2 * faulty + 1, data.draw(columns(least=groups, most=groups))
    pushes, group_of = [], []
    for group, push in enumerate(right):
        wrong = data.draw(st.lists(st.sampled_from([*right, [0.0, -0.0], [1e30, -1e30]]), max_size=faulty))
        pushes += data.draw(st.permutations([*wrong, *[push] * (size - len(wrong))]))
        group_of += [group] * size
    tensors = [torch.tensor(push) for push in pushes]
    pairs = matrix_of([compare_pushes(Vote(faulty=faulty), [[each] for each in tensors])], len(pushes))
    weights = Vote(faulty=faulty).weigh(keep_apart(pairs, group_of), [1 / size] * len(pushes))
    assert sorted(weights, reverse=True) == [1.0] * groups + [0.0] * (len(pushes) - groups)
    assert [push for push, weight in zip(pushes, weights, strict=True) if weight] == right


def test_bits_are_compared_and_not_numbers() -> None:
    assert Vote(faulty=1).compare(torch.tensor([0.0]), torch.tensor([-0.0])) == 1.0
    same = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert Vote(faulty=1).compare(same, same.clone()) == 0.0


def test_a_group_without_a_majority_leaves_all_out() -> None:
    apart = torch.tensor([[0.0, 0.0, torch.inf, torch.inf], [0.0, 0.0, torch.inf, torch.inf]])
    pairs = torch.cat([apart, torch.tensor([[torch.inf, torch.inf, 0.0, 1.0], [torch.inf, torch.inf, 1.0, 0.0]])])
    assert Vote(faulty=1).weigh(pairs, [0.5] * 4) == [0.0] * 4
    assert Vote(faulty=0).weigh(pairs, [0.5] * 4) == [1.0, 0.0, 1.0, 0.0]


def test_where_nobody_computes_the_same_there_is_no_vote() -> None:
    with pytest.raises(UsageError, match=r"each computes batches of its own; use draco\(faulty=2\)"):
        aggregator_of(policy_of("sync(aggregator=vote(faulty=2))"))
    with pytest.raises(UsageError, match="faulty must be at least 0, got -1"):
        parse_aggregator("vote(faulty=-1)")


# delay-compensated ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["-1", "inf", "nan"])
def test_a_scale_that_cannot_be_is_refused(scale: str) -> None:
    with pytest.raises(UsageError, match="scale must be finite and at least 0"):
        parse_aggregator(f"delay-compensated(scale={scale})")


@pytest.mark.parametrize("momentum", ["-0.1", "1", "nan"])
def test_a_momentum_that_cannot_be_is_refused(momentum: str) -> None:
    with pytest.raises(UsageError, match="momentum must be at least 0 and below 1"):
        parse_aggregator(f"delay-compensated(scale=2.0, momentum={momentum})")


def test_squares_that_overflow_switch_the_correction_off() -> None:
    huge, remembered = torch.tensor([3e38]), torch.zeros(1)
    adaptive = DelayCompensated(scale=2.0, momentum=0.5)
    found = adaptive.correct(huge, read=torch.tensor([1.0]), now=torch.tensor([2.0]), remembered=remembered)
    assert torch.equal(found, huge)


@pytest.mark.parametrize("policy", ["sync", "k-sync(k=2)", "k-batch-sync(k=2)"])
def test_where_no_gradient_is_stale_none_is_corrected(policy: str) -> None:
    with pytest.raises(UsageError, match=r"corrects stale gradients, and under .* none is stale"):
        aggregator_of(replace(policy_of(policy), aggregator="delay-compensated(scale=1.0)"))


def test_a_stale_gradient_of_a_square_is_corrected_towards_the_fresh_one() -> None:
    """The loss w^4 / 4 has the gradient w^3, and the second derivative 3 w^2."""
    read, now = torch.tensor([1.0]), torch.tensor([0.9])
    stale, fresh = read**3, now**3
    found = DelayCompensated(scale=3.0).correct(stale, read, now)
    assert abs(found - fresh) < abs(stale - fresh) / 5


# Too small commits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "workers"), [("async", 8), ("sync", 2), ("k-sync(k=2)", 8), ("ada-sync(k0=2)", 8), ("ssp(bound=3)", 8)]
)
def test_a_policy_whose_commits_are_too_small_is_refused(policy: str, workers: int, paceline: Any) -> None:
    text = str(policy_of(policy).__class__(**{**vars(policy_of(policy)), "aggregator": "median"}))
    ended = paceline("train", "--workers", str(workers), "--policy", text)
    assert ended.code == 2 and "aggregator median needs at least 3 pushes in a commit" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("command", [("run", "script.py"), ("train",), ("simulate",)])
def test_an_unknown_aggregator_is_refused_before_anything_starts(command: tuple[str, ...], paceline: Any) -> None:
    option = "--policies" if command == ("simulate",) else "--policy"
    name, *script = command
    ended = paceline(name, option, "sync(aggregator=medain)", *script)
    assert ended.code == 2 and "no aggregator called 'medain'. Did you mean 'median'?" in ended.err


def test_a_commit_that_is_too_small_changes_nothing_and_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with cluster_of_hands("sync(aggregator=median)", 3) as (cluster, hands), caplog.at_level(logging.WARNING):
        for hand in hands:
            hand.ask()
        for hand, number in zip(hands, (1.0, 2.0, 30.0), strict=True):
            hand.push(number)
        assert [hand.go().version for hand in hands] == [1] * 3 and cluster.value == -2.0
        hands.pop().close()
        cluster.until(lambda: 2 not in cluster.server._members)
        for hand in hands:
            hand.push(5.0)
        assert [hand.go().version for hand in hands] == [2] * 2 and cluster.value == -2.0
    assert "a commit of 2 pushes is left out, since aggregator median needs 3" in caplog.text


def test_a_run_that_makes_no_other_commits_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_MOST_LEFT_OUT", 0)
    with (
        pytest.raises(PacelineError, match="2 workers are left: start the run again with more"),
        cluster_of_hands("sync(aggregator=median)", 3) as (cluster, hands),
    ):
        for hand in hands:
            hand.ask()
        hands.pop().close()
        cluster.until(lambda: 2 not in cluster.server._members)
        for hand in hands:
            hand.push(5.0)
        cluster.until(lambda: False)


def test_the_median_of_complex_numbers_is_that_of_their_parts() -> None:
    pushes = [torch.tensor([1 + 5j]), torch.tensor([2 + 3j]), torch.tensor([9 + 4j])]
    assert Median().combine(pushes, [1 / 3] * 3).tolist() == [2 + 4j]
