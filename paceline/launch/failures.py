"""Whose fault it was: from what is known of all processes to the one that failed first, without a process in sight."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

SERVER = -1  # in place of a rank; those beside the first of several servers have -2, -3, ...
# What a worker raises when a neighbour is gone; by name, since a report carries names.
_CONSEQUENCES = {"CommError", "DistNetworkError", "DistBackendError", "DistStoreError"}
_CONSEQUENCE_TEXTS = ("connection closed by peer", "connection reset", "gloo", "broken pipe")


@dataclass(kw_only=True)
class Life:
    """What the supervisor knows of one worker, or of the server, so far."""

    rank: int  # or SERVER, or below it
    incarnation: int = 0  # how many of this rank there were before
    fruitless: int = 0  # how many of those, up to the last one, were killed before they joined
    given_up: bool = False  # it was killed, and so were too many before it for another to be started
    sessions: int = 0  # entered so far
    in_session: bool = False
    step: int | None = None  # the last one reported
    needs_server: bool = False  # its script has named a policy that needs one
    address: str | None = None  # where it serves other hosts, if it does
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
    """What to call the process of this rank."""
    if rank >= 0:
        return f"worker {rank}"
    return "the server" if rank == SERVER else f"server {SERVER - rank}"


def find_fault(lives: Sequence[Life], *, served: bool = False) -> Fault | None:
    """Find the worker at fault, if anything has gone wrong.

    A neighbour often notices a death first and may even exit first, with an error of its own. So in this order, and
    the earliest of its kind: a worker killed by a signal; one that raised an error of its own making; one that exited
    when it should not have; one that raised what a neighbour's death leads to.

    If the workers are ``served`` by a parameter server they may be killed, as long as one is left, or leave early.
    """
    failed = [life for life in lives if life.failure is not None and not (served and _came_too_late(life, lives))]
    raised = [_raised(life, lives, served=served) for life in failed]
    silent = [life for life in lives if life.failure is None]
    killed = [fault for life in silent if (fault := find_kill(life)) and not (served and _may_die(life))]
    exited = [fault for life in silent if (fault := _exited(life)) is not None]
    if not served:
        exited += [fault for life in silent if (fault := _left(life, lives, some_suffer=bool(raised))) is not None]
    certain = [fault for fault in raised if fault.certain]
    likeliest = killed or certain or exited or raised or (_none_left(silent) if served else [])
    return min(likeliest, key=lambda fault: fault.at, default=None)


def _may_die(life: Life) -> bool:
    return life.rank >= 0 and not life.given_up


def _came_too_late(life: Life, lives: Sequence[Life]) -> bool:
    """Whether a worker in another's place failed because the server had ended well by then."""
    ended_well = any(other.rank == SERVER and other.exiting == 0 for other in lives)
    return ended_well and life.incarnation > 0 and life.failure is not None and _is_consequence(life.failure)


def _none_left(lives: Sequence[Life]) -> list[Fault]:
    """The fault of the worker that was killed last, if all were."""
    kills = [find_kill(life) for life in lives if life.rank >= 0]
    if not kills or not all(kills):
        return []
    last = max((kill for kill in kills if kill is not None), key=lambda kill: kill.at)
    return [replace(last, advice="no worker is left")]


def _is_consequence(failure: Mapping[str, Any]) -> bool:
    """Whether an error is of the sort that a neighbour's death leads to."""
    types = set(failure.get("first_types", ()))
    message = str(failure.get("first_message", "")).lower()
    return bool(types & _CONSEQUENCES) or (
        bool(types & {"RuntimeError", "ConnectionError"}) and any(text in message for text in _CONSEQUENCE_TEXTS)
    )


def _raised(life: Life, lives: Sequence[Life], *, served: bool) -> Fault:
    assert life.failure is not None
    certain = not _is_consequence(life.failure)
    gone = [other.rank for other in lives if other.exiting == 0 and (other.rank == SERVER or not served)]
    advice = "" if certain or not gone else f"({name_of(gone[0])} had exited with code 0 by then)"
    return Fault(
        rank=life.rank,
        at=float(life.failure["at"]),
        what="failed",
        traceback=str(life.failure.get("traceback", "")),
        advice=advice,
        certain=certain,
    )


def find_kill(life: Life) -> Fault | None:
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
    if life.given_up:
        where = "as" if life.sessions else "before it joined, and so"
        advice = f"{where} were the {life.fruitless} before it"
    return Fault(rank=life.rank, at=life.ended_at, what=what, advice=advice, code=128 + number)


def _exit_code(life: Life) -> int | None:
    """The code that a worker exited or is exiting with, if it does so by itself."""
    return life.exiting if life.code is None or life.code < 0 else life.code


def _exited(life: Life) -> Fault | None:
    """The fault of a worker that exits with a code other than 0."""
    code = _exit_code(life)
    if not code:
        return None
    return Fault(rank=life.rank, at=life.exiting_at or life.ended_at, what=f"exited with code {code}", code=code)


def _left(life: Life, lives: Sequence[Life], *, some_suffer: bool) -> Fault | None:
    """The fault of a worker that exits with code 0 while others wait for it.

    It is judged when it has ended, since it may leave its session on the way out, or when others suffer.
    """
    if _exit_code(life) != 0 or (life.code is None and not some_suffer):
        return None
    at = life.exiting_at or life.ended_at
    if life.in_session:
        where = "" if life.step is None else f" at step {life.step}"
        what = f"exited with code 0{where} before its session ended"
        advice = "all workers run the same steps: is there an exit, or a shorter loop, for some of them only?"
        return Fault(rank=life.rank, at=at, what=what, advice=advice)
    waiting = [other.rank for other in lives if other.in_session and other.sessions > life.sessions]
    if waiting:
        what = f"exited with code 0 without joining the session that worker {waiting[0]} is in"
        advice = "all workers call paceline.join() equally often"
        return Fault(rank=life.rank, at=at, what=what, advice=advice)
    return None
