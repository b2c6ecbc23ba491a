"""A session in a world of one is the hand-written loop, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import Parts, train_by_hand, train_by_session
from same_bits import assert_same
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader
from training_cases import CASES, DATASET, INPUTS, TARGETS, autocast, classifier, compiled, mlp, momentum, sgd

import paceline
from paceline.record.checkpoint import read_checkpoint
from paceline.seeding import seed_streams


def assert_equal_loops(build: Callable[[], Parts], **options: Any) -> None:
    seed_streams(3)
    by_hand = build()
    expected = train_by_hand(by_hand), by_hand.state()
    seed_streams(3)
    by_session = build()
    assert_same((train_by_session(by_session, **options), by_session.state()), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_a_session_is_the_loop_by_hand(case: str) -> None:
    assert_equal_loops(CASES[case])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_recording_and_saving_change_nothing(case: str, tmp_path: Path) -> None:
    assert_equal_loops(CASES[case], run=tmp_path / "run", save_every=3)


def test_a_compiled_model_is_the_compiled_loop_by_hand(tmp_path: Path) -> None:
    assert_equal_loops(compiled("aot_eager"), run=tmp_path / "run")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own making
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_too() -> None:
    assert_equal_loops(compiled("inductor"))


def test_a_model_compiled_as_one_graph_stays_one(tmp_path: Path) -> None:
    """What a session watches must not break the user's graph."""

    def build() -> Parts:
        torch._dynamo.reset()  # else the graph of the loop by hand is taken, which nobody watched
        parts = sgd()
        whole: Any = torch.compile(parts.model, backend="aot_eager", fullgraph=True)
        parts.model, parts.loss = whole, lambda batch: F.cross_entropy(whole(batch[0]), batch[1])
        return parts

    assert_equal_loops(build, run=tmp_path / "run")


def test_a_session_leaves_no_hooks_behind(tmp_path: Path) -> None:
    """A model may go through many sessions, and be copied or exported after them."""
    parts = sgd()
    for number in range(3):
        train_by_session(parts, 1, run=tmp_path / str(number))
    assert all(not module._forward_hooks for module in parts.model.modules())
    assert all(not parameter._backward_hooks for parameter in parts.model.parameters())


def test_the_case_that_overflows_does_overflow() -> None:
    """Else the table would not show that steps which the scaler skips are the same."""
    parts = autocast(torch.float16, scale=2.0**20)
    before = [parameter.clone() for parameter in parts.model.parameters()]
    assert parts.scaler is not None
    with paceline.join(parts.model, parts.optimizers, scaler=parts.scaler) as session:
        with session.step():
            parts.backward(parts.loss((INPUTS[:8] * 1e3, TARGETS[:8])))
        assert_same(list(map(torch.detach, parts.model.parameters())), before)
        assert parts.scaler.get_scale() == 2.0**19
        assert session.steps == 1


def test_lbfgs_is_minimised_as_by_its_own_closure() -> None:
    def build() -> tuple[nn.Module, LBFGS, ExponentialLR]:
        torch.manual_seed(1)
        model = mlp()
        optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        return model, optimizer, ExponentialLR(optimizer, 0.9)

    model, optimizer, scheduler = build()
    losses = []
    for _ in range(4):

        def closure() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(INPUTS), TARGETS)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss  # type: ignore[return-value]

        losses.append(torch.as_tensor(optimizer.step(closure)).detach())  # type: ignore[no-untyped-call]
        scheduler.step()
    ours, our_optimizer, our_scheduler = build()
    with paceline.join(ours, our_optimizer, scheduler=our_scheduler) as session:

        def evaluate() -> Tensor:
            loss = F.cross_entropy(ours(INPUTS), TARGETS)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        our_losses = [session.minimize(evaluate) for _ in range(4)]
    assert_same(our_losses, losses)
    assert_same(ours.state_dict(), model.state_dict())
    assert_same(our_optimizer.state_dict(), optimizer.state_dict())
    assert_same(our_scheduler.state_dict(), scheduler.state_dict())


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"collate_fn": lambda samples: samples}])
@pytest.mark.parametrize("last", ["short", "drop", "pad"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_a_data_set_are_those_of_the_sampler(options: dict[str, Any], last: Any, shuffle: bool) -> None:
    sampler = paceline.ShardedSampler(len(DATASET), 7, seed=torch.initial_seed(), shuffle=shuffle, last=last)
    collate = options.get("collate_fn", torch.utils.data.default_collate)
    expected = [
        collate([DATASET[int(place)] for place in shard.indices])
        for epoch in range(2)
        for shard in sampler.epoch(epoch)
    ]
    model = mlp()
    before = torch.get_rng_state()
    with paceline.join(model, momentum(model)) as session:
        found = list(session.batches(DATASET, 7, epochs=2, shuffle=shuffle, last=last, **options))
        assert session.epoch == 2
    assert_same(found, expected)
    assert_same(torch.get_rng_state(), before)


def test_training_on_a_data_set_is_the_loop_over_the_sampler() -> None:
    sampler = paceline.ShardedSampler(len(DATASET), 8, seed=torch.initial_seed())

    def build(hand: bool) -> Parts:
        torch.manual_seed(torch.initial_seed())
        if not hand:
            return sgd(source=DATASET, source_options={"batch_size": 8})
        order = [DATASET[shard.indices] for epoch in range(2) for shard in sampler.epoch(epoch)]
        return sgd(source=order)

    by_hand, by_session = build(True), build(False)
    assert_same(train_by_session(by_session, 2), train_by_hand(by_hand, 1))
    assert_same(by_session.state(), by_hand.state())


@pytest.mark.parametrize("wrap", [lambda model: model, lambda model: torch.compile(model, backend="eager")])
def test_names_get_no_prefix(wrap: Callable[[nn.Module], nn.Module], tmp_path: Path) -> None:
    model = mlp()
    names = set(model.state_dict())
    with paceline.join(wrap(model), momentum(model)) as session:
        with session.step():
            F.cross_entropy(model(INPUTS), TARGETS).backward()  # type: ignore[no-untyped-call]
        session.save(tmp_path / "all.safetensors")
        saved = read_checkpoint(tmp_path / "all.safetensors")
        assert set(model.state_dict()) == names
    assert set(saved["trainee"]["model"]) == names
    assert_same(saved["trainee"]["model"], model.state_dict())


class Mistake(Exception):
    """Of the user's."""


@pytest.mark.parametrize("backward_first", [True, False])
@pytest.mark.parametrize("error", [Mistake("in the loop"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_what_a_step_raises_passes_through_and_updates_nothing(error: BaseException, backward_first: bool) -> None:
    parts = CASES["adam with groups"]()
    session = paceline.join(parts.model, parts.optimizers)
    with session.step():
        parts.backward(parts.loss((INPUTS, TARGETS)))
    before = read_state(parts)
    with pytest.raises(type(error)) as caught, session.step():
        if backward_first:
            parts.backward(parts.loss((INPUTS * 5, TARGETS)))
        raise error
    assert caught.value is error
    assert_same(read_state(parts), before)
    assert session.steps == 1


def read_state(parts: Parts) -> Any:
    """A copy of everything, which later steps do not change."""
    model = {name: value.clone() for name, value in parts.model.state_dict().items()}
    return model, torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, parts.state()["optimizers"]
    )


def test_the_loop_goes_on_after_a_mistake() -> None:
    """A step that fails leaves no gradients behind: the others are as if it had never been tried."""

    def train(failing: bool) -> Parts:
        torch.manual_seed(0)
        parts = CASES["momentum"]()
        session = paceline.join(parts.model, parts.optimizers)
        for number in range(6):
            if number == 3 and failing:
                with pytest.raises(Mistake), session.step():
                    parts.backward(parts.loss((INPUTS, TARGETS)))
                    raise Mistake
            with session.step():
                parts.backward(parts.loss((INPUTS[number:], TARGETS[number:])))
        return parts

    assert_same(train(failing=True).state(), train(failing=False).state())


def test_a_mistake_while_accumulating_gives_up_what_was_accumulated() -> None:
    parts = CASES["momentum"]()
    session = paceline.join(parts.model, parts.optimizers)
    with session.step(accumulate=True):
        parts.backward(parts.loss((INPUTS, TARGETS)))
    with pytest.raises(Mistake), session.step(accumulate=True):
        raise Mistake
    with session.step():
        assert all(parameter.grad is None for parameter in parts.model.parameters())


def test_evaluation_may_use_another_loader_while_batches_are_under_way() -> None:
    model = mlp()
    with paceline.join(model, momentum(model)) as session:
        seen = 0
        for _ in session.batches(DATASET, 8, epochs=1):
            seen += sum(len(x) for x, _ in DataLoader(DATASET, 16))
        assert seen == 5 * 40


def test_mean_over_one_worker_is_the_value_itself() -> None:
    model = mlp()
    session = paceline.join(model, momentum(model))
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    mean = session.mean(value * 1, examples=3)
    assert_same(mean, torch.tensor([1.0, 2.0]))
    assert not mean.requires_grad
    assert_same(session.mean(2.5), torch.tensor(2.5))
    held = torch.zeros(1)
    kept = session.mean(held)
    held += 1
    assert kept == 0


def test_a_seed_makes_every_step_draw_its_own_numbers() -> None:
    def draws(seed: int | None, steps: int) -> list[float]:
        torch.manual_seed(99)
        model = mlp()
        session = paceline.join(model, momentum(model), seed=seed)
        found = []
        for _ in range(steps):
            with session.step():
                found.append(float(torch.rand(())))
        return found

    assert draws(1, 4) == draws(1, 6)[:4]
    assert len(set(draws(1, 6) + draws(2, 6))) == 12


def test_a_classifier_learns() -> None:
    """All the equalities above would hold for a loop that does nothing."""
    model = mlp()
    parts = classifier(model, momentum(model))
    losses = train_by_session(parts, epochs=30)
    assert losses[-1] < 0.8 * losses[0]
