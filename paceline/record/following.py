"""Reads a run's files while the run writes them: every call gives what is new, in whole lines and records.

A resumed run cuts its metrics at a checkpoint, and a directory may be removed and made anew. A reader keeps the last
bytes that it has read, and begins anew if they are no longer where they were.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paceline.errors import PacelineError
from paceline.record.timeline import MAGIC, RECORD, Kind, Records, TimelineError

_MARK = 64  # bytes before the position that are compared; each line and record has its time in them
_MOST_LINES = 1 << 20  # bytes of lines in a call: less than a second
_MOST_RECORDS = 1 << 18  # bytes of records of a worker in a call; of more, the last ones
_LONGEST_LINE = 1 << 26  # bytes: a file without line ends is not read into memory
_LATEST = 1e11  # seconds since the epoch: what tells of a later time is broken
_WORKER_FILE = re.compile(r"worker-(\d{1,9})\.bin")


class Tail:
    """The new bytes of a growing file, which may be missing, cut or replaced between two calls."""

    def __init__(self, path: Path, *, most: int) -> None:
        self.path = path
        self.restarts = 0  # how often the file was cut or replaced; then it is given from its beginning
        self.behind = False  # whether the last call left whole lines or records for the next one
        self._most = most
        self._position = 0
        self._mark = b""

    def restart(self) -> None:
        """Begin with the file's first byte again."""
        self._position, self._mark = 0, b""

    def read(self) -> bytes:
        """The bytes that were added since the last call, as far as they are whole; about ``most`` at a time."""
        self.behind = False
        try:
            file = self.path.open("rb", buffering=0)
        except (FileNotFoundError, NotADirectoryError):
            self._found_changed()
            return b""
        with file:
            data = self._after_mark(file)
            if data is None:
                self._found_changed()
                data = self._after_mark(file) or b""
            found = data[: self._whole(file, data)]
        self._position += len(found)
        self._mark = (self._mark + found)[-_MARK:]
        return found

    def _found_changed(self) -> None:
        if self._position > 0:
            self.restarts += 1
        self.restart()

    def _after_mark(self, file: BinaryIO) -> bytes | None:
        """The bytes behind what was read; None if that is no longer there."""
        file.seek(self._position - len(self._mark))
        data = file.read(len(self._mark) + self._most)
        if not data.startswith(self._mark):
            return None
        self.behind = len(data) == len(self._mark) + self._most
        return data[len(self._mark) :]

    def _whole(self, file: BinaryIO, data: bytes) -> int:
        """How many of these bytes are whole lines or records."""
        raise NotImplementedError


class EventTail(Tail):
    """The new lines of a file such as ``metrics.jsonl``, as events; broken lines are left out and counted."""

    def __init__(self, path: Path, *, most: int = _MOST_LINES) -> None:
        super().__init__(path, most=most)
        self.broken = 0

    def restart(self) -> None:
        super().restart()
        self.broken = 0

    def events(self) -> list[dict[str, Any]]:
        """The events that were added since the last call; an unfinished last line is left for the next one."""
        events = [_event(line) for line in self.read().split(b"\n")[:-1]]
        self.broken += events.count(None)
        return [event for event in events if event is not None]

    def _whole(self, file: BinaryIO, data: bytes) -> int:
        end = data.rfind(b"\n") + 1
        if end == 0 and self.behind:
            self._most *= 2  # the next call reads the whole of a long line
            if self._most > _LONGEST_LINE:
                raise PacelineError(f"{self.path}: wanted lines of JSON, found {len(data)} bytes without a line end")
        return end


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(at := event.get("time"), int | float) or not abs(at) < _LATEST:
        return None
    return {"event": "evaluation", **event}  # the lines of evaluations.jsonl need no name


def finite(value: Any) -> float | None:
    """The value of an event as a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


class RecordTail(Tail):
    """The new records of a worker's timeline; with ``skip`` only the last ones if there are many, those of now."""

    def __init__(self, path: Path, *, skip: bool, most: int = _MOST_RECORDS) -> None:
        super().__init__(path, most=max(1, most // RECORD.itemsize) * RECORD.itemsize + len(MAGIC))
        self._skip = skip

    def records(self) -> Records:
        """The records that were added since the last call, without those that cannot be."""
        records = np.frombuffer(self.read().removeprefix(MAGIC), dtype=RECORD)
        start, duration = records["start"], records["duration"]
        with np.errstate(invalid="ignore"):
            can_be = (records["kind"] <= Kind.LEFT) & (np.abs(start) < _LATEST) & (duration >= 0) & (duration < _LATEST)
        sound: Records = records[can_be]
        return sound

    def _after_mark(self, file: BinaryIO) -> bytes | None:
        data = super()._after_mark(file)
        if data is None:
            return None
        if self._position == 0 and not data.startswith(MAGIC[: len(data)]):
            raise TimelineError(f"{self.path} is no timeline of a version that is known here")
        if self.behind and self._skip:
            records = (file.seek(0, 2) - len(MAGIC) - self._most) // RECORD.itemsize
            self._position = max(self._position, len(MAGIC) + records * RECORD.itemsize)
            self._mark, self.behind = b"", False
            file.seek(self._position)
            data = file.read(self._most + RECORD.itemsize)
        return data

    def _whole(self, file: BinaryIO, data: bytes) -> int:
        head = len(MAGIC) if self._position == 0 else 0
        return head + (len(data) - head) // RECORD.itemsize * RECORD.itemsize if len(data) >= head else 0


@dataclass
class News:
    """What a run has written since the last call."""

    events: list[dict[str, Any]] = field(default_factory=list)
    records: dict[int, Records] = field(default_factory=dict)  # of each worker that has new ones
    restarted: bool = False  # the run was cut or replaced: this is all of it, not what is new
    behind: bool = False  # there is more already
    broken: int = 0  # lines so far that are no events
    problem: str | None = None  # a timeline that cannot be read


class RunTail:
    """The new events and records of a run, in files that may appear later.

    With ``skip`` the workers' records begin with the last ones, and the events with the first.
    """

    def __init__(self, path: Path, *, skip: bool = True) -> None:
        self.path, self._skip = path, skip
        self._events = [EventTail(path / "metrics.jsonl"), EventTail(path / "evaluations.jsonl")]
        self._workers: dict[int, RecordTail] = {}

    def read(self) -> News:
        """What was written since the last call, in bounded pieces: ``behind`` asks for the next one at once."""
        before = self._restarts()
        news = self._read()
        if self._restarts() == before:
            return news
        for tail in (*self._events, *self._workers.values()):
            tail.restart()
        news = self._read()
        news.restarted = True
        return news

    def _read(self) -> News:
        news = News()
        for tail in self._events:
            news.events += tail.events()
            news.behind = news.behind or tail.behind
            news.broken += tail.broken
        for rank, worker in self._find_workers().items():
            try:
                records = worker.records()
            except TimelineError as error:
                news.problem = str(error)
                continue
            news.behind = news.behind or worker.behind
            if len(records):
                news.records[rank] = records
        return news

    def _find_workers(self) -> dict[int, RecordTail]:
        folder = self.path / "timeline"
        for file in folder.iterdir() if folder.is_dir() else ():
            if (named := _WORKER_FILE.fullmatch(file.name)) and (rank := int(named[1])) not in self._workers:
                self._workers[rank] = RecordTail(file, skip=self._skip)
        return dict(sorted(self._workers.items()))

    def _restarts(self) -> int:
        return sum(tail.restarts for tail in (*self._events, *self._workers.values()))
