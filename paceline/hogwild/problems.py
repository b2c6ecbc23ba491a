"""The sparse problems as values: data in numpy arrays, which the engine reads where they lie.

>>> import numpy as np
>>> rows = CSR(np.array([0, 1, 2]), np.array([0, 1]), np.array([1.0, 2.0]), columns=2)
>>> LinearProblem(rows, np.array([1.0, -1.0])).items
2
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.hogwild.arrays import CSR, INDICES, REALS, check_alike, check_array, check_size, compiled

__all__ = ["CSR", "SCIKIT_LOSSES", "GraphCut", "LinearProblem", "MatrixCompletion", "Problem", "Storage"]

Loss = Literal["hinge", "logistic", "squared"]
Array = NDArray[Any]

SCIKIT_LOSSES: dict[str, Loss] = {"hinge": "hinge", "log_loss": "logistic", "squared_error": "squared"}
"""The losses by scikit-learn's names."""


class Storage(NamedTuple):
    """The parameters of a problem: the memory that the engine uses, and its parts by name."""

    memory: tuple[Array, ...]
    parts: dict[str, Array]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the memory lies."""
        return tuple(array.ctypes.data for array in self.memory)


class Problem(ABC):
    """A sum over items, each of which depends on few parameters."""

    error_name: ClassVar[str]  # what ``error`` gives

    @property
    @abstractmethod
    def items(self) -> int:
        """How many terms the sum has: one update for each is an epoch."""

    @cached_property
    @abstractmethod
    def native(self) -> Any:
        """The compiled problem. Making it checks all data, once."""

    @abstractmethod
    def storage(self, seed: int) -> Storage:
        """New parameters, as training begins with them."""

    @abstractmethod
    def penalty(self, parts: Mapping[str, Array]) -> float:
        """The part of the objective that depends on no item."""

    def objective(self, loss: float, parts: Mapping[str, Array]) -> float:
        """The whole objective, from the summed losses of the items."""
        return loss / max(1, self.items) + self.penalty(parts)

    def error(self, error: float) -> float:
        """The error that users look at, from its sum over the items."""
        return math.sqrt(error / max(1, self.items))


@dataclass(frozen=True, eq=False)
class LinearProblem(Problem):
    """A linear model of sparse rows: mean loss + ``regulariser`` / 2 * |coef|^2.

    The loss is ``hinge`` (a support vector machine) or ``logistic``, for targets of -1 and 1, or ``squared``. An
    intercept learns as fast as the weight of a column whose entries have the mean size of all. Since all rows have it,
    ``cyclades`` then finds no two updates to run side by side.
    """

    rows: CSR
    targets: Array  # of the type of the values
    loss: Loss = "hinge"
    regulariser: float = 0.0
    weights: Array | None = None  # of the rows
    intercept: bool = False

    def __post_init__(self) -> None:
        if self.loss not in get_args(Loss):
            raise UsageError(f"loss: wanted one of {', '.join(get_args(Loss))}, got {self.loss!r}")
        _check_regulariser(self.regulariser)
        for name, array in (("targets", self.targets), ("weights", self.weights)):
            if array is not None:
                check_array(name, array, REALS, self.rows.rows)
                check_alike("values", self.rows.values, name, array)

    @property
    def items(self) -> int:
        return self.rows.rows

    @property
    def error_name(self) -> str:  # type: ignore[override]
        return "RMSE" if self.loss == "squared" else "error"

    @cached_property
    def native(self) -> Any:
        rows = self.rows
        return compiled().linear(
            rows.values.dtype == np.float64,
            rows.indices.dtype == np.int64,
            rows.indptr.dtype == np.int64,
            rows.rows,
            rows.columns,
            len(rows.values),
            rows.indptr.ctypes.data,
            rows.indices.ctypes.data,
            rows.values.ctypes.data,
            self.targets.ctypes.data,
            0 if self.weights is None else self.weights.ctypes.data,
            get_args(Loss).index(self.loss),
            self.regulariser,
            self.intercept,
        )

    def storage(self, seed: int) -> Storage:
        """Zeros; the last of them is the intercept."""
        weights = np.zeros(self.rows.columns + 1, self.rows.values.dtype)
        parts = {"coef": weights[:-1], "intercept": weights[-1:]}
        return Storage((weights,), parts if self.intercept else {"coef": parts["coef"]})

    def penalty(self, parts: Mapping[str, Array]) -> float:
        return self.regulariser / 2 * _square(parts["coef"])

    def error(self, error: float) -> float:
        """The share of wrong signs, by weight; of ``squared`` the root of the mean squared difference."""
        return super().error(error) if self.loss == "squared" else error / self._total

    @cached_property
    def _total(self) -> float:
        return max(1, self.items) if self.weights is None else float(self.weights.sum(dtype=np.float64)) or 1.0


@dataclass(frozen=True, eq=False)
class MatrixCompletion(Problem):
    """Entries of a matrix as the product of two thin ones, ``left`` and ``right``.

    The objective is the mean over entries of half the squared difference, plus
    ``regulariser`` / 2 * (|left|^2 + |right|^2) / entries.
    """

    error_name: ClassVar[str] = "RMSE"

    row: Array
    column: Array
    values: Array
    shape: tuple[int, int]
    rank: int
    regulariser: float = 0.0

    def __post_init__(self) -> None:
        check_array("values", self.values, REALS)
        check_array("row", self.row, INDICES, len(self.values))
        check_array("column", self.column, INDICES, len(self.values))
        check_alike("row", self.row, "column", self.column)
        _check_regulariser(self.regulariser)
        check_size("rank", self.rank, 1)
        if len(self.shape) != 2:
            raise UsageError(f"shape: wanted two sizes, got {self.shape}")
        for size in self.shape:
            check_size("shape", size, 0)

    @property
    def items(self) -> int:
        return len(self.values)

    @cached_property
    def native(self) -> Any:
        return compiled().completion(
            self.values.dtype == np.float64,
            self.row.dtype == np.int64,
            self.items,
            *self.shape,
            self.rank,
            self.row.ctypes.data,
            self.column.ctypes.data,
            self.values.ctypes.data,
            self.regulariser,
        )

    def storage(self, seed: int) -> Storage:
        """Random numbers whose products have the size of the entries."""
        scale = (
            math.sqrt(math.sqrt(float(np.mean(np.square(self.values, dtype=np.float64))) / self.rank))
            if self.items
            else 0
        )
        random = np.random.default_rng(seed)
        left, right = (
            (random.standard_normal((size, self.rank), self.values.dtype) * scale).astype(self.values.dtype, copy=False)
            for size in self.shape
        )
        return Storage((left, right), {"left": left, "right": right})

    def penalty(self, parts: Mapping[str, Array]) -> float:
        return self.regulariser / 2 * (_square(parts["left"]) + _square(parts["right"])) / max(1, self.items)


@dataclass(frozen=True, eq=False)
class GraphCut(Problem):
    """Labels for the nodes of a graph that cut little weight: sum over edges of weight * |x_u - x_v|_1 / 2.

    Each node has a point of the simplex of ``ways`` labels. ``terminals`` have a fixed label.
    """

    error_name: ClassVar[str] = "cut"

    tail: Array
    head: Array
    weights: Array
    nodes: int
    terminals: Mapping[int, int] = field(default_factory=dict)  # node: label
    ways: int = 2
    offset: float = 0.0  # of the cut, beside its edges

    def __post_init__(self) -> None:
        check_array("weights", self.weights, REALS)
        check_array("tail", self.tail, INDICES, len(self.weights))
        check_array("head", self.head, INDICES, len(self.weights))
        check_alike("tail", self.tail, "head", self.head)
        check_size("nodes", self.nodes, 0)
        check_size("ways", self.ways, 2)
        for node, label in self.terminals.items():
            if not (0 <= node < self.nodes and 0 <= label < self.ways):
                raise UsageError(
                    f"terminals: wanted nodes below {self.nodes} with labels below {self.ways}, got {node}: {label}"
                )

    @classmethod
    def from_arcs(
        cls, tail: Array, head: Array, capacities: Array, nodes: int, source: int, sink: int, dtype: type = np.float32
    ) -> GraphCut:
        """The minimum cut between two nodes of a directed graph, as DIMACS files describe it.

        An arc and its reverse cost a * max(0, d) + b * max(0, -d) = (a + b) / 2 * |d| + (a - b) / 2 * d, where d is how
        much more one node is on the source's side than the other. So a pair is one edge and a cost that is linear in
        where its nodes are. At a terminal the edge is linear too. All linear costs of a node are one edge to the
        terminal that they pull to, beside a constant.
        """
        low, high = np.minimum(tail, head).astype(np.int64), np.maximum(tail, head).astype(np.int64)
        pairs, place = np.unique(low * nodes + high, return_inverse=True)
        low, high = pairs // nodes, pairs % nodes
        forward, backward = (
            np.bincount(place, np.where(way, capacities, 0), len(pairs)) for way in (tail < head, tail > head)
        )
        slope, bend = (forward - backward) / 2, (forward + backward) / 2
        cost = np.zeros(nodes)  # of floats, also without arcs, of which numpy counts integers
        cost += np.bincount(low, slope, nodes) - np.bincount(high, slope, nodes)
        at_end = np.isin(low, (source, sink)) | np.isin(high, (source, sink))
        for end, sign in ((source, -1.0), (sink, 1.0)):
            for one, other in ((low, high), (high, low)):
                cost += sign * np.bincount(other, np.where(one == end, bend, 0), nodes)
        # The edge between both terminals was counted twice, for each of them as the other's node.
        between = float(bend[at_end & ((low + high) == source + sink) & np.isin(low, (source, sink))].sum())
        at_source = float(bend[(low == source) | (high == source)].sum()) + cost[source] - between
        cost[[source, sink]] = 0
        inner, pulled = ~at_end & (bend > 0), np.flatnonzero(cost)
        kind = np.int32 if nodes <= np.iinfo(np.int32).max else np.int64
        return cls(
            np.concatenate([low[inner], pulled]).astype(kind),
            np.concatenate([high[inner], np.where(cost[pulled] > 0, sink, source)]).astype(kind),
            np.concatenate([bend[inner], np.abs(cost[pulled])]).astype(dtype),
            nodes,
            {source: 0, sink: 1},
            offset=at_source + float(np.minimum(cost, 0).sum()),
        )

    @property
    def items(self) -> int:
        return len(self.weights)

    @cached_property
    def _fixed(self) -> NDArray[np.uint8]:
        fixed = np.zeros(self.nodes, np.uint8)
        fixed[list(self.terminals)] = 1
        return fixed

    @cached_property
    def native(self) -> Any:
        return compiled().cut(
            self.weights.dtype == np.float64,
            self.tail.dtype == np.int64,
            self.items,
            self.nodes,
            self.ways,
            self.tail.ctypes.data,
            self.head.ctypes.data,
            self.weights.ctypes.data,
            self._fixed.ctypes.data,
        )

    def storage(self, seed: int) -> Storage:
        """The centre of the simplex, but for the terminals."""
        points = np.full((self.nodes, self.ways), 1 / self.ways, self.weights.dtype)
        for node, label in self.terminals.items():
            points[node] = np.eye(self.ways)[label]
        return Storage((points,), {"x": points})

    def penalty(self, parts: Mapping[str, Array]) -> float:
        return self.offset

    def objective(self, loss: float, parts: Mapping[str, Array]) -> float:
        """The relaxed cut: no mean, since a cut is a sum."""
        return loss + self.penalty(parts)

    def error(self, error: float) -> float:
        """The cut if each node takes the label that it is nearest to."""
        return error + self.offset


def _check_regulariser(regulariser: float) -> None:
    if not (math.isfinite(regulariser) and regulariser >= 0):
        raise UsageError(f"regulariser: wanted a number of at least 0, got {regulariser}")


def _square(array: Array) -> float:
    return float(np.square(array, dtype=np.float64).sum())
