"""The base of aggregators that look at each coordinate for itself: at its values in all pushes, in order of size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.aggregators.base import Aggregator, as_real, total_of
from paceline.errors import UsageError

_BLOCK = 1 << 14  # coordinates that are sorted together: they stay in a core's cache
_MANY = 32  # pushes: from here on torch's sort is faster than exchanging neighbours


@dataclass(frozen=True, kw_only=True)
class Ranked(Aggregator):
    """Choose among the values that the pushes have in a coordinate, by their order.

    The sizes of the weights do not matter, or a worker could count for more by claiming more examples. Their sum scales
    the result.
    """

    @abstractmethod
    def choose(self, ranked: Sequence[Tensor]) -> Tensor:
        """Make the result of the pushes' values: in each coordinate ``ranked[0]`` has the smallest."""

    def combine(self, pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        if len(pushes) < self.least:
            raise UsageError(f"aggregator {self} needs at least {self.least} pushes in a commit, found {len(pushes)}")
        dtype = torch.promote_types(pushes[0].dtype, torch.float32)
        result = torch.empty_like(pushes[0], dtype=dtype)
        for start in range(0, len(result), _BLOCK):
            stop = start + _BLOCK
            ranked = _rank([as_real(push[start:stop].to(dtype)) for push in pushes])
            as_real(result[start:stop]).copy_(self.choose(ranked))
        result += 0.0  # zeros of both signs are equal, so that any may come first: let all be +0
        total = total_of(weights)
        return result if total == 1.0 else result.mul_(total)


def _rank(values: list[Tensor]) -> Sequence[Tensor]:
    """Sort each coordinate's values by exchanging neighbours, an odd-even transposition sort of whole vectors.

    For a few pushes this takes a tenth of the time of torch's sort.
    """
    if len(values) >= _MANY:
        return torch.stack(values).sort(dim=0).values.unbind()
    for turn in range(len(values)):
        for place in range(turn % 2, len(values) - 1, 2):
            one, other = values[place : place + 2]
            values[place : place + 2] = torch.minimum(one, other), torch.maximum(one, other)
    return values
