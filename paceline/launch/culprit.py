"""Whose fault it was: from what is known of all workers to the one that failed first, without a process in sight."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What a worker raises when a neighbour is gone; by name, since a report carries names.
_CONSEQUENCES = {"CommError", "DistNetworkError", "DistBackendError", "DistStoreError"}
_CONSEQUENCE_TEXTS = ("connection closed by peer", "connection reset", "gloo", "broken pipe")


@dataclass(kw_only=True)
class Life:
    """What the supervisor knows of one worker so far."""

    rank: int
    sessions: int = 0  # entered so far
    in_session: bool = False
    step: int | None = None  # the last one reported
    failure: Mapping[str, Any] | None = None  # its last report of a failure, with the time of the first
    exiting: int | None = None  # the exit code it announced
    exiting_at: float = 0.0
    code: int | None = None  # the exit code it ended with, or minus the signal that killed it; None while it runs
    ended_at: float = 0.0

    def hear(self, report: Mapping[str, Any]) -> None:
        """Take in a report."""
        match report["event"]:
            case "joined":
                self.sessions += 1
                self.in_session = True
            case "left":
                self.in_session = False
            case "progress":
                self.step = report.get("step", self.step)
            case "failed":
                first = self.failure or report
                self.failure = {**report, "at": first["at"]}
            case "exiting":
                self.exiting, self.exiting_at = report["code"], report["at"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Who failed, when, and what to tell the user and the shell; uncertain if it may be another's consequence."""

    rank: int
    at: float
    what: str  # such as "exited with code 3"
    advice: str = ""
    traceback: str = ""
    code: int = 1
    certain: bool = True

    def message(self, started: float) -> str:
        """The text for the user, ending with a newline."""
        headline = f"worker {self.rank} {self.what} (after {max(0.0, self.at - started):.1f} s)"
        if self.traceback:
            lines = [f"{headline}:", self.traceback.rstrip(), self.advice]
        else:
            lines = [f"{headline}; {self.advice}" if self.advice else headline]
        return "".join(f"{line}\n" for line in lines if line)


def find_fault(lives: Sequence[Life]) -> Fault | None:
    """Find the worker at fault, if anything has gone wrong.

    A neighbour often notices a death first and may even exit first, with an error of its own. So in this order, and
    the earliest of its kind: a worker killed by a signal; one that raised an error of its own making; one that exited
    when it should not have; one that raised what a neighbour's death leads to.
    """
    raised = [_raised(life, lives) for life in lives if life.failure is not None]
    silent = [life for life in lives if life.failure is None]
    killed = [fault for life in silent if (fault := _killed(life)) is not None]
    exited = [fault for life in silent if (fault := _exited(life, lives, some_suffer=bool(raised))) is not None]
    certain = [fault for fault in raised if fault.certain]
    likeliest = killed or certain or exited or raised
    return min(likeliest, key=lambda fault: fault.at, default=None)


def _is_consequence(failure: Mapping[str, Any]) -> bool:
    """Whether an error is of the sort that a neighbour's death leads to."""
    types = set(failure.get("first_types", ()))
    message = str(failure.get("first_message", "")).lower()
    return bool(types & _CONSEQUENCES) or (
        bool(types & {"RuntimeError", "ConnectionError"}) and any(text in message for text in _CONSEQUENCE_TEXTS)
    )


def _raised(life: Life, lives: Sequence[Life]) -> Fault:
    assert life.failure is not None
    certain = not _is_consequence(life.failure)
    gone = [other.rank for other in lives if other.exiting == 0]
    advice = "" if certain or not gone else f"(worker {gone[0]} had exited with code 0 by then)"
    return Fault(
        rank=life.rank,
        at=float(life.failure["at"]),
        what="failed",
        traceback=str(life.failure.get("traceback", "")),
        advice=advice,
        certain=certain,
    )


def _killed(life: Life) -> Fault | None:
    """The fault of a worker killed by a signal; one that dies of it while exiting with an error is not meant."""
    if life.code is None or life.code >= 0 or life.exiting:
        return None
    number = -life.code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    what = f"was killed by {name}" + ("" if life.exiting is None else " while exiting with code 0")
    advice = "out of memory?" if number == signal.SIGKILL else ""
    return Fault(rank=life.rank, at=life.ended_at, what=what, advice=advice, code=128 + number)


def _exited(life: Life, lives: Sequence[Life], *, some_suffer: bool) -> Fault | None:
    """The fault of a worker that exits by itself: with a code other than 0, or while others wait for it.

    The second is judged when it has ended, since it may leave its session on the way out, or when others suffer.
    """
    code = life.exiting if life.code is None or life.code < 0 else life.code
    if code is None:
        return None
    at = life.exiting_at or life.ended_at
    exited = f"exited with code {code}"
    if code != 0:
        return Fault(rank=life.rank, at=at, what=exited, code=code)
    if life.code is None and not some_suffer:
        return None
    if life.in_session:
        where = "" if life.step is None else f" at step {life.step}"
        what = f"{exited}{where} before its session ended"
        advice = "all workers run the same steps: is there an exit, or a shorter loop, for some of them only?"
        return Fault(rank=life.rank, at=at, what=what, advice=advice)
    waiting = [other.rank for other in lives if other.in_session and other.sessions > life.sessions]
    if waiting:
        what = f"{exited} without joining the session that worker {waiting[0]} is in"
        advice = "all workers call paceline.join() equally often"
        return Fault(rank=life.rank, at=at, what=what, advice=advice)
    return None
