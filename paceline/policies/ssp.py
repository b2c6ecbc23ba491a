"""Stale synchronous parallel: nobody runs further ahead of the slowest than a bound."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.messages import NOTHING, Actions, Drop, Push, mean_of
from paceline.policies.server import ServerPolicy
from paceline.policies.state import ServerState


@dataclass
class SSPState(ServerState):
    """How far each worker is, in pushes."""

    clocks: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SSP(ServerPolicy):
    """Commit every gradient when it comes; who is over ``bound`` pushes ahead of the slowest waits (Ho et al., 2013).

    With bound 0 the workers move in lock-step, each with commits of its own; a large bound is async.

    >>> str(SSP(bound=3))
    'ssp(bound=3)'
    """

    name: ClassVar[str] = "ssp"

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
        state.clocks = dict.fromkeys(range(workers), 0)
        return state

    def pushes_per_commit(self, workers: int) -> int:
        return 1

    def joined(self, state: ServerState, worker: int, incarnation: int, at: float) -> Actions:
        state, mine = _own(state), worker
        state.join(worker, incarnation)
        others = (clock for worker, clock in state.clocks.items() if worker != mine)
        state.clocks[worker] = min(others, default=0)  # it neither holds others back nor is held back
        return self._release(state)

    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        state = _own(state)
        state.leave(worker)
        state.clocks.pop(worker, None)
        return self._release(state)

    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        if not state.ask(worker):
            return NOTHING
        state.waiting[worker] = None
        return self._release(_own(state))

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        if not state.end_step(push):
            return (Drop(push),)
        state = _own(state)
        state.version += 1
        state.clocks[push.worker] += 1
        state.waiting[push.worker] = None
        return (mean_of((push,)), *self._release(state))

    def _release(self, state: SSPState) -> Actions:
        """Send to those who wait and are near enough to the slowest."""
        if not state.waiting:
            return NOTHING
        furthest = min(state.clocks.values()) + self.bound
        free = tuple([worker for worker in state.waiting if state.clocks[worker] <= furthest])
        for worker in free:
            del state.waiting[worker]
        return (state.send(free),) if free else NOTHING


def _own(state: ServerState) -> SSPState:
    assert isinstance(state, SSPState), "the state is of another policy"
    return state
