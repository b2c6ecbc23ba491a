"""Warm-up of the learning rate at a large batch, as in the deck's "Different Warmup Methods"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.problems import Problem
from paceline.schedules import ScheduleConfig
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials
from paceline.studies.checks import check_counts, check_different
from paceline.studies.intervals import verdict
from paceline.studies.measures import final_error, train_loss
from paceline.studies.study import Cell, option

BASELINE = "small batch"
# Top-1 errors in % of ResNet-50 on ImageNet, batch 256 and 8k; the deck leaves out the third (Goyal et al., table 2).
PUBLISHED = {
    BASELINE: "23.60 +- 0.12",
    "none": "24.84 +- 0.37",
    "constant": "25.88 +- 0.56",
    "gradual": "23.74 +- 0.09",
}
WARMUPS = ("none", "constant", "gradual")


@dataclass(frozen=True, kw_only=True)
class WarmUpStudy(ArmStudy):
    """Train with a large batch at a rate scaled linearly with it, without warm-up, with a constant and a gradual one.

    Near the largest stable rate the error should be lowest with a gradual warm-up, close to that of the small batch,
    and highest with a constant one. The last notes say whether it is so at each rate.
    """

    name: ClassVar[str] = "warm-up"
    title: ClassVar[str] = "Warm-up at a large batch"

    batch_size: int = option(32, "Of the baseline, and of each worker.")
    workers: int = option(32, "How many times larger the large batch is.")
    rates: tuple[float, ...] = option((0.02, 0.08), "Learning rates for the small batch.")
    epochs: int = option(10, "Of every run; the rate falls to a tenth after a half and again after three quarters.")
    warmup_epochs: float = option(1.0, "Epochs of the warm-up, which starts at the small batch's rate.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "epochs")
        check_different(self, "rates")

    def arms(self, problem: Problem) -> list[Arm]:
        return [arm for rate in self.rates for arm in self._arms_at(rate)]

    def _arms_at(self, rate: float) -> list[Arm]:
        """The baseline, and the three ways to begin."""
        return [self._arm(rate, BASELINE, "none", 1), *(self._arm(rate, way, way, self.workers) for way in WARMUPS)]

    def _arm(self, rate: float, name: str, warmup: str, factor: int) -> Arm:
        return Arm(
            name=name,
            group=f"rate {rate:g}",
            optimizer=f"sgd(lr={rate!r}, momentum=0.9, nesterov=true, weight_decay=0.0001)",
            epochs=self.epochs,
            batch_size=self.batch_size * factor,
            schedule=ScheduleConfig(
                warmup=warmup,
                warmup_epochs=self.warmup_epochs,
                decay="step",
                decay_epochs=(self.epochs / 2, 3 * self.epochs / 4),
                base_batch=self.batch_size,
            ),
            points=self.epochs,
        )

    def columns(self, trials: Trials) -> tuple[str, ...]:
        return "rate", "warm-up", "kn", "scaled rate", "error %", "training loss", "published error %"

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        rate = float(arm.group.removeprefix("rate "))
        return (
            rate,
            arm.name,
            arm.batch_size,
            rate * arm.batch_size / self.batch_size,
            trials.mean(arm, final_error).show(),
            trials.mean(arm, train_loss).show(3),
            PUBLISHED[arm.name],
        )

    def verdicts(self, trials: Trials) -> list[str]:
        return [line for rate in self.rates for line in self._verdicts_at(rate, trials)]

    def _verdicts_at(self, rate: float, trials: Trials) -> list[str]:
        baseline, none, constant, gradual = self._arms_at(rate)
        claims = [
            ("gradual has a lower error than none", none, gradual),
            ("none has a lower error than constant", constant, none),
            ("gradual has a higher error than the small batch", gradual, baseline),
        ]
        found = [(claim, trials.differences(higher, lower, final_error)) for claim, higher, lower in claims]
        return [verdict(f"Rate {rate:g}, {claim}", values, "points") for claim, values in found if values]

    def notes(self) -> tuple[str, ...]:
        return (
            'After "Different Warmup Methods" in the lecture on large batches (Goyal et al., 2017, table 2). The '
            "published errors are of ResNet-50 on ImageNet, kn = 256 and 8k; the deck's table leaves out that of the "
            "constant warm-up.",
            f"{self.problem}, {self.model}, {self.epochs} epochs, SGD with Nesterov momentum 0.9 and weight decay "
            f"0.0001. The large batch is that of k = {self.workers} workers with n = {self.batch_size}, computed by "
            "one worker on the joined batch, which all-reduce equals. The rate is scaled by k; a warm-up begins at the "
            f"small batch's rate. Epochs of the warm-up: {self.warmup_epochs:g}.",
            self.note_on_seeds(),
        )
