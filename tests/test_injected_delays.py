"""InjectedDelays of real workers: the delay that was asked for, and the same ones in every run."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.delays.delay import parse_delay
from paceline.delays.injected import InjectedDelays, parse_unit
from paceline.errors import UsageError

STEPS = 2000
TEXTS = [
    "2",
    "1+exp(0.5)",
    "lognormal(median=1, sigma=0.5)",
    "pareto(minimum=1, shape=3)",
    "0.5+gaussian(mu=1, sigma=0.2)",
    "1+exp(0.5) slow(worker=3, factor=5)",
    "exp(1) factors(1, 2)",
]


def delays_of(text: str, *, unit: float = 1.0, seed: int = 0, worker: int = 3) -> list[float]:
    injected_delays = InjectedDelays(text, unit, seed=seed, worker=worker)
    return [injected_delays.of_step(step) for step in range(STEPS)]


@pytest.mark.parametrize("text", TEXTS)
def test_they_have_the_mean_of_the_delay(text: str) -> None:
    for worker in (0, 3):
        found = delays_of(text, worker=worker)
        error = statistics.stdev(found) / STEPS**0.5
        assert abs(statistics.fmean(found) - parse_delay(text).mean(worker)) <= 4 * error + 1e-12


def test_they_are_independent_from_step_to_step() -> None:
    found = delays_of("exp(1)")
    assert len(set(found)) == STEPS
    assert abs(statistics.correlation(found[1:], found[:-1])) < 4 / STEPS**0.5


@given(
    text=st.sampled_from(TEXTS),
    seed=st.integers(0, 2**63),
    worker=st.integers(0, 20),
    steps=st.lists(st.integers(0, 2**40), min_size=1, max_size=5),
)
def test_they_depend_on_seed_worker_and_step_alone(text: str, seed: int, worker: int, steps: list[int]) -> None:
    first, second = (InjectedDelays(text, 0.5, seed=seed, worker=worker) for _ in range(2))
    found = {step: first.of_step(step) for step in steps}
    assert all(second.of_step(step) == found[step] for step in reversed(steps))
    assert all(delay >= 0 for delay in found.values())


def test_another_seed_or_worker_has_others() -> None:
    runs = [delays_of("exp(1)", seed=seed, worker=worker) for seed in (0, 1) for worker in (0, 1)]
    assert len({delay for run in runs for delay in run}) == 4 * STEPS


@pytest.mark.parametrize("text", TEXTS)
def test_the_unit_scales_them(text: str) -> None:
    assert delays_of(text, unit=0.04) == pytest.approx([delay * 0.04 for delay in delays_of(text)])


def test_a_slow_worker_is_as_much_slower_in_every_step() -> None:
    plain, slow = delays_of("1+exp(0.5)"), delays_of("1+exp(0.5) slow(worker=3, factor=5)")
    assert slow == pytest.approx([5 * delay for delay in plain])


def test_times_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "times.txt").write_text("0.25\n0.5, 4\n")
    assert set(delays_of(f"measured({tmp_path / 'times.txt'})", unit=2.0)) == {0.5, 1.0, 8.0}


def test_one_that_would_never_end_is_cut_to_what_can_be_waited() -> None:
    assert 1e9 < InjectedDelays("1e50", 1.0, seed=0, worker=0).of_step(0) < 1e10


def test_failures_are_refused() -> None:
    with pytest.raises(UsageError, match=r"has fails\(worker=2, at=60\), but real workers can only be delayed; .*kill"):
        InjectedDelays("1+exp(0.5) slow(worker=3, factor=5) fails(worker=2, at=60)", 1.0, seed=0, worker=0)


def test_what_is_no_delay_is_refused() -> None:
    with pytest.raises(UsageError, match="Did you mean 'exp'"):
        InjectedDelays("1+expo(0.5)", 1.0, seed=0, worker=0)


@pytest.mark.parametrize("unit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_unit_that_is_no_time_is_refused(unit: float) -> None:
    with pytest.raises(UsageError, match="above 0 and finite"):
        InjectedDelays("1", unit, seed=0, worker=0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("40ms", 0.04), ("1s", 1.0), ("250 us", 0.00025), ("1.5e3µs", 0.0015), ("20ns", 2e-8)]
)
def test_units(text: str, seconds: float) -> None:
    assert parse_unit(text) == seconds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("40", "40 has no unit; known are s ms us ns"),
        ("40min", "40min has an unknown unit"),
        ("fast", "wanted a number with a unit, found 'fast'"),
        ("", "wanted a number with a unit"),
        ("0ms", "above 0 and finite, got 0ms"),
        ("-1s", "above 0 and finite, got -1s"),
        ("40ms 2s", "given twice"),
    ],
)
def test_what_is_no_unit_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"cannot read the unit of delays {text!r}: .*{reason}.*; for example 40ms"):
        parse_unit(text)
