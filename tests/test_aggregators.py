"""Aggregators: what each makes of the pushes of a commit, and what becomes of commits that are too small for it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from led_by_hand import cluster_of_hands

from paceline.aggregators import (
    AGGREGATORS,
    Aggregator,
    DelayCompensated,
    Mean,
    Median,
    aggregator_of,
    parse_aggregator,
)
from paceline.errors import PacelineError, UsageError
from paceline.policies import ServerPolicy, parse_policy
from paceline.server import live

ALL_AGGREGATORS: list[Aggregator] = [Mean(), Median(), DelayCompensated(scale=0.5)]
every_aggregator = pytest.mark.parametrize("aggregator", ALL_AGGREGATORS, ids=str)
NUMBER = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)  # their rounding is coarse


def columns(least: int, most: int = 40) -> st.SearchStrategy[list[list[float]]]:
    """Pushes of two numbers each."""
    return st.lists(st.lists(NUMBER, min_size=2, max_size=2), min_size=least, max_size=most)


def combined(aggregator: Aggregator, pushes: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return aggregator.combine([torch.tensor(push, dtype=dtype) for push in pushes], [1 / len(pushes)] * len(pushes))


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
    policy = policy_of(f"k-sync(k=3, aggregator={aggregator})")
    assert aggregator_of(policy, workers=3) == aggregator
    assert policy_of(str(policy)) == policy


@every_aggregator
@given(push=st.lists(NUMBER, min_size=1, max_size=5), weights=st.lists(st.floats(-2, 2), min_size=3, max_size=6))
def test_of_equal_pushes_it_is_that_push_times_the_sum_of_the_weights(
    aggregator: Aggregator, push: list[float], weights: list[float]
) -> None:
    found = aggregator.combine([torch.tensor(push)] * len(weights), weights)
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


# delay-compensated ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["-1", "inf", "nan"])
def test_a_scale_that_cannot_be_is_refused(scale: str) -> None:
    with pytest.raises(UsageError, match="scale must be finite and at least 0"):
        parse_aggregator(f"delay-compensated(scale={scale})")


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
