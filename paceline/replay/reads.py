"""The outcome of each step of a trace: the version that its worker read, and whether it was cancelled or lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.record.trace import (
    Asked,
    Began,
    Cancelled,
    Finished,
    Given,
    Joined,
    Late,
    Left,
    NotFinite,
    Pushed,
    Record,
    Skipped,
)


class Read(NamedTuple):
    """The outcome of a step, or of the message that no batches are left."""

    version: int = 0  # that the worker read, from its later messages; 0: unknown, and not needed
    doomed: bool = False  # the step was cancelled
    lost: bool = False  # the worker died before it sent any result
    pushes: int = 0  # of the worker since it joined, before it received this


def read_versions(records: Sequence[Record]) -> dict[int, Read]:
    """The outcomes of all ``Given`` and ``Finished`` records, by their positions in the trace."""
    reading = _Reading()
    for position, record in enumerate(records):
        reading.take(position, record)
    return reading.with_pushes()


class _Reading:
    """The state of one pass over a trace."""

    def __init__(self) -> None:
        self.found: dict[int, Read] = {}
        self.pushed: set[int] = set()  # positions of steps that were pushed, in time or late
        self.lives: list[list[int]] = []  # positions of what each incarnation of a worker was given
        self.life: dict[int, list[int]] = {}  # rank -> the list of its present incarnation
        self.positions: dict[tuple[int, int], int] = {}  # (rank, step) -> position
        self.under_way: dict[int, int] = {}  # rank -> position of what it was given last, while its outcome is unknown

    def take(self, position: int, record: Record) -> None:
        match record:
            case Given() | Finished():
                if isinstance(record, Given):
                    self.positions[record.rank, record.step] = position
                self.under_way[record.rank] = position
                self.life[record.rank].append(position)
                self.found[position] = Read(lost=True)  # until a later record tells otherwise
            case Cancelled():
                self._know(self.positions[record.rank, record.step], doomed=True)
                self.under_way.pop(record.rank, None)
            case Late():
                at = self.positions[record.rank, record.step]
                self.pushed.add(at)
                self._know(at, version=record.version, doomed=False)
            case Pushed() | NotFinite() | Skipped():
                at = self.positions[record.rank, record.step]
                if not isinstance(record, Skipped):
                    self.pushed.add(at)
                self._know(at, version=record.version)
                self.under_way.pop(record.rank, None)
            case Asked() | Left(dead=False):
                if record.rank in self.under_way:
                    self._know(self.under_way.pop(record.rank), version=record.version)
            case Joined():
                self.under_way.pop(record.rank, None)
                self.life[record.rank] = []
                self.lives.append(self.life[record.rank])
            case Left():
                self.under_way.pop(record.rank, None)
            case Began():
                self.under_way, self.positions = {}, {}
            case _:
                pass

    def _know(self, position: int, **what: Any) -> None:
        self.found[position] = self.found[position]._replace(**what, lost=False)

    def with_pushes(self) -> dict[int, Read]:
        for life in self.lives:
            pushes = 0
            for position in life:
                self.found[position] = self.found[position]._replace(pushes=pushes)
                pushes += position in self.pushed
        return self.found
