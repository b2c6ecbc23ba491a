"""When policies with periods exchange: the decisions alone, and that real workers follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import World
from hypothesis import given
from hypothesis import strategies as st
from replicas import CASE, agree, train
from torch.optim.lr_scheduler import LambdaLR

from paceline.errors import UsageError
from paceline.policies import LocalSGD, Periodic, PostLocalSGD, Progress, parse_policy

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
