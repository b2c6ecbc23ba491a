"""The number of threads that is fastest for a problem on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable

# Fewer updates than these are over before a second thread has begun.
WORTH_THREADS = 10_000
TRIAL = 50_000
ROUNDS = 3


def fastest_threads(items: int, trial: Callable[[int, int], float]) -> int:
    """The fastest of 1, 2, 4, ... threads up to the cores; ``trial(threads, updates)`` gives the seconds of each."""
    candidates = numbers_of_threads(len(os.sched_getaffinity(0)))
    if items < WORTH_THREADS or len(candidates) == 1:
        return 1
    seconds = {threads: min(trial(threads, TRIAL) for _ in range(ROUNDS)) for threads in candidates}
    return min(candidates, key=seconds.__getitem__)


def numbers_of_threads(cores: int) -> list[int]:
    """The numbers to try.

    >>> numbers_of_threads(6)
    [1, 2, 4, 6]
    """
    powers = [1 << power for power in range(cores.bit_length()) if 1 << power < cores]
    return [*powers, cores]
