"""A session on many workers: the joined batch, means, LBFGS, mixed precision, times."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from careful_group import CarefulGroup
from conftest import World
from joined_batch import CASES, adam, assert_close, assert_moved, backward, copy_for, momentum, one_weight
from same_bits import assert_same
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data import TensorDataset

import paceline

CASE = CASES["mlp"]


def train(
    group: Any, template: nn.Module, make_optimizer: Callable[[nn.Module], Optimizer], data: Tensor, batch_size: int
) -> nn.Module:
    model = copy_for(group, template)
    with paceline.join(model, make_optimizer(model), seed=3, group=group) as session:
        for (batch,) in session.batches(TensorDataset(data), batch_size, epochs=3):
            with session.step() as step:
                loss = CASE.loss(model, batch)
                step.record(loss=loss)
                backward(loss)
    return model


@pytest.mark.parametrize("make_optimizer", [momentum, adam])
@pytest.mark.parametrize(("workers", "num_samples"), [(2, 24), (2, 25), (3, 37), (4, 23), (4, 37)])
def test_an_epoch_on_workers_is_that_of_one(
    world: World, workers: int, num_samples: int, make_optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    """One worker has the batches of all of them joined; the last is short, or too short for some."""
    template, data = CASE.build(), CASE.inputs(num_samples)
    (expected,) = world(1, lambda group: train(group, template, make_optimizer, data, 12))
    models = world(workers, lambda group: train(group, template, make_optimizer, data, 12 // workers))
    assert_moved(expected, template)
    assert_close(models[0], expected)
    for model in models[1:]:
        assert_same(model.state_dict(), models[0].state_dict())


def test_means_through_the_session(world: World) -> None:
    def work(group: Any) -> list[Tensor]:
        model = one_weight()
        with paceline.join(model, momentum(model), group=group) as session:
            inside = torch.ones(2, requires_grad=True) * session.rank
            return [session.mean(inside), session.mean(session.rank * 2.0, examples=session.rank)]

    for found in world(3, work):
        assert_same(found, [torch.ones(2), torch.tensor(10 / 3)])


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_is_that_of_one_worker(world: World, line_search: str | None) -> None:
    template = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    data = CASE.inputs(12).double()

    def work(group: Any, shares: list[Tensor]) -> tuple[nn.Module, list[float]]:
        model = copy_for(group, template)
        optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)
        mine = shares[group.rank()]
        with paceline.join(model, optimizer, group=group) as session:

            def closure() -> Tensor:
                loss = CASE.loss(model, mine)
                backward(loss)
                return loss

            losses = [float(session.minimize(closure, examples=len(mine))) for _ in range(4)]
        return model, losses

    ((expected, losses),) = world(1, lambda group: work(group, [data]))
    results = world(2, lambda group: work(group, [data[:5], data[5:]]))
    assert losses[-1] < 0.9 * losses[0]
    for model, found in results:
        assert found == pytest.approx(losses, rel=1e-6)
        for (name, value), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-9, msg=name)
    assert_same(results[1][0].state_dict(), results[0][0].state_dict())


def test_lbfgs_where_one_worker_has_nothing_to_compute(world: World) -> None:
    log: dict[int, Any] = {}

    def work(group: Any) -> float:
        model = one_weight()
        with paceline.join(model, LBFGS(model.parameters(), max_iter=2), group=CarefulGroup(group, log)) as session:

            def closure() -> Tensor:
                if session.rank == 1:
                    return torch.tensor(math.nan)
                loss: Tensor = (model(torch.ones(1, 1)) - 3).square().sum()
                backward(loss)
                return loss

            session.minimize(closure, examples=1 - session.rank)
        return model.weight.item()

    first, second = world(2, work)
    assert first == second != 1.0


def test_an_overflow_on_one_worker_makes_all_skip_the_update(world: World) -> None:
    def work(group: Any) -> tuple[list[float], list[float]]:
        model = one_weight()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
        weights, scales = [], []
        with paceline.join(model, SGD(model.parameters(), lr=0.1), scaler=scaler, group=group) as session:
            for number in range(3):
                with session.step():
                    bad = (number, session.rank) == (1, 1)
                    backward(scaler.scale(model(torch.ones(1, 1)).sum() * (math.inf if bad else 1.0)))
                weights.append(round(model.weight.item(), 6))
                scales.append(scaler.get_scale())
        return weights, scales

    assert world(2, work) == [([0.9, 0.9, 0.8], [8.0, 4.0, 4.0])] * 2


class Slow(nn.Module):
    """Sleeps in its forward pass and in its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = one_weight()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layer(inputs)
        if out.requires_grad:
            out.register_hook(lambda _: time.sleep(PAUSE))  # type: ignore[no-untyped-call]
            time.sleep(PAUSE)
        return out


PAUSE = 0.01


@pytest.mark.parametrize("used_again", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_times_are_parts_of_the_step(world: World, accumulate: int, used_again: bool) -> None:
    """Also where the model is used once more after backward, say for an accuracy."""

    def work(group: Any) -> None:
        model = Slow()
        optimizer = momentum(model)
        optimizer.register_step_pre_hook(lambda *_: time.sleep(PAUSE))
        with paceline.join(model, optimizer, group=group) as session:
            for _ in range(3):
                began = time.perf_counter()
                for number in range(accumulate):
                    with session.step(accumulate=number < accumulate - 1):
                        backward(model(torch.ones(1, 1)).sum())
                        if used_again:
                            time.sleep(2 * PAUSE)
                            with torch.no_grad():
                                model(torch.ones(1, 1))
                took = time.perf_counter() - began
                timing = session.timing
                parts = [timing.forward, timing.backward, timing.communication, timing.waited, timing.optimizer]
                assert min(parts) >= 0, timing
                assert min(timing.forward, timing.backward) >= accumulate * PAUSE, timing
                assert timing.optimizer >= PAUSE, timing
                assert sum(parts) <= took
                assert timing.total == pytest.approx(sum(parts))

    world(2, work)


def test_who_is_waited_for_and_who_waits(world: World) -> None:
    come = [threading.Event() for _ in range(6)]  # who is late begins to be late when the other has come

    def work(group: Any) -> list[float]:
        model = one_weight()
        waited = []
        with paceline.join(model, momentum(model), group=group) as session:
            for number in range(6):
                if number > 1 and number % 2 == session.rank:  # in the second step the buckets are made anew
                    assert come[number].wait(world.deadline)
                    time.sleep(0.1)
                with session.step():
                    loss = model(torch.ones(1, 1)).sum()
                    come[number].set()
                    backward(loss)
                waited.append(session.timing.waited)
        return waited[2:]

    first, second = world(2, work)
    assert [waited > 0.04 for waited in first] == [False, True, False, True]
    assert [waited > 0.04 for waited in second] == [True, False, True, False]
