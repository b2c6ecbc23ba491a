"""What most workers of a group agree on, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.aggregators.base import Needs, total_of
from paceline.aggregators.mean import Mean
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Vote(Mean):
    """Add the gradients that ``faulty`` + 1 pushes of each group have, bit for bit (DRACO, Chen et al., 2018).

    A group are pushes of the same batches, whose pairs are finite. If a group has no such majority, no push counts.

    >>> agree = torch.tensor([[0.0, 3.0, 0.0], [3.0, 0.0, 3.0], [0.0, 3.0, 0.0]])  # the second is wrong
    >>> Vote(faulty=1).weigh(agree, [1 / 3] * 3)
    [1.0, 0.0, 0.0]
    """

    name: ClassVar[str] = "vote"
    needs: ClassVar[Needs] = Needs.PAIRS
    whole: ClassVar[bool] = True

    faulty: int  # pushes of a group that may be wrong, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.faulty < 0:
            raise UsageError(f"aggregator {self.name!r}: faulty must be at least 0, got {self.faulty}")

    @property
    def least(self) -> int:
        return self.faulty + 1

    def compare(self, one: Tensor, other: Tensor) -> float:
        return 0.0 if torch.equal(one.view(torch.uint8), other.view(torch.uint8)) else 1.0

    def weigh(self, pairs: Tensor, weights: Sequence[float]) -> Sequence[float]:
        result = [0.0] * len(weights)
        groups = {tuple(row.isfinite().nonzero().flatten().tolist()) for row in pairs}
        for group in groups:
            agreeing = ([each for each in group if pairs[one, each] == 0] for one in group)
            elected = next((same for same in agreeing if len(same) > self.faulty), None)
            if elected is None:
                return [0.0] * len(weights)
            result[elected[0]] = total_of([weights[each] for each in group])
        return result
