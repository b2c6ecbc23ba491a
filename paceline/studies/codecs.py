"""Codecs between peers: how many fewer bytes, at which accuracy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.codecs import Codec, TopK, parse_codec
from paceline.errors import UsageError
from paceline.policies import POLICIES, parse_policy
from paceline.problems import Problem
from paceline.report.series import Axis, Series
from paceline.schedules import ScheduleConfig
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials
from paceline.studies.checks import check_counts, check_positive
from paceline.studies.intervals import interval, limit
from paceline.studies.measures import final_accuracy, megabytes_sent
from paceline.studies.study import Cell, Column, option

BASE = "all-reduce"
# Test accuracy in % without and with the codec, and how many times fewer bytes.
PUBLISHED = {
    "qsgd": "ResNet-110 93.86 -> 94.19",
    "power-sgd": "ResNet-18 94.3 -> 94.4, 136 times",
    "top-k, corrected": "ResNet-110 93.75 -> 93.87; AlexNet 58.17 -> 58.20, 597 times",
    "top-k": "ResNet-110 93.10 -> 92.10",
    "threshold": "an acoustic model, as it was, about 1,000 times",
}


@dataclass(frozen=True, kw_only=True)
class CodecsStudy(ArmStudy):
    """Train with all-reduce as it is, and with codecs that send fewer and fewer bytes; count the bytes on the wire.

    Bytes are those of the packets that workers really send to each other, and of a ring all-reduce where numbers are
    summed as they are. The last notes say of which lines the accuracy falls by less than --within.
    """

    name: ClassVar[str] = "codecs"
    title: ClassVar[str] = "Fewer bytes"

    model: str | None = option("net3", "The network.")
    workers: int = option(4, "Of every line.")
    lines: tuple[str, ...] = option(
        (
            "diloco(every=8, outer_momentum=0.5) + sign",
            *(
                f"diloco(every={every}, outer_lr=1.0, outer_momentum=0.5) + sparse-ternary(density={density})"
                for every, density in ((16, 0.033), (32, 0.033), (32, 0.015), (64, 0.015))
            ),
        ),
        "Codecs, policies, or a policy + a codec, with commas between.",
    )
    batch_size: int = option(32, "Of each worker.")
    epochs: float = option(5.049, "Of every run: on mnist 2,368 steps, which is 37 rounds of 64.")
    rate: float = option(0.1, "Highest learning rate, which falls along a cosine.")
    momentum: float = option(0.9, "Of SGD, but for codecs that have a momentum of their own.")
    within: float = option(0.3, "Points of test accuracy that a line may lose.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers")
        check_positive(self, "rate", "epochs", "within")
        if len(set(self.lines)) < len(self.lines) or not self.lines:
            raise UsageError(f"study {self.name!r}: lines must be different ones, got {self.lines}")
        for line in self.lines:
            _split(line)

    def arms(self, problem: Problem) -> list[Arm]:
        arms = [self._arm(line) for line in (BASE, *self.lines)]
        for arm in arms:
            steps, every = arm.steps(problem), getattr(parse_policy(arm.policy), "every", 1)
            if steps % every:  # the average of the steps that are left costs nothing on virtual workers
                raise UsageError(
                    f"study {self.name!r}: {arm.name} makes {steps} steps, and the bytes after the last {every} of "
                    f"them would not be counted; choose --epochs or --examples for a multiple of {every} steps"
                )
        return arms

    def _arm(self, line: str) -> Arm:
        policy, codec = _split(line)
        momentum = 0.0 if _is_corrected(codec) else self.momentum
        return Arm(
            name=line,
            group=_family(policy, codec),
            optimizer=f"sgd(lr={self.rate!r}, momentum={momentum!r})",
            epochs=self.epochs,
            batch_size=self.batch_size,
            workers=self.workers,
            policy=policy,
            codec=None if codec is None else str(codec),
            schedule=ScheduleConfig(decay="cosine"),
        )

    def columns(self, trials: Trials) -> tuple[Column | str, ...]:
        counted = Column(name="MB sent", decimals=3), Column(name="times fewer bytes", decimals=1)
        return "line", *counted, "test accuracy %", "points lost", "published"

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        return (
            arm.name,
            trials.mean(arm, megabytes_sent).mean,
            _times_fewer(arm, trials),
            trials.mean(arm, final_accuracy).show(),
            None if arm.name == BASE else interval(_lost(arm, trials)).show(),
            PUBLISHED.get(arm.group),
        )

    def axes(self) -> tuple[Axis, Axis]:
        return Axis(label="times fewer bytes", scale="log"), Axis(label="test accuracy (%)")

    def series(self, trials: Trials) -> list[Series]:
        """The accuracy over the bytes, one curve for each family of lines."""
        families: dict[str, list[tuple[float, float]]] = {}
        for arm in trials.arms():
            point = _times_fewer(arm, trials), trials.mean(arm, final_accuracy).mean
            families.setdefault(arm.group, []).append(point)
        panel = f"{self.problem}, {self.model}, {self.workers} workers"
        curves = []
        for family, points in families.items():
            x, y = zip(*sorted(points), strict=True)
            curves.append(Series(label=family, panel=panel, x=x, y=y))
        return curves

    def verdicts(self, trials: Trials) -> list[str]:
        """One for each line, and which of them saves most."""
        found, best = [], ("none of them", 1.0)
        for arm in trials.arms()[1:]:
            times, lost = _times_fewer(arm, trials), _lost(arm, trials)
            claim = limit(f"{arm.name}, {times:,.0f} times fewer bytes, loses", lost, "points", below=self.within)
            found.append(claim)
            if ": holds" in claim and times > best[1]:
                best = f"{arm.name}, {times:,.0f} times", times
        return [*found, f"The fewest bytes of the lines of which it holds: {best[0]}."]

    def notes(self) -> tuple[str, ...]:
        examples = "all training examples" if self.examples is None else f"the first {self.examples:,} examples"
        return (
            "Published accuracies are those of Alistarh et al. (2017), Vogels et al. (2019), Lin et al. (2018; that of "
            "plain gradient dropping is theirs, of 32 workers) and Strom (2015), on CIFAR-10 where it is a ResNet.",
            f"{self.problem}, {self.model}, {examples}, {self.workers} workers, batches of {self.batch_size} per "
            f"worker, SGD at {self.rate:g} with momentum {self.momentum:g} and a cosine over {self.epochs:g} epochs. "
            "Bytes are those that all workers send in the whole run, with headers and control numbers.",
            f"Seeds: {self.seeds}. Numbers are means over them, +- half the 95 % interval. Points lost are paired by "
            "seed. A claim holds if their interval is below the limit.",
        )


def _split(line: str) -> tuple[str, Codec | None]:
    """The policy of a line, and its codec.

    >>> _split("local-sgd(every=4) + sign")
    ('local-sgd(every=4)', Sign(both=False, feedback=True, vote='none', bucket=4096))
    """
    policy, plus, codec = line.rpartition("+")
    if not plus and codec.partition("(")[0].strip() in POLICIES:
        return str(parse_policy(codec)), None
    return str(parse_policy(policy.strip() if plus else BASE)), parse_codec(codec.strip())


def _is_corrected(codec: Codec | None) -> bool:
    return isinstance(codec, TopK) and codec.momentum > 0


def _family(policy: str, codec: Codec | None) -> str:
    """What lines have in common that differ in how much they send, or how often."""
    name = "none" if codec is None else codec.name
    if _is_corrected(codec):
        name += ", corrected"
    if isinstance(codec, TopK) and not codec.feedback:
        name += ", without feedback"
    return name if policy == BASE else f"{parse_policy(policy).name} + {name}"


def _times_fewer(arm: Arm, trials: Trials) -> float:
    """How many times fewer bytes than the first arm."""
    base, own = (trials.mean(each, megabytes_sent).mean for each in (trials.arms()[0], arm))
    return base / own


def _lost(arm: Arm, trials: Trials) -> list[float]:
    """Points of accuracy below the first arm."""
    return trials.differences(trials.arms()[0], arm, final_accuracy)
