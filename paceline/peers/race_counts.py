"""Counts of what workers do to each other in shared memory: torn reads and lost updates."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

NUM_PROBES = 1024  # elements that stand for all
_BEGAN, _ENDED, _TORN, _BETWEEN, _MOST = range(5)  # in a worker's words


class RaceCounts:
    """Counts of one worker, in ``slots`` of words that all workers read and only their owner writes.

    A read lasts from the start of a step to its update. It is *torn* if another worker's update overlaps it.

    Updates that are *lost* cannot be seen in the parameters. So every update adds 1 to each of the ``probes``,
    which lie beside them, in the same unprotected way. What they lack in the end, against the updates in the slots, was
    lost.
    """

    def __init__(self, slots: Sequence[memoryview], rank: int, probes: Tensor) -> None:
        self._slots, self._own, self._probes = slots, slots[rank], probes
        self._others = [slot for slot in slots if slot is not self._own]
        self._ended: int | None = None  # updates of the others when this worker began to read

    def begin(self, nobody_from: int) -> None:
        """The owner of a slot may have died in an update; from this rank on slots have no owner."""
        for slot in [self._own, *self._slots[nobody_from:]]:
            slot[_ENDED] = slot[_BEGAN]
        self._others = [slot for slot in self._slots[:nobody_from] if slot is not self._own]
        self._ended = None

    def read(self) -> None:
        """This worker begins to read, unless it does so already."""
        if self._ended is None:
            self._ended = sum(slot[_ENDED] for slot in self._others)

    def write(self) -> None:
        """This worker has read, and begins an update."""
        own = self._own
        if self._ended is not None:
            between = sum(slot[_BEGAN] for slot in self._others) - self._ended
            own[_TORN] += between > 0
            own[_BETWEEN] += between
            own[_MOST] = max(own[_MOST], between)
        self._ended = None
        own[_BEGAN] += 1
        self._probes.add_(1.0)

    def wrote(self) -> None:
        """The update is made, or left out."""
        self._own[_ENDED] = self._own[_BEGAN]

    def give_up(self) -> None:
        """The step has failed, before its update."""
        self._ended = None

    def told(self) -> dict[str, float]:
        """The counts of all workers so far, for people; lost updates are estimated."""
        updates, torn, between = (sum(slot[word] for slot in self._slots) for word in (_BEGAN, _TORN, _BETWEEN))
        lost = max(0.0, updates - float(self._probes.mean()))
        most = max(slot[_MOST] for slot in self._slots)
        return {"updates": updates, "torn": torn, "between": between, "most_between": most, "lost": lost}
