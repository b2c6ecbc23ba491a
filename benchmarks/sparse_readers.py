"""How fast libsvm text is read: ours on all cores and on one, through a new cache and from it, and scikit-learn's.

    python benchmarks/sparse_readers.py [--rows 400000] [--rounds 3] [--data DIR] [--json]

The text is made anew, in the current directory, or is each file of libsvm/ and rcv1-small/ in DIR. The ways take turns;
`mb_per_second` is the median, and `over_scikit_learn` the ratio to it. All ways must read the same.

At the end a process whose own memory is limited to `allowed_mb` over what it has after its imports reads the text
through a cache and trains one epoch on it; the cache's `csr_mb` are mapped, and not in that limit (RLIMIT_DATA).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.hogwild.engine import Engine
from paceline.hogwild.problems import CSR, LinearProblem
from paceline.hogwild.readers import LibsvmRows, cache, read_libsvm
from paceline.hogwild.synthetic import sparse_rows
from paceline.report.table import print_table

ALLOWED_MB = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="directory with libsvm/ and rcv1-small/")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--limited", nargs=2, help=argparse.SUPPRESS)  # text and cache: this process is limited
    arguments = parser.parse_args()
    if arguments.limited:
        print(json.dumps(read_limited(*map(Path, arguments.limited))))
        return
    if arguments.quick:
        arguments.rows, arguments.rounds = 1000, 1
    cache.CACHED_FROM = sys.maxsize  # only where a cache is named
    with tempfile.TemporaryDirectory(dir=".") as folder:
        texts = real_texts(arguments.data) if arguments.data else [write_text(Path(folder) / "text", arguments.rows)]
        rows = [row for text in texts for row in compare(text, Path(folder), arguments.rounds)]
        limited = in_own_process(texts[-1], Path(folder) / "limited")
    if arguments.json:
        print(json.dumps({"rows": rows, "limited": limited}))
        return
    print_table(rows, {"text": "", "mb": ".1f", "way": "", "mb_per_second": ".0f", "over_scikit_learn": ".1f"})
    print(", ".join(f"{name} {value:.3g}" for name, value in limited.items()))


def real_texts(data: Path) -> list[Path]:
    return [data / "libsvm" / "a9a", data / "libsvm" / "w8a", data / "rcv1-small" / "train.svm"]


def write_text(path: Path, count: int) -> Path:
    """Write a text of rows with 50 random entries each."""
    made = sparse_rows(0, rows=count, columns=50_000, per_row=50)
    with path.open("w") as file:
        for row in range(count):
            part = slice(made.indptr[row], made.indptr[row + 1])
            pairs = zip(made.indices[part].tolist(), made.values[part].tolist(), strict=True)
            file.write(f"{made.targets[row]:g} " + " ".join(f"{index}:{value:.6g}" for index, value in pairs) + "\n")
    return path


def ways(text: Path, folder: Path) -> dict[str, Callable[[], LibsvmRows]]:
    new = folder / "cache"

    def through_new_cache() -> LibsvmRows:
        for file in (new / f"{text.name}.paceline").glob("about.json"):
            file.unlink()
        return read_libsvm(text, wide=True, cache=new)

    return {
        "all cores": lambda: read_libsvm(text, wide=True),
        "one core": lambda: read_libsvm(text, wide=True, threads=1),
        "through a new cache": through_new_cache,
        "from the cache": lambda: read_libsvm(text, wide=True, cache=new),
        **scikit_learn(text),
    }


def scikit_learn(text: Path) -> dict[str, Callable[[], LibsvmRows]]:
    """Its reader, if it is installed."""
    try:
        from sklearn.datasets import load_svmlight_file  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return {}

    def read() -> LibsvmRows:
        rows, targets = load_svmlight_file(str(text), zero_based=True)
        return LibsvmRows(targets, rows.indptr, rows.indices, rows.data, rows.shape[1])

    return {"scikit-learn": read}


def compare(text: Path, folder: Path, rounds: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        first: LibsvmRows | None = None
        for way, read in ways(text, folder).items():
            start = time.perf_counter()
            found = read()
            seconds.setdefault(way, []).append(time.perf_counter() - start)
            first = first or found
            check_same(first, found)
    megabytes = text.stat().st_size / 1e6
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    theirs = medians.get("scikit-learn")
    return [
        {
            "text": text.name,
            "mb": megabytes,
            "way": way,
            "mb_per_second": megabytes / median,
            "over_scikit_learn": None if theirs is None else theirs / median,
        }
        for way, median in medians.items()
    ]


def check_same(first: LibsvmRows, other: LibsvmRows) -> None:
    for name in ("targets", "indptr", "indices", "values"):
        assert np.array_equal(getattr(first, name), getattr(other, name)), name


def in_own_process(text: Path, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--limited", str(text), str(folder)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def read_limited(text: Path, folder: Path) -> dict[str, float]:
    """Read and train with little memory of this process's own."""
    before = own_memory()
    limit = before + ALLOWED_MB * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    read = read_libsvm(text, cache=folder)
    mapped = (read.targets, read.indptr, read.indices, read.values)
    assert all(isinstance(array, np.memmap) for array in mapped)
    rows = CSR(read.indptr, read.indices, read.values, read.columns)
    engine = Engine(LinearProblem(rows, read.targets), "hogwild(threads=2)", seed=0, rate=0.01)
    engine.run()
    return {
        "text_mb": text.stat().st_size / 1e6,
        "csr_mb": sum(array.nbytes for array in mapped) / 1e6,
        "allowed_mb": ALLOWED_MB,
        "grown_mb": (own_memory() - before) / 2**20,
        "error": engine.error(),
    }


def own_memory() -> int:
    """Bytes of memory of this process's own: its private writable pages."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
