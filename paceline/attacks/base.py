"""The base of every attack: a frozen value with a name and a text form, which says what a hostile worker pushes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.spec import check_types, to_spec


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """What a hostile worker pushes; a subclass is a frozen dataclass and one line in ``ATTACKS``.

    The worker has the parameters that it read and its own batch, and knows nothing of the other workers. Random numbers
    come from torch's global stream, which is seeded for every step, so that a replay draws the same ones.
    """

    name: ClassVar[str]  # as users type it, with hyphens

    def __post_init__(self) -> None:
        check_types("attack", self.name, self)

    def __str__(self) -> str:
        """The text form, which ``parse_attack`` reads back to an equal attack."""
        return to_spec(self.name, self)

    @property
    def num_parts(self) -> int:
        """Into how many parts the worker divides its batch, to have a gradient of each."""
        return 1

    def fits(self, target: Tensor) -> bool:
        """Whether the attack can be on data whose examples have such a target."""
        return True

    def relabel(self, targets: Tensor, outputs: Tensor) -> Tensor:
        """Change the targets of a batch, given the model's outputs for it."""
        return targets

    @abstractmethod
    def push(self, gradients: Sequence[Tensor]) -> Tensor:
        """Make the gradient of a parameter that is pushed, given the honest one of each part of the batch."""
