"""Starts, signals and ends the worker and server processes of one host, and collects their reports."""

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
from paceline.launch.failures import ProcessState
from paceline.launch.reaper import Reaper, sweep
from paceline.launch.streams import Copier, Output

_TICK = 0.05  # seconds between looks at the processes


class WorkerProcess:
    """A worker or server process, leader of its own session and process group, and the threads that read its pipes."""

    def __init__(
        self,
        state: ProcessState,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        descriptors: Sequence[int],
        prefix: str,
        output: Output,
        heard: Callable[[ProcessState, dict[str, Any]], None],
    ) -> None:
        reading, writing = os.pipe()
        # The worker inherits the mask, and unblocks SIGINT when it is ready for it.
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
        self.state = state
        assert self.process.stdout is not None and self.process.stderr is not None
        self.copiers = [
            Copier(self.process.stdout, output, "stdout", prefix=prefix),
            Copier(self.process.stderr, output, "stderr", prefix=prefix),
        ]
        self.listener = threading.Thread(target=self._listen, args=(reading, heard), daemon=True)
        try:
            for thread in (*self.copiers, self.listener):
                thread.start()
        except RuntimeError:  # the limit of threads is reached
            self.process.kill()
            raise

    def _listen(self, descriptor: int, heard: Callable[[ProcessState, dict[str, Any]], None]) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            for line in pipe:
                try:
                    report = json.loads(line)
                except ValueError:  # cut off by the worker's death
                    continue
                if isinstance(report, dict) and {"event", "at"} <= report.keys():
                    heard(self.state, report)


class Processes:
    """All processes of a run; the end of the ``with`` block ends them all."""

    def __init__(self, on_report: Callable[[int, dict[str, Any]], None] | None = None) -> None:
        self.output = Output()
        self._on_report = on_report
        # Not a SimpleQueue: its get(timeout) never returns if a signal handler takes longer than the timeout.
        self._reports: queue.Queue[tuple[ProcessState, dict[str, Any]]] = queue.Queue()
        self._states: dict[int, ProcessState] = {}  # the latest of each rank
        self._members: list[WorkerProcess] = []
        self._sweepers: list[threading.Thread] = []
        self._reaper = Reaper()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        self._on_report = None  # it could raise, and keep us from ending the processes
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
        state: ProcessState,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        descriptors: Sequence[int] = (),
        prefix: str = "",
    ) -> None:
        """Start a process, which replaces an earlier one of its rank; only one without a prefix inherits stdin.

        The calling thread must outlive it: when that thread ends, the kernel kills the process.
        """
        member = WorkerProcess(
            state,
            command,
            environment,
            descriptors=descriptors,
            prefix=prefix,
            output=self.output,
            heard=lambda state, report: self._reports.put((state, report)),
        )
        self._reaper.watch(member.process.pid)
        self._states[state.rank] = state
        self._members.append(member)

    @property
    def states(self) -> list[ProcessState]:
        return list(self._states.values())

    @property
    def running(self) -> list[WorkerProcess]:
        return [member for member in self._members if member.state.code is None]

    def wait(self, seconds: float = _TICK, *, until: Callable[[], bool] = lambda: False) -> None:
        """Record reports and exits for a while, or until all have ended or ``until`` returns true."""
        deadline = time.monotonic() + seconds
        while self.running and not until() and (left := deadline - time.monotonic()) > 0:
            self._hear(min(_TICK, left))
            self._reap()

    def signal(self, number: int) -> None:
        """Send a signal to each running process, but not to its children."""
        for member in self.running:
            member.process.send_signal(number)

    def kill(self, which: Callable[[ProcessState], bool] = lambda _: True) -> None:
        """Kill the running processes that ``which`` selects, by default all, and wait for their end."""
        while chosen := [member for member in self.running if which(member.state)]:
            for member in chosen:
                member.process.kill()
            self.wait(until=lambda: not any(which(member.state) for member in self.running))

    def _hear(self, seconds: float) -> None:
        """Wait for a report, and record all that have come."""
        with contextlib.suppress(queue.Empty):
            self._take_in(*self._reports.get(timeout=seconds))
            for _ in range(self._reports.qsize()):  # later ones wait, so that this loop ends
                self._take_in(*self._reports.get_nowait())

    def _take_in(self, state: ProcessState, report: dict[str, Any]) -> None:
        state.update(report)
        if self._on_report is not None:
            self._on_report(state.rank, report)

    def _reap(self) -> None:
        """Find the processes that have ended, end their children, record their last reports, then their exit codes."""
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
            member.state.code = member.process.returncode
            member.state.ended_at = now

    def _sweep(self, ended: Sequence[WorkerProcess]) -> None:
        """End the children of ended processes; this runs in a thread of its own, since it takes time."""
        sweep(member.process.pid for member in ended)
        for member in ended:
            self._reaper.forget(member.process.pid)
