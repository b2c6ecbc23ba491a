"""Runs calls that wait for the network one after the other, on a thread that may be abandoned."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from paceline.errors import CommError

_A_MOMENT = 0.5  # seconds


class Calls:
    """Runs functions in the order of ``submit`` until one fails; all later ones then fail with the same error.

    Unlike an executor's, the thread may be abandoned in a long call when the group is closed or the process ends. When
    the thread ends it calls ``at_end``.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"paceline group {name}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run ``call`` when those before it are done."""
        future: Future[None] = Future()
        if os.getpid() != self._process:
            future.set_exception(CommError("the group belongs to the process that this one was forked from"))
            return future
        with self._changed:
            if self._failure is not None:
                future.set_exception(self._failure)
            else:
                self._calls.append((call, future))
                self._changed.notify()
        return future

    def fail(self, failure: BaseException) -> None:
        """Fail all calls with this error, also the one under way, whose thread may still be busy."""
        if os.getpid() != self._process:  # forked: the thread does not exist here, and may have held the lock
            return
        with self._changed:
            self._failure = self._failure or failure
            for _, future in self._calls:
                future.set_exception(self._failure)
            self._calls.clear()
            self._changed.notify()

    def leave(self) -> None:
        """Give the thread a moment to end, after ``fail``."""
        if self._thread is not threading.current_thread():
            self._thread.join(_A_MOMENT)

    def _run(self) -> None:
        while self._run_next():
            pass
        self._at_end()

    def _run_next(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._calls or self._failure)
            if self._failure is not None:
                return False
            call, future = self._calls[0]
        try:
            call()
        except BaseException as failure:
            self.fail(failure)
            return False
        with self._changed:
            if self._failure is None:
                self._calls.popleft()
                future.set_result(None)
        return True
