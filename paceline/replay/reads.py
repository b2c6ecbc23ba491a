"""What became of the steps of a trace: which version their workers really read, and which came to nothing."""

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
    """What became of what a worker was given."""

    version: int = 0  # that it read, as it said later; 0: not known, and of no consequence
    doomed: bool = False  # it was cancelled
    lost: bool = False  # its worker died of something else before it came to anything
    pushes: int = 0  # that its worker has made before it, since it joined: only then does it hear of this


def read_versions(records: Sequence[Record]) -> dict[int, Read]:
    """Find out for every ``Given`` and ``Finished``, by its place in the trace."""
    reading = _Reading()
    for position, record in enumerate(records):
        reading.take(position, record)
    return reading.with_pushes()


class _Reading:
    """The state of one pass over a trace."""

    def __init__(self) -> None:
        self.found: dict[int, Read] = {}
        self.pushed: set[int] = set()  # the places of steps that were pushed, in time or too late
        self.lives: list[list[int]] = []  # the places of what each worker was given, from its joining to its end
        self.life: dict[int, list[int]] = {}  # by rank: the present one
        self.positions: dict[tuple[int, int], int] = {}  # of the steps, by rank and number
        self.under_way: dict[int, int] = {}  # by rank: what it was given last, if nothing has become of it yet

    def take(self, position: int, record: Record) -> None:
        match record:
            case Given() | Finished():
                if isinstance(record, Given):
                    self.positions[record.rank, record.step] = position
                self.under_way[record.rank] = position
                self.life[record.rank].append(position)
                self.found[position] = Read(lost=True)  # unless there is word of it
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
