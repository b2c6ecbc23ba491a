"""The point with the smallest sum of distances to the pushes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.aggregators.base import total_of
from paceline.aggregators.by_distance import ByDistance

_FURTHEST = 1e6  # radii; of a push further away, the squared distances have lost the digits that matter
_NEAREST = 1e-6  # radii; a distance counts as at least so long, or the division by it would fail
_LARGEST = 1e280  # squared distance: those of doubles may overflow
_MOST_ROUNDS = 200
_SMALLEST_CHANGE = 1e-9  # of a weight, in one round


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(ByDistance):
    """Take the point with the smallest sum of distances to all pushes, by Weiszfeld's rounds (Pillutla et al., 2022).

    A minority of wrong pushes cannot move it far. It is a mean of the pushes, each weighted by one over its distance
    from the result; so every round needs only the distances between pushes. If a push has a smaller sum than what the
    rounds come to, it is the result. The radius is that of the smallest ball around a push that has more than half of
    them. A push over 1e6 radii from there gets weight 0.

    >>> GeometricMedian().weigh(torch.tensor([[0.0, 0.0, 9.0], [0.0, 0.0, 9.0], [9.0, 9.0, 0.0]]), [1 / 3] * 3)
    [0.5, 0.5, 0.0]
    """

    name: ClassVar[str] = "geometric-median"

    @property
    def least(self) -> int:
        return 3

    def weigh(self, pairs: Tensor, weights: Sequence[float]) -> Sequence[float]:
        pairs = pairs.double().clamp(max=_LARGEST)
        squared_radii = pairs.sort(dim=1).values[:, len(weights) // 2]
        centre = int(squared_radii.argmin())
        squared_radius = float(squared_radii[centre])
        near = pairs[centre] <= _FURTHEST**2 * squared_radius
        found = torch.zeros(len(weights), dtype=torch.float64)
        found[near] = _weiszfeld(pairs[near][:, near], squared_radius) * total_of(weights)
        result: list[float] = found.tolist()
        return result


def _weiszfeld(pairs: Tensor, squared_radius: float) -> Tensor:
    """The weights of the points, whose squared distances are given, in their geometric median."""
    shares = torch.full((len(pairs),), 1 / len(pairs), dtype=torch.float64)
    for _ in range(_MOST_ROUNDS if squared_radius else 0):  # within a radius of 0 all points are one
        closeness = _from_mean(pairs, shares).clamp(min=_NEAREST**2 * squared_radius).rsqrt()
        before, shares = shares, closeness / closeness.sum()
        if (shares - before).abs().max() < _SMALLEST_CHANGE:
            break
    sums = pairs.sqrt().sum(dim=1)
    if sums.min() < _from_mean(pairs, shares).clamp(min=0).sqrt().sum():  # the rounds come to a point only slowly
        shares.zero_()[sums.argmin()] = 1
    return shares


def _from_mean(pairs: Tensor, shares: Tensor) -> Tensor:
    """The squared distances of the points from their mean with these weights."""
    to_each = (pairs * shares).sum(dim=1)
    return to_each - (shares * to_each).sum() / 2
