"""When policies with periods exchange: the decisions alone, and that real workers follow them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from hypothesis import given
from hypothesis import strategies as st
from joined_batch import backward
from replicas import CASE, agree, plain, train
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import paceline
from paceline.errors import UsageError
from paceline.policies import AdaComm, LocalSGD, Periodic, PostLocalSGD, Progress, parse_policy
from paceline.sessions.peers import PeersSession

STEPS = 60
RATES = [0.1, 0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0]  # of step 0 and on: warm-up, a decay, a rise


def exchanges(policy: Periodic, progress_after: Callable[[int], Progress], steps: int = STEPS) -> list[int]:
    """The steps after which workers exchange."""
    found, due = [], policy.period(progress_after(0))
    for step in range(1, steps + 1):
        if step == due:
            found.append(step)
            due += policy.period(progress_after(step))
    return found


@given(every=st.integers(1, 20))
def test_local_sgd_averages_after_every_few_steps(every: int) -> None:
    assert exchanges(LocalSGD(every=every), Progress) == list(range(every, STEPS + 1, every))


@given(every=st.integers(1, 20), start=st.integers(0, STEPS))
def test_post_local_sgd_averages_after_each_step_until_it_starts(every: int, start: int) -> None:
    by_step = exchanges(PostLocalSGD(every=every, start=start), Progress)
    assert by_step == [*range(1, start + 1), *range(start + every, STEPS + 1, every)]
    by_rate = PostLocalSGD(every=every)
    assert exchanges(by_rate, lambda step: Progress(step, decayed=step >= start)) == by_step


@given(every=st.integers(1, 20), start=st.integers(0, 5))
def test_post_local_sgd_starts_with_the_first_step_of_an_epoch(every: int, start: int) -> None:
    policy = PostLocalSGD(every=every, start=f"epoch-{start}")
    first = start * 10 + 1 if start else 0  # with 10 steps an epoch
    wanted = [*range(1, first + 1), *range(first + every, STEPS + 1, every)]
    assert exchanges(policy, lambda step: Progress(step, epoch=max(0, step - 1) // 10)) == wanted


@pytest.mark.parametrize("start", ["-1", "epoch-", "epoch-x", "epoch--1", "later", "2.5"])
def test_a_start_that_cannot_be_is_refused(start: str) -> None:
    with pytest.raises(UsageError, match="start"):
        parse_policy(f"post-local-sgd(every=2, start={start})")


def test_workers_follow_the_first_decay_of_the_learning_rate(world: World) -> None:
    """The rise of a warm-up is no decay, and a later rise changes nothing."""
    template = CASE.build()

    def work(group: Any) -> dict[str, Any]:
        def make_scheduler(optimizer: Any) -> LambdaLR:
            return LambdaLR(optimizer, RATES.__getitem__)

        return train(group, template, "post-local-sgd(every=3)", batch_size=6, make_scheduler=make_scheduler)

    assert agree(world(2, work)) == [1, 2, 3, 4, 7]


def test_workers_follow_an_epoch(world: World) -> None:
    template = CASE.build()
    found = world(2, lambda group: train(group, template, "post-local-sgd(every=3, start=epoch-1)", batch_size=6))
    assert agree(found) == [1, 2, 3, 4, 7]


@pytest.mark.parametrize("every", [3, 9])
def test_bytes_fall_by_the_factor(world: World, every: int) -> None:
    template = CASE.build()
    often = world(2, lambda group: train(group, template, "local-sgd(every=1)", batch_size=6))
    seldom = world(2, lambda group: train(group, template, f"local-sgd(every={every})", batch_size=6))
    assert sum(often[0]["bytes"]) == every * sum(seldom[0]["bytes"]) > 0


positive = st.floats(1e-6, 1e6)


@given(every=st.integers(1, 100), first_loss=positive, loss=positive)
def test_ada_comm_follows_the_root_of_the_loss(every: int, first_loss: float, loss: float) -> None:
    policy = AdaComm(every=every)
    period = policy.period(Progress(first_loss=first_loss, loss=loss))
    assert period >= 1
    assert period - 1 < every * math.sqrt(min(1.0, loss / first_loss)) <= period
    assert policy.period(Progress()) == policy.period(Progress(first_loss=first_loss)) == every
    assert policy.period(Progress(first_loss=first_loss, loss=-loss)) == 1
    assert policy.period(Progress(first_loss=-first_loss, loss=loss)) == 1


def losses_of(rank: int, step: int) -> float:
    """The losses that two workers record: they fall from 16 to 1, and differ."""
    return 16 / (1 + step) * (1.5 if rank else 0.5)


def run_ada_comm(group: Any, policy: str, steps: int, *, recorded: bool = True, **options: Any) -> list[int]:
    """Train a worker that records those losses; worker 1 has three times the examples. Give the steps of averages."""
    model = nn.Linear(1, 1, bias=False)
    with paceline.join(model, plain(model), policy=policy, group=group, seed=1, **options) as session:
        assert isinstance(session, PeersSession)
        averages = []
        for number in range(session.steps, steps):
            before = session._exchange.num_bytes
            with session.step(examples=3 if session.rank else 1) as step:
                backward(model(torch.ones(1, 1)).sum())
                if recorded:
                    step.record(loss=losses_of(session.rank, number))
            if session._exchange.num_bytes > before:
                averages.append(session.steps)
    return averages


def ada_comm_by_hand(every: int, window: int, steps: int) -> list[int]:
    mean = [0.25 * losses_of(0, step) + 0.75 * losses_of(1, step) for step in range(steps)]
    averages, due, period, begun = [], every, every, 0
    for step in range(1, steps + 1):
        if step == due:
            averages.append(step)
            if step >= begun + window:
                period = math.ceil(every * math.sqrt(sum(mean[begun:step]) / (step - begun) / mean[0]) - 1e-6)
                begun = step
            due = step + period
    return averages


@pytest.mark.parametrize(("every", "window"), [(6, 1), (6, 10), (9, 4)])
def test_workers_follow_the_mean_loss_of_all(world: World, every: int, window: int, tmp_path: Path) -> None:
    """Also through a checkpoint."""
    policy, run = f"ada-comm(every={every}, window={window})", tmp_path / "run"
    wanted = ada_comm_by_hand(every, window, 60)
    assert len(wanted) > 60 / every, "periods get shorter"
    assert world(2, lambda group: run_ada_comm(group, policy, 60)) == [wanted] * 2
    first = world(2, lambda group: run_ada_comm(group, policy, 25, run=run))[0]
    rest = world(2, lambda group: run_ada_comm(group, policy, 60, run=run, resume=True))[0]
    assert first + rest == wanted


def test_an_average_carries_four_numbers_more_for_the_losses(world: World) -> None:
    template = CASE.build()
    plain, ada = (
        world(2, lambda group, policy=policy: train(group, template, policy, stop=3))  # type: ignore[misc]
        for policy in ("local-sgd(every=3)", "ada-comm(every=3)")
    )
    assert ada[0]["bytes"][2] - plain[0]["bytes"][2] == 4 * 4


def test_without_a_recorded_loss_the_first_window_ends_with_advice(world: World) -> None:
    with pytest.raises(UsageError, match=r"has recorded one in the first 6 steps; .*step.record\(loss=loss\)"):
        world(2, lambda group: run_ada_comm(group, "ada-comm(every=3, window=5)", 60, recorded=False))


@pytest.mark.parametrize("loss", [2.0, 1e30, math.inf])
def test_a_loss_above_the_first_does_not_lengthen_the_period(loss: float) -> None:
    assert AdaComm(every=4).period(Progress(loss=loss, first_loss=1.0)) == 4
