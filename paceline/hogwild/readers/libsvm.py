"""Reads svmlight and libsvm files: a row is ``target index:value index:value ... # comment``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.hogwild.readers.blocks import BLOCK, TextFile
from paceline.hogwild.readers.cache import Array, Facts, Source, gather
from paceline.hogwild.readers.compiled import cores, parsers


@dataclass(frozen=True)
class LibsvmRows:
    """The rows of a file in CSR form. Columns have the file's own numbers, so column 0 may be empty."""

    targets: Array
    indptr: Array  # int64
    indices: Array  # int32
    values: Array  # float32, or float64 if asked
    columns: int
    notes: tuple[str, ...] = ()  # what is odd in the file, for the user


def read_libsvm(
    path: str | Path,
    *,
    cache: str | Path | None = None,
    wide: bool = False,
    threads: int | None = None,
    block: int = BLOCK,
) -> LibsvmRows:
    """Read a file, plain or gzipped, on all cores; values are float32, or float64 if ``wide``.

    Texts from 64 MB on are read in bounded memory into a cache beside them, which is mapped; with ``cache``, a
    directory, any text into a cache there. Blank lines, comments and ``qid:`` are passed over.
    """
    path = Path(path)
    parts = _Parts(path, wide, threads or cores(), block)
    source = Source(files=(path,), kind="libsvm float64" if wide else "libsvm float32")
    arrays, facts = gather(source, parts, None if cache is None else Path(cache))
    if len(arrays.get("targets", ())) == 0:
        raise UsageError(f"{path}: holds no rows")
    return LibsvmRows(**arrays, columns=facts["largest"] + 1, notes=tuple(_notes(path, facts)))


class _Parts:
    def __init__(self, path: Path, wide: bool, threads: int, block: int) -> None:
        self.facts: Facts = {"largest": -1, "unsorted": 0, "unsorted_line": 0, "repeated": 0, "repeated_line": 0}
        self._text, self._wide, self._threads = TextFile(path, block=block), wide, threads

    def __iter__(self) -> Iterator[dict[str, Array]]:
        parse, threads = parsers().libsvm, self._threads
        values = np.float64 if self._wide else np.float32
        entries = 0
        yield {"indptr": np.zeros(1, np.int64)}
        for block in self._text:
            read = parse(block, threads, self._wide)
            self._note(read)
            self._text.take(read)
            ends = entries + np.cumsum(np.frombuffer(read["lengths"], np.int64))
            entries = int(ends[-1]) if len(ends) else entries
            yield {
                "targets": np.frombuffer(read["targets"], values),
                "indptr": ends,
                "indices": np.frombuffer(read["indices"], np.int32),
                "values": np.frombuffer(read["values"], values),
            }

    def _note(self, read: dict[str, Any]) -> None:
        """Remember rows that are odd; a block with a mistake has none."""
        self.facts["largest"] = max(self.facts["largest"], read.get("largest", -1))
        for name in ("unsorted", "repeated"):
            rows, offset = read.get(name, (0, 0))
            if rows and not self.facts[name]:
                self.facts[f"{name}_line"] = self._text.line(offset)
            self.facts[name] += rows


def _notes(path: Path, facts: Facts) -> Iterator[str]:
    if facts["unsorted"]:
        yield f"{path}: {_rows(facts, 'unsorted')} unsorted indices; they are taken as they are"
    if facts["repeated"]:
        yield f"{path}: {_rows(facts, 'repeated')} an index twice; their values add up"


def _rows(facts: Facts, name: str) -> str:
    count, line = facts[name], facts[f"{name}_line"]
    return f"1 row (line {line}) has" if count == 1 else f"{count} rows (first: line {line}) have"
