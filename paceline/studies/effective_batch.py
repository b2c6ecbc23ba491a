"""Local steps against larger batches, as in the deck's "the same effective batch size and communication ratio"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.problems import Problem
from paceline.report.series import Axis, Series
from paceline.schedules import ScheduleConfig
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials
from paceline.studies.checks import check_counts, check_different, check_positive
from paceline.studies.intervals import verdict
from paceline.studies.measures import final_accuracy, megabytes_sent, train_loss
from paceline.studies.study import Cell, Column, option

BOTH, LOCAL = "both", "local SGD"
# The mini-batch is H times that of a local step, and its rate H to this power times that of local SGD.
POWERS = {"mini-batch, same rate": 0.0, "mini-batch, rate x sqrt(H)": 0.5, "mini-batch, rate x H": 1.0}


@dataclass(frozen=True, kw_only=True)
class EffectiveBatchStudy(ArmStudy):
    """Train with H local steps between two averages, and with mini-batches of as many examples, in equal epochs.

    Both use the same examples between two exchanges, and exchange as often. Local SGD should be better, the more so
    the larger H is. The mini-batch has three rates to choose from, local SGD one. The last notes say what holds.
    """

    name: ClassVar[str] = "effective-batch"
    title: ClassVar[str] = "Local steps against larger batches"

    problem: str = option("cifar10", "What to train on; digits needs no data.")
    model: str | None = option("lenet", "The network.")
    examples: int | None = option(4096, "Training examples to use, the first ones.")
    workers: int = option(8, "K, of every line.")
    every: tuple[int, ...] = option((2, 4, 8, 16), "H, local steps between two exchanges; beside 1, which is both.")
    batch_size: int = option(8, "B, of each worker in a local step; H times as many in a mini-batch.")
    rate: float = option(0.04, "Learning rate of local SGD, and of H = 1.")
    epochs: int = option(8, "Of every run; the rate falls to a tenth after a half and again after three quarters.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "epochs")
        check_positive(self, "rate")
        check_different(self, "every", least=2)

    def arms(self, problem: Problem) -> list[Arm]:
        return [*self._lines().values()]

    def _lines(self) -> dict[tuple[int, str], Arm]:
        """The arms by H and algorithm; with H = 1 all algorithms are the same."""
        keys = [(1, BOTH), *((every, name) for every in sorted(self.every) for name in (LOCAL, *POWERS))]
        return {key: self._arm(*key) for key in keys}

    def _arm(self, every: int, name: str) -> Arm:
        local = name == LOCAL
        return Arm(
            name=f"{name}, H={every}",
            optimizer=f"sgd(lr={self._rate(every, name)!r}, momentum=0.9, nesterov=true, weight_decay=0.0005)",
            epochs=self.epochs,
            batch_size=self.batch_size * (1 if local else every),
            workers=self.workers,
            policy=f"local-sgd(every={every})" if local else "all-reduce",
            schedule=ScheduleConfig(
                warmup="gradual",
                warmup_epochs=self.epochs / 10,
                warmup_start=0.1,
                decay="step",
                decay_epochs=(self.epochs / 2, 3 * self.epochs / 4),
            ),
        )

    def _rate(self, every: int, name: str) -> float:
        return float(self.rate * every ** POWERS.get(name, 0.0))

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        measured = "MB sent", "training loss", "test accuracy %"
        return "H", "algorithm", "batch of all", Column(name="rate", decimals=3), *measured

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        every, name = next(key for key, line in self._lines().items() if line == arm)
        return (
            every,
            name,
            arm.batch_size * arm.workers,
            self._rate(every, name),
            trials.mean(arm, megabytes_sent).mean,
            trials.mean(arm, train_loss).show(3),
            trials.mean(arm, final_accuracy).show(),
        )

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="H", scale="log"), Axis(label="test accuracy (%)")

    def series(self, trials: Trials) -> list[Series]:
        return [self._curve(name, trials) for name in (LOCAL, *POWERS)]

    def _curve(self, name: str, trials: Trials) -> Series:
        """The test accuracy over H, from where all are the same."""
        found = [
            (every, trials.mean(arm, final_accuracy).mean)
            for (every, algorithm), arm in self._lines().items()
            if algorithm in (BOTH, name) and arm in trials.arms()
        ]
        x, y = zip(*found, strict=True)
        return Series(label=name, panel=f"{self.problem}, {self.model}, K = {self.workers}", x=x, y=y)

    def verdicts(self, trials: Trials) -> list[str]:
        """Local SGD against the mini-batch at the rate with the highest mean."""
        lines, found = self._lines(), []
        for every in sorted(self.every):
            local, others = lines[every, LOCAL], {name: lines[every, name] for name in POWERS}
            if not {local, *others.values()} <= set(trials.arms()):
                continue
            best = max(others, key=lambda name: trials.mean(others[name], final_accuracy).mean)
            claim = f"With H = {every} local SGD has a higher test accuracy than {best}"
            found.append(verdict(claim, trials.differences(local, others[best], final_accuracy), "points"))
        return found

    def notes(self) -> tuple[str, ...]:
        return (
            'After "Local SGD outperforms mini-batch SGD at the same effective batch size and communication ratio" in '
            "the lecture on local SGD (Lin et al., 2020), whose figures have no numbers.",
            f"{self.problem}, {self.model}, the first {self.examples} training examples, {self.epochs} epochs; SGD, "
            "Nesterov momentum 0.9, weight decay 0.0005, a gradual warm-up in the first tenth. Between two exchanges "
            f"each of {self.workers} workers uses H times {self.batch_size} examples: in H local steps, or in one "
            "mini-batch. MB are those that all workers send, in a ring.",
            "A mini-batch is judged by the rate at which its mean accuracy is highest; local SGD has one rate.",
            self.note_on_seeds(),
        )
