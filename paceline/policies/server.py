"""The base of a parameter server's policies: they map events to actions, and carry nothing out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.policies.base import Policy
from paceline.policies.messages import NOTHING, Actions, Commit, Push, PushKind, mean_of
from paceline.policies.state import NOT_YET, ServerState
from paceline.policies.weights import ByExamples, parse_weights


@dataclass(frozen=True, kw_only=True)
class ServerPolicy(Policy, ABC):
    """A policy under which workers push to a server that owns the parameters.

    The policy decides and a driver (the live server, the virtual cluster or a test) acts. The driver reports every
    event with its time ``at``, and carries out the returned actions in order. All that changes is in the state, which
    ``begin`` makes and every method gets. A push also requests the worker's next step; ``asked`` is for workers that
    have no step, such as those that just joined.
    """

    takes_all: ClassVar[bool] = False  # whether every commit is ``commit_of`` all pushes since the last, in order
    needs_all: ClassVar[bool] = False  # whether every commit needs a push of every worker
    coded: ClassVar[bool] = False  # whether steps are parts of rounds, which every Send names as the worker's work
    # Of differences and parameters, all steps begin with a Send and none with a Continue. A worker that has pushed
    # parameters is sent no step before their commit, and neither is its next incarnation.
    kind: ClassVar[PushKind] = PushKind.GRADIENT

    aggregator: str = "mean"  # how the pushes of a commit combine: the text form of an aggregator
    weights: str = "examples"  # how much each of them counts: the text form of weights

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = parse_weights(self.weights)
        if not (self.has_stale_pushes or isinstance(weights, ByExamples)):
            raise UsageError(
                f"policy {self.name!r}: no push is ever stale under {self.name}, so weights={self.weights} changes "
                "nothing; leave it out, or use an asynchronous policy such as async"
            )

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
    def adds_up(self) -> bool:
        """Whether every commit is ``mean_of`` all pushes since the last, in order."""
        return self.takes_all and isinstance(parse_weights(self.weights), ByExamples)

    @property
    def has_stale_pushes(self) -> bool:
        """Whether a push may be committed after others that its worker had not read."""
        return True

    def commit_of(self, state: ServerState, pushes: Sequence[Push]) -> Commit:
        """The next commit, of these pushes; ``state.version`` does not count it yet."""
        return parse_weights(self.weights).weigh(mean_of(pushes), state.version)

    @property
    def combined_by(self) -> str:
        """The text form of the aggregator: the option, unless the policy needs a certain one."""
        return self.aggregator

    @property
    def local_steps(self) -> int:
        """The steps that a worker makes with its own optimizer before it pushes what has become of its parameters."""
        return 1

    @property
    def local_momentum(self) -> float:
        """The Nesterov momentum of these steps, beside that of the optimizer; only for pushes of parameters."""
        return 0.0

    @abstractmethod
    def pushes_per_commit(self, workers: int) -> int:
        """The number of pushes per commit at the start of a run."""

    def batches_per_commit(self, workers: int) -> int:
        """The number of batches whose mean a commit takes at the start of a run; for learning-rate schedules."""
        return self.pushes_per_commit(workers)

    def joined(self, state: ServerState, worker: int, incarnation: int, at: float) -> Actions:
        """A worker has joined, for the first time or as a later incarnation."""
        state.join(worker, incarnation)
        return NOTHING

    @abstractmethod
    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        """A worker has left or died, or an expected one will never come."""

    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        """A worker requests parameters; it has abandoned its step, if it had one."""
        return (state.send((worker,)),) if state.ask(worker) else NOTHING

    @abstractmethod
    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        """A worker's push has arrived."""

    def skipped(self, state: ServerState, worker: int, at: float) -> Actions:
        """A worker's step came to nothing, since its gradients are not finite; another step is requested."""
        return self.asked(state, worker, at)

    def idle(self, state: ServerState, worker: int, at: float) -> Actions:
        """There are fewer batches than the worker's round has parts, and none for the work that it was sent."""
        return NOTHING

    def ended(self, state: ServerState, at: float) -> Actions:
        """The data is used up and no more pushes will come: commit all pending pushes."""
        return NOTHING

    def room(self, state: ServerState) -> int:
        """The number of next pushes that need no action, unless one has to be dropped."""
        return 0

    def pushed_together(self, state: ServerState, pushes: Sequence[Push], at: float) -> Actions:
        """Several pushes have arrived, in this order; faster than one by one if ``room`` covers them all."""
        return [action for push in pushes for action in self.pushed(state, push, at)]
