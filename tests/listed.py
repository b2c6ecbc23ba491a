"""A server policy whose decisions are listed: commits of any pushes that wait, with any weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from paceline.policies.messages import NOTHING, Action, Actions, Commit, Continue, Drop, Push, Send
from paceline.policies.server import ServerPolicy
from paceline.policies.state import ServerState


class Turn(NamedTuple):
    """What follows from a push: commits, each of places among the pushes that wait, with weights."""

    commits: tuple[tuple[tuple[int, float], ...], ...] = ()
    fresh: bool = True  # the worker is sent parameters, or goes on with those that it has


@dataclass
class ListedState(ServerState):
    """How many turns are over."""

    turns: int = 0


@dataclass(frozen=True, kw_only=True)
class Listed(ServerPolicy):
    """Do what the turns say, push by push, from the first again when all are over; everyone is always sent on."""

    name: ClassVar[str] = "listed"

    turns: tuple[Turn, ...]
    last: tuple[float, ...] = (1.0,)  # weights of those that are left when the data ends

    def __post_init__(self) -> None:
        """It has no text form."""

    def __str__(self) -> str:
        return self.name

    def new_state(self) -> ListedState:
        return ListedState()

    def pushes_per_commit(self, workers: int) -> int:
        return 1

    def joined(self, state: ServerState, worker: int, incarnation: int, at: float) -> Actions:
        state.join(worker, incarnation)
        return NOTHING

    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        state.leave(worker)
        return NOTHING

    def asked(self, state: ServerState, worker: int, at: float) -> Actions:
        return (state.send((worker,)),) if state.ask(worker) else NOTHING

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        assert isinstance(state, ListedState)
        if not state.end_step(push):
            return (Drop(push),)
        turn = self.turns[state.turns % len(self.turns)]
        state.turns += 1
        state.pending.append(push)
        actions: list[Action] = []
        for wanted in turn.commits:
            shares = [
                (state.pending.pop(place % len(state.pending)), weight)
                for place, weight in wanted[: len(state.pending)]
            ]
            if shares:
                actions.append(_commit(state, shares))
        step = state.begin_step((push.worker,))
        return [*actions, Send((push.worker,), step) if turn.fresh else Continue(push.worker, step)]

    def ended(self, state: ServerState, at: float) -> Actions:
        left, state.pending = state.pending, []
        shares = [(push, self.last[place % len(self.last)]) for place, push in enumerate(left)]
        return (_commit(state, shares),) if shares else NOTHING


def _commit(state: ServerState, shares: list[tuple[Push, float]]) -> Commit:
    state.version += 1
    pushes, weights = zip(*shares, strict=True)
    return Commit(pushes, weights)
