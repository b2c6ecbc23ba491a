"""What Ctrl-C does to a command: it ends the process at once, until there is something to tell or save before the end.

Python's own answer, an exception wherever the program stands, does not do while modules are imported: torch and numpy
swallow it there, make another error of it, or abort.
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
    """Say so in one line and end the process, whatever it is doing."""
    with contextlib.suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}paceline: interrupted\n".encode())
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def answered(answer: Callable[..., Any], *signals: signal.Signals) -> Iterator[None]:
    """Let these signals call ``answer`` inside the block; those that this process was started to ignore it ignores."""
    heard = [number for number in signals if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, answer) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopRequest:
    """The first SIGINT or SIGTERM, kept in ``asked`` for a loop to grant at a good moment; the next interrupts at once.

    It replaces Python's own handlers alone, from the first ``hear`` to the last ``leave``: a signal that the program
    ignores or handles itself is left to it. Processes forked meanwhile have Python's handlers.
    """

    def __init__(self) -> None:
        self.asked = False
        self._hearers = 0
        self._before: dict[int, Any] = {}
        self._process = os.getpid()

    def hear(self) -> None:
        """Answer the signals from now on; each call wants a ``leave``."""
        self._hearers += 1
        if self._hearers == 1:
            self.asked = False
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self._process = os.getpid()
        pythons = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
        for number, handler in pythons.items():
            if signal.getsignal(number) == handler:
                self._before[number] = signal.signal(number, self._answer)

    def leave(self) -> None:
        """Put the handlers back, unless others still want to hear, or another has put in its own."""
        self._hearers -= 1
        if self._hearers == 0 and threading.current_thread() is threading.main_thread():
            self._put_back()

    @contextlib.contextmanager
    def heard(self) -> Iterator[Self]:
        """Answer the signals inside the block."""
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
            self.asked = True


OF_SESSIONS = StopRequest()  # one for all of a process: a signal means them all


class Interrupts:
    """SIGINT and SIGTERM during a study; ``asked`` holds those that have come, for a loop to look at.

    At first they end the process. While a loop runs that looks at ``asked``, only the second one breaks into what it
    is doing. While the results are shown they change nothing any more.
    """

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._stage: Literal["start", "loop", "results"] = "start"

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Answer the signals inside the block."""
        with answered(self._answer, signal.SIGINT, signal.SIGTERM):
            try:
                yield
            finally:
                with contextlib.suppress(OSError):  # Python will try again, and tell
                    sys.stdout.flush()

    @contextlib.contextmanager
    def collected(self) -> Iterator[Sequence[int]]:
        """Run the loop in this block; gives ``asked``. What is behind the block shows the results."""
        self._stage = "loop"
        try:
            yield self.asked
        finally:
            self.show_results()

    def show_results(self) -> None:
        """Hold out from now on: this takes seconds, and nobody wants half of a table."""
        self._stage = "results"

    def _answer(self, number: int, _: object) -> None:
        self.asked.append(number)
        if self._stage == "start":
            end_at_once()
        if self._stage == "loop" and len(self.asked) == 2:
            raise KeyboardInterrupt
