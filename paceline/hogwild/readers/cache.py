"""Keeps what a reader yields: in memory, or in a directory of ``.npy`` files that are mapped and never loaded whole.

A cache is written under another name and renamed, so it is whole or not there. Several processes may read a text at
once: the first to finish renames its cache, and the others use it. It is used again while the size and the time of the
text are the same. Any program can open its files; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.errors import UsageError

Array = npt.NDArray[Any]
Facts = dict[str, int]
FORMAT = "paceline-arrays-2"
CACHED_FROM = 64 << 20  # bytes of text from which on it is cached without being asked


class Parts(Protocol):
    """What a reader yields: parts of named arrays; ``facts`` are complete after the last one."""

    facts: Facts

    def __iter__(self) -> Iterator[dict[str, Array]]: ...


@dataclass(frozen=True)
class Source:
    """The files that are read, and how; a cache of other files, or of another way, is not used."""

    files: tuple[Path, ...]
    kind: str  # the reader and its options

    def cache(self, folder: Path | None) -> Path | None:
        """Where the cache belongs: in ``folder``, else beside a text that is large; None if nowhere."""
        first = self.files[0]
        if folder is not None:
            return folder / f"{first.name}.paceline"
        return first.with_name(f"{first.name}.paceline") if self._sizes() >= CACHED_FROM else None

    def stamp(self, folder: Path | None) -> dict[str, Any]:
        """What must be equal for a cache to be used; in a ``folder`` texts of one name may meet."""
        first = self.files[0]
        times = [file.stat().st_mtime_ns for file in self.files]
        return {
            "format": FORMAT,
            "kind": self.kind,
            "files": len(self.files),
            "first": first.name if folder is None else str(first.resolve()),
            "bytes": self._sizes(),
            "times": sum(times),
        }

    def _sizes(self) -> int:
        return sum(file.stat().st_size for file in self.files)


def gather(source: Source, parts: Parts, folder: Path | None) -> tuple[dict[str, Array], Facts]:
    """Read all parts, or take them from the cache; ``folder`` is where the cache is, if it must be somewhere."""
    try:
        cache, stamp = source.cache(folder), source.stamp(folder)
    except OSError as error:
        raise UsageError(f"{source.files[0]}: cannot be read: {error.strerror}") from error
    if cache is None:
        return _in_memory(parts)
    return _opened(cache, stamp) or _made(cache, stamp, parts)


def _in_memory(parts: Parts) -> tuple[dict[str, Array], Facts]:
    gathered: dict[str, list[Array]] = {}
    for part in parts:
        for name, array in part.items():
            gathered.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in gathered.items()}, parts.facts


def _opened(cache: Path, stamp: dict[str, Any]) -> tuple[dict[str, Array], Facts] | None:
    """Map the arrays of a cache; None if there is none, or one of another text, or one that is not whole."""
    try:
        about = json.loads((cache / "about.json").read_text())
        if about != _checked(about) or about["stamp"] != stamp:
            return None
        arrays = {name: np.load(cache / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in about["arrays"]}
        whole = {name: _form(array.dtype, len(array)) for name, array in arrays.items()} == about["arrays"]
        return (arrays, about["facts"]) if whole else None
    except Exception:  # numpy has many errors for files that are damaged; any such cache is made again
        return None


def _checked(about: dict[str, Any]) -> dict[str, Any]:
    """The description of a cache with the checksum of its text."""
    content = {name: value for name, value in about.items() if name != "crc32"}
    return {**content, "crc32": zlib.crc32(json.dumps(content, sort_keys=True).encode())}


def _form(dtype: np.dtype[Any], length: int) -> list[Any]:
    return [dtype.str, length]


def _made(cache: Path, stamp: dict[str, Any], parts: Parts) -> tuple[dict[str, Array], Facts]:
    """Write a cache and map its arrays."""
    aside = _unique(cache)
    try:
        _remove_leftovers(cache)
        aside.mkdir(parents=True)
        with _Growing.all_in(aside) as files:
            for part in parts:
                for name, array in part.items():
                    files.append(name, array)
            arrays = files.finish()
        _write_synced(aside / "about.json", _checked({"stamp": stamp, "facts": parts.facts, "arrays": arrays}))
        return _published(aside, cache, stamp)
    except OSError as error:
        raise UsageError(
            f"could not write the cache {cache}: {error.strerror}; name a directory with space for it (--cache DIR)"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _published(aside: Path, cache: Path, stamp: dict[str, Any]) -> tuple[dict[str, Array], Facts]:
    """Rename a new cache into its place; if another process was first, use its cache, which memory then holds once."""
    own = _opened(aside, stamp)
    if own is None:
        raise UsageError(f"{aside} changed while it was written; is another program writing there?")
    while True:
        try:
            aside.rename(cache)
            return own
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if (others := _opened(cache, stamp)) is not None:
            return others
        _remove(cache)


def _remove(cache: Path) -> None:
    """Remove a cache that is old or damaged, at once: it gets another name before its files go."""
    aside = _unique(cache)
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        cache.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _unique(cache: Path) -> Path:
    return cache.with_name(f".{cache.name}.{uuid.uuid4().hex}.{os.getpid()}.partial")


def _remove_leftovers(cache: Path) -> None:
    """Remove the unfinished caches of processes that were killed."""
    for partial in cache.parent.glob(f".{cache.name}.*.partial"):
        if not Path("/proc", partial.name.split(".")[-2]).exists():
            shutil.rmtree(partial, ignore_errors=True)


def _write_synced(file: Path, about: dict[str, Any]) -> None:
    with file.open("w") as opened:
        json.dump(about, opened)
        opened.flush()
        os.fsync(opened.fileno())


class _Growing:
    """Files of arrays whose lengths are known only at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[IO[bytes], np.dtype[Any]]] = {}
        self._lengths: dict[str, int] = {}

    @classmethod
    @contextlib.contextmanager
    def all_in(cls, folder: Path) -> Iterator[_Growing]:
        files = cls(folder)
        try:
            yield files
        finally:
            for file, _ in files._files.values():
                file.close()

    def append(self, name: str, array: Array) -> None:
        if name not in self._files:
            file = (self._folder / f"{name}.npy").open("wb")
            self._files[name], self._lengths[name] = (file, array.dtype), 0
            self._write_header(name)
        self._files[name][0].write(array.data)
        self._lengths[name] += len(array)

    def finish(self) -> dict[str, list[Any]]:
        """Write the lengths into the files; numpy leaves room for them in their headers."""
        for name, (file, _) in self._files.items():
            file.seek(0)
            self._write_header(name)
            file.flush()
            os.fsync(file.fileno())
        return {name: _form(dtype, self._lengths[name]) for name, (_, dtype) in self._files.items()}

    def _write_header(self, name: str) -> None:
        file, dtype = self._files[name]
        shape = (self._lengths[name],)
        descr = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
