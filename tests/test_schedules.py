"""Schedules as algebra, and the pitfalls of large batches that Goyal et al. (2017) warn of."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from paceline.errors import UsageError
from paceline.optim import LARS
from paceline.schedules import (
    Schedule,
    ScheduleConfig,
    constant_warmup,
    cosine_decay,
    gradual_warmup,
    make_scheduler,
    product,
    scaled_rate,
    step_decay,
)

law = settings(deadline=None, max_examples=60)

shares = st.floats(0.0, 1.0)
counts = st.integers(1, 200)


def rates_of(config: ScheduleConfig, *, lr: float, steps: int, **sizes: Any) -> list[float]:
    """The rate that each of the first steps of a run would use."""
    optimizer = SGD([Parameter(torch.zeros(1))], lr=lr)
    scheduler = config.build(optimizer, **sizes)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return rates


@law
@given(rate=st.floats(1e-4, 10), base=counts, k=counts)
def test_the_rate_scales_with_the_batch(rate: float, base: int, k: int) -> None:
    assert scaled_rate(rate, base_batch=base, batch=base) == pytest.approx(rate)
    assert scaled_rate(rate, base_batch=base, batch=k * base) == pytest.approx(k * rate)


@law
@given(steps=counts, start=shares)
def test_gradual_warmup_rises_by_the_same_amount_every_step(steps: int, start: float) -> None:
    factor = gradual_warmup(steps, start)
    rises = [factor(step + 1) - factor(step) for step in range(steps)]
    assert factor(0) == start
    assert factor(steps) == factor(steps + 1) == factor(10 * steps) == 1.0
    assert rises == pytest.approx([(1 - start) / steps] * steps)


@law
@given(steps=counts, start=shares)
def test_constant_warmup_jumps_at_its_end(steps: int, start: float) -> None:
    factor = constant_warmup(steps, start)
    assert {factor(step) for step in range(steps)} == {start}
    assert factor(steps) == factor(steps + 100) == 1.0


def test_a_warmup_of_no_steps_changes_nothing() -> None:
    assert gradual_warmup(0, 0.1)(0) == constant_warmup(0, 0.1)(0) == 1.0


@law
@given(milestones=st.lists(st.integers(1, 100), max_size=5, unique=True).map(sorted), decay=st.floats(0.01, 1))
def test_step_decay_multiplies_at_each_milestone(milestones: list[int], decay: float) -> None:
    factor = step_decay(milestones, decay)
    assert factor(0) == 1.0
    for step in range(1, 105):
        expected = factor(step - 1) * (decay if step in milestones else 1.0)
        assert factor(step) == pytest.approx(expected)


@law
@given(total=counts, final=shares)
def test_cosine_decay_falls_to_its_final_share_and_stays(total: int, final: float) -> None:
    factor = cosine_decay(total, final)
    factors = [factor(step) for step in range(total + 1)]
    assert factors[0] == pytest.approx(1.0)
    assert factors[-1] == factor(total + 1) == factor(10 * total) == pytest.approx(final)
    assert factors == sorted(factors, reverse=True)
    mirrored = [factor(step) + factor(total - step) for step in range(total + 1)]
    assert mirrored == pytest.approx([1 + final] * (total + 1))


@law
@given(step=st.integers(0, 300))
def test_product_multiplies(step: int) -> None:
    warm_up, decay = gradual_warmup(50, 0.25), step_decay([100, 200], 0.5)
    assert product(warm_up, decay)(step) == warm_up(step) * decay(step)
    assert product()(step) == 1.0


def test_the_8k_recipe_of_goyal_et_al() -> None:
    per_epoch = 10
    config = ScheduleConfig(warmup="gradual", decay="step", base_batch=256)
    rates = rates_of(config, lr=0.1, steps=90 * per_epoch, steps_per_epoch=per_epoch, epochs=90, batch=8192)
    warm = 5 * per_epoch
    rises = [later - earlier for earlier, later in pairwise(rates[: warm + 1])]

    assert scaled_rate(0.1, base_batch=256, batch=8192) == 3.2
    assert rates[0] == pytest.approx(0.1)
    assert rates[warm] == pytest.approx(3.2)
    assert rises == pytest.approx([3.1 / warm] * warm)
    assert rates[warm : 30 * per_epoch] == pytest.approx([3.2] * (25 * per_epoch))
    assert rates[30 * per_epoch : 60 * per_epoch] == pytest.approx([0.32] * (30 * per_epoch))
    assert rates[60 * per_epoch : 80 * per_epoch] == pytest.approx([0.032] * (20 * per_epoch))
    assert rates[80 * per_epoch :] == pytest.approx([0.0032] * (10 * per_epoch))


def test_constant_warmup_holds_the_rate_before_scaling() -> None:
    config = ScheduleConfig(warmup="constant", warmup_epochs=1.5, base_batch=256)
    rates = rates_of(config, lr=0.1, steps=10, steps_per_epoch=4, epochs=3, batch=1024)
    assert rates == pytest.approx([0.1] * 6 + [0.4] * 4)


def test_a_warmup_without_scaling_starts_from_its_own_share() -> None:
    config = ScheduleConfig(warmup="gradual", warmup_epochs=1, warmup_start=0.0)
    assert rates_of(config, lr=1.0, steps=5, steps_per_epoch=4, epochs=9, batch=8) == [
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
    ]


def test_a_batch_below_the_base_scales_down_and_needs_no_warmup() -> None:
    config = ScheduleConfig(warmup="gradual", base_batch=256)
    rates = rates_of(config, lr=0.1, steps=3, steps_per_epoch=4, epochs=9, batch=64)
    assert rates == pytest.approx([0.025] * 3)


def test_cosine_ends_with_the_run() -> None:
    rates = rates_of(ScheduleConfig(decay="cosine"), lr=2.0, steps=7, steps_per_epoch=3, epochs=2, batch=1)
    assert rates[0] == 2.0
    assert rates[3] == pytest.approx(1.0)
    assert rates[6] == 0.0


def test_scaling_alone_needs_no_scheduler() -> None:
    optimizer = SGD([Parameter(torch.zeros(1))], lr=0.1)
    optimizer.add_param_group({"params": [Parameter(torch.zeros(1))], "lr": 0.5})
    assert ScheduleConfig(base_batch=32).build(optimizer, steps_per_epoch=1, epochs=1, batch=64) is None
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 1.0]


class Halving:
    """A schedule that is an object, with something no JSON can hold."""

    def __init__(self) -> None:
        self.cache = {object()}

    def __call__(self, step: int) -> float:
        return 0.5**step


@pytest.mark.parametrize("schedule", [product(gradual_warmup(4, 0.1), cosine_decay(9)), Halving()])
def test_a_resumed_scheduler_continues_from_json(schedule: Schedule) -> None:
    def fresh() -> tuple[SGD, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = SGD([Parameter(torch.ones(2))], lr=0.3, momentum=0.9)
        return optimizer, make_scheduler(optimizer, schedule)

    def advance(optimizer: SGD, scheduler: torch.optim.lr_scheduler.LambdaLR, steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = fresh()
    advance(optimizer, scheduler, 3)
    saved = json.dumps(scheduler.state_dict())
    assert json.loads(saved)["lr_lambdas"] == [None]

    resumed_optimizer, resumed = fresh()
    resumed_optimizer.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(json.loads(saved))
    assert advance(resumed_optimizer, resumed, 8) == advance(optimizer, scheduler, 8)


@law
@given(before=counts, after=counts, epochs=st.integers(1, 9), done=st.floats(0.0, 1.0))
def test_other_steps_to_an_epoch_keep_the_place_among_the_epochs(
    before: int, after: int, epochs: int, done: float
) -> None:
    """As when a run goes on with another number of workers."""

    def scheduler(steps_per_epoch: int) -> Any:
        optimizer = SGD([Parameter(torch.zeros(1))], lr=1.0)
        config = ScheduleConfig(decay="cosine")
        return config.build(optimizer, steps_per_epoch=steps_per_epoch, epochs=epochs, batch=1)

    first, second = scheduler(before), scheduler(after)
    first.last_epoch = round(done * epochs * before)
    second.load_state_dict(first.state_dict())
    assert 0 <= first.last_epoch / before - second.last_epoch / after + 1e-9 < 1 / after + 1e-6
    assert second.steps_per_epoch == after
    assert (second.last_epoch == first.last_epoch) or before != after


def test_a_second_scheduler_is_refused_and_changes_no_rate() -> None:
    optimizer = SGD([Parameter(torch.ones(2))], lr=0.5)
    make_scheduler(optimizer, step_decay([10]))
    with pytest.raises(UsageError, match="already has a scheduler"):
        make_scheduler(optimizer, step_decay([10]))
    with pytest.raises(UsageError, match="already has a scheduler"):
        ScheduleConfig(base_batch=1).build(optimizer, steps_per_epoch=1, epochs=1, batch=2)
    assert optimizer.param_groups[0]["lr"] == 0.5


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"warmup": "gradul"}, r"no warm-up called 'gradul'\. Did you mean 'gradual'\?"),
    ({"decay": "cosin"}, r"no decay called 'cosin'\. Did you mean 'cosine'\?"),
    ({"warmup_epochs": -1}, r"warmup_epochs must be a number of at least 0, got -1"),
    ({"warmup_epochs": float("inf")}, r"warmup_epochs .*got inf"),
    ({"warmup_start": 2.0}, r"warmup_start must be a share of the rate between 0 and 1, got 2\.0"),
    ({"decay_epochs": (30, 20)}, r"decay_epochs must increase, got \(30, 20\)"),
    ({"decay_epochs": (30, 30)}, r"decay_epochs must increase"),
    ({"decay_epochs": (-1, 30)}, r"decay_epochs\[0\] .*got -1"),
    ({"decay_factor": float("nan")}, r"decay_factor .*got nan"),
    ({"base_batch": 0}, r"base_batch must be a number of at least 1, got 0"),
    ({"warmup": "gradual"}, r"gradual warm-up must know where to start: give base_batch"),
]


@pytest.mark.parametrize(("options", "message"), BAD_CONFIGS)
def test_a_bad_config_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ScheduleConfig(**options)


def test_bad_arguments_of_schedules_are_refused() -> None:
    with pytest.raises(UsageError, match="milestones must not decrease"):
        step_decay([20, 10])
    with pytest.raises(UsageError, match=r"steps .*got -1"):
        gradual_warmup(-1, 0.5)
    with pytest.raises(UsageError, match=r"start .*got 1\.5"):
        constant_warmup(1, 1.5)
    with pytest.raises(UsageError, match=r"total_steps .*got 0"):
        cosine_decay(0)
    with pytest.raises(UsageError, match=r"base_batch .*got 0"):
        scaled_rate(0.1, base_batch=0, batch=1)


def sgd_iterates(*, lr: float, weight_decay: float, loss_scale: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    target, start = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    parameter = Parameter(start)
    optimizer = SGD([parameter], lr=lr, weight_decay=weight_decay)
    iterates = []
    for _ in range(5):
        optimizer.zero_grad()
        (loss_scale * (parameter - target).cos().sum()).backward()
        optimizer.step()
        iterates.append(parameter.detach().clone())
    return iterates


@law
@given(k=st.floats(2, 64), lr=st.floats(1e-3, 0.1), weight_decay=st.floats(0.01, 0.5), seed=st.integers(0, 999))
def test_pitfall_scaling_the_loss_is_not_scaling_the_rate_under_weight_decay(
    k: float, lr: float, weight_decay: float, seed: int
) -> None:
    def iterates(lr: float, decay: float, loss_scale: float) -> Tensor:
        return torch.stack(sgd_iterates(lr=lr, weight_decay=decay, loss_scale=loss_scale, seed=seed))

    torch.testing.assert_close(iterates(lr, 0.0, k), iterates(k * lr, 0.0, 1.0))
    with_scaled_loss, with_scaled_rate = iterates(lr, weight_decay, k), iterates(k * lr, weight_decay, 1.0)
    assert not torch.allclose(with_scaled_loss, with_scaled_rate)
    # The decay is what got lost: a scaled loss is a scaled rate with k times less of it.
    torch.testing.assert_close(with_scaled_loss, iterates(k * lr, weight_decay / k, 1.0))


def end_of_momentum(optimizer_class: Any, lrs: list[float], momentum: float, seed: int, **options: Any) -> Tensor:
    """Where a vector ends up; LARS does not adapt vectors, so only its form of momentum is left."""
    generator = torch.Generator().manual_seed(seed)
    parameter = Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = optimizer_class([parameter], lr=lrs[0], momentum=momentum, **options)
    for lr in lrs:
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = torch.randn(4, generator=generator, dtype=torch.float64)
        optimizer.step()
    return parameter.detach()


@law
@given(
    lrs=st.lists(st.floats(1e-3, 10), min_size=1, max_size=12),
    momentum=st.floats(0.0, 0.99),
    seed=st.integers(0, 999),
)
def test_pitfall_momentum_with_the_rate_inside_needs_a_correction(lrs: list[float], momentum: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    position, velocity, last_lr = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), lrs[0]
    missing, error = torch.zeros(2, 4, dtype=torch.float64)  # what velocity and position lack uncorrected
    for lr in lrs:
        missing = momentum * missing + momentum * (lr / last_lr - 1) * velocity
        velocity = momentum * (lr / last_lr) * velocity
        velocity = velocity + lr * torch.randn(4, generator=generator, dtype=torch.float64)
        position, error, last_lr = position - velocity, error + missing, lr

    corrected = end_of_momentum(LARS, lrs, momentum, seed)
    assert torch.equal(corrected, end_of_momentum(SGD, lrs, momentum, seed))
    torch.testing.assert_close(corrected, position)
    uncorrected = end_of_momentum(LARS, lrs, momentum, seed, momentum_correction=False)
    torch.testing.assert_close(uncorrected, position + error)


def test_without_the_correction_a_jump_of_the_rate_loses_momentum() -> None:
    jump, steady = [0.1, 3.2], [0.1, 0.1]
    uncorrected: dict[str, Any] = {"seed": 0, "momentum": 0.9, "momentum_correction": False}
    corrected = {**uncorrected, "momentum_correction": True}
    assert not torch.allclose(end_of_momentum(LARS, jump, **uncorrected), end_of_momentum(LARS, jump, **corrected))
    torch.testing.assert_close(end_of_momentum(LARS, steady, **uncorrected), end_of_momentum(LARS, steady, **corrected))


def test_momentum_survives_a_rate_of_zero() -> None:
    through_zero = [0.1, 0.0, 0.1]
    assert torch.equal(end_of_momentum(LARS, through_zero, 0.9, 0), end_of_momentum(SGD, through_zero, 0.9, 0))
