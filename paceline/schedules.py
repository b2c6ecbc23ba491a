"""Learning-rate schedules as functions from the step to a factor on the base rate.

>>> warm_up = gradual_warmup(steps=4, start=0.5)
>>> rates = product(warm_up, step_decay([6], factor=0.1))
>>> [round(3.2 * rates(step), 3) for step in range(8)]
[1.6, 2.0, 2.4, 2.8, 3.2, 3.2, 0.32, 0.32]
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer

from paceline.errors import UsageError, unknown_name

Schedule: TypeAlias = Callable[[int], float]


def scaled_rate(rate: float, *, base_batch: int, batch: int) -> float:
    """Scale a rate tuned for ``base_batch`` linearly to ``batch`` (Goyal et al., 2017).

    It is the rate that scales, never the loss: a scaled loss would leave weight decay behind.
    """
    _require_at_least(1, base_batch=base_batch, batch=batch)
    return rate * batch / base_batch


def constant_warmup(steps: int, start: float) -> Schedule:
    """Stay at ``start`` times the rate for ``steps`` steps, then jump to the rate."""
    _require_at_least(0, steps=steps)
    _require_share(start=start)
    return lambda step: start if step < steps else 1.0


def gradual_warmup(steps: int, start: float) -> Schedule:
    """Rise from ``start`` times the rate to the rate by the same amount every step (Goyal et al., 2017)."""
    _require_at_least(0, steps=steps)
    _require_share(start=start)
    return lambda step: start + (1 - start) * step / steps if step < steps else 1.0


def step_decay(milestones: Sequence[int], factor: float = 0.1) -> Schedule:
    """Multiply the rate by ``factor`` at every milestone, from that step on."""
    _require_at_least(0, factor=factor)
    if any(later < earlier for earlier, later in pairwise(milestones)):
        raise UsageError(f"milestones must not decrease, got {list(milestones)}; sort them")
    steps = tuple(milestones)
    return lambda step: factor ** bisect_right(steps, step)


def cosine_decay(total_steps: int, final: float = 0.0) -> Schedule:
    """Fall along half a cosine to ``final`` times the rate, and stay there (Loshchilov and Hutter, 2017)."""
    _require_at_least(1, total_steps=total_steps)
    _require_share(final=final)

    def factor(step: int) -> float:
        done = min(step, total_steps) / total_steps
        return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2

    return factor


def product(*schedules: Schedule) -> Schedule:
    """Apply several schedules at once: the factors multiply."""
    return lambda step: math.prod(schedule(step) for schedule in schedules)


class EpochScheduler(LambdaLR):
    """A scheduler that keeps its place among the epochs when a run goes on with other steps to an epoch.

    More workers, or a larger batch, make fewer steps of the same epoch.
    """

    def __init__(self, optimizer: Optimizer, schedule: Schedule, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch  # LambdaLR saves it with its own attributes
        # LambdaLR saves the attributes of callable objects but nothing of a plain function.
        super().__init__(optimizer, lambda step: schedule(step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        here, there = self.steps_per_epoch, state_dict["steps_per_epoch"]
        super().load_state_dict({**state_dict, "steps_per_epoch": here})
        # Torch's name for the steps done. Rounded down: what is left of an epoch is rounded up to whole steps.
        self.last_epoch = self.last_epoch * here // there


def make_scheduler(optimizer: Optimizer, schedule: Schedule, steps_per_epoch: int = 1) -> EpochScheduler:
    """Let ``schedule`` set the optimizer's rates; call the scheduler's ``step`` once per optimizer step.

    The state of the scheduler is plain numbers. The schedule is not part of it: to resume, make the scheduler
    with the same schedule (or the same one over other ``steps_per_epoch``) and load the state.
    """
    _require_unscheduled(optimizer)
    return EpochScheduler(optimizer, schedule, steps_per_epoch)


WARMUPS: dict[str, Callable[[int, float], Schedule] | None] = {
    "none": None,
    "constant": constant_warmup,
    "gradual": gradual_warmup,
}
DECAYS = ("none", "step", "cosine")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the rate scales with the batch, warms up and decays; the defaults in epochs are Goyal et al.'s."""

    warmup: str = "none"  # a name in WARMUPS
    warmup_epochs: float = 5.0
    warmup_start: float | None = None  # as a share of the scaled rate; None: the rate before scaling
    decay: str = "none"  # a name in DECAYS
    decay_epochs: tuple[float, ...] = (30.0, 60.0, 80.0)
    decay_factor: float = 0.1
    base_batch: int | None = None  # the batch that the optimizer's rate was tuned for; None: do not scale

    def __post_init__(self) -> None:
        if self.warmup not in WARMUPS:
            raise unknown_name("warm-up", self.warmup, WARMUPS)
        if self.decay not in DECAYS:
            raise unknown_name("decay", self.decay, DECAYS)
        _require_at_least(0, warmup_epochs=self.warmup_epochs, decay_factor=self.decay_factor)
        if self.base_batch is not None:
            _require_at_least(1, base_batch=self.base_batch)
        if self.warmup_start is not None:
            _require_share(warmup_start=self.warmup_start)
        self._check_decay_epochs()
        if self.warmup != "none" and self.warmup_start is None and self.base_batch is None:
            raise UsageError(
                f"a {self.warmup} warm-up must know where to start: give base_batch, to start from the rate "
                "before scaling, or warmup_start, a share of the rate"
            )

    def build(self, optimizer: Optimizer, *, steps_per_epoch: int, epochs: float, batch: int) -> EpochScheduler | None:
        """Scale the optimizer's rates to ``batch`` and return the scheduler, or None if the rates then stay.

        The scheduler is stepped once per optimizer step. Call this once, on a fresh optimizer,
        before any saved state is loaded into it.
        """
        _require_unscheduled(optimizer)
        schedules = self._schedules(steps_per_epoch=steps_per_epoch, epochs=epochs, batch=batch)
        if self.base_batch is not None:
            for group in optimizer.param_groups:
                group["lr"] = scaled_rate(group["lr"], base_batch=self.base_batch, batch=batch)
        return make_scheduler(optimizer, product(*schedules), steps_per_epoch) if schedules else None

    def _schedules(self, *, steps_per_epoch: int, epochs: float, batch: int) -> list[Schedule]:
        _require_at_least(1, steps_per_epoch=steps_per_epoch, batch=batch)
        _require_at_least(0, epochs=epochs)
        schedules = []
        warm_up = WARMUPS[self.warmup]
        if warm_up is not None:
            schedules.append(warm_up(round(self.warmup_epochs * steps_per_epoch), self._start(batch)))
        if self.decay == "step":
            milestones = [round(epoch * steps_per_epoch) for epoch in self.decay_epochs]
            schedules.append(step_decay(milestones, self.decay_factor))
        if self.decay == "cosine":
            schedules.append(cosine_decay(max(1, round(epochs * steps_per_epoch))))
        return schedules

    def _start(self, batch: int) -> float:
        if self.warmup_start is not None:
            return self.warmup_start
        assert self.base_batch is not None
        return min(1.0, self.base_batch / batch)  # a batch below the base has nothing to warm up to

    def _check_decay_epochs(self) -> None:
        _require_at_least(0, **{f"decay_epochs[{i}]": epoch for i, epoch in enumerate(self.decay_epochs)})
        if any(later <= earlier for earlier, later in pairwise(self.decay_epochs)):
            raise UsageError(f"decay_epochs must increase, got {self.decay_epochs}; sort them and drop repeats")


def _require_unscheduled(optimizer: Optimizer) -> None:
    """Refuse what torch would do without a word: start from the rates of an earlier scheduler."""
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            "this optimizer already has a scheduler, or the state of one; "
            "make the scheduler once, on a fresh optimizer, and load saved states after that"
        )


def _require_at_least(least: int, **values: float) -> None:
    for name, value in values.items():
        if not least <= value < math.inf:
            raise UsageError(f"{name} must be a number of at least {least}, got {value}")


def _require_share(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise UsageError(f"{name} must be a share of the rate between 0 and 1, got {value}")
