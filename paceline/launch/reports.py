"""Reports a worker's events to its supervisor, as lines of JSON through an inherited pipe."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import runpy
import stat
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from paceline.errors import CheckpointError, NonFiniteLossError, RunInUseError, UsageError

_LONGEST = 32_000  # characters of a text, enough for any traceback that is read

_OUR_FILES = (str(Path(__file__).with_name("worker.py")), runpy.__file__, "<frozen runpy>")

_SAY_ALL = (UsageError, CheckpointError, RunInUseError, NonFiniteLossError)  # what was found, and what to do


def _folder_of(package: str) -> str:
    """Where the files of a package lie; it is not imported for that."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    return f"{Path(found.origin).parent}{os.sep}"


# contextlib calls our generators, and click our commands.
_OUR_CODE = (_folder_of("paceline"), _folder_of("click"), contextlib.__file__)

_descriptor: int | None = None
_writing = threading.RLock()  # reentrant: a signal handler may report while its thread is reporting


def connect(descriptor: int) -> None:
    """Report through this pipe from now on; the process's children, forked or started, do not inherit it."""
    global _descriptor
    try:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        is_pipe = False
    if not is_pipe:  # the variable was inherited, and the number may belong to one of the user's files
        return
    os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=disconnect)
    _descriptor = descriptor


def disconnect() -> None:
    """Close the pipe; reporting does nothing from now on."""
    global _descriptor
    if _descriptor is not None:
        with contextlib.suppress(OSError):
            os.close(_descriptor)
        _descriptor = None


def supervised() -> bool:
    """Whether there is a supervisor to report to."""
    return _descriptor is not None


def report(event: str, **values: object) -> None:
    """Send an event and its time (``at``) to the supervisor; do nothing if there is none or it has ended.

    Values must fit JSON. The middle of very long texts is left out. Any thread may call this.
    """
    if _descriptor is None:
        return
    shortened = {name: _shorten(value) if isinstance(value, str) else value for name, value in values.items()}
    try:
        line = json.dumps({**shortened, "event": event, "at": time.time()}).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise UsageError(f"the report {event!r} holds a value that JSON cannot: {error}") from error
    with _writing, contextlib.suppress(OSError):
        while line:
            line = line[os.write(_descriptor, line) :]


def report_failure(error: BaseException) -> None:
    """Report an exception that will end this worker, before its sockets close.

    If an outer frame reports it again, the last traceback and the first time count. The report also names the first
    exception of the chain: it shows whether another worker's death is the cause.
    """
    first = _first_cause(error)
    report(
        "failed",
        type=type(error).__name__,
        traceback=_readable(error),
        first_types=[kind.__name__ for kind in type(first).__mro__],
        first_message="".join(traceback.format_exception_only(first)),
    )


def frames_of_the_script(error: BaseException) -> TracebackType | None:
    """The traceback without the launcher's frames at its start."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in _OUR_FILES:
        frames = frames.tb_next
    return frames


def _readable(error: BaseException) -> str:
    """The traceback to show; for an error whose message says all, only the user's frames."""
    shown = traceback.TracebackException(type(error), error, frames_of_the_script(error))
    if isinstance(error, _SAY_ALL):
        _leave_out_ours(shown)
    return "".join(shown.format() if shown.stack else shown.format_exception_only())


def _leave_out_ours(shown: traceback.TracebackException) -> None:
    """Leave out our frames, and earlier exceptions of the chain that have no other frames."""
    for before in (shown.__cause__, shown.__context__):
        if before is not None:
            _leave_out_ours(before)
    shown.stack = traceback.StackSummary.from_list(
        [frame for frame in shown.stack if not frame.filename.startswith(_OUR_CODE)]
    )
    if shown.__cause__ is not None and not shown.__cause__.stack:
        shown.__cause__ = None
    if shown.__context__ is not None and not shown.__context__.stack:
        shown.__context__ = None


def _first_cause(error: BaseException) -> BaseException:
    """The first exception of the printed chain."""
    seen = {id(error)}
    while True:
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None or id(before) in seen:
            return error
        seen.add(id(before))
        error = before


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
