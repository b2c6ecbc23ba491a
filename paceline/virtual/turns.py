"""Threads that take turns: exactly one of them runs at any time, in an order that never varies."""

from __future__ import annotations

import threading
from collections.abc import Callable

from paceline.errors import CommError


class _Abandoned(BaseException):
    """Ends a thread whose run has failed elsewhere; no handler of an ``Exception`` keeps it alive."""


class Turns:
    """Run a function on ``workers`` threads, of which one runs until it waits or ends; then the next ready one runs.

    Every result is therefore the same in every run. If a thread fails, the others are ended and its error is raised.
    If all wait, none can go on, and the error says what each waits for.
    """

    def __init__(self, workers: int) -> None:
        self._gates = [threading.Lock() for _ in range(workers)]  # each held, except by the thread whose turn it is
        self._ready: list[Callable[[], bool]] = [lambda: True] * workers
        self._waits_for = [""] * workers
        self._ended = [False] * workers
        self._over = threading.Lock()
        self._failure: BaseException | None = None
        self._meetings = self._met = 0

    def run(self, work: Callable[[int], None]) -> None:
        """Call ``work(rank)`` on every thread and return when all have ended; raise the error of the first to fail."""
        for lock in (*self._gates, self._over):
            lock.acquire()
        ranks = range(len(self._gates))
        threads = [threading.Thread(target=self._work, args=(work, rank), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        self._gates[0].release()
        try:
            self._over.acquire()
        except BaseException as error:  # Ctrl-C: the thread whose turn it is ends when it next waits
            self._failure = self._failure or error
            self._over.acquire()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let the others run until ``ready()``; ``what`` is waited for, as in "the all-reduce number 3"."""
        if self._failure is None and ready():
            return
        self._ready[rank], self._waits_for[rank] = ready, what
        self._pass_on(rank)
        self._gates[rank].acquire()
        self._ready[rank] = lambda: True
        if self._failure is not None:
            raise _Abandoned

    def meet(self, rank: int, then: Callable[[], None]) -> None:
        """Wait until all threads are here; the last one calls ``then`` before any goes on."""
        meeting = self._meetings
        self._met += 1
        if self._met == len(self._gates):
            then()
            self._met, self._meetings = 0, meeting + 1
        self.wait(rank, lambda: self._meetings > meeting, f"the others, after meeting {meeting} times")

    def _work(self, work: Callable[[int], None], rank: int) -> None:
        self._gates[rank].acquire()
        try:
            if self._failure is None:
                work(rank)
        except _Abandoned:
            pass
        except BaseException as error:
            self._failure = self._failure or error
        self._ended[rank] = True
        self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        """Let the next thread run that can: after a failure any, to end."""
        count = len(self._gates)
        for place in range(rank + 1, rank + count + 1):
            other = place % count
            if not self._ended[other] and (self._failure is not None or self._ready[other]()):
                self._gates[other].release()
                return
        waiting = [other for other in range(count) if not self._ended[other]]
        if not waiting:
            self._over.release()
            return
        self._failure = CommError(f"the workers wait for each other: {self._standstill(waiting)}")
        self._gates[waiting[0]].release()

    def _standstill(self, waiting: list[int]) -> str:
        shown = [f"worker {rank} for {self._waits_for[rank]}" for rank in waiting[:4]]
        return "; ".join([*shown, *(["..."] if len(waiting) > 4 else [])])
