"""Ends the children that workers leave behind, and the workers themselves when their supervisor is killed.

This file is also a program. The supervisor starts it, tells it the workers' process groups and keeps the pipe to it
open. The pipe closes when the supervisor ends, in whatever way; then the reaper ends the groups that it still knows.
It imports nothing of the package, so it is ready before the first worker.
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

_PATIENCE = 0.3  # seconds from SIGTERM to SIGKILL
_PATIENCE_WITH_TRACKERS = 3.0  # for resource trackers, which may still be starting on a busy machine


def sweep(groups: Iterable[int]) -> None:
    """End all processes of these groups: SIGTERM, and after a moment SIGKILL for the rest.

    Resource trackers of ``multiprocessing`` get longer: they ignore SIGTERM, and unlink the shared memory of the
    other processes once these have ended.
    """
    terminated = {group for group in groups if _signal_group(group, signal.SIGTERM)}
    stubborn = _wait_until_gone(terminated, _PATIENCE)
    tracked = {group for group in stubborn if _kill_all_but_trackers(group)}
    for group in _wait_until_gone(tracked, _PATIENCE_WITH_TRACKERS):
        _signal_group(group, signal.SIGKILL)


def _wait_until_gone(groups: set[int], seconds: float) -> set[int]:
    """Wait for groups to become empty; return those that did not."""
    deadline = time.monotonic() + seconds
    while groups and time.monotonic() < deadline:
        time.sleep(0.005)
        groups = {group for group in groups if _signal_group(group, 0)}
    return groups


def _kill_all_but_trackers(group: int) -> bool:
    """Kill the processes of a group except resource trackers (known on Linux only); return whether it has such."""
    members = list(_members(group))
    trackers = [process for process, command in members if b"multiprocessing.resource_tracker" in command]
    if not trackers:
        _signal_group(group, signal.SIGKILL)
    for process in {process for process, _ in members} - set(trackers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return bool(trackers)


def _members(group: int) -> Iterator[tuple[int, bytes]]:
    """The processes of a group and their command lines, from /proc."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (directory / "stat").read_text().rpartition(")")[2].split()  # a name may hold anything before
            if int(fields[2]) == group:
                yield int(directory.name), (directory / "cmdline").read_bytes()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal (0: none) to a process group; return whether it has a process."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS raises the second if all are zombies
        return False
    return True


class Reaper:
    """Starts the reaper process, and tells it which process groups to end."""

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
        """End the reaper; it first ends the groups that were not forgotten."""
        self._tell(".\n")  # closing the pipe is not enough if a forked process has a copy of our end
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the run goes on if somebody killed the reaper
            os.write(self._process.stdin.fileno(), line.encode())


def _reap_when_told() -> None:
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
    _reap_when_told()
