"""The median of the pushes in each coordinate, which a minority of wrong pushes cannot move far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.aggregators.ranked import Ranked


@dataclass(frozen=True, kw_only=True)
class Median(Ranked):
    """Take the median in each coordinate; of an even number of pushes, the mean of the middle two (Yin et al., 2018).

    >>> import torch
    >>> Median().combine([torch.tensor([1.0, 9.0]), torch.tensor([2.0, 8.0]), torch.tensor([1e9, -1e9])], [1 / 3] * 3)
    tensor([2., 8.])
    """

    name: ClassVar[str] = "median"

    @property
    def least(self) -> int:
        return 3

    def choose(self, ranked: Sequence[Tensor]) -> Tensor:
        middle, odd = divmod(len(ranked), 2)
        return ranked[middle] if odd else (ranked[middle - 1] + ranked[middle]) / 2
