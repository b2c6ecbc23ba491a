"""Runs small scripts under the supervisor, and finds the processes that they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import textwrap
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE, MARK, living, wait_until_gone

import paceline
from paceline.launch import reaper as guard
from paceline.launch import supervisor
from paceline.launch.supervisor import supervise

PROLOGUE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from paceline.launch.reports import report
rank = int(os.environ.get("RANK", -1))
def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.005)
def sleep():
    while True:
        time.sleep(1)
"""
Reports = Callable[[int, dict[str, Any]], None]


@dataclass
class Ended:
    code: int
    out: str
    err: str


@dataclass
class Bench:
    """A directory for scripts, and a mark in the environment by which their processes are found."""

    directory: Path
    capture: pytest.CaptureFixture[str]
    mark: str

    @property
    def environment(self) -> dict[str, str]:
        packages = str(Path(paceline.__file__).parent.parent)
        return {**os.environ, "PYTHONPATH": packages, MARK: self.mark}

    def script(self, source: str, *, prologue: bool = True) -> str:
        path = self.directory / "script.py"
        path.write_text((PROLOGUE if prologue else "") + textwrap.dedent(source))
        return str(path)

    def run(self, source: str, workers: int = 2, *, on_report: Reports | None = None, **options: Any) -> Ended:
        script = self.script(source)
        code = supervise([script], workers=workers, environment=self.environment, on_report=on_report, **options)
        return Ended(code, *self.capture.readouterr())

    def processes(self) -> list[int]:
        """The living processes that carry the mark."""
        return living(self.mark)


@contextlib.contextmanager
def workbench(directory: Path, capture: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A bench in its own directory; it is an error to leave processes behind on it."""
    monkeypatch.chdir(directory)
    bench = Bench(directory, capture, uuid.uuid4().hex)
    # A machine may hold up any process for longer than a user's patience.
    monkeypatch.setattr(supervisor, "_TIME_TO_SAVE", DEADLINE)
    monkeypatch.setattr(guard, "_PATIENCE_WITH_TRACKERS", DEADLINE)
    yield bench
    left = wait_until_gone(bench.mark, seconds=10)  # those killed last may still be going
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "processes were left behind"


def when_all_say(event: str, workers: int | Iterable[int], action: Callable[[], None]) -> Reports:
    """Do something once each of so many workers, or of these, has reported an event."""
    waiting = set(range(workers) if isinstance(workers, int) else workers)

    def hear(rank: int, report: dict[str, Any]) -> None:
        if report["event"] == event and rank in waiting:
            waiting.remove(rank)
            if not waiting:
                action()

    return hear
