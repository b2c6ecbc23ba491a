"""Handles Ctrl-C: it ends the process at once, or becomes a request to stop where results must first be saved or shown.

Python's own ``KeyboardInterrupt`` is unsuitable during imports: torch and numpy swallow it, turn it into another
error, or abort.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn, Self

INTERRUPTED = 130  # the exit code that shells give a command ended by Ctrl-C
_SHOW_CURSOR = "\r\x1b[K\x1b[?25h"  # on a line of its own: a progress bar may have hidden it


def end_at_once(*_: object) -> NoReturn:
    """Print "interrupted" and end the process, whatever it is doing."""
    with contextlib.suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}paceline: interrupted\n".encode())
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def answered(answer: Callable[..., Any], *signals: signal.Signals) -> Iterator[None]:
    """Let these signals call ``answer`` inside the block; signals that the process ignores stay ignored."""
    handled = [number for number in signals if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, answer) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """Turns the first SIGINT or SIGTERM into ``asked``, which a loop checks between steps; the next one interrupts.

    It replaces only Python's default handlers, from the first ``hear`` to the last ``leave``. Signals that the program
    ignores or handles itself stay so. Processes forked in between have Python's handlers.
    """

    def __init__(self) -> None:
        self.asked = False
        self.number = 0  # of the signal that asked
        self._hearers = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def hear(self) -> None:
        """Handle the signals from now on; each call needs a ``leave``."""
        self._hearers += 1
        if self._hearers == 1:
            self.asked, self.number = False, 0
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        pythons = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        for number, handler in pythons.items():
            if signal.getsignal(number) == handler:
                self._before[number] = signal.signal(number, self._answer)

    def leave(self) -> None:
        """Restore the handlers after the last ``leave``; handlers that the program set since then stay."""
        self._hearers -= 1
        if self._hearers == 0 and threading.current_thread() is threading.main_thread():
            self._put_back()

    @contextlib.contextmanager
    def heard(self) -> Iterator[Self]:
        """Handle the signals inside the block."""
        self.hear()
        try:
            yield self
        finally:
            self.leave()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._answer:
                signal.signal(number, handler)
        self._before = {}

    def _answer(self, number: int, _: object) -> None:
        if os.getpid() != self._process:
            self._put_back()
            signal.raise_signal(number)
        elif self.asked:
            raise KeyboardInterrupt
        else:
            self.asked, self.number = True, number


OF_SESSIONS = StopRequest()  # one for the process: a signal is meant for all its sessions


class Interrupts:
    """SIGINT and SIGTERM during a study; ``asked`` holds the received ones, for a loop to check.

    At first a signal ends the process. During the loop, only the second one interrupts. While the results are shown,
    signals have no effect.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._stage: Literal["start", "loop", "results"] = "start"

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Handle the signals inside the block."""
        with answered(self._answer, signal.SIGINT, signal.SIGTERM):
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # Python flushes again at exit, and reports the error
                    sys.stdout.flush()

    @contextlib.contextmanager
    def collected(self) -> Iterator[Sequence[int]]:
        """Run the loop in this block, which gets ``asked``; the code after it shows the results."""
        self._stage = "loop"
        try:
            yield self.asked
        finally:
            self.show_results()

    def show_results(self) -> None:
        """Ignore signals from now on, so that the results are shown whole."""
        self._stage = "results"

    def _answer(self, number: int, _: object) -> None:
        self.asked.append(number)
        if self._stage == "start":
            end_at_once()
        if self._stage == "loop" and len(self.asked) == 2:
            raise KeyboardInterrupt
