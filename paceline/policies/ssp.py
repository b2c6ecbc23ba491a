"""Stale synchronous parallel: nobody runs further ahead of the slowest than a bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.messages import NOTHING, Actions, Drop, Push, mean_of
from paceline.policies.server import ServerPolicy, send
from paceline.policies.state import ServerState


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

    def joined(self, state: ServerState, worker: int, incarnation: int, at: float) -> Actions:
        others = [member.clock for other, member in state.members.items() if other != worker]
        state.join(worker, incarnation).clock = min(others, default=0)  # it neither holds others back nor is held
        return self._release(state)

    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        state.leave(worker)
        return self._release(state)

    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        if not state.ask(worker):
            return NOTHING
        state.waiting[worker] = None
        return self._release(state)

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        if not state.end_step(push):
            return (Drop(push),)
        state.version += 1
        state.waiting[push.worker] = None
        return (mean_of((push,)), *self._release(state))

    def _release(self, state: ServerState) -> Actions:
        """Send to those who wait and are near enough to the slowest."""
        if not state.waiting:
            return NOTHING
        furthest = min(member.clock for member in state.members.values()) + self.bound
        free = tuple([worker for worker in state.waiting if state.members[worker].clock <= furthest])
        for worker in free:
            del state.waiting[worker]
        return (send(state, free),) if free else NOTHING
