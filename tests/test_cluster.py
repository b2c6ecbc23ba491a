"""The virtual cluster: the policies' times and staleness against theory, and what is counted beside them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.delays.delay import parse_delay
from paceline.errors import UsageError
from paceline.policies import POLICIES, PeersPolicy, ServerPolicy
from paceline.virtual.agenda import Agenda, StepEnds
from paceline.virtual.formulas import iteration_time, mean_staleness
from paceline.virtual.links import parse_link, ring_seconds, server_seconds
from paceline.virtual.simulate import Scenario, Simulated, as_record, simulate, summary

FAMILY = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")


def run(policy: str, workers: int = 8, delay: str = "1+exp(0.5)", commits: int = 400, **options: object) -> Simulated:
    return simulate(Scenario(policy=policy, workers=workers, delay=delay, **options), commits=commits)  # type: ignore[arg-type]


# Against theory; the whole table, to one percent, is benchmarks/oracle.py ----------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_memoryless_times_are_those_of_the_formulas(name: str, k: int) -> None:
    found = run(f"{name}(k={k})", delay="exp(1)", commits=4000 // k + 1000)
    expected = iteration_time(name, parse_delay("exp(1)"), 8, k)
    assert found.iteration == pytest.approx(expected, rel=0.08)
    assert found.iteration_error is not None
    assert abs(found.iteration - expected) < 6 * found.iteration_error


@pytest.mark.parametrize("delay", ["exp(1)", "1+exp(1)", "3 factors(1, 1, 2)"])
@pytest.mark.parametrize("name", ["k-async", "k-batch-async", "async"])
def test_mean_staleness_counts_commits(name: str, delay: str) -> None:
    policy = "async" if name == "async" else f"{name}(k=2)"
    assert run(policy, delay=delay, commits=3000).staleness == pytest.approx(mean_staleness(name, 8, 2), rel=0.02)


@pytest.mark.parametrize("policy", ["sync", "k-sync(k=3)", "k-batch-sync(k=5)", "all-reduce"])
def test_synchronous_policies_are_never_stale(policy: str) -> None:
    found = run(policy)
    assert found.staleness == 0 and found.staleness_histogram == {0: found.pushes}


@pytest.mark.parametrize("policy", ["k-sync(k=8)", "k-async(k=8)", "all-reduce"])
def test_all_of_all_is_sync(policy: str) -> None:
    assert run(policy).iteration == run("sync").iteration
    assert run(policy).waiting == run("sync").waiting


@pytest.mark.parametrize("policy", ["k-async(k=1)", "k-batch-async(k=1)", "ssp(bound=100000)"])
def test_one_of_any_is_async(policy: str) -> None:
    assert dataclasses.replace(run(policy), policy="async") == run("async")


def test_ssp_lies_between_lock_step_and_async() -> None:
    seconds = [run(f"ssp(bound={bound})", commits=4000).seconds for bound in (0, 1, 4, 64)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] == pytest.approx(run("sync", commits=500).seconds, rel=0.05)
    assert seconds[-1] == pytest.approx(run("async", commits=4000).seconds, rel=0.05)


def test_constant_times() -> None:
    found = run("k-sync(k=2)", workers=4, delay="2", commits=10)
    assert (found.seconds, found.iteration, found.cancelled) == (20, 2, 20)
    assert found.thrown_away == 0.5  # half of the workers are cancelled in the very moment in which they end
    assert found.waiting == 0
    assert run("async", workers=4, delay="2", commits=8).seconds == 4


# What is counted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", ["sync", "k-sync(k=3)", "k-batch-sync(k=9)", "async", "k-async(k=3)", "ssp(bound=1)"]
)
@pytest.mark.parametrize("link", ["instant", "10ms 1MB/s"])
def test_shares_of_the_time_are_shares(policy: str, link: str) -> None:
    found = run(policy, link=link, nbytes=1e5)
    assert 0 <= found.waiting < 1 and 0 <= found.thrown_away < 1
    assert found.waiting + found.thrown_away < 1
    assert found.parallel_efficiency is not None and 0 < found.parallel_efficiency <= 1.05
    assert sum(found.staleness_histogram.values()) == found.pushes >= found.commits == 400
    json.dumps(as_record(found), allow_nan=False)


def test_used_and_thrown_away_time_add_up() -> None:
    # One worker at a time is cancelled after one second of its two: a third of the workers' time is for nothing.
    found = run("k-sync(k=1)", workers=2, delay="1 factors(1, 2)", commits=50)
    assert found.seconds == 50 and found.cancelled == 50
    assert found.thrown_away == 0.5 and found.waiting == 0
    waits = run("sync", workers=2, delay="1 factors(1, 2)", commits=50)
    assert waits.seconds == 100 and waits.waiting == 0.25 and waits.thrown_away == 0


@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_scaling_efficiency_is_the_iteration_time_of_one_worker_over_that_of_all(scaling: str) -> None:
    """The mini-batch takes 3 seconds on one worker; under strong scaling it is shared."""
    found = run("sync", workers=64, examples=64, scaling=scaling)
    assert found.scaling_efficiency == pytest.approx(3 / found.iteration)


def test_scaling_efficiency_counts_messages_and_is_none_where_nothing_takes_time() -> None:
    found = run("sync", workers=2, delay="2", link="1s")
    assert found.iteration == 4 and found.scaling_efficiency == 0.5
    assert run("sync", workers=2, delay="0").scaling_efficiency is None


def test_parallel_efficiency_is_the_share_of_ideal_throughput() -> None:
    assert run("sync", workers=1).parallel_efficiency == pytest.approx(1, abs=0.15)
    found = run("sync", workers=64, examples=32)
    assert found.parallel_efficiency == pytest.approx(3 / found.iteration)
    assert found.throughput == pytest.approx(64 * 32 / found.iteration)


def test_strong_scaling_shares_the_work_but_not_the_messages() -> None:
    one, weak, strong = (
        run("all-reduce", workers=workers, delay="4", nbytes=1e6, link="1MB/s", examples=64, scaling=scaling, commits=3)
        for workers, scaling in ((1, "strong"), (4, "weak"), (4, "strong"))
    )
    assert one.iteration == 4
    exchange = ring_seconds(parse_link("1MB/s"), 1e6, 4)
    assert weak.seconds == pytest.approx(3 * 4 + 2 * exchange)  # the last exchange is after the last commit
    assert strong.seconds == pytest.approx(3 * 1 + 2 * exchange)
    assert strong.throughput < weak.throughput
    assert strong.bytes_in == 0 and strong.bytes_out == 3 * 4 * 1.5e6  # each sends 2 N (P-1)/P


# Messages ---------------------------------------------------------------------------------------------------


def test_a_round_of_the_server_takes_what_the_formula_says() -> None:
    options = {"delay": "1", "link": "10ms 1MB/s", "nbytes": 1e5}
    two = run("sync", workers=8, commits=2, **options)  # type: ignore[arg-type]
    one = run("sync", workers=8, commits=1, **options)  # type: ignore[arg-type]
    # The server stands apart, and counts as one more; the first of the workers computes while the last is sent to.
    assert two.seconds - one.seconds == pytest.approx(1 + server_seconds(parse_link("10ms 1MB/s"), 1e5, 9) - 0.7)
    assert two.bytes_in == 16e5 and two.bytes_out == 24e5  # at the start and after both commits


def test_parameters_that_travel_with_pushes_cost_bytes_and_time() -> None:
    plain, compensated = (
        simulate(Scenario(policy=policy, workers=1, delay="1", link="1MB/s", nbytes=1e6), commits=1)
        for policy in ("async", "async(aggregator=delay-compensated(scale=1.0))")
    )
    assert compensated.bytes_in == 2 * plain.bytes_in and compensated.bytes_out == plain.bytes_out
    assert compensated.seconds == pytest.approx(plain.seconds + 1)


def test_pushes_on_the_way_when_their_round_ends_are_dropped() -> None:
    found = run("k-sync(k=1)", workers=3, delay="1", link="10ms 1MB/s", nbytes=1e5, commits=20)
    assert found.dropped > 0
    assert found.thrown_away > 0.3


def test_overlap_hides_the_exchange() -> None:
    options = {"workers": 4, "delay": "1", "link": "100MB/s", "nbytes": 4e7, "commits": 10}
    hidden = run("all-reduce(bucket_cap_mb=5)", **options)  # type: ignore[arg-type]
    shown = run("all-reduce(bucket_cap_mb=5, overlap=false)", **options)  # type: ignore[arg-type]
    one_bucket = run("all-reduce(bucket_cap_mb=100, first_bucket_mb=0)", **options)  # type: ignore[arg-type]
    whole = ring_seconds(parse_link("100MB/s"), 4e7, 4)
    assert shown.seconds == pytest.approx(10 + 9 * whole)
    assert one_bucket.seconds == pytest.approx(shown.seconds)
    assert 10 + 9 * whole / 10 < hidden.seconds < 10 + 9 * whole / 2


def test_topologies_of_the_exchange() -> None:
    options = {"workers": 64, "delay": "0.1", "nbytes": 1e4, "link": "1ms 1GB/s", "commits": 10}
    ring, tree, levels = (
        run("all-reduce", topology=topology, hosts=hosts, **options).seconds  # type: ignore[arg-type]
        for topology, hosts in (("ring", 1), ("tree", 1), ("two-level", 8))
    )
    assert tree < levels < ring


# Failures ---------------------------------------------------------------------------------------------------


def test_a_failed_worker_is_found_out_and_the_run_goes_on() -> None:
    found = run("sync", workers=3, delay="1 fails(worker=2, at=5.5)", notice=4.0, commits=10)
    # Five rounds; the sixth waits for worker 2 until 5.5 + 4; then two workers go on.
    assert found.seconds == 9.5 + 4
    assert found.pushes == 5 * 3 + 5 * 2


@pytest.mark.parametrize("policy", ["k-sync(k=2)", "async", "k-batch-async(k=2)", "ssp(bound=1)", "k-batch-sync(k=3)"])
def test_failures_do_not_stop_a_run(policy: str) -> None:
    delay = "1+exp(1) fails(worker=0, at=0) fails(worker=2, at=20)"
    found = run(policy, workers=4, delay=delay, commits=300)
    assert found.commits == 300 and found.waiting < 0.6


def test_when_all_have_failed_the_run_says_so() -> None:
    with pytest.raises(UsageError, match=r"policy async came to a standstill at .* after 9 commits"):
        run("async", workers=1, delay="1 fails(worker=0, at=9.5)")


# Mistakes ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gossip(PeersPolicy):
    name = "gossip"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"policy": "k-sync(k=9)"}, "needs 9 workers, but the run has 8"),
        ({"policy": "k-async(k=0)"}, "k must be at least 1"),
        ({"policy": "ada-sync"}, "follows the loss.*--problem"),
        ({"policy": Gossip()}, "gossip cannot be simulated"),
        ({"policy": "hogwild"}, "hogwild cannot be simulated: its workers share memory"),
        ({"policy": "hogwild-easgd(period=2, alpha=0.1)"}, "cannot be simulated: its workers share memory"),
        ({"workers": 0}, "at least 1 worker, got 0"),
        ({"delay": "1-exp(2)"}, "cannot read the delay.*Examples"),
        ({"delay": "-1"}, "cannot read the delay.*Examples"),
        ({"delay": "1 slow(worker=8, factor=2)"}, "no worker 8"),
        ({"link": "fast"}, "cannot read the link.*Examples"),
        ({"nbytes": -1.0, "policy": "all-reduce"}, "0 or more bytes"),
        ({"nbytes": -1.0, "link": "1MB/s"}, "0 or more bytes"),
        ({"scaling": "week"}, "Did you mean 'weak'"),
        ({"scaling": "strong", "examples": 7}, "8 workers share a mini-batch, and it has 7 examples.*--examples 256"),
        ({"examples": 0}, "at least 1 example, got 0"),
        ({"topology": "rang"}, "Did you mean 'ring'"),
        ({"hosts": 3}, "8 workers cannot be spread evenly over 3 hosts"),
        ({"notice": -1.0}, "from 0 to 1e.09 seconds, got -1"),
    ],
)
def test_mistakes(changes: dict[str, object], complaint: str) -> None:
    options: dict[str, object] = {"policy": "async", "workers": 8, **changes}
    with pytest.raises(UsageError, match=complaint):
        simulate(Scenario(**options), commits=5)  # type: ignore[arg-type]


def test_a_run_needs_an_end_and_a_commit() -> None:
    scenario = Scenario(policy="async", workers=2, delay="3")
    with pytest.raises(UsageError, match="needs an end"):
        simulate(scenario, commits=None)
    with pytest.raises(UsageError, match="commits must be at least 1"):
        simulate(scenario, commits=0)
    with pytest.raises(UsageError, match="seconds must be above 0"):
        simulate(scenario, seconds=0.0)
    with pytest.raises(UsageError, match="made no commit within 2 s"):
        simulate(scenario, commits=None, seconds=2.0)
    assert simulate(scenario, commits=None, seconds=10.0).commits == 6


# The same seed, and the same run however it is cut -----------------------------------------------------------


SERVER_POLICIES = sorted(name for name, policy in POLICIES.items() if issubclass(policy, ServerPolicy))


@pytest.mark.parametrize("policy", ["all-reduce", *(name for name in SERVER_POLICIES if name != "ada-sync")])
def test_the_same_seed_is_the_same_run(policy: str) -> None:
    needed = {"ssp": "(bound=1)", "downpour": "(period=2)", "gradient-coding": "(stragglers=1)", "draco": "(faulty=1)"}
    needed["easgd"] = "(period=2, alpha=0.4)"
    text = policy + needed.get(policy, "(k=3)" if policy.startswith("k-") else "")
    first, again, other = (as_record(run(text, commits=60, seed=seed)) for seed in (1, 1, 2))
    assert json.dumps(first) == json.dumps(again) != json.dumps(other)


@given(
    cuts=st.lists(st.floats(0.01, 30), max_size=5),
    policy=st.sampled_from(["k-sync(k=3)", "k-async(k=2)", "async"]),
)
@settings(max_examples=20)
def test_a_run_may_be_cut_anywhere(cuts: list[float], policy: str) -> None:
    scenario = Scenario(policy=policy, workers=6)
    cluster = scenario.cluster()
    for seconds in sorted(cuts):
        cluster.run(seconds=seconds)
        cluster.run(commits=cluster.version + 1)
    cluster.run(commits=cluster.version + 20)
    assert summary(scenario, cluster) == simulate(scenario, commits=cluster.version)


def test_handing_pushes_over_together_changes_nothing() -> None:
    scenario = Scenario(policy="k-sync(k=30)", workers=50, delay="lognormal(median=1, sigma=1)")
    together = simulate(scenario, commits=40)
    # An end on the clock makes the driver go one by one, so that it can stop anywhere.
    assert simulate(scenario, commits=40, seconds=1e9) == together


# The agenda -------------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60)
def test_the_agenda_gives_what_is_left_in_order(data: st.DataObject) -> None:
    workers = 12
    agenda = Agenda(workers)
    expected: dict[int, float] = {}
    free, now = set(range(workers)), 0.0
    events = iter(agenda)
    for step in range(data.draw(st.integers(1, 8))):
        begin = data.draw(st.lists(st.sampled_from(sorted(free)), unique=True)) if free else []
        ends = [now + data.draw(st.floats(0, 10)) for _ in begin]
        if begin:
            agenda.begin(np.array(ends), np.array(begin), step, version=step)
            expected |= dict(zip(begin, ends, strict=True))
            free -= set(begin)
        cancel = data.draw(st.lists(st.sampled_from(range(workers)), unique=True, max_size=3))
        assert set(agenda.cancel(np.array(cancel, dtype=np.int64)).tolist()) == expected.keys() & set(cancel)
        for worker in cancel:
            expected.pop(worker, None)
            free.add(worker)
        for _ in range(data.draw(st.integers(0, 4))):
            if expected:
                now, worker, batch = next(events)
                assert expected.pop(worker) == now
                assert now <= min(expected.values(), default=math.inf)
                free.add(worker)
                for other in agenda.take(batch, data.draw(st.integers(0, 3))):
                    now = expected.pop(other)
                    assert now <= min(expected.values(), default=math.inf)
                    free.add(other)
    assert sorted(worker for _, worker, _ in events) == sorted(expected)


def test_calls_come_between_ends() -> None:
    agenda = Agenda(2)
    heard: list[float] = []
    agenda.begin(np.array([1.0, 3.0]), np.array([0, 1]), 0, 0)
    agenda.call(2.0, heard.append)
    for at, worker, batch in agenda:
        assert isinstance(batch, StepEnds)
        if batch.call is not None:
            batch.call(at)
        else:
            heard.append(worker)
    assert heard == [0, 2.0, 1]
