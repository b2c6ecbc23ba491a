"""sync-easgd and sma: workers and a central average pull each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from conftest import World
from hypothesis import given
from hypothesis import strategies as st
from joined_batch import CASES, backward, copy_for, momentum, peers_of
from replicas import plain, train
from same_bits import assert_same
from test_many_resume import WithStatistics
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR

import paceline
from paceline.errors import CommError, UsageError
from paceline.peers.elastic import ElasticExchange
from paceline.peers.exchange import BackwardPass
from paceline.policies import SMA, ElasticRule, Progress, SyncEASGD

CASE = CASES["mlp"]
STEPS = 7


def batches_of(rank: int) -> Tensor:
    return torch.randn(STEPS, 4, 6, generator=torch.Generator().manual_seed(10 + rank))


def milestones(optimizer: SGD) -> MultiStepLR:
    return MultiStepLR(optimizer, milestones=[4], gamma=0.1)


def train_on_workers(
    group: Any, policy: str, template: nn.Module, make_scheduler: Callable[[SGD], LRScheduler] = milestones
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """A worker's parameters after each step, and at the end."""
    model = copy_for(group, template)
    optimizer = momentum(model)
    seen = []
    with paceline.join(model, optimizer, policy=policy, group=group, scheduler=make_scheduler(optimizer)) as session:
        for batch in batches_of(session.rank):
            with session.step():
                backward(CASE.loss(model, batch))
            seen.append([parameter.detach().clone() for parameter in model.parameters()])
    return seen, [parameter.detach().clone() for parameter in model.parameters()]


def train_by_hand(
    template: nn.Module, workers: int, *, alpha: float, mu: float = 0.0, every: int = 1, restart_at: int = 0
) -> tuple[list[list[list[Tensor]]], list[Tensor]]:
    """The equations as they are in the papers: all parameters after each step by step and worker, and z at the end."""
    models = [copy.deepcopy(template) for _ in range(workers)]
    optimizers = [momentum(model) for model in models]
    schedulers = [milestones(optimizer) for optimizer in optimizers]
    z = [parameter.detach().clone() for parameter in template.parameters()]
    z_before = [each.clone() for each in z]
    seen = []
    for step in range(1, STEPS + 1):
        corrections = []
        for rank, model in enumerate(models):
            corrections.append([alpha * (x.detach() - c) for x, c in zip(model.parameters(), z, strict=True)])
            optimizers[rank].zero_grad()
            backward(CASE.loss(model, batches_of(rank)[step - 1]))
            optimizers[rank].step()
            schedulers[rank].step()
        if step % every == 0:
            for model, own in zip(models, corrections, strict=True):
                for parameter, correction in zip(model.parameters(), own, strict=True):
                    parameter.data.sub_(correction)
            sums = [torch.stack(each).sum(0) for each in zip(*corrections, strict=True)]
            moved = [c + s + mu * (c - b) for c, s, b in zip(z, sums, z_before, strict=True)]
            z, z_before = moved, z
        if step == restart_at:
            z_before = z
            for model in models:
                for parameter, c in zip(model.parameters(), z, strict=True):
                    parameter.data.copy_(c)
        seen.append([[parameter.detach().clone() for parameter in model.parameters()] for model in models])
    return seen, z


def assert_as_by_hand(world: World, policy: str, **options: Any) -> None:
    template = CASE.build()
    found = world(3, lambda group: train_on_workers(group, policy, template))
    replicas, z = train_by_hand(template, 3, **options)
    for rank, (seen, end) in enumerate(found):
        for step, wanted in enumerate(replicas):
            torch.testing.assert_close(seen[step], wanted[rank], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(end, z, rtol=1e-5, atol=1e-6)
        assert_same(end, found[0][1])


@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_sync_easgd_is_that_of_the_paper(world: World, alpha: float) -> None:
    """With momentum and weight decay, which must see the parameters from before the correction."""
    assert_as_by_hand(world, f"sync-easgd(alpha={alpha})", alpha=alpha)


@pytest.mark.parametrize(("mu", "every"), [(0.9, 1), (0.5, 2)])
def test_sma_is_that_of_the_paper(world: World, mu: float, every: int) -> None:
    """The rate drops in step 4, after which all begin again at z, without momentum."""
    policy = f"sma(momentum={mu}, every={every})"
    assert_as_by_hand(world, policy, alpha=1 / 3, mu=mu, every=every, restart_at=4)


@pytest.mark.usefixtures("overlapping")
def test_summing_while_backward_runs_gives_the_same(world: World) -> None:
    assert_as_by_hand(world, "sma(momentum=0.5)", alpha=1 / 3, mu=0.5, restart_at=4)


def test_sma_without_momentum_and_drops_is_sync_easgd_to_the_bit(world: World) -> None:
    template = WithStatistics()
    ours = world(3, lambda group: train(group, template, "sma(momentum=0, alpha=0.2)", make_optimizer=momentum))
    theirs = world(3, lambda group: train(group, template, "sync-easgd(alpha=0.2)", make_optimizer=momentum))
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one["replicas"], other["replicas"])
        assert_same(one["model"], other["model"])


def exchange_alone(group: Any, policy: SyncEASGD | SMA, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Workers with different parameters that make no updates: each one's x and z after every exchange."""
    model = nn.Linear(4, 4, dtype=torch.float64)
    exchange = ElasticExchange(model, peers_of(group), policy)
    exchange.started(Progress(rate=0.1))
    with torch.no_grad():
        model.weight.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(group.rank())))
    seen = []
    for step in range(1, steps + 1):
        exchange.begin(BackwardPass(1))
        exchange.finish()
        exchange.updated(Progress(steps=step, rate=0.1))
        own = model.weight.detach().clone()
        with exchange.averaged():
            seen.append((own, model.weight.detach().clone()))
    return seen


@pytest.mark.parametrize("policy", [SyncEASGD(), SMA(momentum=0.0), SyncEASGD(alpha=0.4)], ids=str)
def test_an_exchange_conserves_the_sum_of_workers_and_central_average(world: World, policy: SyncEASGD) -> None:
    found = world(3, lambda group: exchange_alone(group, policy, steps=5))
    sums = [sum(seen[step][0] for seen in found) + found[0][step][1] for step in range(5)]
    for each in sums[1:]:
        torch.testing.assert_close(each, sums[0], rtol=1e-12, atol=1e-12)


def test_without_updates_all_end_in_one_place(world: World) -> None:
    found = world(3, lambda group: exchange_alone(group, SMA(), steps=200))
    for own, central in (seen[-1] for seen in found):
        torch.testing.assert_close(own, central, rtol=1e-6, atol=1e-6)


# Stability --------------------------------------------------------------------------------------------------


def spectral_radius(rule: ElasticRule, workers: int, rate: float) -> float:
    """Of the workers' mean, z and its last move, on a parabola of curvature 1."""
    alpha, mu, pull = rule.alpha, rule.momentum, workers * rule.alpha
    step = np.array([[1 - rate - alpha, alpha, 0], [pull, 1 - pull, mu], [pull, -pull, mu]])
    values = np.abs(np.linalg.eigvals(step))
    return float(sorted(values)[-2 if rate == 0 else -1])  # without a gradient one is 1: the sum that is conserved


@given(st.integers(2, 40), st.floats(0.01, 1.0), st.sampled_from([0.0, 0.5, 0.9]))
def test_an_alpha_is_refused_if_and_only_if_it_diverges_by_itself(workers: int, alpha: float, mu: float) -> None:
    radius = spectral_radius(ElasticRule(alpha, mu), workers, rate=0.0)
    if abs(radius - 1) < 1e-6:
        return
    policy = SMA(alpha=alpha, momentum=mu)
    if radius < 1:
        policy.rule(workers)
    else:
        with pytest.raises(UsageError, match=f"diverges on {workers} workers: alpha must be below"):
            policy.rule(workers)


@given(st.integers(2, 100), st.floats(0.01, 1.9), st.floats(0.01, 0.99))
def test_sync_easgd_is_stable_on_a_parabola_below_its_closed_form(workers: int, rate: float, alpha: float) -> None:
    """(4 - 2 eta) / (2 + 2 P - P eta), which for P = 1 is the (4 - 2 eta) / (4 - eta) of Zhang et al."""
    limit = (4 - 2 * rate) / (2 + 2 * workers - workers * rate)
    if abs(alpha - limit) > 1e-3:
        assert (spectral_radius(ElasticRule(alpha), workers, rate) < 1) == (alpha < limit)


@pytest.mark.parametrize(("alpha", "converges"), [(0.55, True), (0.65, False)])
def test_two_workers_on_a_parabola(world: World, alpha: float, converges: bool) -> None:
    """With a rate of 0.5 the limit is 0.6; without a gradient it would be 2/3."""

    def work(group: Any) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 5.0)
        optimizer = SGD(model.parameters(), lr=0.5)
        with paceline.join(model, optimizer, policy=SyncEASGD(alpha=alpha), group=group) as session:
            for _ in range(300):
                with session.step():
                    backward(model.weight.square().sum() / 2)
        return float(model.weight.detach())

    for end in world(2, work):
        assert (abs(end) < 1e-3) == converges
        assert converges or abs(end) > 100


def test_a_default_alpha_never_diverges_by_itself() -> None:
    for workers in range(1, 200):
        assert SMA().rule(workers).alpha == 1 / workers
        assert SyncEASGD().rule(workers).alpha == 0.9 / workers


# Restarts ---------------------------------------------------------------------------------------------------


def steps_in_which_all_agree(replicas: Sequence[list[list[Tensor]]]) -> list[int]:
    return [
        step
        for step, each in enumerate(zip(*replicas, strict=True), 1)
        if all(torch.equal(a, b) for other in each for a, b in zip(each[0], other, strict=True))
    ]


def test_a_drop_of_the_rate_puts_the_central_average_into_all_workers(world: World) -> None:
    template = CASE.build()
    for policy, wanted in (("sma", [4]), ("sync-easgd", [])):
        found = world(3, lambda group, policy=policy: train_on_workers(group, policy, template)[0])  # type: ignore[misc]
        assert steps_in_which_all_agree(found) == wanted


def test_a_rate_that_falls_a_little_in_every_step_restarts_seldom(world: World) -> None:
    """The cosine of 7 steps is below half its highest value after 4, below half of that after 5, and then after 6."""
    template = CASE.build()

    def work(group: Any) -> list[list[Tensor]]:
        return train_on_workers(group, "sma", template, lambda optimizer: CosineAnnealingLR(optimizer, T_max=8))[0]

    assert steps_in_which_all_agree(world(2, work)) == [4, 6, 7]


def test_a_warm_up_is_no_drop() -> None:
    rule = SMA().rule(2)
    assert not any(rule.restarts_at(rate, highest=rate) for rate in (0.01, 0.1, 1.0))


# What users do ----------------------------------------------------------------------------------------------


def test_central_statistics_are_the_mean_of_the_workers(world: World) -> None:
    """And a worker's stay its own until the end."""

    def work(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        model = nn.BatchNorm1d(2)
        with paceline.join(model, plain(model), policy="sma", group=group) as session:
            for _ in range(2):
                before = model.running_mean.clone()  # type: ignore[union-attr]
                with session.step():
                    backward(model(torch.randn(5, 2) + session.rank).square().sum())
            own = model.running_mean.clone()  # type: ignore[union-attr]
        return before, own, model.running_mean.clone()  # type: ignore[union-attr]

    found = world(2, work)
    for _, _, end in found:
        torch.testing.assert_close(end, (found[0][0] + found[1][0]) / 2)  # exchanged before the last step's pass
    assert not torch.equal(found[0][1], found[1][1])


def test_an_optimizer_that_evaluates_several_times_exchanges_once(world: World) -> None:
    def work(group: Any) -> tuple[float, int]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, 4.0)
        with paceline.join(model, LBFGS(model.parameters(), max_iter=3), policy="sync-easgd", group=group) as session:

            def closure() -> Tensor:
                loss = (model.weight - session.rank).square().sum()
                backward(loss)
                return loss

            for _ in range(60):
                session.minimize(closure)
            return float(model.weight.detach()), session.steps

    for weight, steps in world(2, work):
        assert 0 <= weight <= 1
        assert steps == 60


@pytest.mark.usefixtures("overlapping")
def test_a_step_that_fails_in_the_middle_of_its_exchange_ends_the_run(world: World) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        with paceline.join(model, plain(model), policy="sma", group=group) as session:
            for number in range(3):
                try:
                    with session.step():
                        loss = model(torch.ones(1, 1)).sum()
                        if number == 1 and session.rank == 0:
                            raise ValueError("the user's own")
                        backward(loss)
                except ValueError:
                    pass

    with pytest.raises(CommError, match="a step failed after its exchange had begun"):
        world(2, work)


def test_an_alpha_that_diverges_is_refused_when_the_workers_are_known(world: World) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        paceline.join(model, plain(model), policy="sma(alpha=0.9, momentum=0)", group=group)

    with pytest.raises(UsageError, match=r"sma\(alpha=0.9, momentum=0.0\) diverges on 3 workers: .* below 0.5 there"):
        world(3, work)


def test_a_first_group_without_a_rate_is_no_drop_of_the_rate(world: World) -> None:
    def work(group: Any) -> list[float]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        still: dict[str, Any] = {"params": model[0].parameters(), "lr": 0.0}
        optimizer = SGD([still, {"params": model[1].parameters()}], lr=0.1)
        losses = []
        with paceline.join(model, optimizer, policy="sma", seed=0, group=group) as session:
            for _ in range(20):
                with session.step():
                    loss = model(torch.ones(1, 2)).square().sum()
                    backward(loss)
                losses.append(float(loss.detach()))
        return losses

    for losses in world(2, work):
        assert losses[-1] < 0.5 * losses[0]
