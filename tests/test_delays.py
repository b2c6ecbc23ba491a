"""Delays: their text form, their means and laws, and what bad input is told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.delays.delay import (
    CHANGES,
    DISTRIBUTIONS,
    Changed,
    Constant,
    Delay,
    Distribution,
    Exponential,
    Factors,
    Fails,
    Gaussian,
    LogNormal,
    Measured,
    Pareto,
    Shifted,
    Slow,
    parse_delay,
)
from paceline.errors import UsageError

positive = st.floats(1e-50, 1e50)
distributions = st.one_of(
    st.builds(Exponential, rate=positive),
    st.builds(LogNormal, median=positive, sigma=st.floats(1e-50, 20)),
    st.builds(Pareto, minimum=positive, shape=st.floats(0.1, 1e50)),
    st.builds(Gaussian, mu=st.floats(0, 1e50), sigma=positive),
)
changes = st.one_of(
    st.builds(Factors, values=st.lists(positive, min_size=1, max_size=4).map(tuple)),
    st.builds(Slow, worker=st.integers(0, 10**6), factor=positive),
    st.builds(Fails, worker=st.integers(0, 10**6), at=st.floats(0, 1e50)),
)
bases = st.one_of(
    st.builds(Constant, value=st.floats(0, 1e50)),
    distributions,
    st.builds(Shifted, shift=st.floats(0, 1e50), rest=distributions),
)
delays = st.one_of(bases, st.builds(Changed, base=bases, changes=st.lists(changes, min_size=1, max_size=3).map(tuple)))

# One of every kind, with a variance; a new distribution adds its line.
SAMPLES = [
    "2",
    "exp(0.5)",
    "1+exp(0.5)",
    "lognormal(median=2, sigma=0.5)",
    "pareto(minimum=1, shape=4)",
    "gaussian(mu=1, sigma=0.2)",
    "gaussian(mu=0.5, sigma=1)",
    "gaussian(mu=0, sigma=3)",
    "0.5+pareto(minimum=1, shape=4) factors(1, 2.5) slow(worker=3, factor=5)",
]


def draw(delay: Delay, workers: Any, seed: int = 0, at: Any = 0.0) -> Any:
    return delay.sample(np.random.default_rng(seed), np.asarray(workers), at)


# The text form --------------------------------------------------------------------------------------------


@given(delays)
def test_a_delay_is_read_back_from_its_text(delay: Delay) -> None:
    assert parse_delay(str(delay)) == delay
    assert hash(parse_delay(str(delay))) == hash(delay)
    assert parse_delay(delay) is delay


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2", Constant(value=2)),
        ("constant(2)", Constant(value=2)),
        ("1.5e1", Constant(value=15)),
        ("1+2", Constant(value=3)),
        ("1+exp(0.5)", Shifted(shift=1, rest=Exponential(rate=0.5))),
        (" exp( rate = .5 ) + 1 ", Shifted(shift=1, rest=Exponential(rate=0.5))),
        ("1e+1+exp(2)", Shifted(shift=10, rest=Exponential(rate=2))),
        ("lognormal(2, 0.5)", LogNormal(median=2, sigma=0.5)),
        ("lognormal(2, sigma=0.5)", LogNormal(median=2, sigma=0.5)),
        ("lognormal(sigma=0.5, median=2)", LogNormal(median=2, sigma=0.5)),
        ("pareto(1, 4)", Pareto(minimum=1, shape=4)),
        ("gaussian(1, 0.2)", Gaussian(mu=1, sigma=0.2)),
        ("2 slow(3, 5)", Changed(base=Constant(value=2), changes=(Slow(worker=3, factor=5),))),
        ("2 factors(1, 2)", Changed(base=Constant(value=2), changes=(Factors(values=(1, 2)),))),
        ("2 factors(values=(1, 2))", Changed(base=Constant(value=2), changes=(Factors(values=(1, 2)),))),
        (
            "1+exp(1)  factors(3)\tfails(worker=2, at=60)",
            Changed(
                base=Shifted(shift=1, rest=Exponential(rate=1)),
                changes=(Factors(values=(3,)), Fails(worker=2, at=60)),
            ),
        ),
    ],
)
def test_texts_are_read_as_meant(text: str, wanted: Delay) -> None:
    assert parse_delay(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "wanted a number"),
        ("1+", "found the end"),
        ("-1", "not negative"),
        ("1+-1", "not negative"),
        ("40ms", "without a unit"),
        ("1,2", "found '1,2'"),
        ("nan", "no delay called 'nan'"),
        ("inf", "no delay called 'inf'"),
        ("1e400", "value must be from 0"),
        ("1+exp(0.5", "is a bracket open?"),
        ("exp(1))", "found 'exp(1))'"),
        ("exp", "needs the option rate; for example exp(rate=0.5)"),
        ("exp()", "needs the option rate"),
        ("exp(0)", "rate must be above 0, got 0"),
        ("exp(-2)", "rate must be above 0, got -2"),
        ("exp(nan)", "rate must be above 0, got nan"),
        ("exp(inf)", "rate must be from 1e-50 to 1e+50, got inf"),
        ("exp(fast)", "rate wants a number, got 'fast'"),
        ("exp(mean=2)", "no option 'mean'. Options: rate"),
        ("exp(1, 2)", "exp takes rate, found 2 values"),
        ("exp(,1)", "a value is missing"),
        ("expo(1)", "Did you mean 'exp'?"),
        ("lognormal(1)", "needs the option sigma"),
        ("lognormal(2, median=3)", "median was given before"),
        ("pareto(1, 0)", "shape must be from 0.1"),
        ("gaussian(-1, 1)", "mu must be from 0"),
        ("gaussian(1, 0)", "sigma must be above 0"),
        ("exp(1)+exp(2)", "at most one distribution, found exp(1) and exp(2)"),
        ("exp(1) exp(2)", "write + before exp(2)"),
        ("exp(1) 3", "write + before 3"),
        ("slow(3, 5)", "slow changes a delay"),
        ("exp(1)+slow(3, 5)", "slow changes a delay"),
        ("exp(1) slow(3, 5)+2", "write the whole sum first"),
        ("exp(1) slo(3, 5)", "Did you mean 'slow'?"),
        ("exp(1) slow(3, 0)", "a factor must be above 0, got 0"),
        ("exp(1) slow(-1, 5)", "worker is a number from 0, got -1"),
        ("exp(1) slow(1.5, 5)", "worker wants a whole number, got 1.5"),
        ("exp(1) factors()", "needs the option values"),
        ("exp(1) factors(1, -1)", "a factor must be above 0, got -1"),
        ("exp(1) fails(2, -1)", "must not be negative, got -1"),
        ("exp(1) fails(2, nan)", "must not be negative, got nan"),
        ("measured(no/such/file)", "No such file or directory"),
    ],
)
def test_a_bad_text_is_told_what_was_wanted_with_an_example(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_delay(text)
    told = str(caught.value)
    assert f"cannot read the delay {text!r}: " in told and message in told
    assert "Examples: 2, 1+exp(0.5), " in told and "\n" not in told


@given(st.text(alphabet='exp(),.+-0123456789 slow="\\wmeasurdfact\n', max_size=40))
def test_any_text_is_a_delay_or_a_usage_error(text: str) -> None:
    try:
        delay = parse_delay(text)
    except UsageError:
        return
    assert parse_delay(str(delay)) == delay


def test_what_is_neither_text_nor_delay_is_refused() -> None:
    with pytest.raises(UsageError, match="wanted a delay or its text form, got 3"):
        parse_delay(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="rate wants a number"):
        Exponential(rate="1")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="wanted a distribution to shift"):
        Shifted(shift=1, rest=Constant(value=1))
    with pytest.raises(UsageError, match="value must be from 0"):
        Shifted(shift=-1, rest=Exponential(rate=1))
    with pytest.raises(UsageError, match="wanted a distribution and changes"):
        Changed(base=Constant(value=1), changes=())


# Laws of every delay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SAMPLES)
def test_many_samples_have_the_mean(text: str) -> None:
    delay = parse_delay(text)
    for worker in (0, 1, 3):
        times = draw(delay, np.full(100_000, worker))
        assert times.mean() == pytest.approx(delay.mean(worker), rel=0.02)  # four standard errors or more


def test_samples_of_every_distribution_are_tried() -> None:
    tried = {name for name in DISTRIBUTIONS for text in SAMPLES if name in text} | {"constant", "measured"}
    assert tried == set(DISTRIBUTIONS)
    assert set(CHANGES) == {"factors", "slow", "fails"}


@given(delay=delays, seed=st.integers(0, 2**32), workers=st.lists(st.integers(0, 10), max_size=30))
def test_samples_are_times_and_the_same_for_the_same_seed(delay: Delay, seed: int, workers: list[int]) -> None:
    numbers = np.asarray(workers, dtype=np.int64)
    times = draw(delay, numbers, seed)
    assert times.dtype == np.float64 and times.shape == numbers.shape
    assert (times >= 0).all()
    assert draw(delay, numbers, seed).tobytes() == times.tobytes()
    for worker, time in zip(workers, times, strict=True):
        assert time < math.inf or delay.fails_at(worker) < math.inf


@pytest.mark.parametrize("text", [text for text in SAMPLES if text != "2"])
def test_another_seed_gives_other_times_and_workers_are_independent(text: str) -> None:
    delay = parse_delay(text)
    first, second = draw(delay, np.arange(50)), draw(delay, np.arange(50), seed=1)
    assert (first != second).all()
    assert len(set(first)) == 50


def test_quantiles_are_those_of_the_distributions() -> None:
    half = np.full(100_000, 0)
    assert np.median(draw(LogNormal(median=2, sigma=0.5), half)) == pytest.approx(2, rel=0.01)
    assert np.median(draw(Exponential(rate=0.5), half)) == pytest.approx(2 * math.log(2), rel=0.02)
    pareto = draw(Pareto(minimum=3, shape=2), half)
    assert pareto.min() >= 3
    assert (pareto > 6).mean() == pytest.approx(0.25, rel=0.02)
    assert draw(parse_delay("1+exp(0.5)"), half).min() >= 1


def test_a_gaussian_is_cut_at_zero_and_not_heaped_there() -> None:
    times = draw(Gaussian(mu=0.5, sigma=1), np.full(100_000, 0))
    assert times.min() > 0
    share = (math.erf(0.5 / math.sqrt(2)) - math.erf(-0.5 / math.sqrt(2))) / 2  # of N(0.5, 1), in 0 to 1
    assert (times < 1).mean() == pytest.approx(share / 0.6915, rel=0.02)


def test_a_heavy_tail_has_no_mean() -> None:
    assert Pareto(minimum=1, shape=1).mean(0) == math.inf


# Workers that differ --------------------------------------------------------------------------------------


@given(base=bases, factor=st.floats(0.1, 10), seed=st.integers(0, 99))
def test_a_slow_worker_takes_a_multiple_and_the_others_what_they_took(
    base: Distribution, factor: float, seed: int
) -> None:
    before = draw(base, np.arange(5), seed)
    after = draw(Changed(base=base, changes=(Slow(worker=3, factor=factor),)), np.arange(5), seed)
    assert after[3] == before[3] * factor
    assert np.delete(after, 3).tobytes() == np.delete(before, 3).tobytes()


def test_factors_go_round() -> None:
    delay = parse_delay("2 factors(1, 10, 100) slow(worker=4, factor=0.5)")
    assert draw(delay, [0, 1, 2, 3, 4, 5]).tolist() == [2, 20, 200, 2, 10, 200]
    assert [delay.mean(worker) for worker in range(6)] == [2, 20, 200, 2, 10, 200]


def test_a_failing_worker_finishes_only_what_ends_in_time() -> None:
    delay = parse_delay("2 fails(worker=1, at=10) slow(worker=1, factor=2)")
    assert draw(delay, [0, 1, 1, 1, 1], at=np.asarray([20.0, 0.0, 6.0, 6.1, 20.0])).tolist() == [
        2,
        4,
        4,
        math.inf,
        math.inf,
    ]
    assert draw(delay, [0, 1], at=9.0).tolist() == [2, math.inf]
    assert draw(parse_delay("0 fails(worker=1, at=10)"), [1], at=10.0).tolist() == [math.inf]
    assert [delay.fails_at(worker) for worker in range(3)] == [math.inf, 10, math.inf]
    assert [delay.mean(worker) for worker in range(3)] == [2, math.inf, 2]
    assert parse_delay("2").fails_at(1) == math.inf


def test_a_worker_that_is_not_there_is_refused() -> None:
    for text in ("2 slow(8, 5)", "2 slow(1, 5) fails(8, 5)"):
        parse_delay(text).check_workers(9)
        with pytest.raises(UsageError, match="no worker 8: 8 workers have the numbers 0 to 7"):
            parse_delay(text).check_workers(8)
    parse_delay("1+exp(1)").check_workers(1)
    parse_delay("2 factors(1, 2, 3)").check_workers(1)


# Measured times -------------------------------------------------------------------------------------------


def test_times_in_a_file_are_drawn_again(tmp_path: Path) -> None:
    file = tmp_path / "times, of (one) run.txt"
    file.write_text("0.5 1\n2,4\n\n")
    delay = Measured(file=str(file))
    assert parse_delay(str(delay)) == delay
    assert parse_delay(f'1+measured("{file}")').mean(0) == 1 + 7.5 / 4
    assert set(draw(delay, np.full(1000, 0))) == {0.5, 1, 2, 4}


def test_times_of_a_run_are_forward_and_backward(tmp_path: Path) -> None:
    lines = [
        {"event": "step", "seconds": {"forward": 1.0, "backward": 2.0, "waited": 50.0}},
        {"event": "evaluation", "seconds": 9.0},
        {"event": "step", "seconds": {"forward": 2.0, "backward": 3.0, "waited": 50.0}},
        {"event": "step", "loss": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "st')
    for path in (tmp_path, tmp_path / "metrics.jsonl"):
        assert Measured(file=str(path)).times.tolist() == [3, 5]
        assert parse_delay(f"measured({path})").mean(0) == 4


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("times.txt", b"", "holds no times"),
        ("times.txt", b"1 two", "'two'"),
        ("times.txt", b"1 -2", "time 2 is -2"),
        ("times.txt", b"nan", "time 1 is nan"),
        ("times.txt", b"1e999", "time 1 is inf"),
        ("times.txt", b"\xff\xfe", "does not hold times"),
        ("metrics.jsonl", b"{}\n", "holds no times"),
        ("metrics.jsonl", b"garbage\n", "does not hold times"),
        ("metrics.jsonl", b"[1]\n", "holds no times"),
        ("metrics.jsonl", b'{"event": "step", "seconds": 3}\n', "does not hold times"),
        ("metrics.jsonl", b'{"event": "step", "seconds": {"forward": null}}\n', "does not hold times"),
    ],
)
def test_a_file_without_times_is_refused_by_name(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        parse_delay(f"measured({tmp_path / name})")
    assert message in str(caught.value) and name in str(caught.value)
