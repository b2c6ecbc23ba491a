"""Minimum cuts of flow networks: as sums of distances, which the engine minimises, and back by rounding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.hogwild.readers import FlowNetwork
from paceline.hogwild.readers.arrays import Array


@dataclass(frozen=True)
class Distances:
    """A cut as a sum: ``offset`` plus the weights times the distances of the nodes they join.

    A node's value is 1 on the source's side and 0 on the sink's.
    """

    tails: Array
    heads: Array
    weights: Array
    offset: float


def as_distances(network: FlowNetwork) -> Distances:
    """Write a directed cut as an undirected one that has the same value for every choice of sides.

    An arc from u to v costs c x_u (1 - x_v), which is c/2 |x_u - x_v| + c/2 (x_u - x_v) where x is 0 or 1. The second
    part is a sum over nodes; each node's share becomes one edge to the sink or to the source.
    """
    source, sink = network.source, network.sink
    used = (network.tails != network.heads) & (network.tails != sink) & (network.heads != source)
    tails, heads, costs = network.tails[used], network.heads[used], network.capacities[used]
    from_source, to_sink = tails == source, heads == sink
    inner = ~from_source & ~to_sink
    shares = np.zeros(network.nodes)
    np.add.at(shares, heads[from_source & ~to_sink], -costs[from_source & ~to_sink])
    np.add.at(shares, tails[to_sink & ~from_source], costs[to_sink & ~from_source])
    np.add.at(shares, tails[inner], costs[inner] / 2)
    np.add.at(shares, heads[inner], -costs[inner] / 2)
    left, right, weights = _merged(tails[inner], heads[inner], costs[inner] / 2, network.nodes)
    pulled = np.flatnonzero(shares)
    ends = np.where(shares[pulled] > 0, sink, source)
    return Distances(
        tails=np.concatenate([left, pulled.astype(np.int32)]),
        heads=np.concatenate([right, ends.astype(np.int32)]),
        weights=np.concatenate([weights, np.abs(shares[pulled])]).astype(np.float32),
        offset=float(costs[from_source].sum() + shares[shares < 0].sum()),
    )


def _merged(tails: Array, heads: Array, weights: Array, nodes: int) -> tuple[Array, Array, Array]:
    """One edge for all arcs between two nodes, in either direction."""
    keys = np.minimum(tails, heads).astype(np.int64) * nodes + np.maximum(tails, heads)
    unique, place = np.unique(keys, return_inverse=True)
    sums = np.bincount(place, weights, minlength=len(unique))
    kept = sums > 0
    return (unique[kept] // nodes).astype(np.int32), (unique[kept] % nodes).astype(np.int32), sums[kept]


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
