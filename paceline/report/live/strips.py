"""What each worker did in the last seconds, in cells of time, so that a page shows steps of any length."""

from __future__ import annotations

import numpy as np

from paceline.record.timeline import Kind, Records

CELL = 0.1  # seconds
CELLS = 300
KINDS = (Kind.COMPUTING, Kind.WAITING, Kind.EXCHANGING, Kind.CANCELLED)


class Strip:
    """The last ``CELLS`` cells of one worker: how many seconds of each kind fall into each.

    A record comes when its span has ended, so it may reach back over many cells.
    """

    def __init__(self) -> None:
        self.newest = -1  # the number of the last cell, counted from the epoch
        self._seconds = np.zeros((CELLS, len(KINDS)))
        self._changed = np.full(CELLS, -1)  # the turn in which each cell changed

    def add(self, records: Records, turn: int) -> None:
        """Count the records; older cells than the last ones are forgotten."""
        spans = records[(records["kind"] <= Kind.CANCELLED) & (records["duration"] > 0)]
        if not len(spans):
            return
        ends = spans["start"] + spans["duration"].astype(np.float64)
        self._move_to(int(np.floor(ends.max() / CELL)))
        first = self.newest - CELLS + 1
        borders = np.arange(CELLS + 1) * CELL
        for column, kind in enumerate(KINDS):
            of_kind = spans["kind"] == kind
            starts = np.sort(spans["start"][of_kind] - first * CELL)
            self._seconds[:, column] += np.diff(_seconds_before(borders, starts, np.sort(ends[of_kind] - first * CELL)))
        oldest = int(np.floor(spans["start"].min() / CELL)) - first
        self._changed[max(0, oldest) :] = turn

    def cells(self, since: int = -1) -> tuple[int, bytes]:
        """The number of the first cell that changed after that turn, and from there each kind's share in 255ths."""
        changed = np.flatnonzero(self._changed > since)
        begin = int(changed[0]) if len(changed) else CELLS
        shares = np.clip(np.rint(self._seconds[begin:] / CELL * 255), 0, 255).astype(np.uint8)
        return self.newest - CELLS + 1 + begin, shares.tobytes()

    def seconds(self) -> dict[Kind, float]:
        """The seconds of each kind in all cells."""
        return dict(zip(KINDS, map(float, self._seconds.sum(0)), strict=True))

    def mostly(self, seconds: float) -> Kind:
        """What took most of the last seconds; cancelled work is computed too."""
        sums = self._seconds[-max(1, round(seconds / CELL)) :].sum(0)
        sums[Kind.COMPUTING] += sums[Kind.CANCELLED]
        return Kind(int(sums[: Kind.CANCELLED].argmax()))

    def _move_to(self, newest: int) -> None:
        by = newest - self.newest
        if by <= 0:
            return
        keep = max(0, CELLS - by) if self.newest >= 0 else 0
        self._seconds = np.concatenate([self._seconds[CELLS - keep :], np.zeros((CELLS - keep, len(KINDS)))])
        self._changed = np.concatenate([self._changed[CELLS - keep :], np.full(CELLS - keep, -1)])
        self.newest = newest


def _seconds_before(borders: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How many seconds of the spans lie before each border; both ends of the spans are sorted."""
    result: np.ndarray = _overtaken(borders, starts) - _overtaken(borders, ends)
    return result


def _overtaken(borders: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The sum of ``border - time`` over the times before each border."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    count = np.searchsorted(times, borders)
    result: np.ndarray = borders * count - sums[count]
    return result
