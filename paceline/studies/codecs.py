"""Codecs between peers: how many fewer bytes, at which accuracy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.report.series import Axis
from paceline.schedules import ScheduleConfig
from paceline.studies.arms import Arm, Trial, Trials, error, load_first, note_on, run_arms
from paceline.studies.checks import check_counts, check_positive
from paceline.studies.study import Cell, Column, Study, StudyContext, StudyResult, option

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
class CodecsStudy(Study):
    """Train with all-reduce as it is, with codecs, and with codecs under local SGD; count the bytes on the wire.

    Bytes are those of the packets that workers really send to each other, and of a ring all-reduce where numbers are
    summed as they are. The notes say by how much the accuracy of each line differs from all-reduce.
    """

    name: ClassVar[str] = "codecs"
    title: ClassVar[str] = "Fewer bytes"

    problem: str = option("mnist", "What to train on; digits needs no data.")
    model: str | None = option("net3", "The network.")
    workers: int = option(4, "Of every line.")
    epochs: float = option(4.0, "Of every run.")
    batch_size: int = option(16, "Of each worker.")
    rate: float = option(0.05, "Highest learning rate, which falls along a cosine.")
    momentum: float = option(0.9, "Of SGD.")
    examples: int | None = option(None, "Of the training data, the first ones; by default all.")
    seeds: int = option(5, "Runs of every line.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "batch_size", "seeds")
        check_positive(self, "rate", "epochs")

    def run(self, context: StudyContext) -> StudyResult:
        problem = load_first(self.problem, self.model, self.examples, context)
        trials = run_arms([self._arm(*line) for line in LINES], problem, self.seeds, context)
        base = trials.arms()[0]
        return trials.result(
            self,
            context.seed,
            columns=(
                Column(name="policy"),
                Column(name="codec"),
                Column(name="MB sent", decimals=3),
                Column(name="fewer bytes", decimals=1),
                Column(name="test error %"),
            ),
            rows=tuple(self._row(arm, base, trials) for arm in trials.arms()),
            x_axis=Axis(label="epochs"),
            y_axis=Axis(label="test error %"),
            series=tuple(trials.curve(arm, error) for arm in trials.arms()),
            notes=(*self._notes(), *self._verdicts(trials)),
        )

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

    def _row(self, arm: Arm, base: Arm, trials: Trials) -> tuple[Cell, ...]:
        found = trials.mean(arm, lambda trial: trial.error).show(2)
        return (arm.policy, arm.codec or "none", trials.mean(arm, _sent).mean / 1e6, _fewer(arm, base, trials), found)

    def _verdicts(self, trials: Trials) -> list[str]:
        base, *others = trials.arms()
        found = []
        for arm in others:
            differences = trials.differences(arm, base, lambda trial: trial.error)
            found.append(
                f"{arm.name}: {_fewer(arm, base, trials):.0f} times fewer bytes, test error higher by "
                f"{sum(differences) / len(differences):.2f} points (of single seeds at most {max(differences):.2f})."
            )
        return found

    def _notes(self) -> tuple[str, ...]:
        return (
            f"{self.problem}, {self.model}, {self.workers} workers, batches of {self.batch_size} per worker, SGD at "
            f"{self.rate:g} with momentum {self.momentum:g} and a cosine over {self.epochs:g} epochs. Bytes are those "
            "that all workers send in the whole run.",
            note_on(self.seeds),
        )


def _fewer(arm: Arm, base: Arm, trials: Trials) -> float:
    sent = trials.mean(arm, _sent).mean
    return trials.mean(base, _sent).mean / sent if sent else math.inf


def _sent(trial: Trial) -> float:
    return trial.outcome.run.bytes_out
