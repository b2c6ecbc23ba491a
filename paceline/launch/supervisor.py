"""Runs a script on several workers of this host until all end or one fails."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.failures import Fault, find_fault
from paceline.launch.process_environment import ProcessEnvironment
from paceline.launch.processes import Processes
from paceline.launch.roster import open_run_log
from paceline.launch.service import ServerOptions, Service, open_assignment
from paceline.launch.store import HostedStore

_TIME_TO_SAVE = 10.0  # seconds for workers to end after a signal
_TIME_TO_GATHER = 0.3  # after the first failure, for reports of its cause
_MORE_TO_GATHER = 0.2  # if all failures so far may be consequences
_TIME_TO_END = 0.8  # for the other processes, from SIGTERM to SIGKILL


def supervise(
    command: Sequence[str],
    *,
    workers: int,
    policy: str | None = None,
    codec: str | None = None,
    per_device: int = 1,
    environment: Mapping[str, str] | None = None,
    on_report: Callable[[int, dict[str, Any]], None] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    server: ServerOptions | None = None,
) -> int:
    """Run ``command`` (``script.py ...`` or ``-m module ...``) on this many local workers; return the exit code.

    Each worker gets its share of the cores as threads, and torchrun's variables. Output lines have the rank in front,
    unless there is only one worker. The first failure ends the run within two seconds and is shown. An interrupt
    gives the workers ten seconds to save; a second one ends them at once. No worker outlives this call or this
    process. Its children do not either, unless they started a session of their own.

    A worker that has joined a session may be killed: the run goes on while one is left. A parameter server runs the
    same command. Under it a worker may also leave early, and the run succeeds when all workers and then the server have
    ended.

    ``per_device`` workers at a time have one ``LOCAL_RANK``. ``environment`` replaces ours as the base of the workers'.
    ``on_report`` is called with the rank (``failures.SERVER`` for the server) and the report, ``on_stop`` at the end
    of a run that a signal has ended.
    """
    check_command(command, workers)
    options = server or ServerOptions()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_caught_signals())
        assignment = stack.enter_context(open_assignment(options))
        port = store = None
        if options.join is None and not options.alone:
            store = stack.enter_context(contextlib.closing(HostedStore()))
            port = store.port
            assignment = replace(assignment, log_fd=stack.enter_context(open_run_log()))
        processes = stack.enter_context(Processes(on_report))
        process_environment = ProcessEnvironment(
            workers=workers,
            port=port,
            assignment=assignment,
            policy=policy,
            codec=codec,
            per_device=per_device,
            base=environment,
        )
        service = Service(processes, command, process_environment, options)
        started = time.time()
        service.start()
        if store is not None:
            store.serve()
        fault = _watch(processes, service, store, stop)
        service.tell_the_rest()
        if fault is None and stop:
            fault = _stop(processes, service, stop)
    if fault is not None:
        processes.output.write("stderr", fault.message(started))
    if stop:
        on_stop()
        return 128 + stop[0]
    return 0 if fault is None else fault.code


def check_command(command: Sequence[str], workers: int) -> None:
    """Raise if there is no script, or no worker to run it."""
    if workers < 1:
        raise UsageError(f"a run needs at least 1 worker, got {workers}")
    if not command or command[0] == "":
        raise UsageError("no script to run: give the path of one, or -m and the name of a module")
    if command[0] == "-m":
        if len(command) < 2:
            raise UsageError("-m wants the name of a module after it")
        return
    path = Path(command[0])
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise UsageError(f"{path} is a directory without a __main__.py; give the path of a script")
    if not path.exists():
        raise UsageError(f"no such script: {path}")


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect signals that ask us to stop in a list; ignored signals stay ignored."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            previous[number] = signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch(processes: Processes, service: Service, store: HostedStore | None, stop: list[int]) -> Fault | None:
    """Wait until all processes have ended, or a signal came, or one failed and the others got SIGTERM."""
    fault = None
    while processes.running and fault is None and not stop:
        processes.wait()
        if store is not None and store.error is not None:
            raise PacelineError(f"the store for torch.distributed does not start: {store.error}")
        service.attend()
        fault = service.fault()
    if fault is not None and not fault.traceback:
        _hear_of_signals(processes, service, stop)
    if fault is None or stop:
        return None
    processes.wait(_TIME_TO_GATHER)
    processes.wait(_MORE_TO_GATHER, until=lambda: _is_certain(service.fault()))
    fault = service.fault()  # before our own signals cause more failures
    processes.signal(signal.SIGTERM)
    processes.wait(_TIME_TO_END)
    return fault


def _hear_of_signals(processes: Processes, service: Service, stop: list[int]) -> None:
    """If a worker got a signal and all workers stop, let them save, and take the signal for ours."""
    if all(state.asked_by is None for state in processes.states):
        return
    _let_save(processes, service, until=lambda: bool(stop))
    asked = next((state for state in processes.states if state.asked_by), None)
    if asked is not None and not stop:
        stop.append(asked.asked_by or 0)
        name = signal.Signals(stop[0]).name
        processes.output.write("stderr", f"paceline: worker {asked.rank} was asked to stop by {name}\n")


def _let_save(processes: Processes, service: Service, until: Callable[[], bool]) -> None:
    """Give the workers time to save and end, each without those that have ended before."""

    def over() -> bool:
        service.tell_of_ends()
        return until()

    processes.wait(_TIME_TO_SAVE, until=over)


def _stop(processes: Processes, service: Service, stop: list[int]) -> Fault | None:
    """Pass the signal on and give the workers time to save; return a failure in that time."""
    processes.signal(signal.SIGINT if stop[0] == signal.SIGINT else signal.SIGTERM)
    _let_save(processes, service, until=lambda: len(stop) > 1)
    fault = find_fault([state for state in processes.states if state.failure is not None])
    return fault if _is_certain(fault) else None


def _is_certain(fault: Fault | None) -> bool:
    return fault is not None and fault.certain
