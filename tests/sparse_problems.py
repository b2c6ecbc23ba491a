"""Random sparse problems, and the arithmetic of one update by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.hogwild.problems import CSR, GraphCut, LinearProblem, MatrixCompletion, Problem

Kind = tuple[Any, Any]  # of numbers and of indices
kinds = st.tuples(st.sampled_from([np.float32, np.float64]), st.sampled_from([np.int32, np.int64]))


def linear(
    seed: int,
    rows: int = 60,
    columns: int = 40,
    loss: Any = "hinge",
    kind: Kind = (np.float64, np.int32),
    *,
    regulariser: float = 1e-3,
    intercept: bool = False,
    weighted: bool = False,
    longest: int = 6,
) -> LinearProblem:
    """Rows of up to ``longest`` entries, some empty, some with a column twice, not sorted."""
    random = np.random.default_rng(seed)
    real, index = kind
    lengths = random.integers(0, longest + 1, rows)
    indptr = np.concatenate([[0], lengths.cumsum()]).astype(np.int32 if random.random() < 0.5 else np.int64)
    indices = random.integers(0, columns, indptr[-1]).astype(index)
    targets = random.standard_normal(rows) if loss == "squared" else random.choice([-1.0, 1.0], rows)
    return LinearProblem(
        CSR(indptr, indices, random.standard_normal(indptr[-1]).astype(real), columns),
        targets.astype(real),
        loss,
        regulariser,
        random.uniform(0, 2, rows).astype(real) if weighted else None,
        intercept,
    )


def completion(seed: int, entries: int = 80, kind: Kind = (np.float64, np.int32), rank: int = 3) -> MatrixCompletion:
    """Entries of a low-rank matrix, some of them twice."""
    random = np.random.default_rng(seed)
    real, index = kind
    left, right = random.standard_normal((30, rank)), random.standard_normal((20, rank))
    row, column = random.integers(0, 30, entries).astype(index), random.integers(0, 20, entries).astype(index)
    values = (left[row] * right[column]).sum(axis=1).astype(real)
    return MatrixCompletion(row, column, values, (30, 20), rank, regulariser=0.1)


def cut(seed: int, edges: int = 80, kind: Kind = (np.float64, np.int32), ways: int = 3, nodes: int = 40) -> GraphCut:
    """A random graph with one terminal for each label; some edges are loops."""
    random = np.random.default_rng(seed)
    real, index = kind
    tail, head = (random.integers(0, nodes, edges).astype(index) for _ in range(2))
    weights = random.uniform(0, 1, edges).astype(real)
    return GraphCut(tail, head, weights, nodes, {label: label for label in range(ways)}, ways)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """One of the three, of any size and type."""
    seed, kind, size = draw(st.integers(0, 2**32)), draw(kinds), draw(st.integers(0, 300))
    which = draw(st.sampled_from(["linear", "completion", "cut"]))
    if which == "completion":
        return completion(seed, size, kind, draw(st.integers(1, 9)))
    if which == "cut":
        return cut(seed, size, kind, draw(st.integers(2, 5)))
    return linear(
        seed,
        size,
        draw(st.integers(1, 500)),
        draw(st.sampled_from(["hinge", "logistic", "squared"])),
        kind,
        regulariser=draw(st.sampled_from([0.0, 1e-3, 10.0])),
        intercept=draw(st.booleans()),
        weighted=draw(st.booleans()),
    )


def bits(parameters: dict[str, NDArray[Any]]) -> dict[str, bytes]:
    """The parameters, to compare to the last bit."""
    return {name: part.tobytes() for name, part in parameters.items()}
