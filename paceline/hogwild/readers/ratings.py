"""Reads ratings: lines ``user item value``, or Netflix's files, a movie ``ID:`` and then lines ``user,rating,date``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import UsageError
from paceline.hogwild.readers.blocks import BLOCK, TextFile
from paceline.hogwild.readers.cache import Array, Facts, Source, gather
from paceline.hogwild.readers.compiled import cores, parsers

_NO_ITEM = -1
_HEADING = re.compile(rb"\s*\d+:\s*")  # of a movie, in Netflix's files


@dataclass(frozen=True)
class RatingEntries:
    """The known entries of a matrix; users and items have the files' own numbers, so some may have no entry."""

    users: Array  # int32
    items: Array  # int32
    values: Array  # float32, or float64 if asked
    shape: tuple[int, int]


def read_ratings(
    path: str | Path,
    *,
    cache: str | Path | None = None,
    wide: bool = False,
    threads: int | None = None,
    block: int = BLOCK,
) -> RatingEntries:
    """Read a file of ratings, plain or gzipped, or all files ``*.txt`` of a directory.

    Fields are separated by blanks, tabs, a comma or ``::``; those after the value, such as a time, are passed over,
    and so are comments (``#`` or ``%``) and a first line of names. For ``cache`` and ``wide`` see ``read_libsvm``.
    """
    files = _files(Path(path))
    source = Source(files=files, kind="ratings float64" if wide else "ratings float32")
    arrays, facts = gather(
        source, _Parts(files, wide, threads or cores(), block), None if cache is None else Path(cache)
    )
    if len(arrays.get("values", ())) == 0:
        raise UsageError(f"{path}: holds no ratings")
    return RatingEntries(**arrays, shape=(facts["largest_user"] + 1, facts["largest_item"] + 1))


def _files(path: Path) -> tuple[Path, ...]:
    if not path.is_dir():
        return (path,)
    files = tuple(sorted(path.glob("*.txt")) or sorted(path.glob("*.txt.gz")))
    if not files:
        raise UsageError(f"{path}: wanted files *.txt, as Netflix's data has them, found none")
    return files


class _Parts:
    def __init__(self, files: tuple[Path, ...], wide: bool, threads: int, block: int) -> None:
        self.facts: Facts = {"largest_user": -1, "largest_item": -1}
        self._files, self._wide, self._threads, self._size = files, wide, threads, block

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for path in self._files:
            yield from self._read(TextFile(path, block=self._size))

    def _read(self, text: TextFile) -> Iterator[dict[str, Array]]:
        parse, threads = parsers().ratings, self._threads
        values = np.float64 if self._wide else np.float32
        by_item, item = False, _NO_ITEM
        for number, block in enumerate(text):
            if number == 0:
                by_item = _HEADING.fullmatch(_first_line(block)) is not None
                block = _without_names(block)
            read = text.take(parse(block, threads, self._wide, by_item, item))
            item = read["item"]
            for name in self.facts:
                self.facts[name] = max(self.facts[name], read[name])
            yield {
                "users": np.frombuffer(read["users"], np.int32),
                "items": np.frombuffer(read["items"], np.int32),
                "values": np.frombuffer(read["values"], values),
            }


def _first_line(block: bytes) -> bytes:
    return block.lstrip().partition(b"\n")[0]


def _without_names(block: bytes) -> bytes:
    """The block with a first line of names, as in ``userId,movieId,rating``, turned into a comment of its length."""
    names = block.partition(b"\n")[0].strip().replace(b'"', b"").split(b",")
    is_header = len(names) >= 3 and all(name.strip()[:1].isalpha() for name in names)
    return b"#" + block[1:] if is_header else block
