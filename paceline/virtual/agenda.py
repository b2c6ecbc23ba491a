"""The event queue of the virtual clock: a heap of batches of events, each batch sorted by time.

Workers that begin together are one batch, which is sorted once and is one entry of the heap. So sending parameters to
ten thousand workers costs one sort and one entry.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Times = npt.NDArray[np.float64]

_NONE = -1


@dataclass(slots=True, eq=False)
class StepEnds:
    """Workers that began the same step together, on parameters of one version, in the order of their ends."""

    times: list[float]
    workers: list[int]
    step: int
    version: int
    alive: int  # number of workers that have neither ended nor been cancelled
    call: Callable[[float], None] | None = None  # for a single event that is not the end of a step
    given: int = 0  # number of ends already yielded


Event = tuple[float, int, StepEnds]


class Agenda:
    """Yield the ends of steps and requested calls in the order of their times; events may be added in between.

    Ends at the same time come in the order of their batches, within a batch in the order of its workers.
    """

    def __init__(self, workers: int) -> None:
        self._heap: list[tuple[float, int, StepEnds]] = []
        self._batches: dict[int, StepEnds] = {}  # those in the heap, and the one being yielded
        # One int object per worker: dictionary lookups are faster when keys are the same objects.
        self._names = np.arange(workers).astype(object)
        self._under_way = np.full(workers, _NONE, dtype=np.int64)  # the number of each worker's batch
        self._next_number = 0
        self._horizon = math.inf  # the first time of the other batches

    def begin(self, ends: Times, workers: Numbers, step: int, version: int) -> None:
        """Expect the workers to end the step at these times."""
        order = np.argsort(ends)
        if not np.all(np.diff(ends[order])):  # ties, which the faster sort leaves in any order
            order = np.argsort(ends, kind="stable")
        self._under_way[workers] = self._next_number
        self._add(StepEnds(ends[order].tolist(), self._names[workers[order]].tolist(), step, version, len(workers)))

    def begin_one(self, end: float, worker: int, step: int, version: int) -> None:
        """Expect one worker to end the step at that time."""
        self._under_way[worker] = self._next_number
        self._add(StepEnds([end], [worker], step, version, 1))

    def call(self, at: float, what: Callable[[float], None]) -> None:
        """Add an event at that time whose batch has this call; it cannot be cancelled."""
        self._add(StepEnds([at], [_NONE], 0, 0, 1, what))

    def cancel(self, workers: Numbers) -> Numbers:
        """Cancel the workers' present steps; return the workers whose steps had not ended."""
        running: Numbers = workers[self._under_way[workers] != _NONE]
        numbers, counts = np.unique(self._under_way[running], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            self._batches[number].alive -= count
        self._under_way[running] = _NONE
        return running

    def _add(self, batch: StepEnds) -> None:
        first, number = batch.times[0], self._next_number
        self._next_number += 1
        self._batches[number] = batch
        heapq.heappush(self._heap, (first, number, batch))
        self._horizon = min(self._horizon, first)

    def __iter__(self) -> Iterator[Event]:
        """Yield each event: its time, its worker and its batch; stop when no event is left."""
        heap, under_way = self._heap, self._under_way
        while heap:
            _, number, batch = heapq.heappop(heap)
            self._horizon = heap[0][0] if heap else math.inf
            while batch.alive:
                given = batch.given
                at, worker = batch.times[given], batch.workers[given]
                if at > self._horizon:
                    heapq.heappush(heap, (at, number, batch))
                    break
                batch.given = given + 1
                if worker != _NONE:
                    if under_way[worker] != number:
                        continue
                    under_way[worker] = _NONE
                batch.alive -= 1
                yield at, worker, batch
            else:
                del self._batches[number]

    def take(self, batch: StepEnds, most: int) -> list[int]:
        """Take the workers of the next ends, at most ``most``, up to the next event of another batch.

        ``batch`` is that of the last event. The list is empty if some of its steps were cancelled.
        """
        first = batch.given
        last = min(first + most, bisect.bisect_right(batch.times, self._horizon, first))
        if last <= first or batch.alive != len(batch.times) - first:
            return []
        batch.given = last
        batch.alive -= last - first
        workers = batch.workers[first:last]
        self._under_way[workers] = _NONE
        return workers
