"""The workers of one host, and perhaps the server, as processes: started, heard, signalled and ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.launch.environment import REPORT_DESCRIPTOR
from paceline.launch.failures import Life
from paceline.launch.reaper import Reaper, sweep
from paceline.launch.streams import Copier, Screen

_TICK = 0.05  # seconds between looks at the processes


class WorkerProcess:
    """One of the crew: a process that leads a session and group of its own, and the threads that read its pipes."""

    def __init__(
        self,
        life: Life,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        descriptors: Sequence[int],
        prefix: str,
        screen: Screen,
        heard: Callable[[Life, dict[str, Any]], None],
    ) -> None:
        reading, writing = os.pipe()
        # Inherited: an interrupt waits until the worker is ready for it, rather than hit Python's own start.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.launch.worker", *command],
                env={**environment, REPORT_DESCRIPTOR: str(writing)},
                stdin=subprocess.DEVNULL if prefix else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(writing, *descriptors),
                start_new_session=True,
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        self.life = life
        assert self.process.stdout is not None and self.process.stderr is not None
        self.copiers = [
            Copier(self.process.stdout, screen, "stdout", prefix=prefix),
            Copier(self.process.stderr, screen, "stderr", prefix=prefix),
        ]
        self.listener = threading.Thread(target=self._listen, args=(reading, heard), daemon=True)
        try:
            for thread in (*self.copiers, self.listener):
                thread.start()
        except RuntimeError:  # no more threads to be had
            self.process.kill()
            raise

    def _listen(self, descriptor: int, heard: Callable[[Life, dict[str, Any]], None]) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            for line in pipe:
                try:
                    report = json.loads(line)
                except ValueError:  # cut off by the worker's death
                    continue
                if isinstance(report, dict) and {"event", "at"} <= report.keys():
                    heard(self.life, report)


class Processes:
    """All processes of a run; leaving its ``with`` block leaves none behind."""

    def __init__(self, on_report: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        self.screen = Screen()
        self._on_report = on_report
        # Not a SimpleQueue: its get(timeout) waits for ever if a signal comes and handling it takes longer than that.
        self._reports: queue.Queue[tuple[Life, dict[str, Any]]] = queue.Queue()
        self._lives: dict[int, Life] = {}  # the latest of each rank
        self._members: list[WorkerProcess] = []
        self._sweepers: list[threading.Thread] = []
        self._reaper = Reaper()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        self._on_report = None  # nothing it raises may keep us from ending
        self.kill()
        for sweeper in self._sweepers:
            sweeper.join()
        copiers = [copier for member in self._members for copier in member.copiers]
        for copier in copiers:
            copier.finish()
        for copier in copiers:
            copier.join()
        self._reaper.dismiss()

    def start(
        self,
        life: Life,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        descriptors: Sequence[int] = (),
        prefix: str = "",
    ) -> None:
        """Start a process, in the place of an earlier one of its rank; only one without a prefix has our input.

        The calling thread must outlive it: to the kernel it is the parent that the process dies with.
        """
        member = WorkerProcess(
            life,
            command,
            environment,
            descriptors=descriptors,
            prefix=prefix,
            screen=self.screen,
            heard=lambda life, report: self._reports.put((life, report)),
        )
        self._reaper.watch(member.process.pid)
        self._lives[life.rank] = life
        self._members.append(member)

    @property
    def lives(self) -> list[Life]:
        return list(self._lives.values())

    @property
    def running(self) -> list[WorkerProcess]:
        return [member for member in self._members if member.life.code is None]

    def wait(self, seconds: float = _TICK, *, until: Callable[[], bool] = lambda: False) -> None:
        """Take in reports and endings for a while, or until all have ended or ``until`` says so."""
        deadline = time.monotonic() + seconds
        while self.running and not until() and (left := deadline - time.monotonic()) > 0:
            self._hear(min(_TICK, left))
            self._reap()

    def signal(self, number: int) -> None:
        """Send a signal to each running process; what becomes of its children is that process's business."""
        for member in self.running:
            member.process.send_signal(number)

    def kill(self, which: Callable[[Life], bool] = lambda _: True) -> None:
        """End the running processes, or some of them, at once."""
        while chosen := [member for member in self.running if which(member.life)]:
            for member in chosen:
                member.process.kill()
            self.wait(until=lambda: not any(which(member.life) for member in self.running))

    def _hear(self, seconds: float) -> None:
        """Wait for a report, and take in all that have come."""
        with contextlib.suppress(queue.Empty):
            self._take_in(*self._reports.get(timeout=seconds))
            for _ in range(self._reports.qsize()):  # and not those that come meanwhile: there is more to do
                self._take_in(*self._reports.get_nowait())

    def _take_in(self, life: Life, report: dict[str, Any]) -> None:
        life.hear(report)
        if self._on_report is not None:
            self._on_report(life.rank, report)

    def _reap(self) -> None:
        """Notice which processes have ended, end their children, and take in their last reports before that."""
        ended = [member for member in self.running if member.process.poll() is not None]
        if not ended:
            return
        now = time.time()
        self._sweepers.append(threading.Thread(target=self._sweep, args=(ended,)))
        self._sweepers[-1].start()
        for member in ended:
            member.listener.join(timeout=1)
        self._hear(0)
        for member in ended:
            member.life.code = member.process.returncode
            member.life.ended_at = now

    def _sweep(self, ended: Sequence[WorkerProcess]) -> None:
        """End the children of processes that have ended; the others need not wait for it."""
        sweep(member.process.pid for member in ended)
        for member in ended:
            self._reaper.forget(member.process.pid)
