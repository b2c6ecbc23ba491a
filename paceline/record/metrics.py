"""The run's ``metrics.jsonl``: one JSON object a line, one line per event worth plotting."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

Value = Any  # number, string, None, or a tensor with one element


class MetricsWriter:
    """Append events to ``metrics.jsonl``; tensors are turned into numbers only when lines are flushed.

    ``length`` (after a flush) goes into every checkpoint, so that a resumed run can cut off what was written
    after it and repeat those lines exactly.
    """

    def __init__(self, path: Path, *, length: int = 0, flush_every: int = 64) -> None:
        self._file = path.open("ab")
        self._file.truncate(min(length, self._file.seek(0, os.SEEK_END)))
        self._pending: list[dict[str, Value]] = []
        self._flush_every = flush_every

    def write(self, event: str, **values: Value) -> None:
        """Add one line; ``time`` is seconds since the epoch."""
        self._pending.append({"event": event, "time": time.time(), **values})
        if len(self._pending) >= self._flush_every:
            self.flush()

    def flush(self) -> int:
        """Write what is pending and return the file's length."""
        for values in self._pending:
            numbers = {key: value.item() if isinstance(value, Tensor) else value for key, value in values.items()}
            self._file.write(json.dumps(numbers).encode() + b"\n")
        self._pending.clear()
        self._file.flush()
        return self._file.seek(0, os.SEEK_END)

    def sync(self) -> int:
        """Flush and make the lines survive a power cut; return the file's length."""
        length = self.flush()
        os.fsync(self._file.fileno())
        return length

    def close(self) -> None:
        self.flush()
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the events of a ``metrics.jsonl``; a last line that a crash tore is left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
