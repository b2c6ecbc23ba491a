"""The number of threads that is fastest for a problem on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable

# Fewer updates than these are over before a second thread has begun.
WORTH_THREADS = 10_000
FIRST_TRIAL, LONGEST_TRIAL = 64, 50_000  # updates
SECONDS = 0.3  # of all trials, about


def fastest_threads(items: int, trial: Callable[[int, int], float]) -> int:
    """The fastest of 1, 2, 4, ... threads up to the cores; ``trial(threads, updates)`` gives the seconds of each."""
    candidates = numbers_of_threads(len(os.sched_getaffinity(0)))
    if items < WORTH_THREADS or len(candidates) == 1:
        return 1
    share = SECONDS / len(candidates)
    return max(candidates, key=lambda threads: _speed(lambda updates: trial(threads, updates), share))


def _speed(trial: Callable[[int], float], seconds: float) -> float:
    """The updates a second of the best of longer and longer trials, while the next is likely to fit into the time."""
    updates, best, spent, next_takes = FIRST_TRIAL, 0.0, 0.0, 0.0
    while spent + next_takes <= seconds:
        took = trial(updates)
        spent += max(took, seconds / 100)  # what is around a trial takes time too
        best = max(best, updates / max(took, 1e-9))
        longer = min(4 * updates, LONGEST_TRIAL)
        updates, next_takes = longer, took * longer / updates
    return best


def numbers_of_threads(cores: int) -> list[int]:
    """The numbers to try.

    >>> numbers_of_threads(6)
    [1, 2, 4, 6]
    """
    powers = [1 << power for power in range(cores.bit_length()) if 1 << power < cores]
    return [*powers, cores]
