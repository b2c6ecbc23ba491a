"""Hostile workers: what each attack pushes, that only they attack, and that every driver has the same bits of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from hypothesis import given
from hypothesis import strategies as st
from processes import finished
from recorded import record
from same_bits import assert_same
from torch import Tensor, nn

import paceline as package
from paceline import native
from paceline.attacks import ATTACKS, LittleIsEnough, attacked, parse_attack
from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.problems import Problem, ProblemOptions, load_problem
from paceline.seeding import derive_seed, seed_streams
from paceline.virtual.plan import TrainingPlan
from paceline.virtual.simulate import Scenario
from paceline.virtual.training import begin_training

BATCH = 16
NET1 = ProblemOptions(model="net1")


def batch_of(problem: Problem, size: int = BATCH) -> tuple[Tensor, Tensor]:
    inputs, targets = problem.train[:size]
    return inputs, targets


def gradients(problem: Problem, model: nn.Module, *, worker: int, size: int = BATCH) -> tuple[float, list[Tensor]]:
    """The loss and the gradients that a worker has of the first examples."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = problem.batch_loss(model, *batch_of(problem, size), worker=worker)
    torch.autograd.backward(loss)
    return float(loss.detach()), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# What is pushed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_a_text_form(name: str) -> None:
    attack = parse_attack(name)
    assert attack.name == name and type(attack).__doc__
    assert parse_attack(str(attack)) == attack


def test_a_batch_has_no_more_parts_than_examples() -> None:
    problem = load_problem("logistic")
    model = problem.make_model()
    pushes = [
        gradients(attacked(problem, f"little-is-enough(parts={parts})", 1), model, worker=0, size=3)[1]
        for parts in (3, 10**20)
    ]
    assert_same(*pushes)


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("problem", ["digits", "logistic"])
def test_only_hostile_workers_attack(name: str, problem: str) -> None:
    honest = load_problem(problem)
    hostile = attacked(honest, name, hostile=2)
    model = honest.make_model()
    wanted = gradients(honest, model, worker=2)
    assert_same(gradients(hostile, model, worker=2), wanted)
    for worker in (0, 1):
        loss, pushed = gradients(hostile, model, worker=worker)
        assert [each.shape for each in pushed] == [each.shape for each in wanted[1]]
        assert all(each.isfinite().all() for each in pushed)
        assert not any(torch.equal(one, other) for one, other in zip(pushed, wanted[1], strict=True))
        if name != "label-flip":
            assert loss == pytest.approx(wanted[0], rel=1e-5)


@given(scale=st.floats(0.01, 100))
def test_a_sign_flip_is_the_gradient_times_minus_its_scale(scale: float) -> None:
    problem = load_problem("logistic")
    model = problem.make_model()
    _, honest = gradients(problem, model, worker=0)
    _, pushed = gradients(attacked(problem, f"sign-flip(scale={scale!r})", 1), model, worker=0)
    assert_same(pushed, [-scale * each for each in honest])


def test_constants_and_zeros_and_noise() -> None:
    problem = load_problem("digits")
    model = problem.make_model()
    _, constant = gradients(attacked(problem, "constant(value=-7)", 1), model, worker=0)
    assert all((each == -7).all() for each in constant)
    _, idle = gradients(attacked(problem, "free-rider", 1), model, worker=0)
    assert not any(each.any() for each in idle)
    _, noise = gradients(attacked(problem, "gaussian(deviation=3)", 1), model, worker=0)
    values = torch.cat([each.flatten() for each in noise])
    assert values.mean() == pytest.approx(0, abs=0.1) and values.std() == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("name", ["digits", "logistic"])
def test_labels_are_flipped_and_back(name: str) -> None:
    problem = load_problem(name)
    inputs, targets = batch_of(problem)
    outputs = problem.make_model()(inputs)
    flip = parse_attack("label-flip")
    flipped = flip.relabel(targets, outputs)
    assert torch.equal(flip.relabel(flipped, outputs), targets) and not torch.equal(flipped, targets)
    assert torch.equal(flipped, (9 if name == "digits" else 1) - targets)


def test_labels_of_a_text_are_flipped_too() -> None:
    targets, outputs = torch.tensor([[0, 4], [2, 1]]), torch.zeros(2, 2, 5)
    assert parse_attack("label-flip").relabel(targets, outputs).tolist() == [[4, 0], [2, 3]]
    assert parse_attack("label-flip").relabel(targets, torch.zeros(2, 5, 2)).tolist() == [[4, 0], [2, 3]]


@given(parts=st.lists(st.lists(st.floats(-10, 10), min_size=3, max_size=3), min_size=2, max_size=6), z=st.floats(-5, 5))
def test_little_is_enough_is_z_deviations_from_the_mean(parts: list[list[float]], z: float) -> None:
    found = LittleIsEnough(z=z).push([torch.tensor(part, dtype=torch.float64) for part in parts])
    values = torch.tensor(parts, dtype=torch.float64)
    error = values.var(dim=0).div(len(parts)).sqrt()  # of the mean, which is the gradient of the whole batch
    torch.testing.assert_close(found, values.mean(dim=0) - z * error)


def test_little_is_enough_estimates_from_the_parts_of_its_own_batch() -> None:
    problem = load_problem("digits")
    model = problem.make_model()
    _, honest = gradients(problem, model, worker=0)
    _, mean = gradients(attacked(problem, "little-is-enough(z=0)", 1), model, worker=0)
    torch.testing.assert_close(mean, honest, rtol=1e-4, atol=1e-6)  # of parts of the same size
    _, alone = gradients(attacked(problem, "little-is-enough", 1), model, worker=0, size=1)
    torch.testing.assert_close(alone, gradients(problem, model, worker=0, size=1)[1])


def test_parameters_without_a_gradient_have_none() -> None:
    problem = load_problem("logistic")
    model = nn.ModuleDict({"used": nn.Linear(32, 1), "frozen": nn.Linear(32, 1), "unused": nn.Linear(32, 1)})
    model["frozen"].requires_grad_(False)
    model.forward = lambda inputs: model["used"](inputs) + model["frozen"](inputs)
    gradients(attacked(problem, "constant", 1), model, worker=0)
    assert [name for name, each in model.named_parameters() if each.grad is not None] == ["used.weight", "used.bias"]


@pytest.mark.parametrize(
    ("attack", "hostile", "complaint"),
    [
        ("sine-flip", 1, "no attack called 'sine-flip'. Did you mean 'sign-flip'"),
        ("sign-flip(scale=0)", 1, "scale must be finite and above 0"),
        ("constant(value=nan)", 1, "value must be a number of single precision"),
        ("constant(value=-1e300)", 1, "value must be a number of single precision"),
        ("gaussian(deviation=-1)", 1, "deviation must be finite and above 0"),
        ("little-is-enough(z=inf)", 1, "z must be finite"),
        ("little-is-enough(parts=1)", 1, "parts must be at least 2"),
        ("label-flip", 1, "wants classes to change, and the problem 'quadratic' has none"),
        ("sign-flip", 0, "at least 1 hostile worker, got 0; for example --hostile 1"),
        (None, 2, "2 hostile workers want an attack; for example --attack sign-flip"),
    ],
)
def test_mistakes(attack: str | None, hostile: int, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        attacked(load_problem("quadratic"), attack, hostile)
    assert complaint in str(caught.value)


# Every driver -----------------------------------------------------------------------------------------------


def trained(problem: Problem, policy: str, workers: int = 3, commits: int = 12) -> tuple[nn.Module, float]:
    """The model and its test loss after so many commits on the virtual cluster."""
    plan = TrainingPlan(problem=problem, optimizer="sgd(lr=0.1)", batch_size=BATCH, points=1)
    scenario = Scenario(policy=policy, workers=workers, delay="1+exp(1)", seed=3)
    training = begin_training(scenario, plan, commits=commits)
    training.finish()
    return training.model, training.outcome().curve[-1].loss


@pytest.mark.parametrize(
    ("policy", "attack"),
    [
        ("sync", "constant(value=-10)"),
        ("all-reduce", "gaussian(deviation=5)"),
        ("local-sgd(every=2)", "label-flip"),
        ("downpour(period=2)", "sign-flip"),
    ],
)
def test_an_attack_harms_virtual_workers(attack: str, policy: str) -> None:
    """The same seed gives the same bits, with the noise too."""
    problem = load_problem("digits", NET1)
    _, clean = trained(problem, policy)
    hostile = attacked(problem, attack, hostile=1)
    first, again = trained(hostile, policy), trained(hostile, policy)
    assert_same(first[0].state_dict(), again[0].state_dict())
    assert first[1] > clean


@pytest.mark.parametrize("attack", ["sign-flip", "gaussian(deviation=5)"])
def test_a_median_bears_one_of_five(attack: str) -> None:
    problem = load_problem("digits", NET1)
    clean, mean, median = (
        trained(attacked(problem, attack if hostile else None, hostile), policy, 5, commits=40)[1]
        for hostile, policy in ((0, "sync"), (1, "sync"), (1, "sync(aggregator=median)"))
    )
    assert median < 1.3 * clean < mean


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_vote_has_the_bits_of_the_clean_run(attack: str) -> None:
    problem = load_problem("digits", NET1)
    clean, found = (trained(each, "draco(faulty=1)")[0] for each in (problem, attacked(problem, attack, hostile=1)))
    assert_same(found.state_dict(), clean.state_dict())


@pytest.mark.skipif(not native.available(), reason="sums over Gloo have another order")
@pytest.mark.parametrize("policy", ["all-reduce", "local-sgd(every=2)"])
def test_live_peers_have_the_bits_of_virtual_ones(policy: str) -> None:
    """Without noise, since threads share one random stream; processes are below."""
    problem = attacked(load_problem("logistic"), "little-is-enough", hostile=1)
    model, _ = trained(problem, policy, commits=5)
    state = copied_start(problem, seed=3)

    def work(group: Any) -> dict[str, Tensor]:
        own = problem.make_model()
        own.load_state_dict(state)
        with package.join(
            own, make_optimizer("sgd(lr=0.1)", own.parameters()), policy=policy, seed=3, group=group
        ) as session:
            for inputs, targets in session.batches(problem.train, BATCH, epochs=9):
                if session.steps == 5:
                    break
                with session.step():
                    torch.autograd.backward(problem.batch_loss(own, inputs, targets, worker=session.rank))
        return own.state_dict()

    for found in World("shared memory")(3, work):
        assert_same(found, model.state_dict())


def copied_start(problem: Problem, seed: int) -> dict[str, Tensor]:
    """The parameters with which runs of this seed begin."""
    seed_streams(derive_seed(seed, "model"))
    return problem.make_model().state_dict()


@pytest.mark.parametrize(
    ("policy", "attack"),
    [("async", "constant(value=0.01)"), ("k-sync(k=2)", "little-is-enough"), ("downpour(period=2)", "label-flip")],
)
def test_a_replay_has_the_bits_of_the_run(policy: str, attack: str, tmp_path: Path, paceline: Any) -> None:
    run = record(tmp_path, policy, attack=attack, hostile=1, optimizer="sgd(lr=0.02)")
    ended = paceline("replay", str(run), "--json")
    assert (ended.code, json.loads(ended.out)["equal"]) == (0, True)
    config = json.loads((run / "config.json").read_text())
    config["train"]["hostile"] = 2
    (run / "config.json").write_text(json.dumps(config))
    ended = paceline("replay", str(run))
    assert ended.code == 1 and "bits differ: worker 1" in ended.err


# The command ------------------------------------------------------------------------------------------------


def test_simulated_workers_attack(paceline: Any) -> None:
    options = ("simulate", "--problem", "digits", "--model", "net1", "--seconds", "120", "--points", "1", "--json")
    policies = ("--policies", "sync,sync(aggregator=median)", "--workers", "5")
    attack = ("--attack", "sign-flip", "--hostile", "1")
    found = [json.loads(paceline(*options, *policies, *more).out) for more in ((), attack)]
    (clean, _), (mean, median) = ([each["curve"][-1]["value"] for each in result["records"]] for result in found)
    assert mean < 0.5 < clean and median > clean - 0.1
    assert found[1]["notes"] == [*found[0]["notes"], "Hostile workers, from worker 0: 1. Attack: sign-flip."]


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize(
    ("policy", "hostile"),
    # Of two that do not wait for each other one may make all steps.
    [("all-reduce", 1), ("k-sync(k=2)", 1), ("downpour(period=2)", 2)],
)
def test_processes_attack_and_replay(policy: str, hostile: int, paceline: Any, tmp_path: Path) -> None:
    options = ("--policy", policy, "--workers", "2", "--epochs", "1", "--json", "--run", str(tmp_path / "run"))
    ran = finished(["train", "logistic", "--attack", "gaussian(deviation=3)", "--hostile", str(hostile), *options])
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["loss"] > 1
    if policy != "all-reduce":
        ended = paceline("replay", str(tmp_path / "run"), "--json")
        assert (ended.code, json.loads(ended.out)["equal"]) == (0, True)


SCRIPT = """
import torch, paceline
from paceline.attacks import attacked
from paceline.problems import load_problem
problem = attacked(load_problem("logistic"), "gaussian(deviation=3)", hostile=1)
torch.manual_seed(0)
model = problem.make_model()
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="async", run="run") as session:
    for inputs, targets in session.batches(problem.train, 64, epochs=1):
        with session.step() as step:
            loss = problem.batch_loss(model, inputs, targets, worker=session.rank)
            step.record(loss=loss)
            loss.backward()
"""


@pytest.mark.processes
@pytest.mark.soak
def test_a_script_attacks_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    for arguments in (["run", "--workers", "2", "script.py"], ["replay", "run"]):
        ran = finished(arguments)
        assert ran.returncode == 0, ran.stderr
    assert "equal to the last bit" in ran.stdout
