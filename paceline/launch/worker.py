"""The program of a worker: ``python -m paceline.launch.worker script.py ...`` or ``... -m module ...``.

It runs the script as ``python script.py ...`` would, dies with its supervisor, and reports a failure at once,
before the script's objects are torn down.
"""

from __future__ import annotations

import ctypes
import io
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import NoReturn

from paceline.launch import reports
from paceline.launch.environment import take_server_assignment, take_supervisor

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main() -> NoReturn:
    """Run the script named on the command line; exit with 1 if it raises, with 130 if it is interrupted."""
    supervisor = take_supervisor()
    if supervisor is not None:
        process, descriptor = supervisor
        _die_with(process)
        reports.connect(descriptor)
    _print_whole_lines()
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        take_server_assignment()  # before the script can start children
        _run(sys.argv[1:])
    except SystemExit as error:
        _report_exit(error.code)
        raise
    except KeyboardInterrupt as error:
        _show(error)
        sys.exit(130)
    except BaseException as error:
        reports.report_failure(error)
        _show(error)
        sys.exit(1)
    _report_exit(None)
    sys.exit(0)


def _die_with(parent: int) -> None:
    """Ask the Linux kernel to kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _print_whole_lines() -> None:
    """Write each line at once and whole, as at a terminal: other processes print between any two writes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _run(arguments: list[str]) -> None:
    """Run ``-m module ...`` or ``script.py ...`` as ``__main__``."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def _report_exit(code: object) -> None:
    """Report the exit code now: other workers notice closed sockets long before this interpreter has ended."""
    number = 0 if code is None else code if isinstance(code, int) else 1
    reports.report("exiting", code=number & 0xFF)


def _show(error: BaseException) -> None:
    """Print the traceback, unless a supervisor does: it prints only the first failure's."""
    if not reports.supervised():
        sys.excepthook(type(error), error, reports.frames_of_the_script(error))


if __name__ == "__main__":
    main()
