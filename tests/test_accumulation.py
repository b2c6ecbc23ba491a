"""Blocks that accumulate, backward passes where none should be, and clipping, on many workers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import CASES, assert_close, assert_moved, backward, copy_for, momentum
from same_bits import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import UsageError

CASE = CASES["mlp"]


def train_accumulating(template: nn.Module, updates: Sequence[Sequence[Tensor]], **options: Any) -> nn.Module:
    """By one worker and by hand: every update adds up the gradients of a few batches."""
    model = copy.deepcopy(template)
    optimizer = momentum(model)
    for batches in updates:
        optimizer.zero_grad()
        for batch in batches:
            backward(CASE.loss(model, batch))
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        optimizer.step()
    return model


def assert_equal_on_workers(models: list[nn.Module], expected: nn.Module, template: nn.Module) -> None:
    assert_moved(expected, template)
    assert_close(models[0], expected)
    for model in models[1:]:
        assert_same(model.state_dict(), models[0].state_dict())


# How many examples each of two workers has in the micro-batches of an update.
SHARES = {"even": [(4, 4), (4, 4), (4, 4)], "in the same proportion": [(1, 3), (2, 6), (1, 3)]}


@pytest.mark.parametrize("share", SHARES)
def test_micro_batches_are_those_of_one_worker(world: World, share: str) -> None:
    template = CASE.build()
    dealt = [[[CASE.inputs(count) for count in pair] for pair in SHARES[share]] for _ in range(4)]
    expected = train_accumulating(template, [[torch.cat(pair) for pair in update] for update in dealt])

    def work(group: Any) -> nn.Module:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), group=group) as session:
            for update in dealt:
                for number, pair in enumerate(update):
                    with session.step(accumulate=number < 2, examples=len(pair[session.rank])):
                        backward(CASE.loss(model, pair[session.rank]))
            assert session.steps == len(dealt)
        return model

    assert_equal_on_workers(world(2, work), expected, template)


@pytest.mark.parametrize("without", [0, 1, 2])
def test_borrowed_data_of_one_micro_batch_counts_for_nothing(world: World, without: int) -> None:
    """A worker that has no examples in one micro-batch of three might as well have made no backward pass in it."""
    template = CASE.build()
    dealt = [[CASE.inputs(4), CASE.inputs(4)] for _ in range(3)]

    def work(group: Any, backward_on_borrowed: bool) -> nn.Module:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), group=group) as session:
            for number, pair in enumerate(dealt):
                none = session.rank == 1 and number == without
                with session.step(accumulate=number < 2, examples=0 if none else 4):
                    if not none:
                        backward(CASE.loss(model, pair[session.rank]))
                    elif backward_on_borrowed:
                        backward(CASE.loss(model, torch.full((1, 6), torch.nan)))
        return model

    expected, _ = world(2, lambda group: work(group, False))
    assert_equal_on_workers(world(2, lambda group: work(group, True)), expected, template)


@pytest.mark.parametrize("num_samples", [16, 21, 17])
def test_an_epoch_with_a_short_end_is_that_of_one_worker(world: World, num_samples: int) -> None:
    """The last of them is divided otherwise than the others, and of 17 samples it has but one: a worker has none."""
    template, inputs = CASE.build(), CASE.inputs(num_samples)
    batches = [inputs[start : start + 8] for start in range(0, num_samples, 8)]
    last = len(batches) - 1
    expected = train_accumulating(template, [batches])

    def work(group: Any) -> nn.Module:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), group=group) as session:
            mine = session.batches(TensorDataset(inputs), 4, epochs=1, shuffle=False)
            for number, (batch,) in enumerate(mine):
                with session.step(accumulate=number < last):
                    backward(CASE.loss(model, batch))
        return model

    assert_equal_on_workers(world(2, work), expected, template)


def test_what_only_the_first_micro_batch_used_is_exchanged(world: World) -> None:
    def work(group: Any) -> list[Tensor | None]:
        model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
        with paceline.join(model, momentum(model), group=group) as session:
            for _ in range(3):
                with session.step(accumulate=True):
                    backward(model[0](torch.full((1, 1), 1.0 + session.rank)).sum())
                with session.step():
                    backward(model[1](torch.ones(1, 1)).sum())
        return [parameter.grad for parameter in model.parameters()]

    assert world(2, work) == [[torch.tensor([[1.5]]), torch.tensor([[1.0]]), None]] * 2


@pytest.mark.parametrize("by", ["user", "session"])
def test_clipping_sees_the_averaged_gradients(world: World, by: str) -> None:
    template = CASE.build()
    dealt = [[CASE.inputs(2 + step), CASE.inputs(5)] for step in range(5)]
    norm = 0.05
    expected = train_accumulating(template, [[torch.cat(pair)] for pair in dealt], clip_norm=norm)
    free = train_accumulating(template, [[torch.cat(pair)] for pair in dealt])

    def work(group: Any) -> nn.Module:
        model = copy_for(group, template)
        options: dict[str, Any] = {"clip_norm": norm} if by == "session" else {}
        with paceline.join(model, momentum(model), group=group, **options) as session:
            for pair in dealt:
                with session.step(examples=len(pair[session.rank])):
                    backward(CASE.loss(model, pair[session.rank]))
                    if by == "user":
                        nn.utils.clip_grad_norm_(model.parameters(), norm)
        return model

    models = world(2, work)
    assert_equal_on_workers(models, expected, template)
    assert_moved(free, expected)  # else nothing was clipped


def test_a_second_backward_in_a_step_is_refused_with_advice(world: World) -> None:
    def work(group: Any) -> str:
        model = nn.Linear(1, 1)
        session = paceline.join(model, momentum(model), group=group)
        with (
            session,
            pytest.raises(UsageError, match=r"second backward.*accumulate=True") as caught,
            session.step(),
        ):
            backward(model(torch.ones(1, 1)).sum())
            backward(model(torch.ones(1, 1)).sum())
        return str(caught.value)

    assert [message[:8] for message in world(2, work)] == ["worker 0", "worker 1"]


def test_a_backward_between_steps_is_harmless(world: World) -> None:
    template = CASE.build()
    dealt = [[CASE.inputs(3), CASE.inputs(5)] for _ in range(5)]
    expected = train_accumulating(template, [[torch.cat(pair)] for pair in dealt])

    def work(group: Any) -> nn.Module:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), group=group) as session:
            for number, pair in enumerate(dealt):
                if number != 3:
                    for _ in range(1 + session.rank):  # not even as often on all workers
                        backward(CASE.loss(model, CASE.inputs(2)))
                with session.step(examples=len(pair[session.rank])):
                    backward(CASE.loss(model, pair[session.rank]))
        return model

    assert_equal_on_workers(world(2, work), expected, template)


class Checkpointed(nn.Sequential):
    """Computes its layers' outputs a second time during backward."""

    reentrant = False

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        for layer in self:
            inputs = checkpoint(layer, inputs, use_reentrant=self.reentrant)
        return inputs


def test_activation_checkpointing(world: World) -> None:
    template = Checkpointed(*CASE.build().children())
    dealt = [[CASE.inputs(3), CASE.inputs(5)] for _ in range(4)]
    expected = train_accumulating(nn.Sequential(*template.children()), [[torch.cat(pair)] for pair in dealt])

    def work(group: Any) -> nn.Module:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), policy="all-reduce(bucket_cap_mb=0)", group=group) as session:
            for pair in dealt:
                with session.step(examples=len(pair[session.rank])):
                    backward(CASE.loss(model, pair[session.rank]))
        return model

    assert_equal_on_workers(world(2, work), expected, nn.Sequential(*template.children()))


def test_reentrant_checkpointing_is_refused_with_advice(world: World) -> None:
    def work(group: Any) -> None:
        model = Checkpointed(*CASE.build().children())
        model.reentrant = True
        session = paceline.join(model, momentum(model), group=group)
        with session, pytest.raises(UsageError, match="use_reentrant=False"), session.step():
            backward(CASE.loss(model, CASE.inputs(2)))

    world(2, work)


def penalties(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_are_averaged_too(world: World) -> None:
    """As optimizers do that estimate the Hessian."""
    template, inputs = CASE.build(), [CASE.inputs(3), CASE.inputs(3)]
    expected = copy.deepcopy(template)
    backward(CASE.loss(expected, torch.cat(inputs)))

    def work(group: Any) -> list[Tensor]:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), group=group) as session, session.step():
            torch.autograd.backward(CASE.loss(model, inputs[session.rank]), create_graph=True)
        return [gradient.detach() for gradient in penalties(model)]

    for found in world(2, work):
        torch.testing.assert_close(found, [gradient.detach() for gradient in penalties(expected)])


def test_what_is_accumulated_and_never_used_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(1, 1)
    with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session, session.step(accumulate=True):
        backward(model(torch.ones(1, 1)).sum())
    assert session.steps == 0
    assert "accumulated since step 0 was not used; end with a step without accumulate=True" in caplog.text
