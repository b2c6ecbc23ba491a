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
from paceline.studies import (
    AdversariesStudy,
    BatchesOrLearnersStudy,
    CodecsStudy,
    DiLoCoStudy,
    EASGDStudy,
    EffectiveBatchStudy,
    LocalSGDStudy,
    ScalingStudy,
    SMAStudy,
    StalenessStudy,
    Study,
    StudyContext,
    StudyResult,
    WarmUpStudy,
)
from paceline.studies.arms import Arm, Trial, Trials, first, run_arms
from paceline.studies.intervals import interval, verdict
from paceline.studies.kept import KeptTrials
from paceline.virtual.plan import Point, TrainingOutcome
from paceline.virtual.simulate import Scenario, simulate
from paceline.virtual.tally import Tally

ARM = Arm(name="one", optimizer="sgd(lr=0.1)", epochs=1, batch_size=64)
DIGITS = load_problem("digits")
QUICK = WarmUpStudy(problem="digits", workers=4, rates=(0.1,), epochs=1, seeds=2)


def trial(arm: Arm, seed: int, *values: float) -> Trial:
    """A trial whose accuracy was measured after every commit, one a second."""
    run = simulate(Scenario(policy="sync", workers=1, delay="1"), commits=1)
    curve = [Point(seconds=at, commits=at, loss=1 - value, value=value) for at, value in enumerate(values)]
    return Trial(
        arm=arm, seed=seed, outcome=TrainingOutcome(run=run, curve=tuple(curve)), train_loss=0.0, train_value=1.0
    )


def trials_of(*done: Trial) -> Trials:
    return Trials(problem=DIGITS, done=done, interrupted_at=None)


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
        problem=DIGITS,
        done=(trial(ARM, 0, 0.1, 0.5), trial(other, 0, 0.1, 0.4), trial(ARM, 1, 0.1, 0.9)),
        interrupted_at="x",
    )
    assert trials.arms() == [ARM, other]
    assert trials.of(ARM, lambda each: 100 * (1 - each.last.value)) == pytest.approx([50, 10])
    assert trials.differences(other, ARM, lambda each: 100 * (1 - each.last.value)) == pytest.approx([10])
    curve = trials.curve(ARM, lambda point: point.value)
    assert curve.x == (1.0,) and curve.y == pytest.approx((0.7,))


def test_a_target_has_its_time_and_its_epochs() -> None:
    found = trial(dataclasses.replace(ARM, epochs=8), 0, 0.1, 0.3, 0.6, 0.5, 0.7)
    assert (found.time_to(DIGITS, 0.6), found.epochs_to(DIGITS, 0.6)) == (2, 4)
    assert found.time_to(DIGITS, 0.8) == found.epochs_to(DIGITS, 0.8) == math.inf


def test_arms_train_for_their_epochs_on_the_same_examples() -> None:
    problem = dataclasses.replace(DIGITS, train=first(DIGITS.train, 100), test=first(DIGITS.test, 50))
    several = dataclasses.replace(ARM, name="several", batch_size=16, workers=4, policy="local-sgd(every=2)")
    trials = run_arms([ARM, several], problem, 2, StudyContext(seed=3))
    assert [(each.arm.name, each.seed) for each in trials.done] == [
        ("one", 3), ("several", 3), ("one", 4), ("several", 4),
    ]  # fmt: skip
    assert [each.last.commits for each in trials.done] == [2, 2, 2, 2]
    assert trials.done[0].outcome.curve[0].loss == trials.done[1].outcome.curve[0].loss
    with pytest.raises(UsageError, match="wanted 101 examples"):
        first(problem.train, 101)


def test_arms_of_a_server_make_the_commits_of_their_epochs() -> None:
    problem = dataclasses.replace(DIGITS, train=first(DIGITS.train, 96), test=first(DIGITS.test, 50))
    policies = {
        "sync": 2,
        "k-sync(k=2)": 3,
        "k-batch-async(k=2)": 3,
        "async": 6,
        "downpour(period=3)": 2,
        "gradient-coding(stragglers=1)": 2,
    }
    arms = [
        dataclasses.replace(ARM, name=policy, policy=policy, batch_size=16, workers=3, attack="constant", hostile=1)
        for policy in policies
    ]
    trials = run_arms(arms, problem, 1, StudyContext())
    assert {each.arm.name: each.last.commits for each in trials.done} == policies
    honest = run_arms([dataclasses.replace(ARM, batch_size=16, workers=3, policy="sync")], problem, 1, StudyContext())
    assert trials.done[0].outcome.run.seconds == honest.done[0].outcome.run.seconds
    assert trials.done[0].last.loss > 2 * honest.done[0].last.loss


def test_kept_trials_are_not_made_again(tmp_path: Path) -> None:
    problem = dataclasses.replace(DIGITS, train=first(DIGITS.train, 100), test=first(DIGITS.test, 50))
    file, told = tmp_path / "kept.jsonl", []
    arms = [ARM, dataclasses.replace(ARM, name="faster", optimizer="sgd(lr=0.2)")]
    context = StudyContext(tell=lambda text, done, total: told.append(text))
    made = run_arms(arms[:1], problem, 2, context, KeptTrials(file, {"examples": 100}))
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"key": "cut')
    both = run_arms(arms, problem, 2, context, KeptTrials(file, {"examples": 100}))
    assert [each for each in both.done if each.arm == ARM] == list(made.done)
    assert file.read_bytes().startswith(whole) and len(file.read_bytes().splitlines()) == 4
    assert run_arms(arms, problem, 2, context, KeptTrials(file, {"examples": 100})) == both
    assert len(file.read_bytes().splitlines()) == 4
    assert KeptTrials(file, {"examples": 90}).find(ARM, 0) is None


@pytest.mark.parametrize("line", ["a note", "[1]", "{}"])
def test_another_file_is_not_one_of_kept_trials(tmp_path: Path, line: str) -> None:
    file = tmp_path / "notes"
    file.write_text(line + "\n")
    with pytest.raises(UsageError, match=r"line 1 of .*notes is not a finished training"):
        KeptTrials(file, {})


# The studies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        (WarmUpStudy, {"workers": 0}, "workers must be at least 1"),
        (WarmUpStudy, {"rates": (0.1, 0.1)}, "different numbers"),
        (WarmUpStudy, {"rates": (-0.1,)}, "above 0"),
        (LocalSGDStudy, {"rate": 0.0}, "rate must be above 0"),
        (LocalSGDStudy, {"seeds": 0}, "seeds must be at least 1"),
        (EffectiveBatchStudy, {"every": (1, 2)}, "numbers from 2"),
        (EffectiveBatchStudy, {"every": (2, 2)}, "different numbers"),
        (EffectiveBatchStudy, {"rate": math.nan}, "rate must be above 0"),
        (ScalingStudy, {"workers": ()}, "different numbers from 1"),
        (ScalingStudy, {"policies": ("gossip", "gossip")}, "different policies"),
        (SMAStudy, {"learners": (1,)}, "numbers from 2"),
        (SMAStudy, {"rates": ()}, "numbers above 0"),
        (DiLoCoStudy, {"rate": math.inf}, "above 0 and finite"),
        (DiLoCoStudy, {"every": 0}, "every must be at least 1"),
        (AdversariesStudy, {"attacks": ("sine-flip",)}, "Did you mean 'sign-flip'"),
        (AdversariesStudy, {"hostile": 9}, "wanted 9 hostile workers of 8"),
        (AdversariesStudy, {"defences": ("median",)}, "defences with mean, that of the clean run"),
        (StalenessStudy, {"rates": (0.2, 0.1)}, "numbers above 0 that grow"),
        (EASGDStudy, {"periods": (4, 4)}, "periods are different numbers above 0"),
        (EASGDStudy, {"momenta": (0.0,)}, "momenta are different numbers above 0"),
        (CodecsStudy, {"lines": ()}, "lines must be different ones"),
        (CodecsStudy, {"lines": ("tok-k",)}, "Did you mean 'top-k'"),
        (CodecsStudy, {"lines": ("local-sdg + sign",)}, "Did you mean 'local-sgd'"),
        (BatchesOrLearnersStudy, {"ks": (2, 9)}, "ks are different numbers from 1 to 8"),
        (BatchesOrLearnersStudy, {"rates": (0.0,)}, "rates are numbers above 0"),
    ],
)
def test_mistakes(kind: type[Study], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        kind(**options)


def test_a_defence_bears_an_attack_if_it_loses_little_with_certainty() -> None:
    study = AdversariesStudy(attacks=("sign-flip", "label-flip"), defences=("mean", "median"), seeds=2)
    values = {
        ("none", "mean"): (0.9, 0.91),
        ("none", "median"): (0.9, 0.9),
        ("sign-flip", "mean"): (0.1, 0.11),
        ("sign-flip", "median"): (0.895, 0.905),
        ("label-flip", "mean"): (0.9, 0.8),
        ("label-flip", "median"): (0.9, 0.91),
    }
    done = [trial(study._arm(*cell), seed, 0.1, found[seed]) for seed in range(2) for cell, found in values.items()]
    assert study.verdicts(trials_of(*done)) == [
        "mean: fails under sign-flip (80.00 +- 0.00); nothing is shown under label-flip (5.50 +- 69.88).",
        "median: bears sign-flip (0.50 +- 0.00), label-flip (0.00 +- 0.00).",
    ]
    assert study.row(study._arm("label-flip", "mean"), trials_of(*done[:5]))[1:] == ("90.00", None)


def test_a_codec_is_judged_by_what_it_loses() -> None:
    lines = "sign", "local-sgd(every=2)", "local-sgd(every=4) + top-k", "top-k(momentum=0.5)", "top-k(feedback=false)"
    study = CodecsStudy(lines=lines, batch_size=16, epochs=4, within=0.5, seeds=2)
    arms = dict(zip(("all-reduce", *lines), study.arms(DIGITS), strict=True))
    assert [arm.group for arm in arms.values()] == [
        "none",
        "sign",
        "local-sgd + none",
        "local-sgd + top-k",
        "top-k, corrected",
        "top-k, without feedback",
    ]
    assert [arm.name for arm in arms.values() if "momentum=0.0" in arm.optimizer] == ["top-k(momentum=0.5)"]
    values = {"all-reduce": (0.9, 0.92), "sign": (0.9, 0.92), "top-k(momentum=0.5)": (0.8, 0.82)}
    done = [trial(arms[line], seed, 0.1, found[seed]) for seed in range(2) for line, found in values.items()]
    sent = {"all-reduce": 6e6, "sign": 2e6, "top-k(momentum=0.5)": 1e6}
    done = [_sending(each, sent[each.arm.name]) for each in done]
    assert study.verdicts(trials_of(*done)) == [
        "sign, 3 times fewer bytes, loses less than 0.5 points: holds (0.00 +- 0.00 points, 2 seeds).",
        "top-k(momentum=0.5), 6 times fewer bytes, loses less than 0.5 points: does not hold (10.00 +- 0.00 points, "
        "2 seeds).",
        "The fewest bytes of the lines of which it holds: sign, 3 times.",
    ]


def test_a_run_of_rounds_ends_with_one() -> None:
    study = CodecsStudy(problem="digits", model="net1", lines=("local-sgd(every=7) + sign",), batch_size=16, epochs=4)
    with pytest.raises(UsageError, match=r"makes 92 steps, .* a multiple of 7 steps"):
        study.run(StudyContext())


def _sending(found: Trial, nbytes: float) -> Trial:
    run = dataclasses.replace(found.outcome.run, bytes_out=nbytes)
    return dataclasses.replace(found, outcome=dataclasses.replace(found.outcome, run=run))


def test_rates_at_which_something_helps() -> None:
    study = StalenessStudy(rates=(0.1, 0.2), seeds=2)
    values = {
        ("async", 0.1): (0.8, 0.8),
        ("async", 0.2): (0.2, 0.3),
        ("staleness-aware", 0.1): (0.7, 0.7),
        ("staleness-aware", 0.2): (0.8, 0.9),
        ("DC-ASGD-a", 0.1): (0.7, 0.9),
        ("DC-ASGD-a", 0.2): (0.1, 0.2),
    }
    done = [trial(study._arm(*line), seed, 0.1, found[seed]) for seed in range(2) for line, found in values.items()]
    found = study.verdicts(trials_of(*done))
    beside = "Beside async at the same rate, the error of"
    assert f"{beside} staleness-aware is lower at 0.2; higher at 0.1." in found
    assert f"{beside} DC-ASGD-a is higher at 0.2; not shown to differ at 0.1." in found
    assert "staleness-aware (rate 0.2) has a lower error than async (rate 0.1): not shown" in found[0]
    assert "async turns unstable at rate 0.2." in found and "staleness-aware is stable at all rates." in found
    assert not any("DC-ASGD-c" in line for line in found)


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


def table_of(found: StudyResult) -> list[dict[str, Any]]:
    names = [column.name for column in found.columns]
    return [dict(zip(names, row, strict=True)) for row in found.rows]


def test_local_steps_and_larger_batches_have_equal_examples_and_messages() -> None:
    study = EffectiveBatchStudy(
        problem="digits", model="net2", examples=128, workers=2, batch_size=8, every=(4, 2), rate=0.1, epochs=1, seeds=1
    )
    first, *rows = table_of(study.run(StudyContext()))
    assert (first["H"], first["algorithm"], first["batch of all"]) == (1, "both", 16)
    assert [row["H"] for row in rows] == [2] * 4 + [4] * 4
    for row in rows:
        local = row["algorithm"] == "local SGD"
        assert row["batch of all"] == (16 if local else 16 * row["H"])
        assert row["MB sent"] == pytest.approx(first["MB sent"] / row["H"], rel=0.05)
    assert [row["rate"] for row in rows[4:]] == pytest.approx([0.1, 0.1, 0.2, 0.4])


def test_local_sgd_is_compared_with_the_best_rate_of_the_mini_batch() -> None:
    study = EffectiveBatchStudy(every=(2,), seeds=2)
    both, local, *others = study._lines().values()
    values = {both: 0.9, local: 0.6, **dict(zip(others, (0.3, 0.5, 0.4), strict=True))}
    trials = [trial(arm, seed, 0.1, value + seed / 100) for seed in range(2) for arm, value in values.items()]
    (note,) = study.verdicts(trials_of(*trials))
    assert note.startswith("With H = 2 local SGD has a higher test accuracy than mini-batch, rate x sqrt(H): holds")
    assert study.verdicts(trials_of(*trials[:3])) == []


def test_all_reduce_has_as_much_time_as_diloco() -> None:
    study = DiLoCoStudy(problem="digits", model="net1", workers=2, every=5, steps=20, link="1kB/s", seeds=1, judges=50)
    found = study.run(StudyContext())
    rows = {row["algorithm"]: row for row in table_of(found)}
    seconds = {name: row["virtual s"] for name, row in rows.items()}
    assert seconds["all-reduce, equal time"] <= seconds["DiLoCo"] < seconds["all-reduce, equal steps"]
    assert rows["all-reduce, equal time"]["steps"] < 20
    assert any("DiLoCo sends 5." in note for note in found.notes)


@pytest.mark.data
@pytest.mark.soak
def test_a_gradual_warm_up_saves_a_large_batch_of_mnist(data_dir: Path) -> None:
    found = WarmUpStudy(rates=(0.08,), examples=12_000, seeds=3).run(StudyContext(data=data_dir))
    means = {row[1]: float(str(row[4]).split()[0]) for row in found.rows}
    assert means["small batch"] < means["gradual"] < min(means["none"], means["constant"])


@pytest.mark.soak
def test_medians_and_krum_bear_what_the_mean_does_not() -> None:
    found = AdversariesStudy(
        problem="digits",
        examples=1437,
        attacks=("sign-flip", "gaussian"),
        defences=("mean", "median", "multi-krum(faulty=2)"),
        batch_size=16,
        epochs=20,
        judges=360,
        seeds=2,
    ).run(StudyContext())
    clean = float(str(found.rows[0][1]).split()[0])
    for _, *cells in found.rows[1:]:
        mean, *others = (float(str(cell).split()[0]) for cell in cells)
        assert mean < 30 < clean - 5 < min(others)
