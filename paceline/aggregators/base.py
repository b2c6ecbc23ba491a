"""The base of every aggregator: a frozen value with a name and a text form, which works on tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from torch import Tensor

from paceline.spec import check_types, to_spec


class Needs(Enum):
    """What has to be kept of the pushes until their commit."""

    SUM = auto()  # their weighted sum: a push is added to it when it comes
    PUSHES = auto()  # each push
    READS = auto()  # each push, and the parameters that its worker read for it


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """How the pushes of a commit combine into one; a subclass is a frozen dataclass and one line in ``AGGREGATORS``."""

    name: ClassVar[str]  # as users type it, with hyphens
    needs: ClassVar[Needs] = Needs.PUSHES
    least: ClassVar[int] = 1  # pushes of a commit; a smaller commit changes nothing

    def __post_init__(self) -> None:
        check_types("aggregator", self.name, self)

    def __str__(self) -> str:
        """The text form, which ``parse_aggregator`` reads back to an equal aggregator."""
        return to_spec(self.name, self)

    def correct(self, push: Tensor, read: Tensor, now: Tensor) -> Tensor:
        """Correct the gradients of a parameter that its worker has ``read``, given the parameter as it is ``now``.

        Called for each push before ``combine``, if ``needs`` is ``READS``.
        """
        return push

    @abstractmethod
    def combine(self, pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Combine one vector of each push into a new one, in at least single precision.

        No weight is 0. Of pushes that are all the same the result is that push times the sum of the weights. A vector
        is only a part of a push, that of one dtype and one server, so each coordinate's result must depend on that
        coordinate alone.
        """
