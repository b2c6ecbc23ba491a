"""Codecs between peers: how many fewer bytes, at which accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.problems import Problem
from paceline.schedules import ScheduleConfig
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials
from paceline.studies.checks import check_counts, check_positive
from paceline.studies.measures import final_error, megabytes_sent
from paceline.studies.study import Cell, Column, option

BASE = "all-reduce"
# Momentum is the optimizer's, but for the codec that corrects it.
LINES: tuple[tuple[str, str | None], ...] = (
    (BASE, None),
    (BASE, "qsgd(levels=7)"),
    (BASE, "power-sgd(rank=2)"),
    (BASE, "top-k(density=0.001, momentum=0.9, warm_up=100)"),
    (BASE, "top-k(density=0.001)"),
    ("local-sgd(every=32)", "top-k(density=0.01)"),
    ("local-sgd(every=64)", "top-k(density=0.01)"),
    ("local-sgd(every=64)", "top-k(density=0.003)"),
)


@dataclass(frozen=True, kw_only=True)
class CodecsStudy(ArmStudy):
    """Train with all-reduce as it is, with codecs, and with codecs under local SGD; count the bytes on the wire.

    Bytes are those of the packets that workers really send to each other, and of a ring all-reduce where numbers are
    summed as they are. The notes say by how much the accuracy of each line differs from all-reduce.
    """

    name: ClassVar[str] = "codecs"
    title: ClassVar[str] = "Fewer bytes"

    model: str | None = option("net3", "The network.")
    workers: int = option(4, "Of every line.")
    epochs: float = option(4.0, "Of every run.")
    rate: float = option(0.05, "Highest learning rate, which falls along a cosine.")
    momentum: float = option(0.9, "Of SGD.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers")
        check_positive(self, "rate", "epochs")

    def arms(self, problem: Problem) -> list[Arm]:
        return [self._arm(*line) for line in LINES]

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        counted = Column(name="MB sent", decimals=3), Column(name="fewer bytes", decimals=1)
        return "policy", "codec", *counted, "test error %"

    def _arm(self, policy: str, codec: str | None) -> Arm:
        corrected = codec is not None and "momentum" in codec
        return Arm(
            name=policy if codec is None else f"{policy}, {codec}",
            optimizer=f"sgd(lr={self.rate!r}, momentum={0.0 if corrected else self.momentum!r})",
            epochs=self.epochs,
            batch_size=self.batch_size,
            workers=self.workers,
            policy=policy,
            codec=codec,
            schedule=ScheduleConfig(decay="cosine"),
            points=4,
        )

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        sent, found = trials.mean(arm, megabytes_sent).mean, trials.mean(arm, final_error).show()
        return arm.policy, arm.codec or "none", sent, _fewer(arm, trials), found

    def verdicts(self, trials: Trials) -> list[str]:
        base, *others = trials.arms()
        found = []
        for arm in others:
            differences = trials.differences(arm, base, final_error)
            found.append(
                f"{arm.name}: {_fewer(arm, trials):.0f} times fewer bytes, test error higher by "
                f"{sum(differences) / len(differences):.2f} points (of single seeds at most {max(differences):.2f})."
            )
        return found

    def notes(self) -> tuple[str, ...]:
        return (
            f"{self.problem}, {self.model}, {self.workers} workers, batches of {self.batch_size} per worker, SGD at "
            f"{self.rate:g} with momentum {self.momentum:g} and a cosine over {self.epochs:g} epochs. Bytes are those "
            "that all workers send in the whole run.",
            self.note_on_seeds(),
        )


def _fewer(arm: Arm, trials: Trials) -> float:
    """How many times fewer bytes than the first arm."""
    base, sent = trials.mean(trials.arms()[0], megabytes_sent).mean, trials.mean(arm, megabytes_sent).mean
    return base / sent if sent else math.inf
