"""Parameters that a step does not use, and gradients that are sparse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from careful_group import CarefulGroup
from conftest import World
from joined_batch import adam, assert_close, assert_moved, backward, copy_for, momentum
from same_bits import assert_same
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam

import paceline
from paceline.errors import UsageError

EXPERTS = 4
STEPS = 8


class Experts(nn.Module):
    """A batch goes through some of the experts only; the others' parameters are unused."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 1) for _ in range(EXPERTS))

    def loss_sum(self, inputs: Tensor, chosen: list[int]) -> Tensor:
        return torch.stack([self.experts[place](inputs).square().sum() for place in chosen]).sum()


# Who uses which experts, by step and worker; an empty list is a step without any backward pass on that worker.
CHOICES: dict[str, Callable[[int, int], list[int]]] = {
    "all": lambda step, rank: list(range(EXPERTS)),
    "one each": lambda step, rank: [rank],
    "never the last": lambda step, rank: [0, 1, 2],
    "changing": lambda step, rank: [(step + rank) % EXPERTS, (2 * step) % EXPERTS],
    "worker 1 has nothing at first": lambda step, rank: [] if (step, rank) == (0, 1) else [0, 1],
    "worker 0 has nothing at first": lambda step, rank: [] if (step, rank) == (0, 0) else [0, 1],
    "worker 1 has nothing later": lambda step, rank: [] if rank == 1 and step in (2, 3, 7) else [step % EXPERTS],
    "nobody has anything in one step": lambda step, rank: [] if step == 4 else [rank, 2],
    "nobody has anything at first": lambda step, rank: [] if step == 0 else [rank, 2],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize("policy", ["all-reduce", "all-reduce(bucket_cap_mb=0)"])
@pytest.mark.parametrize("choice", CHOICES)
def test_unused_parameters_are_as_unused_as_with_one_worker(
    world: World, choice: str, policy: str, make_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    template = Experts()
    inputs = torch.randn(STEPS, 2, 5, 3)
    expected = copy.deepcopy(template)
    expected_optimizer = make_optimizer(expected)
    expected_gradients = []
    for step in range(STEPS):
        expected_optimizer.zero_grad()
        chosen = [CHOICES[choice](step, rank) for rank in (0, 1)]
        losses = [expected.loss_sum(inputs[step, rank], chosen[rank]) for rank in (0, 1) if chosen[rank]]
        if losses:
            backward(torch.stack(losses).sum() / 10)
        expected_gradients.append([parameter.grad is None for parameter in expected.parameters()])
        expected_optimizer.step()
    log: dict[int, Any] = {}

    def work(group: Any) -> tuple[nn.Module, Optimizer]:
        model = copy_for(group, template)
        assert isinstance(model, Experts)
        optimizer = make_optimizer(model)
        with paceline.join(model, optimizer, policy=policy, group=CarefulGroup(group, log)) as session:
            for step in range(STEPS):
                chosen = CHOICES[choice](step, session.rank)
                with session.step(examples=5):
                    if chosen:
                        backward(model.loss_sum(inputs[step, session.rank], chosen) / 5)
                unused = [parameter.grad is None for parameter in model.parameters()]
                assert unused == expected_gradients[step]
        return model, optimizer

    results = world(2, work)
    for model, optimizer in results:
        assert_close(model, expected)
        assert_same_state_places(optimizer, expected_optimizer)
    assert_same(results[1][0].state_dict(), results[0][0].state_dict())
    assert_same(results[1][1].state_dict(), results[0][1].state_dict())
    assert_moved(expected, template)


def assert_same_state_places(optimizer: Optimizer, expected: Optimizer) -> None:
    """The optimizer has state for the same parameters, which have been updated equally often."""
    found, wanted = optimizer.state_dict()["state"], expected.state_dict()["state"]
    assert sorted(found) == sorted(wanted)
    for place, state in wanted.items():
        assert_same(found[place].get("step"), state.get("step"))


def test_what_only_a_worker_without_examples_used_counts_as_unused(world: World) -> None:
    """It computes on borrowed data, so that an optimizer must not find a gradient of zeros there."""

    def work(group: Any) -> tuple[bool, int]:
        model = Experts()
        optimizer = Adam(model.parameters())
        with paceline.join(model, optimizer, group=group) as session, session.step(examples=1 - session.rank):
            backward(model.loss_sum(torch.ones(1, 3), [session.rank]))
        return model.experts[1].weight.grad is None, len(optimizer.state)

    assert world(2, work) == [(True, 2), (True, 2)]


class Words(nn.Module):
    """Embeddings with sparse gradients before a dense layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words: nn.Embedding | nn.EmbeddingBag
        self.words = nn.EmbeddingBag(9, 3, sparse=True) if kind == "bag" else nn.Embedding(9, 3, sparse=True)
        self.unused = nn.Embedding(4, 2, sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.words(words))
        return out


def sparse_adam(model: Words) -> list[Optimizer]:
    return [SparseAdam([model.words.weight, model.unused.weight], lr=0.1), momentum(model.out)]


def sgd(model: Words) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=0.1)]


# The numbers of examples of the workers; the second of three never sees the words that the others see.
SHARES: dict[str, list[int]] = {"even": [3, 3, 3], "uneven": [1, 4, 2], "one has none": [3, 0, 2]}


@pytest.mark.parametrize("make_optimizers", [sgd, sparse_adam])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", ["plain", "bag"])
def test_sparse_gradients_are_those_of_the_joined_batch(
    world: World, kind: str, share: str, make_optimizers: Callable[[Words], list[Optimizer]]
) -> None:
    template = Words(kind)
    counts = SHARES[share]
    steps = 4
    dealt = [
        [torch.randint(4 * (rank == 1), 4 + 4 * (rank == 1), (max(1, count), 2)) for rank, count in enumerate(counts)]
        for _ in range(steps)
    ]
    expected = copy.deepcopy(template)
    optimizers = make_optimizers(expected)
    for batches in dealt:
        for optimizer in optimizers:
            optimizer.zero_grad()
        joined = torch.cat([batch[:count] for batch, count in zip(batches, counts, strict=True)])
        backward(expected(joined).square().mean())
        for optimizer in optimizers:
            optimizer.step()

    def work(group: Any) -> Words:
        model = copy_for(group, template)
        assert isinstance(model, Words)
        with paceline.join(model, make_optimizers(model), group=group) as session:
            for batches in dealt:
                with session.step(examples=counts[session.rank]):
                    loss = model(batches[session.rank]).square().mean()
                    backward(loss if counts[session.rank] else loss * torch.nan)
                assert model.words.weight.grad is not None and model.words.weight.grad.is_sparse
                assert model.unused.weight.grad is None
        return model

    models = world(3, work)
    assert_close(models[0], expected)
    assert_moved(expected, template)
    for model in models[1:]:
        assert_same(model.state_dict(), models[0].state_dict())


def test_sparse_gradients_that_one_worker_has_not_or_nobody(world: World) -> None:
    def work(group: Any) -> list[Tensor | None]:
        model = Words("plain")
        nn.init.ones_(model.words.weight)
        nn.init.ones_(model.out.weight)
        found = []
        with paceline.join(model, SGD(model.parameters(), lr=0.0), group=group) as session:
            for users in ([0, 1], [0], [], [1]):
                with session.step():
                    if session.rank in users:
                        backward(model(torch.tensor([[2]])).sum())
                gradient = model.words.weight.grad
                found.append(None if gradient is None else gradient.to_dense().clone())
        return found

    once = torch.zeros(9, 3).index_fill(0, torch.tensor(2), 1.0)
    for found in world(2, work):
        assert_same(found, [once, once / 2, None, once / 2])


def test_a_sparse_gradient_nobody_announced_is_refused(world: World) -> None:
    def work(group: Any) -> None:
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros(5, 2))
        session = paceline.join(model, SGD(model.parameters(), lr=0.1), group=group)
        with session, pytest.raises(UsageError, match=r"weight has a sparse gradient but"), session.step():
            backward(nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum())

    world(2, work)
