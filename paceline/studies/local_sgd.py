"""Local SGD against large batches, as in the deck's "Don't Use Large Mini-Batches, Use Local SGD"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.problems import Problem
from paceline.report.series import Axis
from paceline.schedules import ScheduleConfig
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Measure, Trials
from paceline.studies.checks import check_counts, check_positive
from paceline.studies.intervals import verdict
from paceline.studies.measures import final_accuracy, megabytes_sent, train_loss
from paceline.studies.study import Cell, option

SMALL, LARGE, HUGE = "A1 small batch", "A2 large batch", "A3 huge batch"
LOCAL, POST, LONG = "A4 local, H=4", "A5 post-local, H=16", "A5 post-local, H=32"
# Training and test accuracy in % of ResNet-20 on CIFAR-10 (Lin et al., 2020; the deck's scenarios and table).
PUBLISHED = {SMALL: "100 / 92.63", LARGE: "100 / 92.48", HUGE: "81 / -"}
PUBLISHED |= {LOCAL: "95 / 92", POST: "99 / 92.80", LONG: "- / 93.02"}


@dataclass(frozen=True, kw_only=True)
class LocalSGDStudy(ArmStudy):
    """Train in equally many epochs with small, large and huge batches, with local steps, and with local steps late.

    Large batches should generalise worse than small ones, and huge ones train badly. Local SGD communicates as seldom
    as the huge batch and should be better than it, post-local SGD better than the large batch. The last notes say
    what holds.
    """

    name: ClassVar[str] = "local-sgd"
    title: ClassVar[str] = "Local SGD against large batches"

    problem: str = option("cifar10", "What to train on; digits needs no data.")
    model: str | None = option("lenet", "The network.")
    examples: int | None = option(4000, "Training examples to use, the first ones.")
    workers: int = option(16, "K, of all but the small batch.")
    batch_size: int = option(16, "Of each worker; four times as many in the huge batch.")
    rate: float = option(0.01, "Learning rate for a worker's batch, scaled linearly to larger ones.")
    epochs: int = option(16, "Of every run; the rate falls to a tenth after a half and again after three quarters.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "epochs")
        check_positive(self, "rate")

    def arms(self, problem: Problem) -> list[Arm]:
        own = self.batch_size
        return [
            self._arm(SMALL, 1, own),
            self._arm(LARGE, self.workers, own),
            self._arm(HUGE, self.workers, 4 * own),
            self._arm(LOCAL, self.workers, own, "local-sgd(every=4)"),
            self._arm(POST, self.workers, own, "post-local-sgd(every=16)"),
            self._arm(LONG, self.workers, own, "post-local-sgd(every=32)"),
        ]

    def _arm(self, name: str, workers: int, batch_size: int, policy: str = "all-reduce") -> Arm:
        return Arm(
            name=name,
            group=f"{self.problem}, {self.model}",
            optimizer=f"sgd(lr={self.rate!r}, momentum=0.9, nesterov=true, weight_decay=0.0005)",
            epochs=self.epochs,
            batch_size=batch_size,
            workers=workers,
            policy=policy,
            schedule=ScheduleConfig(
                warmup="gradual",
                warmup_epochs=self.epochs / 20,
                decay="step",
                decay_epochs=(self.epochs / 2, 3 * self.epochs / 4),
                base_batch=self.batch_size,
            ),
            points=min(4, self.epochs),
        )

    def columns(self, trials: Trials) -> tuple[str, ...]:
        measured = "training loss", "training accuracy %", "test accuracy %", "MB sent"
        return "algorithm", "K", "batch", *measured, "published training / test %"

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="epoch"), Axis(label="test error (%)")

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        return (
            arm.name,
            arm.workers,
            arm.batch_size * arm.workers,
            trials.mean(arm, train_loss).show(3),
            trials.mean(arm, lambda trial: 100 * trial.train_value).show(),
            trials.mean(arm, final_accuracy).show(),
            trials.mean(arm, megabytes_sent).mean,
            PUBLISHED[arm.name],
        )

    def verdicts(self, trials: Trials) -> list[str]:
        arms = {arm.name: arm for arm in self.arms(trials.problem)}

        def accuracy_above(name: str, other: str) -> tuple[str, str, str, Measure]:
            return "has a higher test accuracy than", name, other, final_accuracy

        def loss_above(name: str, other: str) -> tuple[str, str, str, Measure]:
            return "has a higher training loss than", name, other, train_loss

        claims = [
            accuracy_above(SMALL, LARGE),
            accuracy_above(LARGE, HUGE),
            accuracy_above(LOCAL, HUGE),
            accuracy_above(POST, LOCAL),
            accuracy_above(POST, LARGE),
            accuracy_above(LONG, LARGE),
            loss_above(POST, SMALL),
            loss_above(LOCAL, POST),
            loss_above(HUGE, LOCAL),
        ]
        return [
            verdict(f"{name} {what} {other}", found, "nats" if "loss" in what else "points")
            for what, name, other, measure in claims
            if (found := trials.differences(arms[name], arms[other], measure))
        ]

    def notes(self) -> tuple[str, ...]:
        return (
            'After "Main results" in the lecture on local SGD, and the table behind it (Lin et al., 2020). The '
            "published accuracies are of ResNet-20 on all of CIFAR-10, 300 epochs, batches of 128 (A1: K = 2).",
            f"{self.problem}, {self.model}, the first {self.examples} training examples, {self.epochs} epochs; SGD, "
            f"Nesterov momentum 0.9, weight decay 0.0005, rate {self.rate:g} for a batch of {self.batch_size}, scaled "
            "linearly after a gradual warm-up. Post-local SGD begins its local steps when the rate first falls.",
            "A4 has the same batch between two exchanges as A3, and as many exchanges. MB are those that all workers "
            "send, in a ring.",
            self.note_on_seeds(),
        )
