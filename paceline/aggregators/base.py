"""What every aggregator is: a frozen value with a name and a text form, which works on tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.spec import check_types, to_spec


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """How the pushes of a commit combine into one; a subclass is a frozen dataclass and one line in ``AGGREGATORS``."""

    name: ClassVar[str]  # as users type it, with hyphens
    adds_up: ClassVar[bool] = False  # the result is a weighted sum, so that pushes can be added up as they come

    def __post_init__(self) -> None:
        check_types("aggregator", self.name, self)

    def __str__(self) -> str:
        """The text form, which ``parse_aggregator`` reads back to an equal aggregator."""
        return to_spec(self.name, self)

    @abstractmethod
    def combine(self, pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Combine one vector of every push into a new one, in at least single precision."""
