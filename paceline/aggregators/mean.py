"""The weighted sum of the pushes, which is their mean if the weights add up to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.aggregators.base import Aggregator, Needs


@dataclass(frozen=True, kw_only=True)
class Mean(Aggregator):
    """Add the pushes, each times its weight.

    >>> Mean().combine([torch.tensor([1.0, 2.0]), torch.tensor([5.0, 6.0])], [0.75, 0.25])
    tensor([2., 3.])
    """

    name: ClassVar[str] = "mean"
    needs: ClassVar[Needs] = Needs.SUM

    def combine(self, pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        first = pushes[0]
        total = torch.zeros_like(first, dtype=torch.promote_types(first.dtype, torch.float32))
        for push, weight in zip(pushes, weights, strict=True):
            total.add_(push, alpha=weight)
        return total
