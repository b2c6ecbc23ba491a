"""The mean of the pushes in each coordinate without the largest and smallest values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.aggregators.ranked import Ranked
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Ranked):
    """Leave out the ``drop`` largest and smallest values of each coordinate; take the mean of the rest.

    Up to ``drop`` wrong pushes cannot move it out of the range of the right ones (Yin et al., 2018).

    >>> import torch
    >>> pushes = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0]), torch.tensor([1e9])]
    >>> TrimmedMean(drop=1).combine(pushes, [1 / 4] * 4)
    tensor([3.])
    """

    name: ClassVar[str] = "trimmed-mean"

    drop: int  # at each end

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drop < 1:
            raise UsageError(
                f"aggregator {self.name!r}: drop must be at least 1, got {self.drop}; for example {self.name}(drop=1)"
            )

    @property
    def least(self) -> int:
        return 2 * self.drop + 1

    def choose(self, ranked: Sequence[Tensor]) -> Tensor:
        first, *others = ranked[self.drop : len(ranked) - self.drop]
        total = first.clone()
        for values in others:
            total += values
        return total.div_(1 + len(others))
