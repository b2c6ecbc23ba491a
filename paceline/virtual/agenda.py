"""What happens next on the virtual clock: a heap of batches of events, each batch in the order of its times.

Workers that begin together are one batch: it is sorted once, and enters and leaves the heap as one, so that ten
thousand workers that are sent parameters cost one sort and one entry.
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
    """Workers that began the same step together, on parameters of one version, in the order in which they end it."""

    times: list[float]
    workers: list[int]
    step: int
    version: int
    alive: int  # have neither ended nor been cancelled
    call: Callable[[float], None] | None = None  # of a single event that is no end of a step
    given: int = 0  # how many have been given


Event = tuple[float, int, StepEnds]


class Agenda:
    """Give the ends of steps, and calls asked for, in the order of their times; what is added in between counts.

    Ends at the same time come in the order of the batches, and in a batch in that of its workers.
    """

    def __init__(self, workers: int) -> None:
        self._heap: list[tuple[float, int, StepEnds]] = []
        self._batches: dict[int, StepEnds] = {}  # those in the heap, and the one being given
        # One object for each worker's number: dictionaries find their keys faster when they are the same objects.
        self._names = np.arange(workers).astype(object)
        self._under_way = np.full(workers, _NONE, dtype=np.int64)  # the number of each worker's batch
        self._next_number = 0
        self._horizon = math.inf  # when the first batch behind the one being given begins

    def begin(self, ends: Times, workers: Numbers, step: int, version: int) -> None:
        """Expect the workers to end the step at these times."""
        order = np.argsort(ends)
        if not np.all(np.diff(ends[order])):  # ties, which the quicker sort leaves in no order
            order = np.argsort(ends, kind="stable")
        self._under_way[workers] = self._next_number
        self._add(StepEnds(ends[order].tolist(), self._names[workers[order]].tolist(), step, version, len(workers)))

    def begin_one(self, end: float, worker: int, step: int, version: int) -> None:
        """Expect one worker to end the step at that time."""
        self._under_way[worker] = self._next_number
        self._add(StepEnds([end], [worker], step, version, 1))

    def call(self, at: float, what: Callable[[float], None]) -> None:
        """Give an event whose batch has this call, at that time; it cannot be cancelled."""
        self._add(StepEnds([at], [_NONE], 0, 0, 1, what))

    def cancel(self, workers: Numbers) -> Numbers:
        """Expect the steps that the workers are on to end no more; gives those whose had not ended already."""
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
        """Give the next event: its time, its worker and its batch; ends when nothing is expected any more."""
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
        """Give at once up to so many of the workers whose ends come next; none if other events come between.

        ``batch`` is that of the event given last. None are given either if some of its steps were cancelled.
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
