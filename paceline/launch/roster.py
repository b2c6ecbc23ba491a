"""The log of a run's workers, and the groups that follow from it.

The supervisor and its workers append lines to one memory file, and all of them read it. All see the same lines in the
same order, so every worker comes to the same groups by itself: who is in one, in which order of ranks, and from whom
the others copy the state of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

# What a worker gives up or repeats: a step, the exchange after an update, the last exchange, or something that changes
# no state of the run. Or it begins a turn of its loop, where others may join.
Doing = Literal["step", "exchange", "end", "other", "turn"]


class Member(NamedTuple):
    """A process of a worker: the worker's number in the launch, and how many processes of it came before."""

    worker: int
    incarnation: int = 0


class Status(NamedTuple):
    """How far a worker is when it waits for a new group."""

    steps: int = 0  # updates made
    operations: int = 0  # exchanges done with all others
    doing: Doing = "other"
    has_state: bool = False  # the state of the run; a worker that joins does not have it yet
    in_hand: bool = False  # its loop has a batch of which nothing comes
    epoch: int = 0
    catches_up: bool = False  # it makes the updates that others have exchanged by itself

    @property
    def progress(self) -> tuple[int, int, int]:
        return self.steps, self.operations, self.epoch


class Formation(NamedTuple):
    """The members of one group, by rank."""

    number: int
    members: tuple[Member, ...]
    statuses: tuple[Status, ...]

    @property
    def source(self) -> int | None:
        """The rank that is furthest, from which others copy; None if all begin together."""
        ranks = [rank for rank, status in enumerate(self.statuses) if status.has_state]
        return max(ranks, key=lambda rank: (*self.statuses[rank].progress, -rank), default=None)

    @property
    def furthest(self) -> Status:
        """The status of the source."""
        assert self.source is not None
        return self.statuses[self.source]

    @property
    def in_hand(self) -> bool:
        """Whether one that is furthest, of perhaps several, has a batch in hand."""
        return any(status.in_hand for status in self.statuses if status.progress == self.furthest.progress)

    @property
    def newcomers(self) -> list[Member]:
        """The members that have no state of the run."""
        return [member for member, status in zip(self.members, self.statuses, strict=True) if not status.has_state]

    def is_behind(self, rank: int) -> bool:
        """Whether another member has already done what this one waits to do."""
        return self.source is not None and self.statuses[rank].progress < self.furthest.progress

    def copies(self, rank: int) -> bool:
        """Whether this member takes the state of the source: one that joins, or has missed an exchange of updates.

        Where a member catches up by itself, that is the last exchange only.
        """
        if self.source is None:
            return False
        status = self.statuses[rank]
        if status.catches_up:
            missed = status.doing == "end"
        else:
            missed = status.doing != "other" or self.furthest.operations > status.operations + 1
        return not status.has_state or (missed and self.is_behind(rank))


class Roster:
    """What the log says about one session of the run; a worker whose process has died is in no later group.

    A group forms when every worker that has neither died nor left waits for it. A worker that joins is let in only
    where the others begin a turn of their loop: there its script, which begins anew, meets them.
    """

    def __init__(self, session: int, workers: int) -> None:
        self._session = session
        self._expected = {Member(worker) for worker in range(workers)}
        self._waiting: dict[Member, Status] = {}
        self._since: dict[Member, int] = {}  # the group with which each has had the state
        self._number = 0
        self.dead: set[Member] = set()
        self.left: set[Member] = set()
        self.begun = False  # the state of the run has changed since its start
        self.invited_after: int | None = None  # exchanges after which all form a new group, to let others in

    def hear(self, line: Mapping[str, Any]) -> Formation | None:
        """Take a line of the log; return the group that is complete with it, if one is."""
        if line["event"] == "died":
            self.dead.add(_member(line))
        elif line["session"] != self._session:
            return None
        match line["event"]:
            case "here":
                self._expected.add(_member(line))
                self._waiting[_member(line)] = Status(*line["status"])
            case "left":
                self.left.add(_member(line))
            case "begun":
                self.begun = True
            case "invite" if self.invited_after is None:
                self.invited_after = line["after"]
        return self._form()

    @property
    def missing(self) -> list[Member]:
        """The members for which those that wait are waiting."""
        return sorted(self._expected - self.dead - self.left - self._waiting.keys())

    @property
    def newcomers(self) -> bool:
        """Whether a living worker waits to be let in."""
        return any(not status.has_state for member, status in self._waiting.items() if member not in self.dead)

    @property
    def abandoned(self) -> bool:
        """Whether only workers without the state of the run are left."""
        present = self._expected - self.dead - self.left
        return self.begun and all(member in self._waiting and not self._waiting[member].has_state for member in present)

    def _form(self) -> Formation | None:
        present = self._expected - self.dead - self.left
        if not present or self.missing or self.abandoned:
            return None
        keeping = [member for member in present if self._waiting[member].has_state]
        furthest = max((self._waiting[member] for member in keeping), key=lambda status: status.progress, default=None)
        if furthest is not None and furthest.doing != "turn":
            present = set(keeping)
        self._number += 1
        for member in present:
            if not self._waiting[member].has_state:
                self._since[member] = self._number
        ordered = tuple(sorted(present, key=lambda member: (self._since[member], member)))
        self.invited_after = None
        return Formation(self._number, ordered, tuple(self._waiting.pop(member) for member in ordered))


def _member(line: Mapping[str, Any]) -> Member:
    return Member(*line["member"])


class RunLog:
    """The file: lines of JSON that any process of the run appends, and this reader's place in it."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._place = 0

    def append(self, event: str, member: Member, **values: Any) -> None:
        """Add a line at the end."""
        line = json.dumps({"event": event, "member": member, **values}).encode()
        # The newline in front ends the line of a process that was killed while it wrote.
        os.write(self.file, b"\n" + line + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """The lines since the last call."""
        size = os.fstat(self.file).st_size
        if size == self._place:  # as in nearly every step
            return []
        data = os.pread(self.file, size - self._place, self._place)
        whole = data[: data.rfind(b"\n") + 1]
        self._place += len(whole)
        lines = []
        for text in whole.split(b"\n"):
            with contextlib.suppress(ValueError):  # empty, or cut off
                lines.append(json.loads(text))
        return lines


def make_run_log() -> int:
    """Make the memory file of a log."""
    file = os.memfd_create("paceline-run-log")
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # for all that inherit it
    return file


@contextlib.contextmanager
def open_run_log() -> Iterator[int | None]:
    """Have the file of a log inside the block; None where the system has no memory files."""
    if not hasattr(os, "memfd_create"):
        yield None
        return
    file = make_run_log()
    try:
        yield file
    finally:
        os.close(file)
