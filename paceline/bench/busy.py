"""Busy loops during a measurement: processes that use a core all the time, like other programs of the host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from paceline.errors import UsageError

# It ends when its parent has ended, so nothing is left behind after Ctrl-C or a kill.
LOOP = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run this many loops inside the block, and end them after it."""
    if count < 0:
        raise UsageError(f"--busy must be at least 0, got {count}")
    loops: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            loops.append(_start())
        yield loops
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def _start() -> subprocess.Popen[bytes]:
    # In its own session: the kernel first divides the cores among sessions, and workers have their own too.
    command = [sys.executable, "-I", "-S", "-c", LOOP, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
