"""What is known of each worker while a run goes on: what it does now, its last seconds, its births and deaths."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from paceline.record.timeline import Kind, Records
from paceline.report.live.strips import Strip

State = Literal["computing", "waiting", "exchanging", "dead", "left", "expected"]
STATES: tuple[State, ...] = ("computing", "waiting", "exchanging", "dead", "left", "expected")
Happening = Literal["joined", "left", "died"]
Source = Literal["metrics", "timeline"]

_QUIET = 1.0  # seconds without a record after which a worker must be in the span that follows its last one
_REMEMBERED = 200  # births and deaths of all workers
_DEATHS = 8  # of one worker


class Change(NamedTuple):
    """A worker joined, left or died."""

    at: float
    worker: int
    happening: Happening
    incarnation: int


@dataclass
class Lives:
    """How many lives of a worker have begun and ended."""

    begun: int = 0
    ended: int = 0


@dataclass
class Worker:
    """One worker, through all its lives.

    Metrics and timeline both tell of births and deaths, one sooner and one later. Both tell of the same lives in the
    same order, so the first to tell of the n-th birth or end is believed, and the other adds nothing.
    """

    rank: int
    incarnation: int = 0
    step: int = 0
    gone: Literal["left", "died"] | None = None
    gone_at: float = -math.inf
    seconds_per_step: float | None = None  # of computing, in its last records
    deaths: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_DEATHS))  # from and to
    strip: Strip = field(default_factory=Strip)
    _lives: Lives = field(default_factory=Lives)
    _told: dict[Source, Lives] = field(default_factory=lambda: {"metrics": Lives(), "timeline": Lives()})
    _has_pushed: bool = False  # whether its last records are those of a push
    _until: float = -math.inf  # the end of its last record

    def state(self, now: float, *, over: bool = False, served: bool = False) -> State:
        """What it does now: that which took most of the last second.

        A span is written when it ends. After a second without any, the state is what follows the last one. Peers write
        at the end of an update, so they compute then. Workers of a server write when they have the parameters, and then
        compute, and when they have pushed, and then wait.
        """
        if self.gone == "left":
            return "left"
        if self.gone == "died" or (over and self.has_been):
            return "dead"
        if not self.has_been:
            return "expected"
        if now - self._until < _QUIET:
            return STATES[self.strip.mostly(_QUIET)]
        return "waiting" if served and self._has_pushed else "computing"

    @property
    def has_been(self) -> bool:
        """Whether it has joined, or written anything."""
        return self._lives.begun > 0 or self._until > -math.inf

    def waiting_share(self) -> float | None:
        """The share of its last seconds in which it waited; None if it has written nothing."""
        seconds = self.strip.seconds()
        total = sum(seconds.values())
        return seconds[Kind.WAITING] / total if total > 0 else None

    def dead_times(self, now: float, *, over: bool = False) -> list[tuple[float, float]]:
        """When it was dead, up to now."""
        is_dead = self.gone == "died" or (over and self.gone is None)
        since = self.gone_at if self.gone == "died" else self._until
        return [*self.deaths, (since, now)] if is_dead and math.isfinite(since) else list(self.deaths)

    def take(self, records: Records, turn: int) -> Iterator[Change]:
        """Count its new records; give what they tell of its lives."""
        self.strip.add(records, turn)
        begin = 0
        for place in np.flatnonzero((records["kind"] == Kind.BEGAN) | (records["kind"] == Kind.LEFT)):
            self._reach(records[begin:place])
            mark, begin = records[place], int(place) + 1
            if mark["kind"] == Kind.BEGAN:
                yield from self.joined("timeline", float(mark["start"]), int(mark["step"]))
            else:
                yield from self.ended("timeline", float(mark["start"]), "left")
            self._reach(records[place:begin])
        self._reach(records[begin:])
        computing = records[records["kind"] == Kind.COMPUTING]
        if len(computing):
            self.step = int(computing["step"][-1])
            self.seconds_per_step = float(computing["duration"].sum()) / len(np.unique(computing["step"]))

    def joined(self, source: Source, at: float, incarnation: int) -> Iterator[Change]:
        """One source tells of its next life."""
        told = self._told[source]
        if told.begun > told.ended:  # nobody saw the end of the life before
            yield from self.ended(source, self._until if math.isfinite(self._until) else at, "died")
        told.begun = told.ended + 1
        if told.begun > self._lives.begun:
            self._lives.begun = told.begun
            if self.gone == "died":
                self.deaths.append((self.gone_at, at))
            self.gone, self.incarnation = None, incarnation
            yield Change(at, self.rank, "joined", incarnation)

    def ended(self, source: Source, at: float, how: Literal["left", "died"]) -> Iterator[Change]:
        """One source tells that its life has ended."""
        told = self._told[source]
        told.ended += 1
        if told.ended > self._lives.ended:
            self._lives.ended = told.ended
            self._lives.begun = max(self._lives.begun, told.ended)
            self.gone, self.gone_at = how, at
            yield Change(at, self.rank, how, self.incarnation)

    def _reach(self, records: Records) -> None:
        if len(records):
            self._until = float(records["start"][-1] + records["duration"][-1])
            kinds = records["kind"][-2:].tolist()
            self._has_pushed = kinds[-1] == Kind.COMPUTING or kinds == [Kind.COMPUTING, Kind.EXCHANGING]


class Workers:
    """All workers of a run, and their last births and deaths."""

    def __init__(self) -> None:
        self.changes: deque[Change] = deque(maxlen=_REMEMBERED)
        self.counts: Counter[Happening] = Counter()
        self.served = False  # by a server
        self._all: dict[int, Worker] = {}

    def expect(self, number: int) -> None:
        """There are to be so many; those that have written nothing yet are expected."""
        for rank in range(number):
            self._find(rank)

    def take(self, rank: int, records: Records, turn: int) -> None:
        """Count the new records of a worker."""
        self._note(self._find(rank).take(records, turn))

    def joined(self, rank: int, at: float, incarnation: int) -> None:
        """The metrics tell that a worker has joined."""
        self._note(self._find(rank).joined("metrics", at, incarnation))

    def ended(self, rank: int, at: float, *, dead: bool) -> None:
        """The metrics tell that a worker has left or died."""
        self._note(self._find(rank).ended("metrics", at, "died" if dead else "left"))

    def listed(self) -> list[Worker]:
        """All workers by rank."""
        return [self._all[rank] for rank in sorted(self._all)]

    def slowest(self, number: int) -> list[Worker]:
        """Those that compute longest for a step."""
        known = [worker for worker in self.listed() if worker.seconds_per_step is not None and worker.gone is None]
        return sorted(known, key=lambda worker: -(worker.seconds_per_step or 0.0))[:number]

    def _find(self, rank: int) -> Worker:
        return self._all.setdefault(rank, Worker(rank))

    def _note(self, changes: Iterator[Change]) -> None:
        for change in changes:
            self.changes.append(change)
            self.counts[change.happening] += 1
