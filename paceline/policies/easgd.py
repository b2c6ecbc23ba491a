"""Workers with parameters of their own, each pulled to the server's, which it pulls in turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import UsageError
from paceline.policies.messages import Action, Actions, Commit, Drop, Push, PushKind
from paceline.policies.server import ServerPolicy
from paceline.policies.state import ServerState


@dataclass
class TurnState(ServerState):
    """The cyclic order of the ranks, and how far it has come."""

    carried: ClassVar[tuple[str, ...]] = (*ServerState.carried, "last")

    last: int = -1  # the worker that exchanged last

    def has_pushed(self, worker: int) -> bool:
        """Whether a push of this worker waits for its exchange; the worker itself may have left."""
        return worker in self.waiting or worker in self.credited

    def turn(self, *, of_all: bool) -> int | None:
        """The next worker in the order of ranks: of all members and all that have pushed, or of the latter alone."""
        follower = self.last + 1
        if self.has_pushed(follower) or (of_all and follower in self.members):
            return follower  # as nearly always, and without a look at all the others
        workers = {*self.waiting, *self.credited, *(self.members if of_all else ())}
        return min(workers, key=lambda worker: (worker <= self.last, worker), default=None)


@dataclass(frozen=True, kw_only=True)
class EASGD(ServerPolicy):
    """Exchange with each worker after every ``period`` steps of its own (EASGD, Zhang et al., NeurIPS 2015).

    Of a worker's parameters x and the server's z, alpha (x - z) is added to z and taken from x. A ``momentum`` above 0
    is that of the worker's steps (EAMSGD). The server exchanges with whoever comes, or with the workers in the cyclic
    order of their ranks; there a worker waits for its turn, and those who have left are passed over.

    >>> str(EASGD(period=10, alpha=0.1, order="round-robin"))
    'easgd(period=10, alpha=0.1, order=round-robin)'
    """

    name: ClassVar[str] = "easgd"
    kind: ClassVar[PushKind] = PushKind.PARAMETERS

    period: int
    alpha: float
    order: Literal["first-come", "round-robin"] = "first-come"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        example = "for example easgd(period=10, alpha=0.1)"
        if self.period < 1:
            raise UsageError(f"policy {self.name!r}: period must be at least 1, got {self.period}; {example}")
        if not 0 < self.alpha < 1:  # from 1 on, x and z only change places, or diverge, even without gradients
            raise UsageError(f"policy {self.name!r}: alpha must be above 0 and below 1, got {self.alpha}; {example}")
        if not 0 <= self.momentum < 1:
            raise UsageError(
                f"policy {self.name!r}: momentum must be at least 0 and below 1, got {self.momentum}; {example}"
            )
        if self.weights != "examples":
            raise UsageError(
                f"policy {self.name!r}: alpha is the weight of every exchange, so weights={self.weights} has no "
                f"meaning; leave it out, {example}"
            )

    def new_state(self) -> TurnState:
        return TurnState()

    @property
    def local_steps(self) -> int:
        return self.period

    @property
    def local_momentum(self) -> float:
        return self.momentum

    def pushes_per_commit(self, workers: int) -> int:
        return 1

    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        state.leave(worker)
        return self._exchange(_own(state))  # it may have been this worker's turn

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        if not state.end_step(push):
            return (Drop(push),)
        state.pending.append(push)
        state.waiting[push.worker] = None
        return self._exchange(_own(state))

    def ended(self, state: ServerState, at: float) -> Actions:
        return self._exchange(_own(state), of_all=False)

    def _exchange(self, state: TurnState, *, of_all: bool = True) -> Actions:
        """Exchange with the workers that have pushed and whose turn it is; ``of_all``: the others will push too."""
        actions: list[Action] = []
        while state.pending:
            worker = state.pending[0].worker if self.order == "first-come" else state.turn(of_all=of_all)
            if worker is None or not state.has_pushed(worker):
                break
            actions += self._exchange_with(state, worker)
        return actions

    def _exchange_with(self, state: TurnState, worker: int) -> list[Action]:
        place = next(place for place, push in enumerate(state.pending) if push.worker == worker)
        push = state.pending.pop(place)
        state.version += 1
        state.last = worker
        state.credited.pop(worker, None)
        actions: list[Action] = [Commit((push,), (self.alpha if push.examples else 0.0,))]
        if worker in state.waiting:
            del state.waiting[worker]
            actions.append(state.send((worker,)))
        return actions


def _own(state: ServerState) -> TurnState:
    assert isinstance(state, TurnState), "the state is of another policy"
    return state
