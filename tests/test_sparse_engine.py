"""The engine of sparse problems: laws of all schemes, and the arithmetic by hand."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.hogwild.engine import SCHEMES, Engine
from paceline.hogwild.orders import Orders
from paceline.hogwild.problems import CSR, GraphCut, LinearProblem, MatrixCompletion, Problem
from paceline.hogwild.sparsity import sparsity
from paceline.hogwild.thread_choice import fastest_threads
from paceline.policies import Hogwild, SparsePolicy

pytest.importorskip("paceline.native._sparse", reason="needs the compiled engine")

from sparse_problems import bits, completion, cut, linear, problems

every_scheme = pytest.mark.parametrize("scheme", [scheme.name for scheme in SCHEMES])
THREADED = [scheme.name for scheme in SCHEMES if scheme.name != "serial"]
several = st.integers(1, 8)


def with_fields(value: Any, **fields: Any) -> Any:
    return replace(value, **fields)


def trained(problem: Problem, policy: str | SparsePolicy, epochs: int = 2, **options: Any) -> Engine:
    engine = Engine(problem, policy, **{"seed": 5, "rate": 0.1, **options})
    for _ in range(epochs):
        engine.run()
    return engine


@given(problems(), several, st.integers(0, 40))
def test_cyclades_has_the_bits_of_serial(problem: Problem, threads: int, batch: int) -> None:
    serial = trained(problem, "serial")
    parallel = trained(problem, f"cyclades(threads={threads}, batch={batch})")
    assert bits(parallel.parameters) == bits(serial.parameters)


@given(problems(), st.sampled_from(THREADED))
def test_one_thread_has_the_bits_of_serial(problem: Problem, scheme: str) -> None:
    alone = trained(problem, f"{scheme}(threads=1)").parameters
    serial = trained(problem, "serial").parameters
    if isinstance(problem, GraphCut):  # points that threads may have left beside the simplex are put back on it
        np.testing.assert_allclose(alone["x"], serial["x"], atol=1e-6)
    else:
        assert bits(alone) == bits(serial)


def test_an_average_of_one_copy_keeps_the_signs_of_zeros() -> None:
    """Factors begin as random numbers in proportion to the values, so here they are zeros of both signs."""
    entries = np.zeros(3, np.int32)
    problem = MatrixCompletion(entries, entries, np.zeros(3, np.float32), shape=(30, 20), rank=1, regulariser=0.1)
    assert bits(trained(problem, "average(threads=1)").parameters) == bits(trained(problem, "serial").parameters)


@given(problems(), st.sampled_from(THREADED), several)
def test_every_scheme_makes_every_update(problem: Problem, scheme: str, threads: int) -> None:
    engine = Engine(problem, f"{scheme}(threads={threads})", seed=0, rate=0.01)
    assert engine.run().updates == problem.items
    assert engine.position == (1, 0)
    assert all(np.isfinite(part).all() for part in engine.parameters.values())


@given(problems(), st.sampled_from(["serial", "cyclades(threads=3)"]), st.lists(st.integers(0, 200), max_size=4))
def test_a_run_in_parts_and_resumed_has_the_same_bits(problem: Problem, policy: str, parts: list[int]) -> None:
    whole = trained(problem, policy, epochs=2)
    engine = Engine(problem, policy, seed=5, rate=0.1)
    for part in parts:
        if engine.position[0] < 2:
            engine.run(part)
        resumed = Engine(problem, policy, seed=5, rate=0.1)
        resumed.parameters, resumed.position = engine.parameters, engine.position
        engine = resumed
    while engine.position[0] < 2:
        engine.run()
    assert bits(engine.parameters) == bits(whole.parameters)


@given(st.integers(0, 2**32), several)
def test_average_is_the_same_each_time(seed: int, threads: int) -> None:
    problem = linear(seed, rows=3000)
    one, other = (trained(problem, f"average(threads={threads})") for _ in range(2))
    assert bits(one.parameters) == bits(other.parameters)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 10, 250, 2048, 2049, 2500])
def test_only_copies_that_made_updates_are_averaged(rows: int, threads: int) -> None:
    data = CSR(np.arange(rows + 1), np.arange(rows, dtype=np.int32), np.ones(rows), rows)
    engine = Engine(LinearProblem(data, np.ones(rows)), f"average(threads={threads})", seed=0, rate=1.0)
    assert engine.run().updates == rows
    copies = 1 / engine.parameters["coef"]  # each row has a column of its own, so one copy has 1 there
    assert (copies == copies[0]).all() and min(rows, threads) / 2 < copies[0] <= min(rows, threads)


def test_all_copies_learn_from_few_rows() -> None:
    data = CSR(np.arange(251), np.zeros(250, np.int32), np.ones(250), 1)
    engine = Engine(LinearProblem(data, np.ones(250), "squared"), "average(threads=8)", seed=0, rate=0.1)
    engine.run()
    assert engine.parameters["coef"][0] == pytest.approx(1 - 0.9**31, rel=0.02)


@pytest.mark.parametrize("policy", ["serial", "hogwild(threads=2)", "average(threads=2)"])
def test_stop_ends_a_run_early(policy: str) -> None:
    data = CSR(np.arange(10_001), np.zeros(10_000, np.int32), np.ones(10_000), 1)
    problem = LinearProblem(data, np.ones(10_000))
    engine = Engine(problem, policy, seed=0, rate=1e-3, delay=1e-3)
    report = engine.run(stop=lambda: True)
    assert 0 < report.updates < 10_000 and engine.position == (0, report.updates)
    with pytest.raises(ZeroDivisionError):
        engine.run(stop=lambda: bool(1 // 0))


@every_scheme
def test_every_scheme_finds_the_minimum(scheme: str) -> None:
    random = np.random.default_rng(0)
    truth = random.standard_normal(50)
    indices = random.integers(0, 50, (2000, 3)).astype(np.int32)
    values = random.standard_normal((2000, 3))
    rows = CSR(np.arange(0, 6001, 3), indices.ravel(), values.ravel(), 50)
    problem = LinearProblem(rows, (values * truth[indices]).sum(axis=1), "squared")
    policy = scheme if scheme == "serial" else f"{scheme}(threads=2)"
    assert trained(problem, policy, epochs=20).error() < 0.01


@every_scheme
def test_every_scheme_completes_a_matrix(scheme: str) -> None:
    problem = completion(1, entries=3000)
    policy = scheme if scheme == "serial" else f"{scheme}(threads=2)"
    before = Engine(problem, policy, seed=5, rate=0.05).error()
    assert trained(problem, policy, epochs=20, rate=0.05).error() < before / 2


def test_one_update_of_a_linear_model_by_hand() -> None:
    rows = CSR(np.array([0, 2]), np.array([1, 0]), np.array([2.0, -1.0]), 3)
    problem = LinearProblem(rows, np.array([1.0]), "squared", 0.5, np.array([2.0]), intercept=True)
    engine = Engine(problem, "serial", seed=0, rate=0.1)
    engine.parameters = {"coef": np.array([1.0, 1.0, 1.0]), "intercept": np.array([1.0])}
    engine.run()
    slope = 0.1 * 2 * (2 - 1 + 1 - 1)
    shrink = 1 + 0.1 * 0.5
    expected = [(1 + slope) / shrink, (1 - 2 * slope) / shrink, 1.0]
    np.testing.assert_allclose(engine.parameters["coef"], expected)
    np.testing.assert_allclose(engine.parameters["intercept"], 1 - slope * 2.5)  # entries have a mean square of 2.5


@pytest.mark.parametrize(("loss", "slope"), [("hinge", -1), ("logistic", -1 / (1 + np.exp(0.5))), ("squared", -0.5)])
def test_the_slopes_of_the_losses(loss: Any, slope: float) -> None:
    problem = LinearProblem(CSR(np.array([0, 1]), np.array([0]), np.array([1.0]), 1), np.array([1.0]), loss)
    engine = Engine(problem, "serial", seed=0, rate=1.0)
    engine.parameters["coef"][:] = 0.5
    engine.run()
    np.testing.assert_allclose(engine.parameters["coef"], 0.5 - slope)


def test_one_update_of_a_completion_by_hand() -> None:
    index = np.array([0])
    problem = MatrixCompletion(index, index, np.array([1.0]), (1, 1), rank=2, regulariser=0.5)
    engine = Engine(problem, "serial", seed=0, rate=0.1)
    left, right = np.array([[1.0, 2.0]]), np.array([[3.0, -1.0]])
    engine.parameters = {"left": left, "right": right}
    engine.run()
    difference = 3 - 2 - 1
    assert difference == 0
    np.testing.assert_allclose(engine.parameters["left"], left / 1.05)
    engine.parameters = {"left": left, "right": 2 * right}
    engine.run()
    step = 0.09 * (2 - 1)
    np.testing.assert_allclose(engine.parameters["left"], (left - step * 2 * right) / (1 + 0.09 * 0.5))
    np.testing.assert_allclose(engine.parameters["right"], (2 * right - step * left) / (1 + 0.09 * 0.5))


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_points_of_a_cut_stay_on_the_simplex(seed: int, ways: int) -> None:
    problem = cut(seed, ways=ways)
    x = trained(problem, "hogwild(threads=3)", rate=0.5).parameters["x"]
    assert (x >= 0).all()
    np.testing.assert_allclose(x.sum(axis=1), 1)
    for node, label in problem.terminals.items():
        assert x[node, label] == 1


@given(st.integers(0, 2**32))
def test_a_directed_cut_is_the_same_for_every_labelling(seed: int) -> None:
    random = np.random.default_rng(seed)
    nodes, source, sink = 6, 4, 1
    tail, head = random.integers(0, nodes, (2, 20))
    capacities = random.integers(0, 9, 20)
    problem = GraphCut.from_arcs(tail, head, capacities, nodes, source, sink, np.float64)
    engine = Engine(problem, "serial", seed=0, rate=0.1)
    for labels in itertools.product([0, 1], repeat=nodes):
        if labels[source] == 0 and labels[sink] == 1:
            side = np.array(labels)
            engine.parameters = {"x": np.eye(2)[side]}
            expected = capacities[(side[tail] == 0) & (side[head] == 1)].sum()
            np.testing.assert_allclose(engine.judge(), [expected, expected])


def test_a_small_cut_is_found() -> None:
    tail, head = np.array([0, 1, 2, 0, 1]), np.array([1, 2, 3, 2, 3])
    problem = GraphCut.from_arcs(tail, head, np.array([9, 1, 9, 1, 1]), 4, 0, 3)
    assert trained(problem, "serial", epochs=60, rate=0.1).error() == pytest.approx(3)


@given(problems())
def test_the_sparsity_is_that_of_every_pair(problem: Problem) -> None:
    touched = coordinates_of(problem)
    found = sparsity(problem)
    items = max(1, problem.items)
    sharing = [sum(bool(one & other) for other in touched) for one in touched]
    users = [sum(u in one for one in touched) for u in set().union(*touched)]
    assert found.exact
    assert found.omega == max(map(len, touched), default=0)
    assert found.rho == max(sharing, default=0) / items
    assert found.delta == max(users, default=0) / items


def coordinates_of(problem: Problem) -> list[set[int]]:
    """What each update writes."""
    if isinstance(problem, MatrixCompletion):
        return [
            {int(row), problem.shape[0] + int(column)} for row, column in zip(problem.row, problem.column, strict=True)
        ]
    if isinstance(problem, GraphCut):
        ends = zip(problem.tail.tolist(), problem.head.tolist(), strict=True)
        return [set(pair) - set(problem.terminals) for pair in ends]
    assert isinstance(problem, LinearProblem)
    rows, always = problem.rows, {-1} if problem.intercept else set()
    starts = rows.indptr.tolist()
    return [set(rows.indices[start:end].tolist()) | always for start, end in itertools.pairwise(starts)]


def test_a_search_that_is_cut_short_says_so() -> None:
    found = sparsity(linear(0, rows=500, columns=200), budget=1)
    assert not found.exact
    assert 0 < found.rho < 1


def one_coordinate(updates: int) -> LinearProblem:
    """Each update adds the rate to the one weight, while that is below 1."""
    rows = CSR(np.arange(updates + 1), np.zeros(updates, np.int32), np.ones(updates), 1)
    return LinearProblem(rows, np.ones(updates), "hinge")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_what_is_lost_is_what_is_missing(threads: int) -> None:
    """Sums of a power of 2 are exact, and every store is watched."""
    updates, rate = 200_000, 2.0**-20
    engine = Engine(one_coordinate(updates), Hogwild(threads=threads), seed=0, rate=rate, watch=1)
    report = engine.run()
    assert report.sampled == updates
    assert engine.parameters["coef"][0] == updates * rate - report.overwritten
    assert (report.lost > 0) or report.overwritten == 0
    assert threads > 1 or report.lost == 0


@pytest.mark.parametrize("scheme", ["atomic", "locked", "round-robin", "cyclades"])
def test_other_schemes_lose_nothing(scheme: str) -> None:
    engine = Engine(one_coordinate(50_000), f"{scheme}(threads=2)", seed=0, rate=2.0**-20)
    engine.run()
    assert engine.parameters["coef"][0] == 50_000 * 2.0**-20


def test_only_a_sample_is_watched() -> None:
    report = Engine(one_coordinate(6400), "hogwild(threads=2)", seed=0, rate=1e-9).run()
    assert report.sampled == 100
    assert Engine(one_coordinate(100), "hogwild(threads=2)", seed=0, rate=1e-9, watch=0).run().sampled == 0


def test_updates_of_dense_data_wait() -> None:
    """Half of them: those of the second thread. When it is seen that all do, the rest is made by one thread."""
    report = Engine(one_coordinate(5000), "cyclades(threads=2, batch=100)", seed=0, rate=1e-9).run()
    assert (report.rounds, report.waited) == (50, 2500)
    report = Engine(one_coordinate(20_000), "cyclades(threads=2)", seed=0, rate=1e-9).run()
    assert 0 < report.waited < 2000


def test_updates_that_share_nothing_do_not_wait() -> None:
    rows = 5000
    data = CSR(np.arange(rows + 1), np.arange(rows, dtype=np.int32), np.ones(rows), rows)
    report = Engine(LinearProblem(data, np.ones(rows)), "cyclades(threads=2, batch=20)", seed=0, rate=0.1).run()
    assert report.rounds == 250
    assert report.waited < 25  # some seem to share a parameter


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(1e-6, 1e-2))
def test_the_regulariser_of_rows_without_a_gradient(seed: int, rows: int, strength: float) -> None:
    """Of 16 visits one takes the steps of all: the weight has then shrunk as in the plain form, to first order."""
    problem = linear(seed, rows, columns=10, regulariser=strength / rows)
    data, start = problem.rows, np.full(10, 1e9)
    satisfied = replace(problem, rows=replace(data, values=abs(data.values) + 1), targets=np.ones(rows))
    policies = ("serial", "cyclades(threads=3)")
    serial, cyclades = (Engine(satisfied, policy, seed=1, rate=1.0, decay=1.0) for policy in policies)
    for engine in (serial, cyclades):
        engine.parameters["coef"][:] = start
        for _ in range(16):
            engine.run()
    assert bits(cyclades.parameters) == bits(serial.parameters)
    entries = np.bincount(data.indices, minlength=10)
    each = strength / np.maximum(1, entries)
    shrunk = np.log(serial.parameters["coef"] / start)
    np.testing.assert_allclose(shrunk, -entries * np.log1p(16 * each), rtol=1e-9, atol=1e-12)
    plain = -entries * 16 * np.log1p(each)
    assert (abs(shrunk - plain) <= entries * (16 * each) ** 2 / 2 + 1e-12).all()


@given(st.integers(0, 1000), st.integers(0, 2**60), st.integers(0, 5))
def test_an_epoch_has_every_item_once(items: int, seed: int, epoch: int) -> None:
    order = Orders(items, seed).take(epoch)
    assert sorted(order.tolist()) == list(range(items))
    assert order.tolist() == Orders(items, seed).take(epoch).tolist()


def test_the_next_order_is_made_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.hogwild.orders.BESIDE_FROM", 1)
    orders = Orders(1000, 3)
    beside = [orders.take(epoch).tolist() for epoch in (0, 1, 2, 0)]
    assert beside == [Orders(1000, 3).take(epoch).tolist() for epoch in (0, 1, 2, 0)]
    assert len({tuple(order) for order in beside}) == 3


def test_the_rate_decays_after_each_epoch() -> None:
    engine = Engine(linear(0), "serial", seed=0, rate=0.5, decay=0.5)
    engine.run(10)
    assert (engine.rate, engine.position) == (0.5, (0, 10))
    engine.run()
    assert (engine.rate, engine.position) == (0.25, (1, 0))


def test_the_fastest_number_of_threads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(6))
    assert fastest_threads(10**6, lambda threads, _: abs(threads - 4.2)) == 4
    assert fastest_threads(10, lambda threads, _: 1 / threads) == 1


@pytest.mark.parametrize("cost", [1e-9, 1e-7, 1e-4])
def test_trials_of_threads_are_short(cost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    spent = []

    def trial(threads: int, updates: int) -> float:
        spent.append(updates * cost * (30 if threads == 2 else 1))
        return spent[-1]

    assert fastest_threads(10**6, trial) == 1
    assert sum(spent) < 0.6 and len(spent) < 500


def test_a_trial_of_threads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.hogwild.thread_choice.WORTH_THREADS", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2))
    problem = linear(0)
    engine = trained(problem, "cyclades")
    assert engine.threads in (1, 2)
    assert bits(engine.parameters) == bits(trained(problem, "serial").parameters)


def test_judging_other_data() -> None:
    engine = trained(linear(0), "serial")
    other = linear(1)
    coef, rows = engine.parameters["coef"], other.rows
    scores = np.array([rows.values[a:b] @ coef[rows.indices[a:b]] for a, b in itertools.pairwise(rows.indptr.tolist())])
    margins = scores * other.targets
    objective = np.maximum(0, 1 - margins).mean() + 1e-3 / 2 * (coef**2).sum()
    wrong = (scores > 0) != (other.targets > 0)
    np.testing.assert_allclose(engine.judge(other), [objective, wrong.mean()])
    with pytest.raises(UsageError, match="names, shapes and types"):
        engine.judge(linear(1, columns=41))


def changed(name: str, place: int, value: float) -> LinearProblem:
    problem = linear(0, kind=(np.float64, np.int64))
    arrays = {"values": problem.rows.values, "indices": problem.rows.indices, "indptr": problem.rows.indptr}
    {**arrays, "targets": problem.targets}[name][place] = value
    return problem


@pytest.mark.parametrize(
    ("name", "place", "value", "complaint"),
    [
        ("values", 3, np.nan, r"row \d+, column \d+: wanted a finite number, got nan"),
        ("values", 3, np.inf, r"row \d+, column \d+: wanted a finite number, got inf"),
        ("indices", 5, 40, r"row \d+: wanted an index from 0 to 39, got 40"),
        ("indices", 5, -1, r"row \d+: wanted an index from 0 to 39, got -1"),
        ("indptr", 0, 1, "indptr: wanted numbers from 0"),
        ("indptr", 5, 10**6, r"indptr: row 4 begins at \d+ and ends at 1000000"),
        ("indptr", 5, -1, "indptr: row 4 begins"),
        ("indptr", -1, 10**6, "indptr: wanted numbers from 0"),
        ("targets", 7, 0, "row 7: wanted a target of -1 or 1, got 0"),
        ("targets", 7, np.nan, "row 7: wanted a target of -1 or 1"),
    ],
)
def test_wrong_data_is_refused_with_its_place(name: str, place: int, value: float, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        Engine(changed(name, place, value), "serial", seed=0, rate=0.1)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (
            lambda: CSR(np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float16), 1),
            "values: wanted a numpy",
        ),
        (lambda: CSR(np.zeros(1, np.int64), np.zeros(2, np.int32), np.zeros(1), 1), "indices: wanted 1 numbers, got 2"),
        (lambda: CSR(np.zeros(1, np.int64), np.zeros(4, np.int32)[::2], np.zeros(2), 1), "wanted contiguous memory"),
        (lambda: CSR.from_scipy([[1]]), "wanted a CSR matrix of scipy, got list"),
        (lambda: linear(0, loss="cubic"), "loss: wanted one of hinge, logistic, squared, got 'cubic'"),
        (lambda: linear(0, regulariser=-1), "regulariser: wanted a number of at least 0, got -1"),
        (
            lambda: Engine(linear(0), "async", seed=0, rate=1),
            "policy 'async' is not one of a sparse problem; use one of",
        ),
        (lambda: Engine(linear(0), "serial", seed=0, rate=0), "rate: wanted a number above 0, got 0"),
        (lambda: cut(0, ways=1), "ways: wanted at least 2, got 1"),
        (lambda: completion(0, rank=0), "rank: wanted at least 1, got 0"),
        (lambda: with_fields(completion(0), rank=2.5), "rank: wanted a whole number, got 2.5"),
        (lambda: with_fields(completion(0), shape=(30.0, 20)), "shape: wanted a whole number, got 30.0"),
        (lambda: with_fields(completion(0), shape=(30, -1)), "shape: wanted at least 0, got -1"),
        (lambda: with_fields(completion(0), shape=(30,)), "shape: wanted two sizes"),
        (lambda: with_fields(linear(0).rows, columns=40.0), "columns: wanted a whole number, got 40.0"),
        (lambda: with_fields(linear(0).rows, columns=-1), "columns: wanted at least 0, got -1"),
        (lambda: with_fields(cut(0), ways=3.0), "ways: wanted a whole number, got 3.0"),
        (lambda: with_fields(cut(0), nodes=-1, terminals={}), "nodes: wanted at least 0, got -1"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        make()


def test_entries_after_the_last_row_change_nothing() -> None:
    rows = CSR(np.array([0, 1, 2]), np.array([0, 1, 1, 1]), np.array([1.0, 2.0, 50.0, 70.0]), 2)
    exact = CSR(rows.indptr, rows.indices[:2].copy(), rows.values[:2].copy(), 2)
    more, same = (
        trained(LinearProblem(each, np.array([1.0, -1.0]), "squared", intercept=True), "serial")
        for each in (rows, exact)
    )
    assert bits(more.parameters) == bits(same.parameters)


def test_nothing_is_copied() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    matrix = sparse.random(50, 20, 0.2, format="csr", random_state=0)
    rows = CSR.from_scipy(matrix)
    assert rows.values is matrix.data
    assert rows.indices is matrix.indices
    assert rows.indptr is matrix.indptr


INTERRUPTED = """
import signal, sys, numpy as np
from paceline.hogwild.engine import Engine
from paceline.hogwild.problems import CSR, LinearProblem
n = 100_000
rows = CSR(np.arange(n + 1), np.zeros(n, np.int32), np.ones(n), 1)
for policy in ("serial", *(f"{name}(threads=2)" for name in sys.argv[1:])):
    engine = Engine(LinearProblem(rows, np.ones(n)), policy, seed=0, rate=1e-9, delay=1e-3)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        engine.run()
    except KeyboardInterrupt:
        assert 0 <= engine.position[1] < n, engine.position  # 0: on a busy machine the signal may be first
        done = engine.parameters["coef"][0] / 1e-9
        assert policy.startswith(("hogwild", "average")) or abs(done - engine.position[1]) < 0.5, (policy, done)
        print(policy.partition("(")[0])
"""


@pytest.mark.processes
def test_signals_stop_every_scheme() -> None:
    """And the position tells what was done. In a process of its own, whose main thread gets the signals."""
    stopped = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *THREADED], capture_output=True, text=True, check=True
    ).stdout.split()
    assert stopped == ["serial", *THREADED]


def test_the_interpreter_is_free_while_the_engine_runs() -> None:
    engine = Engine(one_coordinate(200), "serial", seed=0, rate=1e-9, delay=1e-3)
    running = threading.Thread(target=engine.run)
    running.start()
    ticks = 0
    while running.is_alive():
        ticks += 1
        time.sleep(0.001)
    assert ticks > 3
    assert signal.getsignal(signal.SIGINT) is not None
