"""A trace as a plan: the commits in order, and the pushes of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.record.trace import (
    Began,
    Chose,
    Committed,
    Described,
    Ended,
    Finished,
    Given,
    GivenMore,
    Hashed,
    Joined,
    Pushed,
    Record,
    TraceError,
)


class RecordedBatch(NamedTuple):
    epoch: int
    number: int
    weight: float = 1.0  # in a sum

    def __str__(self) -> str:
        return f"batch {self.number} of epoch {self.epoch}"


class RecordedCodec(NamedTuple):
    """What a worker's codec remembers: its pushes since it joined, or since it did in a run that was then resumed."""

    joined: int  # how often it had joined then
    since: int  # the version at that moment
    undone: bool = False  # but for the last one before it joined again, which was lost


@dataclass(frozen=True)
class RecordedPush:
    """An accepted push, and everything that its gradients depend on beside the parameters of its version."""

    told: Pushed
    batches: tuple[RecordedBatch, ...]
    fresh: bool  # False: the worker went on with its own buffers, and not the server's
    joined: int  # how often its worker had joined
    codec: RecordedCodec  # of its worker

    def __str__(self) -> str:
        batches = ", ".join(map(str, self.batches))
        return f"worker {self.told.rank}, step {self.told.step}, on version {self.told.version} ({batches})"


class RecordedSend(NamedTuple):
    """Parameters that were sent to a worker."""

    rank: int
    joined: int  # how often it had joined when its codec began
    step: int  # -1: there were no more batches
    packet: bool  # a packet was sent in their place
    again: bool  # it has joined again since the last ones, and its codec remembers them


class RecordedCommit(NamedTuple):
    version: int  # after it
    pushes: tuple[RecordedPush, ...]  # in the order in which they were applied
    weights: tuple[float, ...] | None  # None: the mean by examples
    groups: tuple[int, ...] = ()  # of the pushes, if there are weights


@dataclass
class Plan:
    """What a replay does: its commits in order, and the hashes to compare with."""

    first: int = 0  # version at the start of the trace
    pushes: list[RecordedPush] = field(default_factory=list)  # all accepted pushes, in the order of arrival
    sends: dict[int, list[RecordedSend]] = field(default_factory=lambda: defaultdict(list))  # by version
    commits: list[RecordedCommit] = field(default_factory=list)
    hashes: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))  # by version
    data: list[Described] = field(default_factory=list)
    ended: Ended | None = None  # None: the server was killed, or is still running

    @property
    def last(self) -> int:
        """The version at the end of the trace."""
        return self.first + len(self.commits)

    def computed_from(self) -> dict[int, list[RecordedPush]]:
        """The pushes by the version that they were computed from, in the order of arrival.

        Pushes that were never committed are included: the worker may have continued with the buffers of such a step.
        """
        found: dict[int, list[RecordedPush]] = defaultdict(list)
        for push in self.pushes:
            found[push.told.version].append(push)
        return found


def read_plan(records: Iterable[Record]) -> Plan:
    """Read a plan from a trace; raise ``TraceError`` if the trace contradicts itself."""
    return _Reading().read(records)


class _Reading:
    """The state of one pass over a trace."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.begun = False
        self.joined: Counter[int] = Counter()  # by rank: how often
        self.codecs: dict[int, RecordedCodec] = {}  # by rank
        self.given: dict[int, Given] = {}  # by rank: the step under way
        self.batches: dict[int, list[RecordedBatch]] = {}  # of that step
        self.taken: dict[tuple[int, int], RecordedPush] = {}  # by rank and step: and not committed yet
        self.chosen: dict[tuple[int, int], Chose] = {}  # those of the next commit
        self.versions: dict[int, int] = {}  # by rank: of the parameters that its last push was computed from
        self.last: dict[int, int] = {}  # by rank: the step of its last push since it joined
        self.again: set[int] = set()  # ranks that have joined again with what their codecs remember
        self.lost: set[tuple[int, int]] = set()  # rank and step of pushes that were not committed when the server ended

    def read(self, records: Iterable[Record]) -> Plan:
        for record in records:
            match record:
                case Began():
                    self._begin(record)
                case Joined():
                    self._join(record)
                case Given():
                    self.given[record.rank] = record
                    self.batches[record.rank] = [RecordedBatch(record.epoch, record.batch, record.weight)]
                    if record.fresh:
                        self._send(record.rank, record.version, record.step, packet=record.packet)
                case Finished():
                    self._send(record.rank, record.version)
                case GivenMore() if record.batch >= 0:
                    self.batches.setdefault(record.rank, []).append(
                        RecordedBatch(record.epoch, record.batch, record.weight)
                    )
                case Pushed():
                    self._take(record)
                case Chose():
                    self.chosen[record.rank, record.step] = record
                case Committed():
                    self._commit(record)
                case Hashed():
                    self.plan.hashes[record.version].append(record.digest)
                case Described():
                    self.plan.data.append(record)
                case Ended():
                    self.plan.ended = record
                case _:
                    pass
        if not self.begun:
            raise TraceError("the trace does not say that a server began; the run ended before it did anything")
        return self.plan

    def _begin(self, record: Began) -> None:
        """The server began, or replaced a killed one: all workers join again, and pushes not committed are lost."""
        if not self.begun:
            self.plan.first, self.begun = record.version, True
        elif record.version != self.plan.last:
            raise TraceError(
                f"the trace has a gap: a server went on from version {record.version}, and the commit before it made "
                f"version {self.plan.last}"
            )
        self.plan.ended = None
        self.lost = {*self.taken}
        self.given, self.batches, self.taken, self.chosen, self.versions = {}, {}, {}, {}, {}

    def _join(self, record: Joined) -> None:
        rank = record.rank
        self.joined[rank] += 1
        if record.kept and rank in self.codecs:
            undone = (rank, self.last.get(rank, -1)) in self.lost
            self.codecs[rank] = self.codecs[rank]._replace(undone=undone)
            self.again.add(rank)
        else:
            self.codecs[rank] = RecordedCodec(self.joined[rank], self.plan.last)
        for known in (self.given, self.batches, self.versions, self.last):
            known.pop(rank, None)

    def _send(self, rank: int, version: int, step: int = -1, *, packet: bool = False) -> None:
        again = rank in self.again
        self.again.discard(rank)
        self.plan.sends[version].append(RecordedSend(rank, self._codec_of(rank).joined, step, packet, again))

    def _codec_of(self, rank: int) -> RecordedCodec:
        return self.codecs.get(rank, RecordedCodec(0, self.plan.first))

    def _take(self, record: Pushed) -> None:
        rank, step, version = record.rank, record.step, record.version
        given = self.given.get(rank)
        if given is None or given.step != step or given.batch < 0:
            raise TraceError(f"worker {rank} pushed step {step}, and the trace does not say what batch it was given")
        if not self.plan.first <= version <= self.plan.last or not (given.fresh or self.versions.get(rank) == version):
            raise TraceError(f"worker {rank} pushed step {step} on version {version}, which it cannot have had")
        self.versions[rank], self.last[rank] = version, step
        push = RecordedPush(record, tuple(self.batches[rank]), given.fresh, self.joined[rank], self._codec_of(rank))
        self.taken[rank, step] = push
        self.plan.pushes.append(push)

    def _commit(self, record: Committed) -> None:
        keys = [*(self.chosen or self.taken)]
        if record.version != self.plan.last + 1 or record.pushes != len(keys) or not self.taken.keys() >= {*keys}:
            raise TraceError(
                f"the trace has a gap: version {record.version} was made of {record.pushes} pushes, and there are "
                f"{len(keys)} after version {self.plan.last}"
            )
        pushes, chosen = tuple(self.taken.pop(key) for key in keys), self.chosen.values()
        weights, groups = tuple(each.weight for each in chosen), tuple(each.group for each in chosen)
        self.plan.commits.append(RecordedCommit(record.version, pushes, weights or None, groups))
        self.chosen = {}
