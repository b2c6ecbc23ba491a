"""The auto-tuner finds the knee of a throughput curve by the rule of CROSSBOW."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies.auto_tuner import AutoTuner


def tune(curve: Callable[[int], float], gain: float = 0.1) -> tuple[int, list[str]]:
    """The number of learners at which the tuner settles, and its answers."""
    tuner = AutoTuner(gain=gain)
    answers: list[str] = []
    while not tuner.settled:
        answer, tuner = tuner.measured(curve(tuner.learners))
        answers.append(answer)
    return tuner.learners, answers


def knee(curve: Callable[[int], float], gain: float) -> int:
    """The first number of learners beyond which one more gains too little."""
    learners = 1
    while curve(learners + 1) > curve(learners) * (1 + gain):
        learners += 1
    return learners


@given(st.floats(1e-3, 1e6), st.floats(0.05, 1.0), st.floats(0.02, 0.5))
def test_it_stops_at_the_knee_of_a_concave_curve(scale: float, power: float, gain: float) -> None:
    def curve(learners: int) -> float:
        return float(scale * learners**power)

    found, answers = tune(curve, gain)
    assert found == knee(curve, gain)
    assert answers == ["add"] * found + ["remove"]


@pytest.mark.parametrize(("cores", "wanted"), [(1, 1), (2, 2), (6, 6), (50, 10)])
def test_a_device_that_is_full(cores: int, wanted: int) -> None:
    """Ten learners gain 11 % over nine, and eleven just 10 % over ten, which is not more."""
    assert tune(lambda learners: float(min(learners, cores)))[0] == wanted


def test_once_settled_it_keeps_the_number() -> None:
    _, tuner = AutoTuner().measured(1.0)
    _, tuner = tuner.measured(1.0)
    assert tuner.settled
    assert tuner.measured(100.0) == ("keep", tuner)
    assert tuner.learners == 1
