"""Closed forms against published values, against each other, and against a plain play of every policy."""

from __future__ import annotations

import heapq
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.delays.delay import Delay, parse_delay
from paceline.errors import UsageError
from paceline.virtual.formulas import (
    STALENESS,
    TIMES,
    NoFormulaError,
    iteration_time,
    k_async_staleness_share,
    mean_staleness,
    order_statistic,
    sync_over_async,
    time_bounds,
)

# P = 8, by event simulation of 20,000 iterations or more: X, K, K-sync, K-batch-sync, K-async, K-batch-async.
SIMULATED = [
    ("exp(1)", 1, 0.125, 0.125, 0.125, 0.125),
    ("exp(1)", 2, 0.268, 0.250, 0.268, 0.250),
    ("exp(1)", 4, 0.635, 0.500, 0.635, 0.500),
    ("exp(1)", 8, 2.718, 1.000, 2.718, 1.000),
    ("1+exp(1)", 1, 1.125, 1.125, 0.250, 0.250),
    ("1+exp(1)", 2, 1.268, 1.266, 0.531, 0.500),
    ("1+exp(1)", 4, 1.635, 1.628, 1.239, 1.000),
    ("1+exp(1)", 8, 3.718, 2.674, 3.718, 2.000),
    ("1+exp(0.5)", 4, 2.269, 2.211, 1.829, 1.500),
    ("1+exp(0.5)", 8, 6.436, 3.732, 6.436, 3.000),
]
FAMILY = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")
ENTRIES = [
    (policy, text, k, value) for text, k, *values in SIMULATED for policy, value in zip(FAMILY, values, strict=True)
]
UNKNOWN = [  # no closed form
    *(("k-batch-sync", text, k) for text, k, *_ in SIMULATED if "+" in text and k > 1),
    *(("k-async", text, k) for text, k, *_ in SIMULATED if "+" in text and 1 < k < 8),
]


@pytest.mark.parametrize(("policy", "text", "k", "value"), ENTRIES)
def test_every_simulated_value_is_met_or_enclosed(policy: str, text: str, k: int, value: float) -> None:
    delay = parse_delay(text)
    if (policy, text, k) in UNKNOWN:
        with pytest.raises(NoFormulaError, match=r"no formula is known for k-.* simulate it instead"):
            iteration_time(policy, delay, 8, k)
        low, high = time_bounds(delay, 8, k)
        assert low <= value <= high
    else:
        assert iteration_time(policy, delay, 8, k) == pytest.approx(value, abs=0.00051)


def test_sync_is_the_deck_s_slowest_of_n() -> None:
    delay = parse_delay("1+exp(0.5)")
    for workers, slowest, over_mean in (
        (10, 6.86, 2.29),
        (100, 11.37, 3.79),
        (1000, 15.97, 5.32),
        (10_000, 20.58, 6.86),
    ):
        assert iteration_time("sync", delay, workers) == pytest.approx(slowest, abs=0.0051)
        assert iteration_time("sync", delay, workers) / delay.mean(0) == pytest.approx(over_mean, abs=0.0051)
        assert order_statistic(delay, 1, workers) == pytest.approx(1 + 2 / workers)


def test_four_backup_workers_of_a_hundred() -> None:
    delay = parse_delay("1+exp(0.5)")
    assert iteration_time("k-sync", delay, 100, 96) == pytest.approx(7.21, abs=0.0051)
    assert iteration_time("sync", delay, 100) / iteration_time("k-sync", delay, 100, 96) == pytest.approx(
        1.58, abs=0.0051
    )


def test_sync_over_async() -> None:
    for text, wanted in (("exp(1)", 21.7), ("1+exp(1)", 14.9), ("1+exp(0.5)", 17.2)):
        assert sync_over_async(parse_delay(text), 8) == pytest.approx(wanted, abs=0.051)
    assert sync_over_async(parse_delay("3"), 8) == pytest.approx(8)


# Laws -----------------------------------------------------------------------------------------------------

delays = st.sampled_from(["2", "exp(0.5)", "1+exp(0.5)", "0.1+exp(3)", "pareto(minimum=1, shape=1.5)"]).map(parse_delay)


@given(delay=delays, workers=st.integers(1, 40))
def test_order_statistics_rise_and_average_to_the_mean(delay: Delay, workers: int) -> None:
    values = [order_statistic(delay, k, workers) for k in range(1, workers + 1)]
    assert all(low <= high * (1 + 1e-12) for low, high in itertools.pairwise(values))
    assert sum(values) / workers == pytest.approx(delay.mean(0))


@given(delay=delays, workers=st.integers(1, 40))
def test_the_ends_of_the_family_are_sync_and_async(delay: Delay, workers: int) -> None:
    sync, one = (iteration_time(policy, delay, workers) for policy in ("sync", "async"))
    assert iteration_time("k-sync", delay, workers, workers) == sync
    assert iteration_time("k-async", delay, workers, workers) == pytest.approx(sync)
    assert iteration_time("k-async", delay, workers, 1) == iteration_time("k-batch-async", delay, workers, 1) == one
    assert iteration_time("k-batch-sync", delay, workers, 1) == pytest.approx(
        iteration_time("k-sync", delay, workers, 1)
    )
    for policy in ("k-async", "k-batch-async"):
        assert mean_staleness(policy, workers, 1) == mean_staleness("async", workers)
    assert mean_staleness("k-async", workers, workers) == 0


@given(workers=st.integers(1, 40), data=st.data())
def test_exponential_times_forget_what_was_done(workers: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, workers))
    delay = parse_delay("exp(0.7)")
    assert iteration_time("k-async", delay, workers, k) == pytest.approx(iteration_time("k-sync", delay, workers, k))
    batches = [iteration_time(policy, delay, workers, k) for policy in ("k-batch-sync", "k-batch-async")]
    assert batches[0] == pytest.approx(batches[1])
    low, high = time_bounds(delay, workers, k)
    assert low <= high * (1 + 1e-12)


@given(workers=st.integers(1, 30), data=st.data())
def test_shares_of_staleness_have_its_mean(workers: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, workers))
    delay = parse_delay("exp(1)")
    shares = [k_async_staleness_share(delay, workers, k, staleness) for staleness in range(1000)]
    assert sum(shares) == pytest.approx(1)
    assert sum(d * share for d, share in enumerate(shares)) == pytest.approx(mean_staleness("k-async", workers, k))


def test_a_heavy_tail_never_ends_a_sync_iteration() -> None:
    delay = parse_delay("pareto(minimum=1, shape=0.9)")
    assert iteration_time("sync", delay, 8) == math.inf
    assert iteration_time("k-sync", delay, 8, 6) < math.inf
    assert iteration_time("async", delay, 8) == math.inf


# Played out -----------------------------------------------------------------------------------------------


def play(policy: str, delay: Delay, workers: int, k: int, commits: int) -> tuple[float, list[int]]:
    """Time per commit and every gradient's staleness, the plainest way; work under way is kept (the async half)."""
    random = np.random.default_rng(0)

    def finish(worker: int, at: float) -> tuple[float, int]:
        return at + float(delay.sample(random, np.asarray([worker]), at)[0]), worker

    heap = [finish(worker, 0.0) for worker in range(workers)]
    heapq.heapify(heap)
    version, read, waiting, staleness = 0, [0] * workers, [], []
    while version < commits:
        now, worker = heapq.heappop(heap)
        staleness.append((version, read[worker]))
        waiting.append(worker)
        full = len(waiting) == k
        version += full
        free = waiting if full and policy == "k-async" else [] if policy == "k-async" else [worker]
        for one in free:
            read[one] = version
            heapq.heappush(heap, finish(one, now))
        waiting = [] if full else waiting
    return now / commits, [at - since for at, since in staleness]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["exp(1)", "1+exp(1)", "2", "1+exp(1) factors(1, 3)"])
@pytest.mark.parametrize(("policy", "k"), [("k-async", 1), ("k-async", 3), ("k-batch-async", 3), ("k-batch-async", 11)])
def test_asynchronous_play_has_the_formulas_time_and_staleness(policy: str, k: int, text: str) -> None:
    delay = parse_delay(text)
    time, staleness = play(policy, delay, 8, k, commits=8000)
    assert np.mean(staleness) == pytest.approx(mean_staleness(policy, 8, k), rel=0.02)
    try:
        wanted = iteration_time(policy, delay, 8, k)
    except NoFormulaError:
        assert policy == "k-async" and k == 3 and "+" in text
    else:
        assert time == pytest.approx(wanted, rel=0.02)


def test_staleness_of_k_async_is_geometric_for_exponential_times() -> None:
    delay = parse_delay("exp(1)")
    _, staleness = play("k-async", delay, 8, 2, commits=10_000)
    for d in range(6):
        assert np.mean(np.asarray(staleness) == d) == pytest.approx(k_async_staleness_share(delay, 8, 2, d), abs=0.01)


@pytest.mark.parametrize("text", ["exp(2)", "3+exp(0.5)", "pareto(minimum=2, shape=3)", "5"])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_sorted_samples_have_the_order_statistics(text: str, k: int) -> None:
    delay = parse_delay(text)
    times = delay.sample(np.random.default_rng(0), np.zeros(6 * 50_000, dtype=int)).reshape(-1, 6)
    assert np.sort(times)[:, k - 1].mean() == pytest.approx(order_statistic(delay, k, 6), rel=0.01)


@pytest.mark.parametrize(("text", "k"), [("exp(2)", 5), ("exp(2)", 20), ("3", 5), ("3", 8), ("3", 9), ("3", 20)])
def test_k_batch_sync_is_the_kth_mini_batch_of_all(text: str, k: int) -> None:
    delay = parse_delay(text)
    times = delay.sample(np.random.default_rng(0), np.zeros(2000 * 8 * 20, dtype=int)).reshape(-1, 8, 20)
    finished = np.sort(times.cumsum(axis=2).reshape(len(times), -1))[:, k - 1]
    assert finished.mean() == pytest.approx(iteration_time("k-batch-sync", delay, 8, k), rel=0.03)


# Mistakes -------------------------------------------------------------------------------------------------


def test_policies_are_those_of_the_family() -> None:
    assert set(TIMES) == set(STALENESS) == {"sync", "async", *FAMILY}


@pytest.mark.parametrize("policy", FAMILY)
def test_no_k_below_one_and_none_above_the_workers_where_workers_are_counted(policy: str) -> None:
    for k in (0, -1):
        with pytest.raises(UsageError, match=f"k must be .*1.*, got {k}"):
            iteration_time(policy, parse_delay("exp(1)"), 8, k)
        with pytest.raises(UsageError, match=f"k must be .*1.*, got {k}"):
            mean_staleness(policy, 8, k)
    if "batch" in policy:
        assert iteration_time(policy, parse_delay("exp(1)"), 8, 9) == 9 / 8
    else:
        with pytest.raises(UsageError, match="k must be from 1 to 8, got 9"):
            iteration_time(policy, parse_delay("exp(1)"), 8, 9)


def test_mistakes_are_named() -> None:
    delay = parse_delay("exp(1)")
    with pytest.raises(UsageError, match="Did you mean 'k-sync'"):
        iteration_time("k_sync", delay, 8, 2)
    with pytest.raises(UsageError, match="no policy with a formula called 'ssp'"):
        mean_staleness("ssp", 8)
    with pytest.raises(UsageError, match="workers must be at least 1, got 0"):
        iteration_time("sync", delay, 0)
    with pytest.raises(UsageError, match="no worker 9"):
        iteration_time("async", parse_delay("exp(1) slow(9, 5)"), 8)
    with pytest.raises(UsageError, match="from 1 to 8, got 9"):
        mean_staleness("k-async", 8, 9)


def test_what_has_no_formula_says_so() -> None:
    for text, reason in (
        ("exp(1) slow(1, 5)", "workers differ"),
        ("gaussian(1, 1)", "special"),
        ("lognormal(1, 1)", "special"),
    ):
        with pytest.raises(NoFormulaError, match=reason):
            iteration_time("sync", parse_delay(text), 8)
        with pytest.raises(NoFormulaError, match=reason):
            k_async_staleness_share(parse_delay(text), 8, 2, 0)
        with pytest.raises(NoFormulaError, match=reason):
            time_bounds(parse_delay(text), 8, 2)
    assert iteration_time("sync", parse_delay("gaussian(1, 1)"), 1) == parse_delay("gaussian(1, 1)").mean(0)


def test_who_fails_no_longer_counts_in_async() -> None:
    assert iteration_time("async", parse_delay("2 fails(0, 10)"), 5) == pytest.approx(2 / 4)
    assert (
        iteration_time("async", parse_delay("0 factors(1, 2)"), 5) == iteration_time("async", parse_delay("0"), 5) == 0
    )
    assert iteration_time("async", parse_delay("2 fails(0, 10)"), 1) == math.inf
