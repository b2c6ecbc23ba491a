"""Synchronous model averaging against synchronous SGD, as in the deck's "CROSSBOW"."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.problems import Problem
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials
from paceline.studies.checks import check_counts, check_different
from paceline.studies.intervals import Interval, verdict
from paceline.studies.measures import final_error
from paceline.studies.study import Cell, Column, option

ALONE, SMA, SSGD = "one learner", "SMA", "S-SGD"
_FACTOR = 1.2  # the epochs of SMA over those of one learner that the paper's figures suggest


@dataclass(frozen=True, kw_only=True)
class SMAStudy(ArmStudy):
    """Train small batches on several learners to a target: by synchronous model averaging, or by synchronous SGD.

    SMA should need hardly more epochs than one learner with the same batch, and fewer than synchronous SGD, whose
    batch is that of all learners. Every line has its best of several rates. The last notes say what holds.
    """

    name: ClassVar[str] = "sma"
    title: ClassVar[str] = "Model averaging with small batches"

    model: str | None = option("lenet", "The network.")
    examples: int | None = option(6000, "Training examples to use, the first ones.")
    learners: tuple[int, ...] = option((2, 4, 8), "Numbers of learners, beside one alone.")
    batch_size: int = option(16, "Of each learner.")
    larger_batches: tuple[int, ...] = option((32, 64, 128), "More of them, which S-SGD does not have.")
    rates: tuple[float, ...] = option((0.02, 0.1), "Learning rates, the same for every learner.")
    epochs: int = option(6, "Of every run.")
    target: float = option(0.95, "Accuracy to reach.")
    delay: str = option("1+exp(4)", "How long a learner computes on a mini-batch.")
    link: str = option("10us 10GB/s", "Between the learners, of one machine.")
    judges: int | None = option(1000, "Examples to evaluate on, the first ones.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "epochs")
        if self.larger_batches:
            check_different(self, "larger_batches", least=self.batch_size + 1)
        check_different(self, "learners", least=2)
        check_different(self, "rates")

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return self.batch_size, *self.larger_batches

    def arms(self, problem: Problem) -> list[Arm]:
        several = [(name, count) for count in self.learners for name in (SMA, SSGD)]
        return [
            self._arm(rate, name, count, batch_size)
            for rate, batch_size in itertools.product(self.rates, self.batch_sizes)
            for name, count in [(ALONE, 1), *several]
            if name != SSGD or batch_size == self.batch_size
        ]

    def _arm(self, rate: float, name: str, learners: int, batch_size: int) -> Arm:
        return Arm(
            name=f"{name if learners == 1 else f'{name} x {learners}'}, batch {batch_size}",
            group=f"rate {rate:g}",
            optimizer=f"sgd(lr={rate!r}, momentum=0.9)",
            epochs=self.epochs,
            batch_size=batch_size,
            workers=learners,
            policy="sma" if name == SMA else "all-reduce",
            delay=self.delay,
            link=self.link,
            points=4 * self.epochs,
            judges=self.judges,
        )

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        seconds = Column(name=f"virtual s to {self.target:g}", decimals=0)
        shares = Column(name="in proportion", decimals=0), Column(name="utilisation %", decimals=1)
        measured = "error %", f"epochs to {self.target:g}", seconds, *shares
        return "algorithm", "learners", "batch", "rate", *measured

    def _epochs(self, arm: Arm, trials: Trials) -> Interval:
        """Infinite where a seed did not reach the target."""
        return trials.mean(arm, trials.epochs_to(self.target))

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        epochs = self._epochs(arm, trials)
        seconds = trials.mean(arm, trials.time_to(self.target)).mean
        return (
            next(name for name in (ALONE, SMA, SSGD) if arm.name.startswith(name)),
            arm.workers,
            arm.batch_size,
            arm.group.removeprefix("rate "),
            trials.mean(arm, final_error).show(),
            epochs.show() if math.isfinite(epochs.mean) else None,
            seconds if math.isfinite(seconds) else None,
            seconds * arm.batch_size / self.batch_size if math.isfinite(seconds) else None,
            trials.mean(arm, lambda trial: 100 * (1 - trial.outcome.run.waiting)).mean,
        )

    def _best(self, name: str, learners: int, batch_size: int, trials: Trials) -> Arm | None:
        """The arm of the rate with the fewest epochs to the target; None if none reached it."""
        arms = [arm for rate in self.rates if (arm := self._arm(rate, name, learners, batch_size)) in trials.arms()]
        reached = [arm for arm in arms if math.isfinite(self._epochs(arm, trials).mean)]
        return min(reached, key=lambda arm: self._epochs(arm, trials).mean, default=None)

    def verdicts(self, trials: Trials) -> list[str]:
        epochs, found = trials.epochs_to(self.target), []
        for batch_size, count in itertools.product(self.batch_sizes, self.learners):
            at = f"with batches of {batch_size}"
            wanted = ((ALONE, 1), (SMA, count), (SSGD, count))
            alone, averaged, large = (self._best(name, learners, batch_size, trials) for name, learners in wanted)
            if alone is None or averaged is None:
                found.append(f"SMA x {count} {at}: nothing is shown, since not all reached {self.target:g}.")
                continue
            spare = [
                _FACTOR * one - several
                for one, several in zip(trials.of(alone, epochs), trials.of(averaged, epochs), strict=False)
            ]
            claim = f"SMA x {count} {at} needs at most {_FACTOR:g} times the epochs of one learner"
            found.append(verdict(claim, spare, "epochs to spare"))
            if large is not None:
                claim = f"S-SGD x {count} {at} needs more epochs than SMA x {count}"
                found.append(verdict(claim, trials.differences(large, averaged, epochs), "epochs"))
        return found

    def notes(self) -> tuple[str, ...]:
        return (
            "After the slides on CROSSBOW in the lecture on large batches (Koliousis et al., 2019), whose figures have "
            "no numbers; the paper reports 1.3 to 4 times shorter times to accuracy than TensorFlow on 8 GPUs.",
            f"{self.problem}, {self.model}, the first {self.examples} training examples, batches of each learner; "
            "momentum 0.9, constant rates. SMA has alpha = 1 / learners and central momentum 0.9. Claims "
            f"are about the rate with the fewest epochs to {self.target:g}. The error is measured four times an epoch.",
            f"Times are those of the virtual clock: compute times {self.delay}, links {self.link}. Utilisation is the "
            "share of time in which learners compute. A batch takes this time whatever its size, as on a device that "
            "small ones leave idle; 'in proportion' has the seconds if it takes as much longer as it is larger.",
            self.note_on_seeds(),
        )
