"""The sparse problems of the command: what their options mean, where their data comes from, how good a result is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import UsageError, unknown_name
from paceline.hogwild.cuts import round_cut
from paceline.hogwild.engine import Engine
from paceline.hogwild.problems import CSR, SCIKIT_LOSSES, GraphCut, LinearProblem, MatrixCompletion, Problem
from paceline.hogwild.readers import (
    FlowNetwork,
    LibsvmRows,
    RatingEntries,
    read_dimacs,
    read_libsvm,
    read_ratings,
)
from paceline.hogwild.readers.cache import Array
from paceline.hogwild.synthetic import first_entries, first_rows, low_rank, noisy_disc, sparse_rows


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """Options of a sparse problem; ``None`` means its own value. Without ``data`` it is made from the seed."""

    problem: str = "svm"
    data: str | None = None
    test: str | None = None
    cache: str | None = None  # directory of mapped copies; None: beside texts that are large
    loss: str = "hinge"
    rank: int = 10
    regulariser: float | None = None
    intercept: bool = False  # a coordinate that all updates share
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Task:
    """A problem to train, another one to test on, and what the options leave open."""

    name: str
    problem: Problem
    test: Problem | None = None
    rate: float  # this and the next two are used if the user gives none
    decay: float = 0.9
    epochs: int = 20
    notes: tuple[str, ...] = ()
    network: FlowNetwork | None = None  # of a cut

    @property
    def metric(self) -> str:
        """The name of the error that is looked at."""
        return self.problem.error_name.lower()

    def measure(self, engine: Engine) -> dict[str, float]:
        """The objective and the errors of the present parameters."""
        objective, error = engine.judge()
        test = {} if self.test is None else {f"test_{self.metric}": engine.error(self.test)}
        return {"objective": float(objective), f"train_{self.metric}": float(error), **test}

    def finish(self, engine: Engine) -> dict[str, float]:
        """What is measured at the end alone: a cut is rounded at the best threshold, before that at a half."""
        if self.network is None:
            return {}
        cut, _ = round_cut(self.network, engine.parameters["x"][:, 0])
        return {"cut": cut}

    def shown(self, measured: dict[str, float]) -> str:
        """The name of the number to show of what was measured: the error on the test data, if there are any."""
        return next(n for n in (self.metric, f"test_{self.metric}", f"train_{self.metric}") if n in measured)


def load_task(options: TaskOptions) -> Task:
    """Read or make the data of a sparse problem."""
    if options.problem not in TASKS:
        raise unknown_name("sparse problem", options.problem, TASKS)
    if options.test is not None and options.data is None:
        raise UsageError("--test goes with --data: the built-in data has test data of its own")
    return TASKS[options.problem](options)


def svm(options: TaskOptions) -> Task:
    """Two classes of sparse rows, told apart by a plane; or numbers, with ``--loss squared``."""
    if options.data is None:
        made = sparse_rows(options.seed, rows=220_000, columns=20_000, per_row=10)
        return rows_task(*first_rows(made, 200_000), options)
    train = read_libsvm(options.data, cache=options.cache)
    test = None if options.test is None else read_libsvm(options.test, cache=options.cache)
    return rows_task(train, test, options)


def rows_task(train: LibsvmRows, test: LibsvmRows | None, options: TaskOptions) -> Task:
    """Make the task of these rows."""
    loss = SCIKIT_LOSSES.get(options.loss, options.loss)
    columns = max(data.columns for data in (train, test) if data is not None)
    regulariser = 1e-5 if options.regulariser is None else options.regulariser
    classes = None if loss == "squared" else _classes(train, options.data or "the data")

    def problem(data: LibsvmRows, file: str | None) -> LinearProblem:
        targets = data.targets if classes is None else _signs(data.targets, classes, file or "the data")
        return LinearProblem(
            CSR(data.indptr, data.indices, data.values, columns),
            targets,
            loss,  # type: ignore[arg-type]  # it is checked there
            regulariser,
            intercept=options.intercept,
        )

    return Task(
        name="svm",
        problem=problem(train, options.data),
        test=None if test is None else problem(test, options.test),
        rate=0.1,
        notes=(
            *train.notes,
            *(() if test is None else (*test.notes, *_new_columns(train, test))),
            *_empty_rows(train, options),
        ),
    )


def _new_columns(train: LibsvmRows, test: LibsvmRows) -> tuple[str, ...]:
    if test.columns <= train.columns:
        return ()
    return (
        f"the test data has columns up to {test.columns - 1}, the training data up to {train.columns - 1}: nothing is "
        "learned about the others",
    )


def _empty_rows(data: LibsvmRows, options: TaskOptions) -> tuple[str, ...]:
    empty = int((np.diff(data.indptr) == 0).sum())
    if not empty or options.intercept:
        return ()
    return (
        f"{empty} of {len(data.targets)} rows have no entries; only an intercept can tell their class (--intercept)",
    )


def _classes(data: LibsvmRows, file: str) -> tuple[float, float]:
    found = np.unique(data.targets)
    if len(found) != 2:
        shown = ", ".join(f"{value:g}" for value in found[:5]) + (", ..." if len(found) > 5 else "")
        raise UsageError(
            f"{file}: wanted targets of two classes, found {len(found)} ({shown}); "
            "use --loss squared for numbers, and paceline.HogwildClassifier for more classes"
        )
    return float(found[0]), float(found[1])


def _signs(targets: Array, classes: tuple[float, float], file: str) -> Array:
    low, high = classes
    other = (targets != low) & (targets != high)
    if other.any():
        row = int(other.argmax())
        raise UsageError(f"{file}: wanted targets {low:g} and {high:g}, found {targets[row]:g} in row {row + 1}")
    return targets if classes == (-1, 1) else np.where(targets == high, 1, -1).astype(targets.dtype)


def matrix_completion(options: TaskOptions) -> Task:
    """The unknown entries of a matrix of low rank, such as ratings."""
    if options.data is None:
        made = low_rank(options.seed, users=5_000, items=2_000, entries=550_000)
        return ratings_task(*first_entries(made, 500_000), options)
    train = read_ratings(options.data, cache=options.cache)
    test = None if options.test is None else read_ratings(options.test, cache=options.cache)
    return ratings_task(train, test, options)


def ratings_task(train: RatingEntries, test: RatingEntries | None, options: TaskOptions) -> Task:
    """Make the task of these entries."""
    known, notes = (None, ()) if test is None else _known(train, test)
    regulariser = 1.0 if options.regulariser is None else options.regulariser

    def problem(data: RatingEntries) -> MatrixCompletion:
        return MatrixCompletion(data.users, data.items, data.values, train.shape, options.rank, regulariser)

    return Task(
        name="matrix-completion",
        problem=problem(train),
        test=None if known is None else problem(known),
        rate=0.05,
        notes=notes,
    )


def _known(train: RatingEntries, test: RatingEntries) -> tuple[RatingEntries, tuple[str, ...]]:
    """The test's entries of users and items that have training entries: nothing was learned about the others."""
    users, items = np.zeros(train.shape[0], bool), np.zeros(train.shape[1], bool)
    users[train.users], items[train.items] = True, True
    inside = (test.users < len(users)) & (test.items < len(items))
    known = inside.copy()
    known[inside] = users[test.users[inside]] & items[test.items[inside]]
    if known.all():
        return test, ()
    if not known.any():
        raise UsageError("no entry of the test data has a user and an item of the training data")
    left = RatingEntries(test.users[known], test.items[known], test.values[known], train.shape)
    return left, (f"{int((~known).sum())} of {len(known)} test entries have a user or item without training entries",)


def graph_cut(options: TaskOptions) -> Task:
    """The smallest cut between the source and the sink of a network, relaxed and rounded."""
    return cut_task(noisy_disc(options.seed, side=100) if options.data is None else read_dimacs(options.data))


def cut_task(network: FlowNetwork) -> Task:
    """Make the task of a network."""
    arcs = (network.tails, network.heads, network.capacities)
    problem = GraphCut.from_arcs(*arcs, network.nodes, network.source, network.sink)
    typical = float(problem.weights.mean()) if problem.items else 1.0
    return Task(name="graph-cut", problem=problem, rate=0.1 / typical, decay=0.995, epochs=800, network=network)


TASKS: dict[str, Callable[[TaskOptions], Task]] = {
    "svm": svm,
    "matrix-completion": matrix_completion,
    "graph-cut": graph_cut,
}

OPTIONS: dict[str, frozenset[str]] = {
    "svm": frozenset({"loss", "regulariser", "intercept", "test", "cache"}),
    "matrix-completion": frozenset({"rank", "regulariser", "test", "cache"}),
    "graph-cut": frozenset(),
}
"""Those of ``TaskOptions`` that not every problem has."""


def describe(problem: Problem) -> dict[str, Any]:
    """The size of a problem, for the metrics."""
    if isinstance(problem, LinearProblem):
        return {"rows": problem.items, "columns": problem.rows.columns, "entries": len(problem.rows.values)}
    if isinstance(problem, MatrixCompletion):
        return {"rows": problem.shape[0], "columns": problem.shape[1], "entries": problem.items, "rank": problem.rank}
    assert isinstance(problem, GraphCut)
    return {"nodes": problem.nodes, "edges": problem.items, "ways": problem.ways}
