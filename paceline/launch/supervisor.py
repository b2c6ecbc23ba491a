"""Runs a script on several workers of this host, and answers for how they end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.failures import Fault, find_fault
from paceline.launch.process_environment import ProcessEnvironment
from paceline.launch.processes import Processes
from paceline.launch.service import ServerOptions, Service, open_assignment
from paceline.launch.store import HostedStore

_TIME_TO_SAVE = 10.0  # seconds that workers have after a signal
_TIME_TO_GATHER = 0.3  # after the first sign of a failure, for the signs of its cause
_MORE_TO_GATHER = 0.2  # if all signs so far look like consequences
_TIME_TO_END = 0.8  # for the others, from SIGTERM to SIGKILL


def supervise(
    command: Sequence[str],
    *,
    workers: int,
    policy: str | None = None,
    environment: Mapping[str, str] | None = None,
    on_report: Callable[[int, dict[str, Any]], None] | None = None,
    on_stop: Callable[[], None] = lambda: None,
    server: ServerOptions | None = None,
) -> int:
    """Run ``command`` (``script.py ...`` or ``-m module ...``) on this many local workers; return the exit code.

    Each worker has its share of the threads and, in torchrun's variables, its place; their output comes with the rank
    in front, unless there is but one. The first failure ends the run within two seconds and is shown; an interrupt
    gives the workers ten seconds to save, a second one none. No worker outlives this call or this process, nor do its
    children, unless they began a session of their own.

    With a parameter server, which runs the same command, a worker may be killed or leave early: the run goes on
    while one lives, and ends well when all workers and then the server have.

    ``environment`` replaces ours as the base of the workers'; ``on_report`` is called with the rank and what its
    worker reported (``culprit.SERVER`` for the server), ``on_stop`` at the end of a run that a signal has ended.
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
        processes = stack.enter_context(Processes(on_report))
        process_environment = ProcessEnvironment(
            workers=workers, port=port, assignment=assignment, policy=policy, base=environment
        )
        service = Service(processes, command, process_environment, options)
        started = time.time()
        service.start()
        if store is not None:
            store.serve()
        fault = _watch(processes, service, store, stop)
        if fault is None and stop:
            fault = _stop(processes, stop)
    if fault is not None:
        processes.screen.write("stderr", fault.message(started))
    if stop:
        on_stop()
        return 128 + stop[0]
    return 0 if fault is None else fault.code


def check_command(command: Sequence[str], workers: int) -> None:
    """Raise if there is nothing to run, or nobody to run it."""
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
    """Collect the signals that ask us to stop instead of dying of them, in a list; the ignored stay ignored."""
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
    """Wait until all have ended well, or we are asked to stop, or something went wrong and was ended."""
    fault = None
    while processes.running and fault is None and not stop:
        processes.wait()
        if store is not None and store.error is not None:
            raise PacelineError(f"the store for torch.distributed does not start: {store.error}")
        service.attend()
        fault = service.fault()
    if fault is None or stop:
        return None
    processes.wait(_TIME_TO_GATHER)
    processes.wait(_MORE_TO_GATHER, until=lambda: _is_certain(service.fault()))
    fault = service.fault()  # before any signal of ours adds to the signs
    processes.signal(signal.SIGTERM)
    processes.wait(_TIME_TO_END)
    return fault


def _stop(processes: Processes, stop: list[int]) -> Fault | None:
    """Pass the signal on and give the workers time to save; a failure in that time is returned."""
    processes.signal(signal.SIGINT if stop[0] == signal.SIGINT else signal.SIGTERM)
    processes.wait(_TIME_TO_SAVE, until=lambda: len(stop) > 1)
    fault = find_fault([life for life in processes.lives if life.failure is not None])
    return fault if _is_certain(fault) else None


def _is_certain(fault: Fault | None) -> bool:
    return fault is not None and fault.certain
