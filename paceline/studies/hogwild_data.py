"""The data of the study of lock-free training: synthetic problems, and real files where there are any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError, unknown_name
from paceline.hogwild.readers.cache import Array
from paceline.hogwild.synthetic import first_entries, first_rows, low_rank, noisy_disc, sparse_rows
from paceline.hogwild.tasks import Task, TaskOptions, cut_task, load_task, ratings_task, rows_task

# Hogwild and round-robin on 10 cores, 20 epochs (Niu et al., 2011, table 1); speed-ups were read off figures.
PUBLISHED = {
    "svm": ("RCV1", {"hogwild": "9.5 s, 3x", "round-robin": "61.8 s"}),
    "matrix-completion": ("Netflix", {"hogwild": "301 s, 4.5x", "round-robin": "2,569 s"}),
    "graph-cut": ("Abdomen", {"hogwild": "1,181 s, 4x", "round-robin": "7,467 s"}),
}


def sparse_svm(size: float) -> Task:
    """A support vector machine whose rows share few columns, with more parameters than a core's own caches hold."""
    count = max(100, int(400_000 * size))
    made = sparse_rows(0, rows=count + count // 10, columns=max(100, int(1_000_000 * size)), per_row=10)
    return rows_task(*first_rows(made, count), TaskOptions())


def low_rank_matrix(size: float) -> Task:
    """Entries of a matrix of rank 5."""
    count = max(200, int(2_000_000 * size))
    users, items = max(10, int(200_000 * size)), max(10, int(20_000 * size))
    made = low_rank(0, users=users, items=items, entries=count + count // 10)
    return ratings_task(*first_entries(made, count), TaskOptions(problem="matrix-completion", rank=10))


def disc(size: float) -> Task:
    """A disc in noise, to be cut out."""
    return cut_task(noisy_disc(0, side=max(8, int(200 * size**0.5))))


SYNTHETIC: dict[str, Callable[[float], Task]] = {
    "sparse-svm": sparse_svm,
    "low-rank": low_rank_matrix,
    "disc": disc,
}


@dataclass(frozen=True)
class Files:
    """The files of a problem, in the directory of data sets."""

    problem: str
    data: str
    test: str | None = None


REAL: dict[str, Files] = {
    "a9a": Files("svm", "libsvm/a9a", "libsvm/a9a.t"),
    "w8a": Files("svm", "libsvm/w8a"),
    "rcv1-small": Files("svm", "rcv1-small/train.svm", "rcv1-small/test.svm"),
    "tsukuba": Files("graph-cut", "tsukuba/tsukuba-nearfar.max.gz"),
}


def check_names(names: tuple[str, ...]) -> None:
    """Raise if a data set is unknown."""
    for name in names:
        if name not in SYNTHETIC and name not in REAL:
            raise unknown_name("data set", name, [*SYNTHETIC, *REAL])


def load_all(names: tuple[str, ...], data: Path | None, size: float) -> dict[str, Task]:
    """The data sets by name; without names the synthetic ones and the real ones that are there."""
    there = [name for name, files in REAL.items() if data is not None and (data / files.data).is_file()]
    return {name: _load(name, data, size) for name in names or (*SYNTHETIC, *there)}


def _load(name: str, data: Path | None, size: float) -> Task:
    if name in SYNTHETIC:
        return SYNTHETIC[name](size)
    if data is None:
        raise UsageError(f"the data set {name} is a real one; say where it lies with --data DIR, or leave it out")
    files = REAL[name]
    test = None if files.test is None else str(data / files.test)
    options = TaskOptions(problem=files.problem, data=str(data / files.data), test=test, intercept=name == "w8a")
    return load_task(options)


@dataclass(frozen=True)
class Picture:
    """The picture that a cut was made of, and its smallest cut, one value for each pixel."""

    seen: Array
    exact: Array


def tsukuba_picture(data: Path) -> Picture | None:
    """Read the left picture and the exact cut; None if they are not there."""
    import numpy as np
    from matplotlib.image import imread

    folder = data / "tsukuba"
    try:
        seen = imread(folder / "scene1.row3.col3.ppm")
        exact = np.unpackbits(np.load(folder / "tsukuba-nearfar.cut.npy", allow_pickle=False))
    except OSError:
        return None
    return Picture(seen, exact.reshape(seen.shape[:2]))
