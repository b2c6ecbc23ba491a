"""A run's ``timeline/worker-RANK.bin``: what each worker did, and when.

A file is a magic number and records of 20 bytes, little endian: kind (1 byte, then 3 zero bytes), step (4), start in
seconds since the epoch (8, a float) and duration in seconds (4, a float). On a virtual cluster seconds begin at 0.
Every process of a worker appends to the worker's file. A half-written last record is left out.
"""

from __future__ import annotations

import logging
import struct
import time
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from paceline.errors import PacelineError

logger = logging.getLogger("paceline")

MAGIC = b"PLTIME1\n"
RECORD = np.dtype(
    {
        "names": ["kind", "step", "start", "duration"],
        "formats": ["u1", "<u4", "<f8", "<f4"],
        "offsets": [0, 4, 8, 16],
        "itemsize": 20,
    }
)
Records: TypeAlias = np.ndarray[Any, Any]  # of RECORD

_PACKED = struct.Struct("<B3xIdf")
_FULL = 1 << 16  # bytes at which pending records are written without waiting
_LAST_STEP = 2**32 - 1


class Kind(IntEnum):
    """What a worker does in a span of time, or what happens to it."""

    COMPUTING = 0  # forward, backward, an injected delay, the optimizer
    WAITING = 1  # for other workers, or for the server's answer
    EXCHANGING = 2  # moving bytes, as far as backward did not hide it
    CANCELLED = 3  # work that was thrown away
    BEGAN = 4  # the worker has joined; the step is its incarnation
    LEFT = 5  # it left by itself
    DEAD = 6  # never written: the reader finds it


class TimelineError(PacelineError):
    """A file is no timeline, or one of another version."""


class TimelineWriter:
    """Append what one worker does to its file.

    Records are written ``every`` so many seconds, by the next one that is added. A failure to write is told once;
    later records are lost, and the training goes on. No file is open between two writes.
    """

    def __init__(self, path: Path, *, every: float = 0.1) -> None:
        self._path, self._every = path, every
        self._pending = bytearray()
        self._written_at = -1e9
        self._found_end = False  # of what earlier processes have written
        self._failed = False

    def began(self, incarnation: int, at: float) -> None:
        """The worker has joined, as this incarnation."""
        self.span(Kind.BEGAN, incarnation, at, 0.0)
        self.flush()

    def span(self, kind: Kind, step: int, start: float, seconds: float) -> None:
        """The worker did this for so many seconds."""
        if self._failed:
            return
        self._pending += _PACKED.pack(kind, min(step, _LAST_STEP), start, seconds)
        now = time.monotonic()
        if now - self._written_at >= self._every or len(self._pending) >= _FULL:
            self._write(now)

    def left(self, at: float) -> None:
        """The worker has left by itself."""
        self.span(Kind.LEFT, 0, at, 0.0)
        self.flush()

    def flush(self) -> None:
        """Write the pending records."""
        if self._pending and not self._failed:
            self._write(time.monotonic())

    def close(self) -> None:
        """Write the pending records; none may be added later."""
        self.flush()
        self._failed = True

    def _write(self, now: float) -> None:
        self._written_at = now
        try:
            if not self._found_end:
                self._find_end()
            with self._path.open("ab", buffering=0) as file:
                while self._pending:
                    del self._pending[: file.write(self._pending)]
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _find_end(self) -> None:
        """Make the file, or cut off the half record of a process that was killed."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            length = file.tell()
            if length < len(MAGIC):
                if length:
                    file.truncate(0)
                self._pending[:0] = MAGIC
            elif not _begins_well(self._path):
                self._give_up("it is the file of another version, or no timeline")
            else:
                file.truncate(length - (length - len(MAGIC)) % RECORD.itemsize)
        self._found_end = True

    def _give_up(self, reason: str) -> None:
        self._failed = True
        self._pending.clear()
        logger.warning("could not write the timeline %s: %s; the run goes on without it", self._path, reason)


def timeline_file(run: Path, rank: int) -> Path:
    """The timeline of one worker."""
    return run / "timeline" / f"worker-{rank}.bin"


def read_timeline(run: Path, *, until: float | None = None) -> dict[int, Records]:
    """Read all workers' records, sorted by start, with the times in which a worker was dead.

    A worker is dead from the end of its last record to the next time that it begins, or to the end of the run, unless
    it has left. The run ends ``until`` then; by default with the last record of all workers. While a run goes on, give
    0: whoever has written nothing for a while may compute.
    """
    found = {rank: _read(file) for rank, file in sorted(_files(run))}
    if until is None:
        until = max((float(_ends(records).max()) for records in found.values() if len(records)), default=0.0)
    return {rank: _with_deaths(records, until) for rank, records in found.items()}


def _files(run: Path) -> list[tuple[int, Path]]:
    named = [(file.stem.removeprefix("worker-"), file) for file in (run / "timeline").glob("worker-*.bin")]
    return [(int(rank), file) for rank, file in named if rank.isdecimal()]


def _begins_well(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _read(path: Path) -> Records:
    data = path.read_bytes()
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise TimelineError(f"{path} is no timeline of a version that is known here; a newer Paceline may have made it")
    whole = max(0, len(data) - len(MAGIC)) // RECORD.itemsize
    records = np.frombuffer(data, RECORD, whole, len(MAGIC)) if whole else np.empty(0, RECORD)
    return records[np.argsort(records["start"], kind="stable")]


def _ends(records: Records) -> Records:
    return records["start"] + records["duration"].astype(np.float64)


def _with_deaths(records: Records, until: float) -> Records:
    """Put in the spans in which the worker was dead."""
    if not len(records):
        return records
    ended = np.maximum.accumulate(_ends(records))
    began = np.flatnonzero(records["kind"] == Kind.BEGAN)
    after = [place for place in began if place > 0 and records["kind"][place - 1] != Kind.LEFT]
    spans = [(int(place), float(ended[place - 1]), float(records["start"][place])) for place in after]
    if records["kind"][-1] != Kind.LEFT:
        spans.append((len(records), float(ended[-1]), until))
    spans = [(place, start, end) for place, start, end in spans if end > start]
    dead = np.zeros(len(spans), RECORD)
    for row, (_, start, end) in zip(dead, spans, strict=True):
        row["kind"], row["start"], row["duration"] = Kind.DEAD, start, end - start
    return np.insert(records, [place for place, _, _ in spans], dead)
