"""Policies of a parameter server: events in, actions out, and nothing done by themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.policies.base import Policy
from paceline.policies.messages import NOTHING, Actions, Push
from paceline.policies.state import NOT_YET, ServerState


@dataclass(frozen=True, kw_only=True)
class ServerPolicy(Policy, ABC):
    """A policy under which workers push to a server that owns the parameters.

    It decides and a driver does: the live server, the virtual cluster or a test tells it of every event, with the
    driver's time ``at``, and carries out the actions that it answers, in their order. What changes is in the state,
    which ``begin`` makes and every event is given. A push also asks for what the worker does next; ``asked`` is for
    workers that have nothing under way, after they have joined.
    """

    needs_loss: ClassVar[bool] = False  # decisions depend on the losses that pushes carry
    adds_up: ClassVar[bool] = False  # every commit is ``mean_of`` all pushes since the last, in the order they came

    def begin(self, workers: int) -> ServerState:
        """Make the state of a run that expects the workers 0 to ``workers`` - 1."""
        if workers < 1:
            raise UsageError(f"a run needs at least 1 worker, got {workers}")
        state = self.new_state()
        state.members = dict.fromkeys(range(workers), NOT_YET)  # commits wait for them
        return state

    def new_state(self) -> ServerState:
        """Make a state without workers."""
        return ServerState()

    def restore(self, saved: dict[str, Any]) -> ServerState:
        """Make the state again that ``state.as_dict()`` was taken of."""
        return type(self.new_state()).from_dict(saved)

    @abstractmethod
    def pushes_per_commit(self, workers: int) -> int:
        """How many pushes a commit takes when so many workers are there, at the start; for schedules of rates."""

    @abstractmethod
    def joined(self, state: ServerState, worker: int, incarnation: int, at: float) -> Actions:
        """A worker has come, for the first time or as a later incarnation."""

    @abstractmethod
    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        """A worker has gone or died; one of those expected that never came has left too."""

    @abstractmethod
    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        """A worker wants parameters; what it had under way it has given up."""

    @abstractmethod
    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        """A worker's result has come."""

    def ended(self, state: ServerState, at: float) -> Actions:
        """No more pushes will come, since the data has been used up: whatever is pending is to be committed."""
        return NOTHING

    def room(self, state: ServerState) -> int:
        """How many pushes to come will all be answered with nothing, unless one has to be dropped."""
        return 0

    def pushed_together(self, state: ServerState, pushes: Sequence[Push], at: float) -> Actions:
        """Several results have come, in this order; if there is room for them all, quicker than one by one."""
        return [action for push in pushes for action in self.pushed(state, push, at)]
