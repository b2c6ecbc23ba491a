"""The run's ``metrics.jsonl``: one JSON object per line and event."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paceline.errors import PacelineError, UsageError

_LATEST = 0.5  # seconds after which a line is written with the next one: someone may watch the run
Value = Any  # number, string, None, or a tensor with one element


class MetricsWriter:
    """Append events to ``metrics.jsonl``, several at a time; only a flush waits for numbers on a GPU.

    ``length`` (after a flush) goes into every checkpoint, so that a resumed run can cut off the later lines and
    repeat them exactly.
    """

    def __init__(self, path: Path, *, length: int = 0, flush_every: int = 64) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._length = min(length, self._file.seek(0, os.SEEK_END))
        self._file.truncate(self._length)
        self._pending: list[dict[str, Value]] = []
        self._flush_every = flush_every
        self._flushed_at = time.monotonic()

    def write(self, event: str, /, **values: Value) -> None:
        """Add one line; ``time`` is seconds since the epoch. Values must be numbers or texts."""
        line = {name: as_number(value, name) for name, value in values.items()}
        self._pending.append({"event": event, "time": time.time(), **line})
        if len(self._pending) >= self._flush_every or time.monotonic() - self._flushed_at >= _LATEST:
            self.flush()

    def flush(self) -> int:
        """Write the pending lines, all or none, and return the file's length."""
        self._flushed_at = time.monotonic()
        lines = b"".join(_as_line(values) for values in self._pending)
        try:
            rest = lines
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            self._file.truncate(self._length)
            raise PacelineError(f"could not write {self._path}: {error.strerror}; no line is lost yet") from error
        self._length += len(lines)
        self._pending.clear()
        return self._length

    def sync(self) -> int:
        """Flush and fsync; return the file's length."""
        length = self.flush()
        os.fsync(self._file.fileno())
        return length

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._file.close()


def as_number(value: Value, name: str = "a value") -> Value:
    """A value for JSON; of a GPU's tensor a copy, which the next flush reads."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone() if value.is_cuda else value.item()
    if isinstance(value, np.generic):
        return value.item()
    if not _is_json(value):
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f"metrics hold numbers and texts, but {name} is {found}; reduce it to one number")
    return value


def _is_json(value: Value) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _as_line(values: dict[str, Value]) -> bytes:
    numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
    # JSON has no NaN and no infinity: a strict reader would fail at the first one.
    finite = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in numbers.items()}
    return json.dumps(finite).encode() + b"\n"


def length_up_to(path: Path, step: int) -> int:
    """The length of the whole lines before the first one of a later step."""
    length = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or json.loads(line).get("step", 0) > step:
                break
            length += len(line)
    return length


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the events of a ``metrics.jsonl``; an unfinished last line is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
