"""Finds the process that failed first, from what the supervisor knows of all processes; starts and reads nothing."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

SERVER = -1  # in place of a rank; further servers have -2, -3, ...
# Exceptions that a worker raises when another one is gone; as names, since reports carry names.
_CONSEQUENCES = {"CommError", "DistNetworkError", "DistBackendError", "DistStoreError"}
_CONSEQUENCE_TEXTS = ("connection closed by peer", "connection reset", "gloo", "broken pipe")


@dataclass(kw_only=True)
class ProcessState:
    """What the supervisor knows of one worker or server process."""

    rank: int  # or SERVER, or below it
    incarnation: int = 0  # the number of earlier processes of this rank
    failed_starts: int = 0  # the number of processes of this rank, up to the last one, killed before they joined
    given_up: bool = False  # killed, after too many failed starts to start another
    sessions: int = 0  # entered so far
    in_session: bool = False
    step: int | None = None  # the last one reported
    survives: bool = False  # its session goes on without workers that are killed
    reformed: Mapping[str, Any] | None = None  # the last report that its group has changed
    needs_server: bool = False  # its script has named a policy that needs one
    address: str | None = None  # of a server for other hosts
    failure: Mapping[str, Any] | None = None  # the last failure report, with the time of the first
    asked_by: int | None = None  # the signal after which it has stopped; 0 if another worker got it
    exiting: int | None = None  # the announced exit code
    exiting_at: float = 0.0
    code: int | None = None  # the exit code, or minus the signal that killed it; None while it runs
    ended_at: float = 0.0

    def update(self, report: Mapping[str, Any]) -> None:
        """Record a report of the process."""
        match report["event"]:
            case "joined":
                self.sessions += 1
                self.in_session = True
                self.survives = report.get("survives", False)
            case "re-formed":
                self.step, self.reformed = report["step"], report
            case "needs server":
                self.needs_server = True
            case "serving":
                self.address = report.get("address")
            case "left":
                self.in_session = False
            case "progress":
                self.step = report.get("step", self.step)
            case "failed":
                first = self.failure or report
                self.failure = {**report, "at": first["at"]}
            case "interrupted":
                self.asked_by = report.get("signal", 0)
            case "exiting":
                self.exiting, self.exiting_at = report["code"], report["at"]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Which process failed, when, and the message and exit code; uncertain if another's failure may be the cause."""

    rank: int
    at: float
    what: str  # such as "exited with code 3"
    advice: str = ""
    traceback: str = ""
    code: int = 1
    certain: bool = True

    @property
    def who(self) -> str:
        return name_of(self.rank)

    def message(self, started: float) -> str:
        """The text for the user, ending with a newline."""
        headline = f"{self.who} {self.what} (after {max(0.0, self.at - started):.1f} s)"
        if self.traceback:
            lines = [f"{headline}:", self.traceback.rstrip(), self.advice]
        else:
            lines = [f"{headline}; {self.advice}" if self.advice else headline]
        return "".join(f"{line}\n" for line in lines if line)


def name_of(rank: int) -> str:
    """The name of this rank's process in messages."""
    if rank >= 0:
        return f"worker {rank}"
    return "the server" if rank == SERVER else f"server {SERVER - rank}"


def find_fault(states: Sequence[ProcessState], *, with_server: bool = False) -> Fault | None:
    """Find the process that failed first, or return ``None`` if nothing has failed.

    Another worker often reports a death first, and may even exit first, with an error of its own. So these are
    searched in this order, the earliest of each kind: a worker killed by a signal; one that raised an error of its
    own; one that exited too early; one that raised an error that another worker's death causes.

    ``with_server``: workers may be killed, as long as one is left, or leave early. A worker whose session goes on
    without it may be killed too.
    """
    failed = [
        state for state in states if state.failure is not None and not (with_server and _came_too_late(state, states))
    ]
    raised = [_raised(state, states, with_server=with_server) for state in failed]
    silent = [state for state in states if state.failure is None]
    killed = [fault for state in silent if (fault := find_kill(state)) and not may_die(state, with_server=with_server)]
    exited = [fault for state in silent if (fault := _exited(state)) is not None]
    if not with_server:
        exited += [fault for state in silent if (fault := _left(state, states, some_suffer=bool(raised))) is not None]
    certain = [fault for fault in raised if fault.certain]
    likeliest = killed or certain or exited or raised or _none_left(silent)
    return min(likeliest, key=lambda fault: fault.at, default=None)


def may_die(state: ProcessState, *, with_server: bool) -> bool:
    """Whether the run can go on without this process; nobody waits for one that has come in the place of another."""
    came_later = state.incarnation > 0 and state.sessions == 0
    return state.rank >= 0 and not state.given_up and (with_server or state.survives or came_later)


def _came_too_late(state: ProcessState, states: Sequence[ProcessState]) -> bool:
    """Whether a replacement worker failed because the server had already ended normally."""
    ended_well = any(other.rank == SERVER and other.exiting == 0 for other in states)
    return ended_well and state.incarnation > 0 and state.failure is not None and _is_consequence(state.failure)


def _none_left(states: Sequence[ProcessState]) -> list[Fault]:
    """The fault of the worker killed last, if all workers were killed."""
    kills = [find_kill(state) for state in states if state.rank >= 0]
    if not kills or not all(kills):
        return []
    last = max((kill for kill in kills if kill is not None), key=lambda kill: kill.at)
    return [replace(last, advice="no worker is left")]


def _is_consequence(failure: Mapping[str, Any]) -> bool:
    """Whether an error is one that another worker's death causes."""
    types = set(failure.get("first_types", ()))
    message = str(failure.get("first_message", "")).lower()
    return bool(types & _CONSEQUENCES) or (
        bool(types & {"RuntimeError", "ConnectionError"}) and any(text in message for text in _CONSEQUENCE_TEXTS)
    )


def _raised(state: ProcessState, states: Sequence[ProcessState], *, with_server: bool) -> Fault:
    assert state.failure is not None
    certain = not _is_consequence(state.failure)
    gone = [other.rank for other in states if other.exiting == 0 and (other.rank == SERVER or not with_server)]
    advice = "" if certain or not gone else f"({name_of(gone[0])} had exited with code 0 by then)"
    return Fault(
        rank=state.rank,
        at=float(state.failure["at"]),
        what="failed",
        traceback=str(state.failure.get("traceback", "")),
        advice=advice,
        code=2 if state.failure.get("type") == "UsageError" else 1,
        certain=certain,
    )


def find_kill(state: ProcessState) -> Fault | None:
    """The fault of a worker killed by a signal, unless it was already exiting with an error."""
    if state.code is None or state.code >= 0 or state.exiting:
        return None
    number = -state.code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    what = f"was killed by {name}" + ("" if state.exiting is None else " while exiting with code 0")
    advice = "out of memory?" if number == signal.SIGKILL else ""
    if state.given_up:
        where = "as" if state.sessions else "before it joined, and so"
        advice = f"{where} were the {state.failed_starts} before it"
    return Fault(rank=state.rank, at=state.ended_at, what=what, advice=advice, code=128 + number)


def _exit_code(state: ProcessState) -> int | None:
    """The code that a worker exited or is exiting with, unless a signal killed it before."""
    return state.exiting if state.code is None or state.code < 0 else state.code


def _exited(state: ProcessState) -> Fault | None:
    """The fault of a worker that exits with a code other than 0."""
    code = _exit_code(state)
    if not code:
        return None
    return Fault(rank=state.rank, at=state.exiting_at or state.ended_at, what=f"exited with code {code}", code=code)


def _left(state: ProcessState, states: Sequence[ProcessState], *, some_suffer: bool) -> Fault | None:
    """The fault of a worker that exits with code 0 while others wait for it.

    It is judged after its end, since it may leave its session while exiting, or as soon as others fail.
    """
    if _exit_code(state) != 0 or (state.code is None and not some_suffer):
        return None
    at = state.exiting_at or state.ended_at
    if state.in_session:
        where = "" if state.step is None else f" at step {state.step}"
        what = f"exited with code 0{where} before its session ended"
        advice = "close it, by `with paceline.join(...) as session:`; or is there an exit, or a shorter loop, on some?"
        return Fault(rank=state.rank, at=at, what=what, advice=advice)
    waiting = [other.rank for other in states if other.in_session and other.sessions > state.sessions]
    if waiting and not state.incarnation:  # nobody waits for one that came later
        what = f"exited with code 0 without joining the session that worker {waiting[0]} is in"
        advice = "all workers call paceline.join() equally often"
        return Fault(rank=state.rank, at=at, what=what, advice=advice)
    return None
