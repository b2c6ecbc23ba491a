"""Ends what workers leave behind, and the workers themselves when their supervisor is killed.

This file is also a program of its own: the supervisor starts it, tells it the workers' process groups and keeps
the pipe to it open. When the pipe closes, however the supervisor ended, the groups it still knows are ended. It
imports nothing of the package, so that it is there long before the first worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

_PATIENCE = 0.3  # seconds for processes to go by themselves
_PATIENCE_WITH_TRACKERS = 3.0  # for resource trackers, which may be just starting on a busy machine


def sweep(groups: Iterable[int]) -> None:
    """End all processes of these groups: SIGTERM, and SIGKILL for what is left after a moment.

    Resource trackers of ``multiprocessing`` are given longer: they ignore SIGTERM, and unlink the shared memory of the
    others once these are gone.
    """
    terminated = {group for group in groups if _signal_group(group, signal.SIGTERM)}
    stubborn = _wait_until_gone(terminated, _PATIENCE)
    tracked = {group for group in stubborn if _kill_all_but_trackers(group)}
    for group in _wait_until_gone(tracked, _PATIENCE_WITH_TRACKERS):
        _signal_group(group, signal.SIGKILL)


def _wait_until_gone(groups: set[int], seconds: float) -> set[int]:
    """Wait for groups to become empty; return those that are not."""
    deadline = time.monotonic() + seconds
    while groups and time.monotonic() < deadline:
        time.sleep(0.005)
        groups = {group for group in groups if _signal_group(group, 0)}
    return groups


def _kill_all_but_trackers(group: int) -> bool:
    """Kill the processes of a group, save resource trackers (known on Linux only); whether there are any of these."""
    members = list(_members(group))
    trackers = [process for process, command in members if b"multiprocessing.resource_tracker" in command]
    if not trackers:
        _signal_group(group, signal.SIGKILL)
    for process in {process for process, _ in members} - set(trackers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return bool(trackers)


def _members(group: int) -> Iterator[tuple[int, bytes]]:
    """The processes of a group and their command lines, as far as /proc tells."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (directory / "stat").read_text().rpartition(")")[2].split()  # a name may hold anything before
            if int(fields[2]) == group:
                yield int(directory.name), (directory / "cmdline").read_bytes()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal (0: none) to a process group; whether there was a process in it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS answers with the second if all are zombies
        return False
    return True


class Reaper:
    """The supervisor's end: start the guard, tell it of process groups, dismiss it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that a Ctrl-C in the terminal does not reach it
        )

    def watch(self, group: int) -> None:
        """End this group if the supervisor is gone before ``forget``."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """This group has ended."""
        self._tell(f"-{group}\n")

    def dismiss(self) -> None:
        """Let the guard go; it ends the groups not forgotten first."""
        self._tell(".\n")  # closing the pipe is not enough if some forked process has a copy of our end
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody killed the guard: the run is worth more
            os.write(self._process.stdin.fileno(), line.encode())


def _stand_guard() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        match line[0]:
            case "+":
                groups.add(int(line[1:]))
            case "-":
                groups.discard(int(line[1:]))
            case _:
                break
    sweep(groups)


if __name__ == "__main__":
    _stand_guard()
