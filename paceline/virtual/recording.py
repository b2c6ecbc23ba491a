"""Writes a training on the virtual cluster as real runs write themselves, with virtual seconds as times."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.record.timeline import Kind, TimelineWriter, timeline_file


class RunRecord:
    """The timeline and the metrics of virtual workers, in the directory ``run``.

    A worker that does nothing between two spans waits.
    """

    def __init__(self, run: Path, workers: int) -> None:
        self._timelines = [TimelineWriter(timeline_file(run, worker), every=math.inf) for worker in range(workers)]
        self._ends = np.zeros(workers)  # of what each has done so far
        from paceline.record.metrics import MetricsWriter  # it needs torch, and a simulation without gradients does not

        self._metrics = MetricsWriter(run / "metrics.jsonl")
        self._num_bytes = 0.0  # moved up to the last commit
        self.commits: list[tuple[int, int]] = [(0, 0)]  # examples and bytes after so many
        for worker, timeline in enumerate(self._timelines):
            timeline.began(0, 0.0)
            self._metrics.write("joined", time=0.0, step=0, worker=worker, incarnation=0)

    def span(self, worker: int, kind: Kind, step: int, start: float, end: float) -> None:
        """A worker did this from ``start`` to ``end``."""
        timeline, before = self._timelines[worker], float(self._ends[worker])
        if start > before:
            timeline.span(Kind.WAITING, step, before, start - before)
        if end > start:
            timeline.span(kind, step, start, end - start)
        self._ends[worker] = max(before, end)

    def committed(self, event: str, at: float, num_bytes: float, examples: int, **values: Any) -> None:
        """A commit, or a step of all workers, was made; ``num_bytes`` have been moved since the start."""
        moved, self._num_bytes = num_bytes - self._num_bytes, num_bytes
        self.commits.append((self.commits[-1][0] + examples, round(num_bytes)))
        step = len(self.commits) - 1
        self._metrics.write(event, time=at, step=step, examples=examples, bytes=round(moved), **values)

    def close(self, at: float, failed: Collection[int] = ()) -> None:
        """The run has ended; all workers but those that have failed leave."""
        for worker, timeline in enumerate(self._timelines):
            if worker not in failed:
                timeline.left(max(at, float(self._ends[worker])))
            timeline.close()
            values = {"worker": worker, "incarnation": 0, "dead": worker in failed}
            self._metrics.write("left", time=at, step=len(self.commits) - 1, **values)
        self._metrics.close()


def exchange_spans(begins: Any, ends: Any, clocks: Any) -> Iterator[tuple[int, Kind, float, float]]:
    """What peers did in a step that each began, computed to its end, and then exchanged until its clock's time.

    A worker waits for the slowest first.
    """
    last = float(np.max(ends))
    for worker, (begin, end, clock) in enumerate(zip(begins.tolist(), ends.tolist(), clocks.tolist(), strict=True)):
        waited = min(clock, max(last, end)) if clock > end else end
        yield worker, Kind.COMPUTING, begin, end
        yield worker, Kind.WAITING, end, waited
        yield worker, Kind.EXCHANGING, waited, clock
