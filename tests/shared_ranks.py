"""Ranks of a shared-memory group, as threads of this process or as processes of their own."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.core import SharedGroup
from paceline.native import _core

T = TypeVar("T")
Array = NDArray[Any]

DEADLINE = 200.0


def hurried(seconds: float) -> Callable[..., _core.Group]:
    """What joins a group whose calls have so many seconds, however long its ranks take to meet."""
    join = _core.join
    return lambda file, rank, size, cores, _, *rest: join(file, rank, size, cores, seconds, *rest)


class DirectoryStore:
    """A key-value store for threads and processes: one file per key."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str, value: str) -> None:
        file = self._file(key)
        aside = file.with_suffix(".new")
        aside.write_text(value)
        aside.rename(file)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() >= end:
                raise RuntimeError(f"no {keys} in the store")
            time.sleep(0.001)

    def check(self, keys: list[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=DEADLINE))
        return self._file(key).read_bytes()

    def _file(self, key: str) -> Path:
        return self._directory / key.replace("/", "+")


def start_ranks(
    work: Callable[[SharedGroup], T],
    ranks: range,
    size: int,
    directory: Path,
    *,
    timeout: float = 60.0,
    name: str = "g",
) -> list[tuple[threading.Thread, list[T | BaseException]]]:
    """Start some of the group's ranks as threads; each leaves its result, or what it raised."""
    store = DirectoryStore(directory)

    def be(rank: int, result: list[T | BaseException]) -> None:
        try:
            with SharedGroup(store, rank, size, timeout=timeout, name=name) as group:
                result.append(work(group))
        except BaseException as error:
            result.append(error)

    started = []
    for rank in ranks:
        result: list[T | BaseException] = []
        thread = threading.Thread(target=be, args=(rank, result), daemon=True)
        thread.start()
        started.append((thread, result))
    return started


def outcomes(started: list[tuple[threading.Thread, list[T | BaseException]]]) -> list[T | BaseException]:
    """Wait for the ranks, and give what each returned or raised."""
    end = time.monotonic() + DEADLINE
    for thread, _ in started:
        thread.join(max(0.0, end - time.monotonic()))
    assert all(result for _, result in started), "ranks still running: " + str(
        [rank for rank, (_, result) in enumerate(started) if not result]
    )
    return [result[0] for _, result in started]


def run_ranks(work: Callable[[SharedGroup], T], size: int, directory: Path, **options: Any) -> list[T]:
    """Run ``work(group)`` on every rank and give their results; raise what one of them raised."""
    results = []
    for outcome in outcomes(start_ranks(work, range(size), size, directory, **options)):
        if isinstance(outcome, BaseException):
            raise outcome
        results.append(outcome)
    return results


def start_process(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run Python code in a process of its own; it finds the arguments in ``sys.argv[1:]``."""
    path = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    head = f"import sys; sys.path[:0] = {path!r}\n"
    command = [sys.executable, "-c", head + code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def address(array: Array) -> int:
    return int(array.ctypes.data)


def numbers(dtype: str, count: int, seed: int) -> Array:
    """Random elements; ``bfloat16`` ones come as the 16-bit patterns that they are."""
    random = np.random.default_rng(seed)
    if dtype == "bfloat16":
        return narrow(random.standard_normal(count).astype(np.float32), dtype)
    if dtype == "bool":
        return random.integers(0, 2, count).astype(bool)
    if dtype.startswith("float"):
        return random.standard_normal(count).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)


def widen(array: Array, dtype: str) -> Array:
    """The float32 numbers that 16-bit ones are; others as they are."""
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if dtype == "float16" else array


def narrow(array: Array, dtype: str) -> Array:
    """The inverse of ``widen``, rounded as torch does."""
    import torch

    if dtype == "bfloat16":
        return torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return array.astype(np.float16) if dtype == "float16" else array


def folded(arrays: list[Array], dtype: str, op: str) -> Array:
    """What a reduction must give: the ranks folded in order, 16-bit numbers in float32 and rounded once."""
    step: dict[str, Callable[[Array, Array], Array]] = {
        "sum": np.add,
        "avg": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "product": np.multiply,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    with np.errstate(all="ignore"):
        total = widen(arrays[0], dtype)
        for array in arrays[1:]:
            total = step[op](total, widen(array, dtype))
        if op == "avg":
            total = total / total.dtype.type(len(arrays))
        return narrow(total, dtype)
