"""The mini-batches of a run, leased to workers by number, so that an epoch uses each exactly once."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paceline.data.sampler import Last, ShardedSampler
from paceline.errors import UsageError

_ROUND = -1  # in place of a worker: the batches are leased to the present round


class RoundBatch(NamedTuple):
    """A batch of a round."""

    epoch: int
    number: int
    examples: int


class WorkQueue:
    """Lease mini-batches to workers, the smallest number first; batches that were not used are leased again.

    The batches of all epochs are numbered consecutively; ``take`` returns them as epoch and number in it.

    >>> queue = WorkQueue()
    >>> queue.describe(num_samples=5, batch_size=2, last="short", shuffle=True)
    >>> queue.take(worker=0, epochs=1), queue.take(worker=1, epochs=1)
    ((0, 0), (0, 1))
    >>> queue.give_back(worker=0)
    >>> queue.take(worker=1, epochs=1)
    (0, 0)
    """

    def __init__(self) -> None:
        self._data: ShardedSampler | None = None  # for one worker, so that its steps are the batches
        self._next = 0  # the first batch that was never handed out
        self._returned: list[int] = []  # a heap
        self._leases: dict[int, list[int]] = {}  # worker, or the round -> the batches of its step
        self._pushed: dict[tuple[int, int], list[int]] = {}  # (worker, step) -> batches of a push not committed yet
        self._round = -1  # the number of the last round
        self._spoilt: set[int] = set()  # batches of it that are not handed out again

    def describe(self, num_samples: int, batch_size: int, last: Last, shuffle: bool) -> None:
        """Describe the data; all later descriptions must equal the first."""
        data = ShardedSampler(num_samples, batch_size, last=last, shuffle=shuffle)
        if self._data is None:
            self._data = data
        elif data != self._data:
            raise UsageError(
                f"all workers of a run must have the same data; first it was {_told(self._data)}, now {_told(data)}; "
                "give all of them the same data set, batch size and options, and a resumed run those that it had"
            )

    def take(self, worker: int, epochs: int) -> tuple[int, int] | None:
        """Lease to the worker a batch of the epochs below ``epochs``, as its epoch and number; None if none is free.

        Leased batches may still be given back; ``finished`` says whether all are used.
        """
        taken = self._take(worker, epochs)
        return None if taken is None else divmod(taken, self._batches_per_epoch())

    def _take(self, worker: int, epochs: int) -> int | None:
        first = self._returned[0] if self._returned else self._next
        if first >= epochs * self._batches_per_epoch():
            return None
        if self._returned:
            heapq.heappop(self._returned)
        else:
            self._next += 1
        self._leases.setdefault(worker, []).append(first)
        return first

    def take_round(self, number: int, size: int, epochs: int) -> list[RoundBatch]:
        """Lease ``size`` batches, or all that are free, to a round, whose workers share them.

        Once a round has batches, they are the same at every call. A round before it has come to nothing.

        >>> queue = WorkQueue()
        >>> queue.describe(num_samples=5, batch_size=2, last="short", shuffle=True)
        >>> [batch.examples for batch in queue.take_round(0, size=4, epochs=1)]
        [2, 2, 1]
        >>> queue.end_round(used=True)
        5
        """
        if number != self._round:
            self.end_round(used=False)
            self._round = number
        if _ROUND not in self._leases:
            while size and self._take(_ROUND, epochs) is not None:
                size -= 1
        return [self._described(batch) for batch in self._leases.get(_ROUND, ())]

    def spoil(self, batches: Iterable[tuple[int, int]]) -> None:
        """Count batches of the present round, given as epoch and number, as used even if nothing comes of the round."""
        per_epoch = self._batches_per_epoch()
        self._spoilt |= {epoch * per_epoch + number for epoch, number in batches}

    def end_round(self, *, used: bool) -> int:
        """End the present round, whose batches are ``used`` or returned; return how many examples were used."""
        leased, spoilt = self._leases.pop(_ROUND, []), self._spoilt
        self._spoilt = set()
        if used:
            return sum(self._described(batch).examples for batch in leased)
        for batch in leased:
            if batch not in spoilt:
                heapq.heappush(self._returned, batch)
        return 0

    def _described(self, batch: int) -> RoundBatch:
        data, (epoch, number) = self._data, divmod(batch, self._batches_per_epoch())
        assert data is not None
        left = data.num_samples - number * data.batch_size
        return RoundBatch(epoch, number, data.batch_size if data.last == "pad" else min(data.batch_size, left))

    def has(self, epochs: int) -> bool:
        """Whether ``take`` would return a batch now."""
        first = self._returned[0] if self._returned else self._next
        return first < epochs * self._batches_per_epoch()

    @property
    def described(self) -> bool:
        """Whether the data was described."""
        return self._data is not None

    def use(self, worker: int) -> None:
        """Count the worker's leased batches as used, without a push."""
        self._leases.pop(worker, None)

    def push(self, worker: int, step: int) -> None:
        """Count the worker's leased batches as used by its accepted push, which waits for its commit."""
        self._pushed[worker, step] = self._leases.pop(worker, [])

    def commit(self, pushes: Iterable[tuple[int, int]]) -> None:
        """Record that the pushes of these workers and steps are committed."""
        for push in pushes:
            del self._pushed[push]

    def give_back(self, worker: int) -> None:
        """Take back the worker's leased batches: its step was cancelled, or it has left."""
        for batch in self._leases.pop(worker, ()):
            heapq.heappush(self._returned, batch)

    def finished(self, epochs: int) -> bool:
        """Whether all batches of the epochs below ``epochs`` are used."""
        return epochs <= 0 or (self._data is not None and self._first_unused() >= epochs * self._batches_per_epoch())

    @property
    def epoch(self) -> int:
        """The epoch of the oldest batch that is not used yet."""
        return 0 if self._data is None else self._first_unused() // self._batches_per_epoch()

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values; batches that are leased, or pushed and not committed, count as unused."""
        data = self._data
        return {
            "data": data and [data.num_samples, data.batch_size, data.last, data.shuffle],
            "next": self._next,
            "unused": sorted([*self._unused(), *(batch for batches in self._pushed.values() for batch in batches)]),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load the result of ``state_dict``; present leases are forgotten."""
        if saved["data"] is not None:
            self.describe(*saved["data"])
        self._next = saved["next"]
        self._returned = sorted(saved["unused"])
        self._leases, self._pushed, self._round, self._spoilt = {}, {}, -1, set()

    def _batches_per_epoch(self) -> int:
        if self._data is None:
            raise UsageError("a batch was asked for before the data was described; describe(...) comes first")
        return self._data.steps_per_epoch

    def _first_unused(self) -> int:
        return min(self._unused(), default=self._next)

    def _unused(self) -> list[int]:
        """The batches that were given back or are leased."""
        return [*self._returned, *(batch for leases in self._leases.values() for batch in leases)]


def _told(data: ShardedSampler) -> str:
    order = "shuffled" if data.shuffle else "in order"
    return f"{data.num_samples} samples {order} in batches of {data.batch_size} (last={data.last!r})"
