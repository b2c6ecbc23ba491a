"""Cuts of flow networks: their values, and relaxed ones rounded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.hogwild.readers import FlowNetwork
from paceline.hogwild.readers.cache import Array


def cut_value(network: FlowNetwork, on_source_side: npt.NDArray[np.bool_]) -> float:
    """The capacity of the arcs from the source's side to the sink's."""
    across = on_source_side[network.tails] & ~on_source_side[network.heads]
    return float(network.capacities[across].sum())


def round_cut(network: FlowNetwork, x: Array) -> tuple[float, npt.NDArray[np.bool_]]:
    """Round values between 0 and 1 at the best threshold; return the cut's value and the nodes on the source's side.

    All thresholds are tried in one pass: an arc is cut by those from its head's value up to its tail's.
    """
    x = np.asarray(x, np.float64).copy()
    x[network.source], x[network.sink] = np.inf, -np.inf
    values, ranks = np.unique(x, return_inverse=True)
    low, high = ranks[network.heads], ranks[network.tails]
    cut = high > low
    changes = np.bincount(low[cut], network.capacities[cut], minlength=len(values))
    changes -= np.bincount(high[cut], network.capacities[cut], minlength=len(values))
    costs = np.cumsum(changes)[:-1]  # at the threshold above the last value, the source is on the wrong side
    best = int(costs.argmin())
    sides = x > values[best]
    return cut_value(network, sides), sides
