"""How fast the sparse engine is: against scikit-learn on one thread, and two threads against one under every scheme.

    python benchmarks/sparse_speed.py [--data ../shared/data] [--only sklearn threads wabbit ...] [--json]

It needs an idle machine with two cores. Cases take turns, and figures are medians. `together` is what two serial runs
on disjoint halves of the data reach side by side: no scheme of two threads can be expected to do more. `predicted` is
the slow-down that the data's sparsity allows in the bound of Niu et al. (2011), for threads that are one update apart.
Vowpal Wabbit takes part if it is installed: its passes over a binary cache of the rows, without reading their text.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.hogwild.engine import Engine
from paceline.hogwild.problems import CSR, LinearProblem, MatrixCompletion, Problem
from paceline.hogwild.sparsity import sparsity
from paceline.report.table import print_table

TWO = [f"{name}(threads=2)" for name in ("hogwild", "atomic", "locked", "round-robin", "average", "cyclades")]
Row = dict[str, Any]
Predict = Callable[[Any], NDArray[Any]]
Trainer = Callable[[Any, Any, int], Predict]  # of rows, labels and a seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="where libsvm/ and rcv1-small/ lie")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[*PARTS])
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    found = {}
    for part in arguments.only:
        found[part] = PARTS[part](arguments.data, arguments.quick)
        if not arguments.json:
            print(f"\n{part}")
            if found[part]:
                print_table(found[part], {key: _form(value) for key, value in found[part][0].items()})
    if arguments.json:
        print(json.dumps(found))


def _form(value: Any) -> str:
    return "" if isinstance(value, str) else "d" if isinstance(value, int) else ".3g"


def against_sklearn(data: Path, quick: bool) -> list[Row]:
    epochs, rounds = (2, 1) if quick else (20, 25)
    trainers = {"scikit-learn": sklearn_trainer(epochs), "serial": own_trainer(epochs)}
    return [row for name, sets in real_data(data).items() for row in compare(trainers, name, *sets, epochs, rounds)]


def against_wabbit(data: Path, quick: bool) -> list[Row]:
    """Apart from scikit-learn, whose fits of few rows are slower in a process where Vowpal Wabbit has run."""
    epochs, rounds = (2, 1) if quick else (20, 5)
    rows = []
    for name, sets in real_data(data).items():
        with tempfile.TemporaryDirectory() as folder:
            if (wabbit := wabbit_trainer(epochs, Path(folder))) is not None:
                rows += compare({"vowpal-wabbit": wabbit, "serial": own_trainer(epochs)}, name, *sets, epochs, rounds)
    return rows


def compare(
    trainers: dict[str, Trainer],
    name: str,
    train: Any,
    labels: Any,
    test: Any,
    test_labels: Any,
    epochs: int,
    rounds: int,
) -> list[Row]:
    """One thread, the same rows, as many epochs, hinge loss, in turns; each fit follows one that is not counted."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped,unused-ignore]

    seconds: dict[str, list[float]] = {trainer: [] for trainer in trainers}
    accuracy: dict[str, list[float]] = {trainer: [] for trainer in trainers}
    for seed, (trainer, train_one) in itertools.product(range(rounds), trainers.items()):
        with threadpool_limits(1):
            train_one(train, labels, seed)  # brings its rows near; else a trainer pays for the one before it
            start = time.perf_counter()
            predict = train_one(train, labels, seed)
            seconds[trainer].append(time.perf_counter() - start)
        accuracy[trainer].append(float(np.mean(predict(test) == test_labels)))
    medians = {trainer: statistics.median(times) for trainer, times in seconds.items()}
    first = next(iter(trainers))
    return [
        {
            "data": name,
            "trainer": trainer,
            "updates per second": epochs * train.shape[0] / median,
            f"times {first}": medians[first] / median,
            "test accuracy": statistics.median(accuracy[trainer]),
        }
        for trainer, median in medians.items()
    ]


def real_data(data: Path) -> dict[str, tuple[Any, Any, Any, Any]]:
    """Train and test rows with labels of -1 and 1; every fifth row of w8a is kept for the test."""
    from sklearn.datasets import load_svmlight_file, load_svmlight_files

    found: dict[str, tuple[Any, Any, Any, Any]] = {}
    for name, pair in {
        "a9a": ("libsvm/a9a", "libsvm/a9a.t"),
        "rcv1-small": ("rcv1-small/train.svm", "rcv1-small/test.svm"),
    }.items():
        if (data / pair[0]).exists():
            train, labels, test, test_labels = load_svmlight_files([str(data / file) for file in pair])
            found[name] = (narrow(train), labels, narrow(test), test_labels)
    if (data / "libsvm/w8a").exists():
        rows, labels = load_svmlight_file(str(data / "libsvm/w8a"))
        test = np.arange(rows.shape[0]) % 5 == 0
        found["w8a"] = (narrow(rows[~test]), labels[~test], narrow(rows[test]), labels[test])
    return found


def narrow(rows: Any) -> Any:
    """With indices of 32 bits, which scikit-learn's SGD wants."""
    rows.indices, rows.indptr = rows.indices.astype(np.int32), rows.indptr.astype(np.int32)
    return rows


def sklearn_trainer(epochs: int) -> Trainer:
    from sklearn.linear_model import SGDClassifier

    def train(rows: Any, labels: Any, seed: int) -> Predict:
        model = SGDClassifier(loss="hinge", max_iter=epochs, tol=None, random_state=seed).fit(rows, labels)
        return lambda test: np.asarray(model.predict(test))

    return train


def own_trainer(epochs: int) -> Trainer:
    from paceline.hogwild.estimators import HogwildClassifier

    def train(rows: Any, labels: Any, seed: int) -> Predict:
        model = HogwildClassifier(max_iter=epochs, tol=None, policy="serial", random_state=seed).fit(rows, labels)
        return model.predict

    return train


def wabbit_trainer(epochs: int, folder: Path) -> Trainer | None:
    """Vowpal Wabbit over its binary cache, which the first call makes in the folder; it does not shuffle."""
    try:
        from vowpalwabbit import Workspace  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        return None
    text = folder / "rows.txt"
    options = f"-d {text} --cache_file {folder / 'rows.cache'} --loss_function hinge --holdout_off --quiet"

    def train(rows: Any, labels: Any, seed: int) -> Predict:
        if not text.exists():
            lines = zip(labels, wabbit_lines(rows), strict=True)
            text.write_text("".join(f"{label:g} {line}\n" for label, line in lines))
        model = Workspace(f"{options} --passes {epochs}")
        return lambda test: np.where([model.predict(line) > 0 for line in wabbit_lines(test)], 1, -1)

    return train


def wabbit_lines(rows: Any) -> Iterator[str]:
    for start, end in itertools.pairwise(rows.indptr):
        entries = zip(rows.indices[start:end], rows.data[start:end], strict=True)
        yield "| " + " ".join(f"{column}:{value:.9g}" for column, value in entries)


def synthetic(rows: int, columns: int, length: int, seed: int = 0) -> LinearProblem:
    """Rows of as many entries each, in columns drawn evenly; one label in five is wrong.

    With fewer wrong ones training leaves so few errors that 1 % of them is a handful of rows.
    """
    random = np.random.default_rng(seed)
    indices = np.sort(random.integers(0, columns, (rows, length), dtype=np.int32), axis=1)
    values = random.standard_normal((rows, length), np.float32)
    truth = random.standard_normal(columns, np.float32)
    targets = np.where(np.einsum("ij,ij->i", truth[indices], values) > 0, 1, -1)
    targets[random.random(rows) < 0.2] *= -1
    csr = CSR(np.arange(0, rows * length + 1, length), indices.ravel(), values.ravel(), columns)
    return LinearProblem(csr, targets.astype(np.float32), "hinge", 1e-7)


def half(problem: LinearProblem, second: bool) -> LinearProblem:
    middle = problem.items // 2
    rows = problem.rows
    cut = slice(rows.indptr[middle], None) if second else slice(0, rows.indptr[middle])
    indptr = rows.indptr[middle:] - rows.indptr[middle] if second else rows.indptr[: middle + 1]
    csr = CSR(indptr, rows.indices[cut], rows.values[cut], rows.columns)
    targets = problem.targets[middle:] if second else problem.targets[:middle]
    return LinearProblem(csr, targets, problem.loss, problem.regulariser)


def together(problem: LinearProblem, epochs: int, rate: float) -> float:
    """Updates per second of two serial runs side by side, each on its half and with its own parameters."""
    engines = [Engine(half(problem, second), "serial", seed=0, rate=rate) for second in (False, True)]
    for engine in engines:
        engine.run()
    rates = []
    for _ in range(epochs):
        threads = [threading.Thread(target=engine.run) for engine in engines]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(problem.items / (time.perf_counter() - start))
    return statistics.median(rates)


def schemes(name: str, problem: Problem, policies: list[str], epochs: int, rate: float, **options: Any) -> list[Row]:
    """Each policy's epochs, in turns; the first row is ``serial``."""
    engines = {policy: Engine(problem, policy, seed=0, rate=rate, **options) for policy in ["serial", *policies]}
    speeds: dict[str, list[float]] = {policy: [] for policy in engines}
    sampled, lost = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    for _ in range(epochs):
        for policy, engine in engines.items():
            report = engine.run()
            speeds[policy].append(report.updates_per_second)
            sampled[policy] += report.sampled
            lost[policy] += report.lost
    found = sparsity(problem)
    serial, judged = statistics.median(speeds["serial"]), engines["serial"].judge()
    return [
        {
            "data": name,
            "policy": policy,
            "threads": engine.threads,
            "updates per second": statistics.median(speeds[policy]),
            "times serial": statistics.median(speeds[policy]) / serial,
            "error": engine.error(),
            "error / serial's": engine.error() / judged.error if judged.error else 1.0,
            "objective / serial's": engine.objective() / judged.objective,
            "lost": lost[policy] / sampled[policy] if sampled[policy] else 0.0,
            "rho": found.rho,
            "delta": found.delta,
            "predicted": found.predicted_slowdown(engine.threads - 1),
        }
        for policy, engine in engines.items()
    ]


def two_threads(_: Path, quick: bool) -> list[Row]:
    """Data of 160 MB and more, which no cache holds."""
    sizes = [(5000, 10_000, 10)] if quick else [(1_000_000, 1_000_000, 20), (2_000_000, 2_000_000, 10)]
    rows = []
    for count, columns, length in sizes:
        problem = synthetic(count, columns, length)
        name, epochs = f"{count} x {columns}, {length} each", 2 if quick else 7
        found = schemes(name, problem, TWO, epochs, 0.1)
        speed = together(problem, epochs, 0.1)
        others = {key: 0.0 for key in found[0] if key not in ("data", "policy", "threads")}
        times = speed / float(found[0]["updates per second"])
        bound = {"data": name, "policy": "together", "threads": 2, **others}
        rows += [*found, {**bound, "updates per second": speed, "times serial": times}]
    return rows


def delayed(_: Path, quick: bool) -> list[Row]:
    """Each gradient takes a millisecond more: then turns cost nothing."""
    problem = synthetic(100 if quick else 2000, 5000, 10)
    return schemes("1 ms a gradient", problem, TWO, 1 if quick else 3, 0.1, delay=1e-3)


def small(data: Path, quick: bool) -> list[Row]:
    """a9a: few columns in few cache lines. A policy without a number of threads chooses it."""
    if (rows := real_data(data).get("a9a")) is None:
        return []
    problem = LinearProblem(CSR.from_scipy(rows[0]), rows[1], "hinge", 1e-4)
    return schemes("a9a", problem, [*TWO, "hogwild", "cyclades"], 2 if quick else 15, 0.02)


def completed(_: Path, quick: bool) -> list[Row]:
    """A matrix of rank 10 with noise."""
    entries, shape, rank = (20_000, (2000, 1000), 4) if quick else (10_000_000, (100_000, 50_000), 10)
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((size, rank), np.float32) / rank**0.25 for size in shape)
    row, column = (random.integers(0, size, entries, dtype=np.int32) for size in shape)
    values = np.einsum("ij,ij->i", left[row], right[column]) + 0.1 * random.standard_normal(entries, np.float32)
    problem = MatrixCompletion(row, column, values.astype(np.float32), shape, rank, 0.1)
    policies = TWO if quick else [policy for policy in TWO if not policy.startswith("average")]
    return schemes(f"{entries} entries", problem, policies, 2 if quick else 7, 0.05)


PARTS: dict[str, Callable[[Path, bool], list[Row]]] = {
    "sklearn": against_sklearn,
    "wabbit": against_wabbit,
    "threads": two_threads,
    "delay": delayed,
    "small": small,
    "completion": completed,
}


if __name__ == "__main__":
    main()
