"""Every attack against every defence: what hostile workers do to the accuracy, and what bears them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.attacks import ATTACKS, parse_attack
from paceline.errors import UsageError
from paceline.policies import POLICIES
from paceline.problems import Problem
from paceline.studies.arm_study import ArmStudy
from paceline.studies.arms import Arm, Trials
from paceline.studies.checks import check_counts
from paceline.studies.intervals import interval
from paceline.studies.measures import final_accuracy
from paceline.studies.study import Cell, option

MEAN, NOBODY = "mean", "none"  # the aggregator of the clean run, and its attack
_CLOSE = 2.0  # points of accuracy


@dataclass(frozen=True, kw_only=True)
class AdversariesStudy(ArmStudy):
    """Train with some hostile workers under synchronous SGD, with every attack against every defence.

    The mean should fail where wrong pushes are large. The median, the trimmed mean and Krum should stay within 2 points
    of the clean run, which is that of the mean without hostile workers; DRACO should be that run. The last notes say
    what holds.
    """

    name: ClassVar[str] = "adversaries"
    title: ClassVar[str] = "Attacks of hostile workers against defences"

    examples: int | None = option(16000, "Training examples to use, the first ones.")
    workers: int = option(8, "All of them.")
    hostile: int = option(2, "Those that attack.")
    attacks: tuple[str, ...] = option(tuple(ATTACKS), "With commas between.")
    defences: tuple[str, ...] = option(
        (
            MEAN,
            "median",
            "trimmed-mean(drop=2)",
            "krum(faulty=2)",
            "multi-krum(faulty=2)",
            "geometric-median",
            "draco(faulty=2)",
        ),
        "Aggregators of sync, or policies, with commas between.",
    )
    optimizer: str = option("sgd(lr=0.1, momentum=0.9)", "Of the server.")
    batch_size: int = option(256, "Of each worker.")
    epochs: int = option(10, "Of every run.")
    judges: int | None = option(2000, "Examples to evaluate on, the first ones.")
    seeds: int = option(5, "Runs of every cell.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "workers", "hostile", "epochs")
        for attack in self.attacks:
            parse_attack(attack)
        if self.hostile > self.workers:
            raise UsageError(f"study {self.name!r}: wanted {self.hostile} hostile workers of {self.workers}")
        if MEAN not in self.defences or not self.attacks:
            raise UsageError(f"study {self.name!r}: name attacks, and defences with {MEAN}, that of the clean run")

    def arms(self, problem: Problem) -> list[Arm]:
        return [self._arm(attack, defence) for attack in (NOBODY, *self.attacks) for defence in self.defences]

    def _arm(self, attack: str, defence: str) -> Arm:
        return Arm(
            name=defence,
            group=attack,
            optimizer=self.optimizer,
            epochs=self.epochs,
            batch_size=self.batch_size,
            workers=self.workers,
            policy=defence if defence.partition("(")[0] in POLICIES else f"sync(aggregator={defence})",
            attack=None if attack == NOBODY else attack,
            hostile=0 if attack == NOBODY else self.hostile,
            points=self.epochs,
            judges=self.judges,
        )

    def columns(self, trials: Trials) -> tuple[str, ...]:
        return "attack", *self.defences

    def rows(self, trials: Trials) -> list[tuple[Cell, ...]]:
        """One for every attack."""
        return [self.row(self._arm(attack, MEAN), trials) for attack in (NOBODY, *self.attacks)]

    def row(self, arm: Arm, trials: Trials) -> tuple[Cell, ...]:
        """All defences against the attack of an arm."""
        arms = [self._arm(arm.group, defence) for defence in self.defences]
        found = [trials.of(each, final_accuracy) for each in arms]
        return arm.group, *(interval(values).show() if values else None for values in found)

    def verdicts(self, trials: Trials) -> list[str]:
        """One line for each defence: under which attacks it is close to the clean run, and under which not."""
        clean, lines = self._arm(NOBODY, MEAN), []
        for defence in self.defences:
            found: dict[str, list[str]] = {"bears": [], "fails under": [], "nothing is shown under": []}
            for attack in self.attacks:
                losses = trials.differences(clean, self._arm(attack, defence), final_accuracy)
                if losses:
                    found[_word(losses)].append(f"{attack} ({interval(losses).show()})")
            parts = [f"{word} {', '.join(those)}" for word, those in found.items() if those]
            lines.append(f"{defence}: {'; '.join(parts)}.")
        return lines

    def notes(self) -> tuple[str, ...]:
        return (
            "Attacks and defences are those of Blanchard et al. (2017), Chen et al. (2018), Yin et al. (2018), "
            "Baruch et al. (2019), Fang et al. (2020) and Pillutla et al. (2022). Cells are the test accuracy at the "
            "end, in %.",
            f"{self.problem}, {self.model}, the first {self.examples} training examples, {self.epochs} epochs, "
            f"{self.optimizer}; {self.workers} workers with batches of {self.batch_size}, of which {self.hostile} "
            "attack. Each hostile worker knows its own batch alone.",
            f"{self.note_on_seeds()} A defence bears an attack if the interval of what it loses against the clean "
            f"run is below {_CLOSE:g} points, and fails if it is above; what it loses is in brackets.",
        )


def _word(losses: list[float]) -> str:
    found = interval(losses)
    if found.half is None:
        return "nothing is shown under"
    if found.mean + found.half < _CLOSE:
        return "bears"
    return "fails under" if found.mean - found.half > _CLOSE else "nothing is shown under"
