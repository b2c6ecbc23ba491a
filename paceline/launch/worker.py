"""What the supervisor starts: ``python -m paceline.launch.worker script.py ...`` or ``... -m module ...``.

It runs the script as ``python script.py ...`` would, dies with its supervisor, and tells it of a failure at once,
before the script's objects are torn down.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from paceline.launch import reports
from paceline.launch.environment import take_supervisor

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def main() -> NoReturn:
    """Run the script named on the command line; exit with 1 if it raises, with 130 if it is interrupted."""
    supervisor = take_supervisor()
    if supervisor is not None:
        process, descriptor = supervisor
        _die_with(process)
        reports.connect(descriptor)
    try:
        _run(sys.argv[1:])
    except SystemExit as error:
        _report_exit(error.code)
        raise
    except KeyboardInterrupt as error:
        _show(error)
        sys.exit(130)
    except BaseException as error:
        _report_failure(error)
        _show(error)
        sys.exit(1)
    _report_exit(None)
    sys.exit(0)


def _die_with(parent: int) -> None:
    """Ask the kernel (Linux's) to kill this process when its parent dies, even if nothing else is left to do so."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


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
    """Tell the exit code now: neighbours notice as soon as sockets are closed, long before the interpreter is gone."""
    number = 0 if code is None else code if isinstance(code, int) else 1
    reports.report("exiting", code=number & 0xFF)


def _report_failure(error: BaseException) -> None:
    """Send the traceback, and what it goes back to: that tells a cause from what a neighbour's death led to."""
    first = _first_cause(error)
    reports.report(
        "failed",
        type=type(error).__name__,
        traceback="".join(traceback.format_exception(type(error), error, _users_frames(error))),
        first_types=[kind.__name__ for kind in type(first).__mro__],
        first_message="".join(traceback.format_exception_only(first)),
    )


def _show(error: BaseException) -> None:
    """Print the traceback, unless a supervisor does it: that of one worker, not of all."""
    if not reports.supervised():
        sys.excepthook(type(error), error, _users_frames(error))


def _first_cause(error: BaseException) -> BaseException:
    """The exception at the top of the printed chain."""
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return error
        seen.add(id(before))
        error = before


def _users_frames(error: BaseException) -> TracebackType | None:
    """The traceback from the first frame of the script on."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    main()
