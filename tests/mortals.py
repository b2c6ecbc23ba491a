"""Workers as threads that may die at any call of their group, others in their places, and a ledger of samples."""

from __future__ import annotations

import faulthandler
import itertools
import threading
import time
import traceback
import unittest.mock
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.launch.roster import Formation, Member, RunLog, make_run_log
from paceline.peers.forming import Seat
from paceline.sessions.reforming import ReformingSession

Fate = Literal["die before", "die after", "lose"]  # a call: it is not made; it is, and nothing more; its result is lost
# Given a worker, the number of its group, the number of the call in it and its name: a fate, or what gives it when the
# call has been made.
Fates = Callable[[Member, int, int, str], Fate | Callable[[], Fate] | None]

DEADLINE = 30.0
TIMEOUT = timedelta(seconds=DEADLINE)


class Killed(BaseException):
    """Ends a thread as SIGKILL ends a process."""


class MortalGroup:
    """A process group whose calls may be the last ones of a worker."""

    def __init__(self, group: Any, member: Member, number: int, fates: Fates) -> None:
        self._group, self._member, self._number, self._fates = group, member, number, fates
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name not in ("allreduce", "broadcast", "allgather", "barrier", "send", "recv"):
            return found

        def call(*arguments: Any) -> Any:
            fate = self._fates(self._member, self._number, self._calls, name)
            self._calls += 1
            if fate == "die before":
                raise Killed
            work = found(*arguments)
            if fate is not None:
                work.wait()
                fate = fate() if callable(fate) else fate
                raise Killed if fate == "die after" else RuntimeError("the result of this call was lost")
            return work

        return call


@dataclass
class Life:
    """What a worker's thread knows of itself, and leaves behind."""

    member: Member
    used: list[tuple[int, list[int], int]] = field(default_factory=list)  # epoch, samples, steps before
    group: int = 0  # the number of its present one
    operations: Callable[[], int] = lambda: 0  # that it has done with others
    result: Any = None
    killed: bool = False
    failed: bool = False


def nobody_dies(*_: object) -> None:
    return None


@dataclass
class Mortals:
    """Run a function on workers that are threads; the supervisor's part is done here."""

    log: int
    lives: list[Life] = field(default_factory=list)
    formed: dict[int, int] = field(default_factory=dict)  # group -> the steps that all of its members had the fruit of

    def __post_init__(self) -> None:
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._seat = threading.local()
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def __call__(
        self, workers: int, work: Callable[[Life], Any], fates: Fates = nobody_dies, *, respawn: bool = False
    ) -> list[Any]:
        """Run ``work`` on all; return the results of those that were not killed, by worker and incarnation."""
        self._workers, self._work, self._fates, self._respawn = workers, work, fates, respawn
        go_on = ReformingSession._go_on_with

        def noted(session: ReformingSession, *arguments: Any) -> None:
            go_on(session, *arguments)
            self.formed[session.generation] = session.steps - len(session._data._since)

        with (
            unittest.mock.patch("paceline.sessions.peers.take_seat", lambda *_: self._take_seat()),
            unittest.mock.patch.object(ReformingSession, "_go_on_with", noted),
        ):
            for worker in range(workers):
                self._start(Member(worker))
            end = time.monotonic() + DEADLINE
            while any(thread.is_alive() for thread in self._threads) and not self._failures:
                if time.monotonic() > end:
                    faulthandler.dump_traceback()
                    raise AssertionError([thread.name for thread in self._threads if thread.is_alive()])
                time.sleep(0.002)
            if self._failures:
                failure = self._failures[0]
                self._end_the_others()
                raise failure
        return [life.result for life in sorted(self.lives, key=lambda life: life.member) if not life.killed]

    def _end_the_others(self) -> None:
        """Let those that are left go on without the ones that have failed, so that no thread outlives the test."""
        for life in self.lives:
            if life.failed:
                RunLog(self.log).append("died", life.member)
        for thread in self._threads:
            thread.join(DEADLINE)

    def _start(self, member: Member) -> None:
        life = Life(member)
        self.lives.append(life)
        thread = threading.Thread(target=self._live, args=(life,), daemon=True, name=str(member))
        self._threads.append(thread)
        thread.start()

    def _live(self, life: Life) -> None:
        log = RunLog(self.log)
        self._seat.member, self._seat.sessions = life.member, itertools.count()
        try:
            life.result = self._work(life)
        except Killed as killed:
            traceback.clear_frames(killed.__traceback__)
            life.killed = True
            log.append("died", life.member)
            if self._respawn:
                self._start(Member(life.member.worker, life.member.incarnation + 1))
        except SystemExit:  # came too late
            life.killed = True
        except BaseException as error:
            life.failed = True
            self._failures.append(error)

    def _take_seat(self) -> Seat:
        member, session = self._seat.member, next(self._seat.sessions)
        return Seat(RunLog(self.log), member, self._workers, session, self._group_for(member, session))

    def _group_for(self, member: Member, session: int) -> Any:
        def make(formation: Formation, rank: int, check: Callable[[], None]) -> MortalGroup:
            from paceline.collectives.backend import ProcessGroup

            name = f"session {session}, group {formation.number}"
            store = c10d.PrefixStore(name, self._store)
            group = ProcessGroup(store, rank, len(formation.members), TIMEOUT, name, watch=check)
            return MortalGroup(group, member, formation.number, self._fates)

        return make

    # The ledger -------------------------------------------------------------------------------------------

    def uses(self) -> Counter[tuple[int, int]]:
        """How often each (epoch, sample) has got into the state of the run."""
        found: Counter[tuple[int, int]] = Counter()
        for life in self.lives:
            done = min((steps for group, steps in self.formed.items() if group > life.group), default=None)
            for epoch, samples, steps in life.used:
                if not life.killed or done is None or steps < done:
                    found.update((epoch, sample) for sample in samples)
        return found


def mortals() -> Mortals:
    """A world in which workers may die. Its log stays open: after a failure threads may be left, and write to it."""
    return Mortals(make_run_log())
