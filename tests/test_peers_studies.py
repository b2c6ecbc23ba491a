"""The studies of peers: what they claim from numbers, what they refuse, and what is left after Ctrl-C."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.problems import load_problem
from paceline.studies import DiLoCoStudy, LocalSGDStudy, ScalingStudy, SMAStudy, Study, StudyContext, WarmUpStudy
from paceline.studies.arms import Arm, Trial, Trials, first, run_arms
from paceline.studies.intervals import interval, verdict
from paceline.virtual.plan import Point, TrainingOutcome
from paceline.virtual.simulate import Scenario, simulate
from paceline.virtual.tally import Tally

ARM = Arm(name="one", optimizer="sgd(lr=0.1)", epochs=1, batch_size=64)
QUICK = WarmUpStudy(problem="digits", workers=4, rates=(0.1,), epochs=1, seeds=2)


def trial(arm: Arm, seed: int, *values: float) -> Trial:
    """A trial whose accuracy was measured after every commit, one a second."""
    run = simulate(Scenario(policy="sync", workers=1, delay="1"), commits=1)
    curve = [Point(seconds=at, commits=at, loss=1 - value, value=value) for at, value in enumerate(values)]
    return Trial(
        arm=arm, seed=seed, outcome=TrainingOutcome(run=run, curve=tuple(curve)), train_loss=0.0, train_value=1.0
    )


# Intervals ----------------------------------------------------------------------------------------------------


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20), shift=st.floats(-10, 10))
def test_an_interval_moves_with_its_values_and_shrinks_with_them(values: list[float], shift: float) -> None:
    found, moved, halved = (
        interval(each) for each in (values, [value + shift for value in values], [value / 2 for value in values])
    )
    assert found.half is not None and moved.half is not None and halved.half is not None
    assert moved.mean == pytest.approx(found.mean + shift, abs=1e-6)
    assert moved.half == pytest.approx(found.half, abs=1e-6)
    assert halved.half == pytest.approx(found.half / 2, abs=1e-6)


def test_intervals_are_students() -> None:
    assert interval([0.0, 1.0]).half == pytest.approx(12.706 / 2)
    assert interval([0.0, 1.0] * 3).half == pytest.approx(2.571 * math.sqrt(0.3 / 6))
    assert interval([7.0]).half is None
    assert interval([1.0, math.inf]).half is None


@pytest.mark.parametrize(
    ("advantages", "word"),
    [([1.0, 1.3], "not shown"), ([1.0, 1.01], "holds"), ([-1.0, -1.01], "does not hold"), ([1.0], "one seed shows")],
)
def test_a_claim_holds_only_if_its_interval_does(advantages: list[float], word: str) -> None:
    assert f"A is above B: {word}" in verdict("A is above B", advantages, "points")


# Trials -------------------------------------------------------------------------------------------------------


def test_trials_are_compared_seed_by_seed() -> None:
    other = dataclasses.replace(ARM, name="other")
    trials = Trials(
        done=(trial(ARM, 0, 0.1, 0.5), trial(other, 0, 0.1, 0.4), trial(ARM, 1, 0.1, 0.9)), interrupted_at="x"
    )
    assert trials.arms() == [ARM, other]
    assert trials.of(ARM, lambda each: each.error) == pytest.approx([50, 10])
    assert trials.differences(other, ARM, lambda each: each.error) == pytest.approx([10])
    curve = trials.curve(ARM, lambda point: point.value)
    assert curve.x == (1.0,) and curve.y == pytest.approx((0.7,))


def test_a_target_has_its_time_and_its_epochs() -> None:
    problem = load_problem("digits")
    found = trial(dataclasses.replace(ARM, epochs=8), 0, 0.1, 0.3, 0.6, 0.5, 0.7)
    assert (found.time_to(problem, 0.6), found.epochs_to(problem, 0.6)) == (2, 4)
    assert found.time_to(problem, 0.8) == found.epochs_to(problem, 0.8) == math.inf


def test_arms_train_for_their_epochs_on_the_same_examples() -> None:
    problem = load_problem("digits")
    problem = dataclasses.replace(problem, train=first(problem.train, 100), test=first(problem.test, 50))
    several = dataclasses.replace(ARM, name="several", batch_size=16, workers=4, policy="local-sgd(every=2)")
    trials = run_arms([ARM, several], problem, 2, StudyContext(seed=3))
    assert [(each.arm.name, each.seed) for each in trials.done] == [
        ("one", 3), ("several", 3), ("one", 4), ("several", 4),
    ]  # fmt: skip
    assert [each.last.commits for each in trials.done] == [2, 2, 2, 2]
    assert trials.done[0].outcome.curve[0].loss == trials.done[1].outcome.curve[0].loss
    with pytest.raises(UsageError, match="wanted 101 examples"):
        first(problem.train, 101)


# The studies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        (WarmUpStudy, {"workers": 0}, "workers must be at least 1"),
        (WarmUpStudy, {"rates": (0.1, 0.1)}, "named twice"),
        (WarmUpStudy, {"rates": (-0.1,)}, "above 0"),
        (LocalSGDStudy, {"rate": 0.0}, "rate must be above 0"),
        (LocalSGDStudy, {"seeds": 0}, "seeds must be at least 1"),
        (ScalingStudy, {"workers": ()}, "needs workers and policies"),
        (ScalingStudy, {"workers": (2, 2)}, "named twice"),
        (SMAStudy, {"learners": (1,)}, "numbers from 2"),
        (SMAStudy, {"rates": ()}, "numbers above 0"),
        (DiLoCoStudy, {"every": 0}, "every must be at least 1"),
    ],
)
def test_mistakes(kind: type[Study], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        kind(**options)


@pytest.mark.parametrize("after", [1, 60])
def test_breaking_off_keeps_what_is_done(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, count = [after], Tally.commit_together

    def pressed(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        count(*arguments)

    monkeypatch.setattr(Tally, "commit_together", pressed)
    if after == 1:
        with pytest.raises(KeyboardInterrupt, match="in training 1 of 8"):
            QUICK.run(StudyContext())
        return
    found = QUICK.run(StudyContext())
    assert found.interrupted and found.missing is not None and "in training" in found.missing
    assert len(found.rows) == 2 and len(found.series) == len(found.rows)


def test_all_reduce_has_as_much_time_as_diloco() -> None:
    study = DiLoCoStudy(problem="digits", model="net1", workers=2, every=5, steps=20, link="1kB/s", seeds=1, judges=50)
    found = study.run(StudyContext())
    names = [column.name for column in found.columns]
    rows = {str(row[0]): dict(zip(names, row, strict=True)) for row in found.rows}
    seconds = {name: row["virtual s"] for name, row in rows.items()}
    assert seconds["all-reduce, equal time"] <= seconds["DiLoCo"] < seconds["all-reduce, equal steps"]  # type: ignore[operator]
    assert rows["all-reduce, equal time"]["steps"] < 20  # type: ignore[operator]
    assert any("DiLoCo sends 5." in note for note in found.notes)


@pytest.mark.data
@pytest.mark.soak
def test_a_gradual_warm_up_saves_a_large_batch_of_mnist(data_dir: Path) -> None:
    found = WarmUpStudy(rates=(0.08,), examples=12_000, seeds=3).run(StudyContext(data=data_dir))
    means = {row[1]: float(str(row[4]).split()[0]) for row in found.rows}
    assert means["small batch"] < means["gradual"] < min(means["none"], means["constant"])
