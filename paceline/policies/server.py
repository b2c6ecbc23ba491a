"""The base of a parameter server's policies: they map events to actions, and carry nothing out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.policies.base import Policy
from paceline.policies.messages import NOTHING, Actions, Push, PushKind
from paceline.policies.state import NOT_YET, ServerState


@dataclass(frozen=True, kw_only=True)
class ServerPolicy(Policy, ABC):
    """A policy under which workers push to a server that owns the parameters.

    The policy decides and a driver (the live server, the virtual cluster or a test) acts. The driver reports every
    event with its time ``at``, and carries out the returned actions in order. All that changes is in the state, which
    ``begin`` makes and every method gets. A push also requests the worker's next step; ``asked`` is for workers that
    have no step, such as those that just joined.
    """

    adds_up: ClassVar[bool] = False  # whether every commit is ``mean_of`` all pushes since the last, in order
    kind: ClassVar[PushKind] = PushKind.GRADIENT  # of differences, all steps begin with a Send and none with a Continue

    aggregator: str = "mean"  # how the pushes of a commit combine: the text form of an aggregator

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
        """Make a state from the result of ``state.as_dict()``."""
        return type(self.new_state()).from_dict(saved)

    @property
    def local_steps(self) -> int:
        """The steps that a worker makes with its own optimizer before it pushes their difference."""
        return 1

    @abstractmethod
    def pushes_per_commit(self, workers: int) -> int:
        """The number of pushes per commit at the start of a run; for learning-rate schedules."""

    @abstractmethod
    def joined(self, state: ServerState, worker: int, incarnation: int, at: float) -> Actions:
        """A worker has joined, for the first time or as a later incarnation."""

    @abstractmethod
    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        """A worker has left or died, or an expected one will never come."""

    @abstractmethod
    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        """A worker requests parameters; it has abandoned its step, if it had one."""

    @abstractmethod
    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        """A worker's push has arrived."""

    def ended(self, state: ServerState, at: float) -> Actions:
        """The data is used up and no more pushes will come: commit all pending pushes."""
        return NOTHING

    def room(self, state: ServerState) -> int:
        """The number of next pushes that need no action, unless one has to be dropped."""
        return 0

    def pushed_together(self, state: ServerState, pushes: Sequence[Push], at: float) -> Actions:
        """Several pushes have arrived, in this order; faster than one by one if ``room`` covers them all."""
        return [action for push in pushes for action in self.pushed(state, push, at)]
