"""Many workers with uneven batches train as one worker with the joined batch, whatever the model and the buckets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import (
    CASES,
    adam,
    assert_close,
    assert_moved,
    backward,
    copy_for,
    deal,
    momentum,
    peers_of,
    train_joined,
    train_on_workers,
    uneven_sizes,
)
from same_bits import assert_same
from torch import Tensor, nn

from paceline.errors import CommError
from paceline.peers.buckets import plan_buckets
from paceline.peers.connect import begin_exchange
from paceline.peers.exchange import BackwardPass
from paceline.policies import AllReduce

POLICIES = {
    "default": AllReduce(),
    "one each": AllReduce(bucket_cap_mb=0),
    "tiny": AllReduce(bucket_cap_mb=0.001, first_bucket_mb=0.0002),
    "first alone": AllReduce(first_bucket_mb=0),
    "no overlap": AllReduce(bucket_cap_mb=0.001, overlap=False),
}
# Each model goes every way, and each policy too, in as few trainings as that takes.
WAYS = [(2, momentum, True), (3, adam, False), (4, momentum, False), (2, adam, True)]
TABLE = [
    pytest.param(case, policy, *WAYS[(row + column) % len(WAYS)], id=f"{case}, {policy}")
    for row, case in enumerate(CASES)
    for column, policy in enumerate(POLICIES)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "policy", "workers", "make_optimizer", "known_total"), TABLE)
def test_workers_equal_one_on_the_joined_batch(
    world: World, case: str, policy: str, workers: int, make_optimizer: Any, known_total: bool
) -> None:
    template = CASES[case].build()
    dealt = deal(CASES[case], uneven_sizes(workers))
    expected = train_joined(CASES[case], template, make_optimizer, dealt)
    assert_moved(expected, template)
    models = world(
        workers,
        lambda group: train_on_workers(
            group,
            CASES[case],
            template,
            make_optimizer,
            dealt,
            policy=POLICIES[policy],
            known_total=known_total,
        ),
    )
    assert_close(models[0], expected)
    for model in models[1:]:
        assert_same(model.state_dict(), models[0].state_dict())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("case", ["mlp", "channels last", "dtypes"])
def test_gradients_are_aligned_views_of_a_few_buckets(world: World, case: str, set_to_none: bool) -> None:
    template = CASES[case].build()
    inputs = CASES[case].inputs(4)
    kinds = len({parameter.dtype for parameter in template.parameters()})

    def work(group: Any) -> None:
        model = copy_for(group, template)
        exchange = begin_exchange(model, AllReduce(first_bucket_mb=25), peers_of(group))
        storages: list[set[int]] = []
        for _ in range(4):
            model.zero_grad(set_to_none=set_to_none)
            exchange.begin(BackwardPass(examples=1, total=2))
            backward(CASES[case].loss(model, inputs))
            exchange.finish()
            gradients = [gradient_of(parameter) for parameter in model.parameters()]
            assert all(gradient.data_ptr() % 64 == 0 for gradient in gradients)
            for gradient, parameter in zip(gradients, model.parameters(), strict=True):
                assert gradient.stride() == parameter.stride()
            storages.append({gradient.untyped_storage().data_ptr() for gradient in gradients})
            assert len(storages[-1]) == kinds
            exchange.release()
        assert storages[2] == storages[3]  # the buckets stay, once they are in the order in which gradients come

    world(2, work)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_freezing_and_unfreezing_on_all_workers_keeps_averages_right(world: World) -> None:
    case = CASES["mlp"]
    template = case.build()
    dealt = deal(case, uneven_sizes(2, steps=9))

    def freeze(model: nn.Module, step: int) -> None:
        layers = [child for child in model.children() if isinstance(child, nn.Linear)]
        for place, layer in enumerate(layers):
            layer.requires_grad_(step < 2 or (step // 2) % 3 != place)

    expected = copy.deepcopy(template)
    optimizer = momentum(expected)
    for step, batches in enumerate(dealt):
        freeze(expected, step)
        optimizer.zero_grad()
        backward(case.loss(expected, torch.cat(batches)))
        optimizer.step()

    def work(group: Any) -> nn.Module:
        model = copy_for(group, template)
        optimizer = momentum(model)
        exchange = begin_exchange(model, AllReduce(bucket_cap_mb=0.0001), peers_of(group))
        for step, batches in enumerate(dealt):
            freeze(model, step)
            optimizer.zero_grad()
            mine = batches[group.rank()]
            exchange.begin(BackwardPass(examples=len(mine), total=None))
            backward(case.loss(model, mine if len(mine) else batches[1 - group.rank()]))
            exchange.finish()
            optimizer.step()
            exchange.release()
        return model

    models = world(2, work)
    assert_close(models[0], expected)
    assert_same(models[1].state_dict(), models[0].state_dict())


def test_all_parameters_frozen_is_an_exchange_of_nothing(world: World) -> None:
    def work(group: Any) -> list[Tensor | None]:
        model = nn.Linear(2, 2).requires_grad_(False)
        exchange = begin_exchange(model, AllReduce(), peers_of(group))
        exchange.begin(BackwardPass(examples=3, total=None, loss=lambda: 2.0))
        outcome = exchange.finish()
        assert outcome is not None
        assert (outcome.examples, outcome.loss) == (6, 2.0)
        return [parameter.grad for parameter in model.parameters()]

    assert world(2, work) == [[None, None]] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_another_order_of_buckets_on_one_worker_is_found(
    world: World, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 1 is the plan at the start, stage 2 the one in the order in which gradients came."""
    plans: list[list[list[int]]] = []

    def plan(*arguments: Any, **options: Any) -> list[list[int]]:
        plans.append(plan_buckets(*arguments, **options))
        return plans[-1][::-1] if len(plans) == 2 * stage else plans[-1]

    monkeypatch.setattr("paceline.peers.reducer.plan_buckets", plan)

    def work(group: Any) -> str:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # parameters of equal sizes: nothing else would tell
        with pytest.raises(CommError, match="other gradient buckets than worker 0") as caught:
            exchange = begin_exchange(model, AllReduce(bucket_cap_mb=0), peers_of(group))
            for _ in range(2):
                exchange.begin(BackwardPass(examples=1, total=2))
                backward(model(torch.ones(1, 2)).sum())
                exchange.finish()
        return str(caught.value)

    assert len(world(2, work)) == 2
