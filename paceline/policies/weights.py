"""How much each push of a commit counts, as values: one small class per idea, one table from name to class."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.messages import Commit
from paceline.spec import check_types, from_spec


@dataclass(frozen=True, kw_only=True)
class Weights(ABC):
    """How much each push of a commit counts; a subclass is a frozen dataclass and one line in ``WEIGHTS``."""

    name: ClassVar[str]  # as users type it, with hyphens

    def __post_init__(self) -> None:
        check_types("weights", self.name, self)

    @abstractmethod
    def weigh(self, commit: Commit, version: int) -> Commit:
        """Weigh a commit, whose weights are shares of the examples, on parameters of this version."""


@dataclass(frozen=True, kw_only=True)
class ByExamples(Weights):
    """Weigh each push by its share of the examples."""

    name: ClassVar[str] = "examples"

    def weigh(self, commit: Commit, version: int) -> Commit:
        return commit


@dataclass(frozen=True, kw_only=True)
class ByStaleness(Weights):
    """Divide a push's share of the examples by its staleness to the power of ``power`` (Zhang et al., 2015).

    The staleness is the number of commits since the version that its worker has read. One of 0 counts as 1.

    >>> from paceline.policies.messages import Push
    >>> pushes = (Push(worker=0, incarnation=0, step=0, version=6), Push(worker=1, incarnation=0, step=1, version=2))
    >>> ByStaleness().weigh(Commit(pushes, (0.5, 0.5)), version=6).weights
    (0.5, 0.125)
    """

    name: ClassVar[str] = "staleness"

    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.power < math.inf:
            raise UsageError(f"weights {self.name!r}: power must be above 0 and finite, got {self.power:g}")

    def weigh(self, commit: Commit, version: int) -> Commit:
        staleness = [max(1.0, version - push.version) for push in commit.pushes]
        shares = zip(commit.weights, staleness, strict=True)
        return commit._replace(weights=tuple([share * stale**-self.power for share, stale in shares]))


WEIGHTS: dict[str, type[Weights]] = {weights.name: weights for weights in (ByExamples, ByStaleness)}


@cache
def parse_weights(text: str) -> Weights:
    """Read weights from their text form.

    >>> parse_weights("staleness(power=0.5)")
    ByStaleness(power=0.5)
    """
    return from_spec("weights", WEIGHTS, text)
