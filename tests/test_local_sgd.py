"""Local SGD: workers update their own parameters, and average them after every few steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import CASES, backward, copy_for, momentum
from same_bits import assert_same
from test_many_resume import DATA, Broken, WithStatistics
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import CommError
from paceline.sessions.peers import PeersSession

CASE = CASES["mlp"]
EPOCHS = 3


def plain(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def train(
    group: Any,
    template: nn.Module,
    policy: str,
    *,
    make_optimizer: Any = plain,
    stop: int | None = None,
    batch_size: int = 4,
    **options: Any,
) -> dict[str, Any]:
    model = copy_for(group, template)
    optimizer = make_optimizer(model)
    replicas: list[list[Tensor]] = []
    session = paceline.join(model, optimizer, policy=policy, seed=1, group=group, **options)
    try:
        with session:
            for (batch,) in session.batches(TensorDataset(DATA), batch_size, epochs=EPOCHS):
                with session.step() as step:
                    loss = CASE.loss(model, batch)
                    step.record(loss=loss)
                    backward(loss)
                replicas.append([parameter.detach().clone() for parameter in model.parameters()])
                if session.steps == stop:
                    raise Broken
    except Broken:
        pass
    assert isinstance(session, PeersSession)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps": session.steps,
        "replicas": replicas,
        "bytes": session._exchange.num_bytes,
    }


@pytest.mark.parametrize("batch_size", [4, 7])
def test_averaging_after_every_step_of_plain_sgd_is_all_reduce(world: World, batch_size: int) -> None:
    """With short batches and, in the last step of the epoch, a worker that has none."""
    template = CASE.build()
    local = world(3, lambda group: train(group, template, "local-sgd(every=1)", batch_size=batch_size))
    together = world(3, lambda group: train(group, template, "all-reduce", batch_size=batch_size))
    for name, wanted in together[0]["model"].items():
        torch.testing.assert_close(local[0]["model"][name], wanted, rtol=1e-6, atol=1e-6)


def test_replicas_differ_between_averages_and_agree_to_the_bit_after_each(world: World) -> None:
    template = CASE.build()
    found = world(3, lambda group: train(group, template, "local-sgd(every=2)", make_optimizer=momentum))
    steps = found[0]["steps"]
    assert steps == 9
    for step in range(1, steps + 1):
        one, *others = [each["replicas"][step - 1] for each in found]
        for other in others:
            same = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
            assert same == (step % 2 == 0), step
    for each in found[1:]:
        assert_same(found[0]["model"], each["model"])  # the last odd step is averaged when the session ends


def test_momentum_stays_each_workers_own(world: World) -> None:
    template = CASE.build()
    found = world(2, lambda group: train(group, template, "local-sgd(every=1)", make_optimizer=momentum))
    one, other = (each["optimizer"]["state"][0]["momentum_buffer"] for each in found)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("every", [3, 9])
def test_bytes_fall_by_the_factor(world: World, every: int) -> None:
    template = CASE.build()
    often = world(2, lambda group: train(group, template, "local-sgd(every=1)", batch_size=6))
    seldom = world(2, lambda group: train(group, template, f"local-sgd(every={every})", batch_size=6))
    assert often[0]["steps"] == seldom[0]["steps"] == 9
    shared = 16  # the number of the run and the like, told once
    assert often[0]["bytes"] - shared == pytest.approx(every * (seldom[0]["bytes"] - shared), abs=16 * every)


@pytest.mark.parametrize("stop", [4, 6])
def test_a_resumed_run_equals_one_that_was_never_stopped(world: World, tmp_path: Path, stop: int) -> None:
    """In the middle of a round and at an average; momentum, replicas and the examples of the round are saved."""
    template = WithStatistics()
    options: dict[str, Any] = {"policy": "local-sgd(every=3)", "make_optimizer": momentum, "save_every": 2}
    whole = world(3, lambda group: train(group, template, run=tmp_path / "whole", **options))
    world(3, lambda group: train(group, template, run=tmp_path / "cut", stop=stop, **options))
    resumed = world(3, lambda group: train(group, template, run=tmp_path / "cut", resume=True, **options))
    for before, after in zip(whole, resumed, strict=True):
        assert_same(before["model"], after["model"])
        assert_same(before["optimizer"], after["optimizer"])


def test_another_number_of_workers_goes_on_from_the_average(world: World, tmp_path: Path) -> None:
    template = CASE.build()
    options: dict[str, Any] = {"run": tmp_path / "run", "save_every": 1}
    cut = world(3, lambda group: train(group, template, "local-sgd(every=4)", stop=3, **options))
    means = [torch.stack(each).mean(0) for each in zip(*(each["replicas"][-1] for each in cut), strict=True)]
    started: list[Tensor] = []

    def resume(group: Any) -> None:
        model = copy_for(group, template)
        with paceline.join(
            model, plain(model), policy="local-sgd(every=4)", group=group, resume=True, run=options["run"]
        ):
            if group.rank() == 0:
                started.extend(parameter.detach().clone() for parameter in model.parameters())

    world(2, resume)
    for parameter, mean in zip(started, means, strict=True):
        torch.testing.assert_close(parameter, mean)


def test_inside_averaged_the_model_is_the_mean_and_after_it_the_workers_own(world: World) -> None:
    def work(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Linear(1, 1, bias=False)
        with paceline.join(model, plain(model), policy="local-sgd(every=5)", group=group) as session:
            with session.step():
                backward(model(torch.full((1, 1), 1.0 + session.rank)).sum())
            own = model.weight.detach().clone()
            with session.averaged():
                mean = model.weight.detach().clone()
            assert torch.equal(model.weight, own)
        return own, mean, model.weight.detach().clone()

    found = world(2, work)
    for _, mean, end in found:
        torch.testing.assert_close(mean, (found[0][0] + found[1][0]) / 2)
        assert torch.equal(mean, end)


def test_statistics_of_batches_are_averaged_with_the_parameters(world: World) -> None:
    template = WithStatistics()
    found = world(2, lambda group: train(group, template, "local-sgd(every=2)"))
    assert_same(found[0]["model"], found[1]["model"])
    assert not torch.equal(found[0]["model"]["layers.1.running_mean"], template.layers[1].running_mean)  # type: ignore[arg-type]


def test_halves_are_averaged_in_single_precision(world: World) -> None:
    def work(group: Any) -> Tensor:
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        with paceline.join(model, plain(model), policy="local-sgd(every=1)", group=group):
            pass
        nn.init.constant_(model.weight, 1.0)
        with paceline.join(model, plain(model), policy="local-sgd(every=1)", group=group) as session, session.step():
            backward(0.04 * (1 + session.rank) * model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        return model.weight.detach()

    one, other = world(2, work)
    assert torch.equal(one, other)
    assert abs(one.float().item() - 0.994) < 0.008


def test_workers_that_are_out_of_step_are_told(world: World) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        with paceline.join(model, plain(model), policy="local-sgd(every=4)", group=group) as session:
            for _ in range(1 + session.rank):
                with session.step():
                    backward(model(torch.ones(1, 1)).sum())

    with pytest.raises(CommError, match="out of step"):
        world(2, work)


def test_alone_it_is_a_plain_loop() -> None:
    model = nn.Linear(2, 1)
    by_hand = copy.deepcopy(model)
    with paceline.join(model, plain(model), policy=paceline.LocalSGD(every=3)) as session, session.step():
        backward(model(torch.ones(1, 2)).sum())
    backward(by_hand(torch.ones(1, 2)).sum())
    plain(by_hand).step()
    assert torch.equal(model.weight, by_hand.weight)


def test_all_reduce_goes_on_from_the_average_of_replicas(world: World, tmp_path: Path) -> None:
    """Workers that differ must not go on as if they were alike."""
    template = CASE.build()
    options: dict[str, Any] = {"run": tmp_path / "run", "save_every": 1}
    cut = world(2, lambda group: train(group, template, "local-sgd(every=4)", stop=3, **options))
    assert not torch.equal(cut[0]["replicas"][-1][0], cut[1]["replicas"][-1][0])
    found = world(2, lambda group: train(group, template, "all-reduce", resume=True, **options))
    assert found[0]["steps"] > 3
    assert_same(found[0]["model"], found[1]["model"])
