"""The push that is nearest to most others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.aggregators.base import total_of
from paceline.aggregators.by_distance import ByDistance
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Krum(ByDistance):
    """Take the push with the smallest score, as it is (Blanchard et al., 2017).

    The score of a push is the sum of its squared distances to the n - ``faulty`` - 2 nearest of n pushes. Of equal
    scores the first push counts.

    >>> far_apart = [[0.0, 1.0, 4.0, 81.0], [1.0, 0.0, 1.0, 64.0], [4.0, 1.0, 0.0, 49.0], [81.0, 64.0, 49.0, 0.0]]
    >>> Krum(faulty=0).weigh(torch.tensor(far_apart), [1 / 4] * 4)
    [0.0, 1.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "krum"

    faulty: int  # pushes of a commit that may be wrong, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.faulty < 0:
            raise UsageError(
                f"aggregator {self.name!r}: faulty must be at least 0, got {self.faulty}; "
                f"for example {self.name}(faulty=1)"
            )

    @property
    def least(self) -> int:
        return 2 * self.faulty + 3

    def num_kept(self, pushes: int) -> int:
        """How many of the best pushes are taken."""
        return 1

    def weigh(self, pairs: Tensor, weights: Sequence[float]) -> Sequence[float]:
        pushes = len(weights)
        nearest = pairs.sort(dim=1).values[:, 1 : pushes - self.faulty - 1]  # the first is the push itself
        best = nearest.sum(dim=1).argsort(stable=True)[: self.num_kept(pushes)]
        taken = torch.zeros(pushes, dtype=torch.float64)
        taken[best] = total_of(weights) / len(best)
        result: list[float] = taken.tolist()
        return result
