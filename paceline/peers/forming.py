"""Makes the groups of a session one after the other, as workers die and join, from what the run's log says."""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline import native
from paceline.collectives.python_group import nccl_backend
from paceline.errors import CommError, LostContactError
from paceline.launch.environment import ServerAssignment, World
from paceline.launch.roster import Formation, Member, Roster, RunLog, Status
from paceline.peers.group import Peers, Traffic

_LOOK = 0.002  # seconds between two looks at the log while others are waited for
_TIME_TO_LEARN = 10.0  # seconds for the supervisor to tell of a death
_TIMEOUT = 1800.0  # seconds for the other workers to come, and of a group's calls

_sessions = itertools.count()
_open: defaultdict[tuple[int, Member], set[int]] = defaultdict(set)  # sessions that each worker of each run has now


class RunOverError(CommError):
    """The other workers have ended the run well, before this one was let in."""


class Seat(NamedTuple):
    """A worker's place in a run whose workers may die and join."""

    log: RunLog
    member: Member
    workers: int  # at the start
    session: int  # the number of sessions before this one
    make_group: MakeGroup


# Makes the process group of a formation for one of its ranks; the last argument raises when it is in vain.
MakeGroup = Callable[[Formation, int, Callable[[], None]], Any]


def take_seat(world: World | None, assignment: ServerAssignment | None, device: torch.device) -> Seat | None:
    """The place that the supervisor has given to this process; None if groups cannot be made anew.

    That needs Paceline's own launcher, several workers, and a script that makes no default group of its own.
    """
    if world is None or assignment is None or assignment.log_fd is None or world.size == 1 or dist.is_initialized():
        return None
    session = next(_sessions)
    return Seat(
        RunLog(assignment.log_fd),
        Member(world.rank, assignment.incarnation),
        world.size,
        session,
        _HostGroups(world, session, device, assignment.log_fd),
    )


class Forming:
    """Makes the groups of one session, in which ``seat`` is this worker's place."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        self._log, self.member, self.workers, self._session, self._make_group = seat
        self._device = device
        self._roster = Roster(seat.session, seat.workers)
        self._peers: Peers | None = None
        self._traffic = Traffic()  # of all groups
        self.formation = Formation(0, (), ())  # of the present group
        self._place = seat.log.file, seat.member

    def form(self, status: Status, *, failed: bool = True) -> Peers:
        """Wait for all workers that are left, and return the group of them.

        The present group is left at once if it has ``failed``, so that others notice; else when
        nobody uses it any more.
        """
        _open[self._place].add(self._session)
        while True:
            if failed:
                self.close()
            self._append("here", status=status)
            formation = self._await_formation()
            self.close()
            self.formation, failed = formation, True
            rank = formation.members.index(self.member)
            try:
                group = self._make_group(formation, rank, self._check)
            except CommError as error:
                self.await_death(error)
                continue
            self._peers = Peers(group, rank, len(formation.members), self._device, self._traffic, may_lose=True)
            return self._peers

    def await_death(self, error: CommError) -> None:
        """Return when a worker of the present group is known to have died; raise ``error`` if none has."""
        deadline = time.monotonic() + _TIME_TO_LEARN
        while not self._gone():
            if time.monotonic() > deadline:
                raise error
            time.sleep(_LOOK)
            self._hear()

    def is_due(self, operations: int, lead: int) -> bool:
        """Whether all form a new group now, where a turn of their loop begins, to let others in.

        Worker 0 invites those that wait. It does so before it takes part in the next exchange, so others know of the
        invitation after that exchange, or after as many more as they may be ahead (``lead``).

        Nobody is let in while this worker has two sessions: one that is in the first of them waits to be let into the
        other, where the others do not come without it.
        """
        self._hear()
        if self._roster.invited_after is not None:
            return operations >= self._roster.invited_after
        if self._roster.newcomers and self.formation.members[0] == self.member and len(_open[self._place]) == 1:
            self._append("invite", after=operations + 1 + lead)
        return False

    def has_news(self) -> bool:
        """Whether one of the present group has died, or others wait to be let in, as far as was heard."""
        return self._roster.newcomers or bool(self._gone())

    def begun(self) -> None:
        """Tell that the run has begun: from now on a worker that joins needs the state of another."""
        self._append("begun")

    def some_left(self) -> bool:
        """Whether a worker has ended the session well."""
        self._hear()
        return bool(self._roster.left)

    def leave(self, *, ended_well: bool) -> None:
        """End the session on this worker; one that has ``ended_well`` is not waited for any more."""
        _open[self._place].discard(self._session)
        if ended_well:
            self._append("left")
        self.close()

    def close(self) -> None:
        """Leave the present group; calls of others that wait for this worker fail."""
        if self._peers is not None:
            self._peers.close()
            self._peers = None

    def _await_formation(self) -> Formation:
        deadline = time.monotonic() + _TIMEOUT
        while True:
            for formation in self._hear():
                if self.member in formation.members:
                    return formation
            if self._roster.abandoned:
                self._give_up()
            if time.monotonic() > deadline:
                missing = ", ".join(str(member.worker) for member in self._roster.missing)
                raise CommError(
                    f"worker {self.member.worker} waited {_TIMEOUT:g} s to go on with the others, and worker "
                    f"{missing} did not come; is it stopped?"
                )
            time.sleep(_LOOK)

    def _give_up(self) -> NoReturn:
        if self._roster.left:
            raise RunOverError(f"worker {self.member.worker} came after the others had ended the run")
        raise CommError(
            f"worker {self.member.worker} was to join, but no worker is left that has the state of the run; "
            "start it anew, with resume=True if it has checkpoints"
        )

    def _check(self) -> None:
        self._hear()
        if gone := self._gone():
            raise LostContactError(f"worker {gone.pop().worker} died while a group was made")

    def _gone(self) -> set[Member]:
        return self._roster.dead & set(self.formation.members)

    def _hear(self) -> list[Formation]:
        heard = [self._roster.hear(line) for line in self._log.read()]
        return [formation for formation in heard if formation is not None]

    def _append(self, event: str, **values: Any) -> None:
        self._log.append(event, self.member, session=self._session, **values)


class _HostGroups:
    """Makes groups of workers of this host, which meet through the supervisor's store."""

    def __init__(self, world: World, session: int, device: torch.device, log: int) -> None:
        self._world, self._session, self._device, self._log = world, session, device, log
        self._store: Any = None

    def __call__(self, formation: Formation, rank: int, check: Callable[[], None]) -> Any:
        name = f"session {self._session}, group {formation.number}"
        store = c10d.PrefixStore(name, self._connected())
        size, timeout = len(formation.members), timedelta(seconds=_TIMEOUT)
        if self._device.type == "cuda":
            return _Watched(nccl_backend(store, rank, size, timeout), RunLog(self._log), formation)
        if not native.available():
            return GlooGroup(dist.ProcessGroupGloo(store, rank, size, timeout))
        from paceline.collectives.backend import ProcessGroup

        numbers = [member.worker for member in formation.members]
        return ProcessGroup(store, rank, size, timeout, name, numbers=numbers, watch=check)

    def _connected(self) -> Any:
        if self._store is None:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self._world.master_addr, self._world.master_port, is_master=False, wait_for_workers=False
            )
        return self._store


class GlooGroup:
    """A Gloo group that can be left: Gloo closes its connections when nothing refers to the group any more."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def abort(self) -> None:
        self._group = None


class _Watched:
    """An NCCL group that is aborted when one of its workers dies: NCCL itself would wait for it until a timeout."""

    def __init__(self, group: Any, log: RunLog, formation: Formation) -> None:
        self._group, self._log, self.members = group, log, formation.members
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="paceline-watch", daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def abort(self) -> None:
        self._closed.set()
        self._group.abort()

    def _watch(self) -> None:
        while not self._closed.wait(0.1):
            if any(line["event"] == "died" and Member(*line["member"]) in self.members for line in self._log.read()):
                self.abort()
