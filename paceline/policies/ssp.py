"""Stale synchronous parallel: a bound on how far a worker may be ahead of the slowest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.messages import NOTHING, Actions, Drop, Push
from paceline.policies.server import ServerPolicy
from paceline.policies.state import NOT_YET, ServerState


@dataclass
class SSPState(ServerState):
    """Each worker's clock, its number of pushes; the slowest clock is kept up to date."""

    clocks: dict[int, int] = field(default_factory=dict)  # worker -> its pushes
    crowd: dict[int, int] = field(default_factory=dict)  # clock -> number of workers with it, never 0
    slowest: int = 0  # the smallest clock

    def put(self, worker: int, clock: int) -> None:
        """Give a worker without a clock this one, which must not be below the slowest."""
        if not self.clocks:
            self.slowest = clock
        self.clocks[worker] = clock
        self.crowd[clock] = self.crowd.get(clock, 0) + 1

    def tick(self, worker: int) -> None:
        """Advance the worker's clock by one."""
        clock = self.clocks[worker]
        self.clocks[worker] = clock + 1
        self.crowd[clock + 1] = self.crowd.get(clock + 1, 0) + 1
        self._depart(clock)

    def remove(self, worker: int) -> None:
        """Forget the worker's clock, if it has one."""
        if worker in self.clocks:
            self._depart(self.clocks.pop(worker))

    def _depart(self, clock: int) -> None:
        self.crowd[clock] -= 1
        if not self.crowd[clock]:
            del self.crowd[clock]
        while self.crowd and self.slowest not in self.crowd:
            self.slowest += 1


@dataclass(frozen=True, kw_only=True)
class SSP(ServerPolicy):
    """Commit every gradient at once; a worker over ``bound`` pushes ahead of the slowest waits (Ho et al., 2013).

    With bound 0 the workers move in lock-step, each with its own commits; a large bound is async.

    >>> str(SSP(bound=3))
    'ssp(bound=3)'
    """

    name: ClassVar[str] = "ssp"
    takes_all = True

    bound: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bound < 0:
            raise UsageError(
                f"policy {self.name!r}: bound must be at least 0, got {self.bound}; for example ssp(bound=3)"
            )

    def new_state(self) -> SSPState:
        return SSPState()

    def begin(self, workers: int) -> ServerState:
        state = _own(super().begin(workers))
        state.clocks, state.crowd = dict.fromkeys(range(workers), 0), {0: workers}
        return state

    def pushes_per_commit(self, workers: int) -> int:
        return 1

    def joined(self, state: ServerState, worker: int, incarnation: int, at: float) -> Actions:
        state = _own(state)
        expected = state.members.get(worker) == NOT_YET
        state.join(worker, incarnation)
        if not expected:  # an expected worker has had clock 0 from the start
            state.remove(worker)
            state.put(worker, state.slowest if state.clocks else 0)  # so it neither delays others nor has to wait
        return self._release(state, state.waiting)

    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        state = _own(state)
        state.leave(worker)
        state.remove(worker)
        return self._release(state, state.waiting)

    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        if not state.ask(worker):
            return NOTHING
        state.waiting[worker] = None
        return self._release(_own(state), (worker,))

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        if not state.end_step(push):
            return (Drop(push),)
        state = _own(state)
        slowest = state.slowest
        commit = self.commit_of(state, (push,))
        state.version += 1
        state.tick(push.worker)
        state.waiting[push.worker] = None
        # Waiting workers wait until the slowest clock moves, so only then are the others checked.
        candidates = state.waiting if state.slowest > slowest else (push.worker,)
        return (commit, *self._release(state, candidates))

    def _release(self, state: SSPState, candidates: Iterable[int]) -> Actions:
        """Send parameters to the waiting candidates that are within the bound of the slowest."""
        furthest = state.slowest + self.bound
        free = tuple([worker for worker in candidates if state.clocks[worker] <= furthest])
        for worker in free:
            del state.waiting[worker]
        return (state.send(free),) if free else NOTHING


def _own(state: ServerState) -> SSPState:
    assert isinstance(state, SSPState), "the state is of another policy"
    return state
