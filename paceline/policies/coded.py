"""Rounds of which each worker computes several parts, so that a commit does not need all workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.messages import NOTHING, Action, Actions, Cancel, Commit, Drop, Push, Send, Work
from paceline.policies.server import ServerPolicy
from paceline.policies.state import ServerState


class Code(ABC):
    """Who computes what in a round of as many parts as workers; each worker has a place in it."""

    rows: tuple[tuple[tuple[int, float], ...], ...]  # of each place: its parts, with their coefficients

    @abstractmethod
    def enough(self, places: Iterable[int]) -> bool:
        """Whether the pushes of these places are all that a commit needs."""

    @abstractmethod
    def weights(self, places: Sequence[int]) -> list[float] | None:
        """The weights by which the pushes of these places add up to the sum of all parts; None if they cannot."""

    def group(self, place: int) -> int:
        """The group of a place: all pushes of a group should be the same, if there are groups."""
        return 0

    def may_take(self, place: int, pushed: Sequence[int]) -> bool:
        """Whether a worker that has pushed these places may compute another one."""
        return True


@dataclass
class CodedState(ServerState):
    """The present round: who has which place, and which places are done."""

    round: int = 0
    num_parts: int = 0  # of the round, and places; 0: there is no round
    places: dict[int, int] = field(default_factory=dict)  # worker -> the place that it computes, or was the last to
    arrived: dict[int, None] = field(default_factory=dict)  # the places of the pending pushes, in their order
    empty: dict[int, None] = field(default_factory=dict)  # places without a batch
    failed: dict[int, None] = field(default_factory=dict)  # places whose gradients are not finite

    def is_open(self, place: int) -> bool:
        """Whether a push of this place may still come."""
        return place not in self.arrived and place not in self.empty and place not in self.failed

    def coming(self) -> list[int]:
        """The open places of the members."""
        places = [place for worker, place in self.places.items() if worker in self.members]
        return [place for place in places if self.is_open(place)]

    def pushed_by(self, worker: int) -> list[int]:
        """The places of a worker's pending pushes."""
        return [place for place, push in zip(self.arrived, self.pending, strict=True) if push.worker == worker]


@dataclass(frozen=True, kw_only=True)
class Coded(ServerPolicy):
    """Let each worker compute several parts of a round, and commit when the pushes suffice; cancel the rest.

    A round begins with its members, of which each has a place. Who joins later takes part in the next round, or takes
    the place of one that has left, if it is needed. So does one that has pushed and waits.
    """

    coded: ClassVar[bool] = True
    has_stale_pushes = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregator != "mean":
            raise UsageError(
                f"policy {self.name!r}: its weights say how pushes add up to the gradient of all batches, so "
                f"aggregator={self.aggregator} cannot combine them; leave it out"
            )

    @abstractmethod
    def code(self, workers: int) -> Code:
        """The code of a round of so many workers."""

    def new_state(self) -> CodedState:
        return CodedState()

    def batches_per_commit(self, workers: int) -> int:
        return workers

    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        assert isinstance(state, CodedState)
        state.leave(worker)
        return self._go_on(state)

    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        assert isinstance(state, CodedState)
        if not state.ask(worker):
            return NOTHING
        if not state.num_parts:
            self._begin_round(state)
        state.under_way.pop(worker, None)
        state.waiting[worker] = None
        return self._go_on(state)

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        assert isinstance(state, CodedState)
        if not state.end_step(push):
            return (Drop(push),)
        state.pending.append(push)
        return self._end_work(state, push.worker, state.arrived)

    def skipped(self, state: ServerState, worker: int, at: float) -> Actions:
        assert isinstance(state, CodedState)
        if worker not in state.under_way:
            return self.asked(state, worker, at)
        del state.under_way[worker]
        return self._end_work(state, worker, state.failed)

    def idle(self, state: ServerState, worker: int, at: float) -> Actions:
        assert isinstance(state, CodedState)
        if worker not in state.under_way:
            return NOTHING
        del state.under_way[worker]
        return self._end_work(state, worker, state.empty)

    def ended(self, state: ServerState, at: float) -> Actions:
        assert isinstance(state, CodedState)
        return self._end_round(state) if state.pending else NOTHING

    def _end_work(self, state: CodedState, worker: int, among: dict[int, None]) -> Actions:
        """A worker's place is done, and now ``among`` those; the worker waits."""
        among[state.places[worker]] = None
        state.waiting[worker] = None
        return self._go_on(state)

    def _go_on(self, state: CodedState) -> Actions:
        """Do what the present round needs: a commit, more work, or nothing."""
        if not (state.under_way or state.waiting or state.pending):
            state.num_parts = 0  # nobody is in the round, and nothing has come of it: who asks next begins another
        if not state.num_parts:
            return NOTHING
        code = self.code(state.num_parts)
        done, coming = [*state.arrived, *state.empty], state.coming()
        if state.pending and code.enough(done):
            return self._end_round(state)
        free = [worker for worker in state.waiting if not self._has_open_place(state, worker)]
        taken = {} if code.enough([*done, *coming]) else self._places_for(state, code, free)
        for worker, place in taken.items():
            for former in [each for each, its in state.places.items() if its == place]:
                del state.places[former]
            state.places[worker] = place
        ready = [worker for worker in state.waiting if self._has_open_place(state, worker)]
        if ready:
            return (self._send(state, ready),)
        # Without anyone who waits the round stays as it is, for those who join.
        return NOTHING if coming or not state.waiting else self._end_round(state)

    def _has_open_place(self, state: CodedState, worker: int) -> bool:
        return worker in state.places and state.is_open(state.places[worker])

    def _places_for(self, state: CodedState, code: Code, free: Sequence[int]) -> dict[int, int]:
        """Give the places of those who have left to these workers."""
        coming, taken = {*state.coming()}, dict[int, int]()
        left = [place for place in range(state.num_parts) if state.is_open(place) and place not in coming]
        for worker in free:
            pushed = state.pushed_by(worker)
            place = next((each for each in left if code.may_take(each, pushed)), None)
            if place is not None:
                taken[worker] = place
                left.remove(place)
        return taken

    def _end_round(self, state: CodedState) -> Actions:
        """Commit the pending pushes, by weights of 0 if they do not suffice, and begin the next round."""
        actions: list[Action] = []
        if state.pending:
            actions.append(self._commit(state))
            state.version += 1
        state.pending = []
        state.credited.clear()
        late, state.under_way = state.under_way, {}
        if late:
            actions.append(Cancel(tuple(late), tuple(late.values())))
        self._begin_round(state)
        free = [worker for worker in state.places if worker in state.waiting or worker in late]
        if free:
            actions.append(self._send(state, free))
        return actions

    def _commit(self, state: CodedState) -> Commit:
        """The commit of the pending pushes, in the order of their places: the bits of a sum depend on its order."""
        code = self.code(state.num_parts)
        places, pushes = zip(*sorted(zip(state.arrived, state.pending, strict=True)), strict=True)
        weights = code.weights([*places, *state.empty]) or [0.0] * len(places)
        return Commit(pushes, tuple(weights[: len(places)]), tuple(map(code.group, places)))

    def _begin_round(self, state: CodedState) -> None:
        state.round += 1
        state.num_parts = len(state.members)
        state.places = {worker: place for place, worker in enumerate(sorted(state.members))}
        state.arrived, state.empty, state.failed = {}, {}, {}

    def _send(self, state: CodedState, workers: Sequence[int]) -> Send:
        """Let the workers compute their places."""
        rows = self.code(state.num_parts).rows
        for worker in workers:
            state.waiting.pop(worker, None)
        work = tuple(Work(state.round, state.num_parts, rows[state.places[worker]]) for worker in workers)
        return Send(tuple(workers), state.begin_step(workers), work)
