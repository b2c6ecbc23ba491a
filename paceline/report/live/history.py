"""The course of a whole run in a bounded number of spans of time, which grow longer with the run."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

SPANS = 600  # at most; a page has about as many pixels
_SHORTEST = 0.25  # seconds
_COLUMNS = ("updates", "losses", "loss", "examples", "pushes", "staleness", "bytes")


class Update(NamedTuple):
    """One update of the parameters, as far as the metrics tell of it."""

    at: float
    loss: float | None = None
    examples: float = 0.0
    staleness: tuple[float, ...] = ()  # of each push in it
    bytes: float = 0.0


class Span(NamedTuple):
    """What happened in a span of time; None where nothing tells it."""

    number: int  # of the span, from the beginning of the run
    loss: float | None  # mean over its updates
    examples_per_second: float | None
    staleness: float | None  # mean over its pushes
    bytes_per_second: float | None


class History:
    """Sums over spans of time. When there would be too many spans, each two become one.

    ``turn`` counts the looks at the run: a reader that has seen turn t asks for the spans that changed after it.
    """

    def __init__(self, turn: int = 0) -> None:
        self.turn = turn
        self.width = _SHORTEST
        self.reshaped = turn  # the turn since which the numbers of the spans mean the same
        self.began: float | None = None
        self._sums = {name: np.zeros(SPANS) for name in _COLUMNS}
        self._last = np.full(SPANS, -np.inf)  # the time of the last update in each
        self._changed = np.full(SPANS, -1)

    def add(self, update: Update) -> None:
        """Count an update."""
        if self.began is None:
            self.began = update.at
        number = max(0, math.floor((update.at - self.began) / self.width))
        while number >= SPANS:
            self._join_pairs()
            number = math.floor((update.at - self.began) / self.width)
        sums = self._sums
        sums["updates"][number] += 1
        if update.loss is not None:
            sums["losses"][number] += 1
            sums["loss"][number] += update.loss
        sums["examples"][number] += update.examples
        sums["pushes"][number] += len(update.staleness)
        sums["staleness"][number] += sum(update.staleness)
        sums["bytes"][number] += update.bytes
        self._last[number] = max(self._last[number], update.at)
        self._changed[number] = self.turn

    def spans(self, since: int = -1) -> list[Span]:
        """The spans with updates, as far as they changed after that turn.

        A rate is that since the last update of the span before, so steps may be longer than a span.
        """
        there = np.flatnonzero(self._sums["updates"])
        before = np.concatenate([[-np.inf], self._last[there][:-1]])
        seconds = self._last[there] - before
        # The next span's rate begins where this one ends, so both change.
        changed = np.flatnonzero((self._changed[there] > since) | (self._changed[np.roll(there, 1)] > since))
        return [self._span(int(there[place]), float(seconds[place])) for place in changed]

    def _span(self, number: int, seconds: float) -> Span:
        sums = {name: float(column[number]) for name, column in self._sums.items()}
        known = 0 < seconds < math.inf
        return Span(
            number,
            loss=sums["loss"] / sums["losses"] if sums["losses"] else None,
            examples_per_second=sums["examples"] / seconds if known else None,
            staleness=sums["staleness"] / sums["pushes"] if sums["pushes"] else None,
            bytes_per_second=sums["bytes"] / seconds if known else None,
        )

    def _join_pairs(self) -> None:
        for name, column in self._sums.items():
            self._sums[name] = self._halved(column.reshape(-1, 2).sum(1), 0.0)
        self._last = self._halved(self._last.reshape(-1, 2).max(1), -np.inf)
        self._changed = self._halved(self._changed.reshape(-1, 2).max(1), -1)
        self.width *= 2
        self.reshaped = self.turn

    def _halved(self, values: np.ndarray, empty: float) -> np.ndarray:
        return np.concatenate([values, np.full(SPANS - len(values), empty, values.dtype)])
