"""The base of aggregators that weigh whole pushes by how far they are from each other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.aggregators.base import Needs, as_real
from paceline.aggregators.mean import Mean


@dataclass(frozen=True, kw_only=True)
class ByDistance(Mean):
    """Take the weighted sum of the pushes, with weights that follow from their squared distances.

    The sizes of the given weights do not matter, or a worker could count for more by claiming more examples. Their sum
    scales the result.
    """

    needs: ClassVar[Needs] = Needs.PAIRS

    def compare(self, one: Tensor, other: Tensor) -> float:
        return float((as_real(one).double() - as_real(other).double()).square_().sum())

    @abstractmethod
    def weigh(self, pairs: Tensor, weights: Sequence[float]) -> Sequence[float]:
        """Give the new weights, by the squared distances."""
