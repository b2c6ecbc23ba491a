"""How sparse a problem is, and the slow-down that this predicts (Niu et al., NIPS 2011)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.hogwild.problems import Problem

BUDGET = 2_000_000_000  # steps in search of the item that shares with most


@dataclass(frozen=True)
class Sparsity:
    """The numbers that bound what lock-free threads cost.

    >>> round(Sparsity(omega=3, delta=0.01, rho=0.02, exact=True).predicted_slowdown(2), 2)
    8.44
    """

    omega: int  # most coordinates that an item has
    delta: float  # share of the items that have the most common coordinate
    rho: float  # largest share of items that share a coordinate with one item
    exact: bool  # else rho is the largest share that was found in a limited search

    def predicted_slowdown(self, tau: float) -> float:
        """How many times more updates the bound asks for if each reads parameters up to ``tau`` updates old."""
        return 1 + 6 * tau * self.rho + 6 * tau**2 * self.omega * math.sqrt(self.delta)


def sparsity(problem: Problem, *, budget: int = BUDGET) -> Sparsity:
    """Measure a problem. Vectors of a factor, and points of a node, count as one coordinate each."""
    omega, busiest, intersecting, exact = problem.native.describe(budget)
    items = max(1, problem.items)
    return Sparsity(omega=omega, delta=busiest / items, rho=intersecting / items, exact=exact)
