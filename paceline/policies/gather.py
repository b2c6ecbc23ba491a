"""Six policies of one family: gather pushes until there are enough, then commit them together.

They differ in three things: how many pushes are enough; whether workers are counted or mini-batches of any worker; and
whether late work is cancelled (Dutta et al., AISTATS 2018).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.policies.messages import NOTHING, WORKER, Action, Actions, Cancel, Continue, Drop, Push, Send
from paceline.policies.server import ServerPolicy
from paceline.policies.state import ServerState


@dataclass(frozen=True, kw_only=True)
class Gather(ServerPolicy):
    """Commit when there are enough pushes."""

    takes_all = True
    counts_batches = False  # whether several pushes of one worker count; if so, no worker waits for others
    cancels = False  # whether late work is cancelled, so that no push is ever stale

    @property
    def has_stale_pushes(self) -> bool:
        return not self.cancels

    @abstractmethod
    def enough(self, state: ServerState) -> int:
        """The number of pushes that the next commit needs."""

    def committed(self, state: ServerState, pushes: tuple[Push, ...], at: float) -> None:
        """Record a commit in the state."""

    def left(self, state: ServerState, worker: int, at: float) -> Actions:
        state.leave(worker)
        return self._commit_if_enough(state, at)  # a death can complete a round

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        if not state.end_step(push):
            return (Drop(push),)
        state.pending.append(push)
        state.waiting[push.worker] = None
        if len(state.pending) >= self.enough(state):
            return self._commit(state, at)
        return self._go_on(state, push.worker) if self.counts_batches else NOTHING

    def ended(self, state: ServerState, at: float) -> Actions:
        return self._commit(state, at) if state.pending else NOTHING  # the last commit may be smaller

    def room(self, state: ServerState) -> int:
        return 0 if self.counts_batches else self.enough(state) - len(state.pending) - 1

    def pushed_together(self, state: ServerState, pushes: Sequence[Push], at: float) -> Actions:
        workers = dict.fromkeys(map(WORKER, pushes))
        if len(workers) < len(pushes) or len(pushes) > self.room(state) or not state.end_steps(workers, pushes):
            return super().pushed_together(state, pushes, at)
        state.pending += pushes
        state.waiting = {**state.waiting, **workers} if state.waiting else workers
        return NOTHING

    def _go_on(self, state: ServerState, worker: int) -> Actions:
        del state.waiting[worker]
        if not self.cancels:
            return (state.send((worker,)),)
        return (Continue(worker, state.begin_step((worker,))),)

    def _commit_if_enough(self, state: ServerState, at: float) -> Actions:
        return self._commit(state, at) if 0 < self.enough(state) <= len(state.pending) else NOTHING

    def _commit(self, state: ServerState, at: float) -> Actions:
        commit = self.commit_of(state, state.pending)
        state.pending = []
        state.credited.clear()
        state.version += 1
        self.committed(state, commit.pushes, at)
        actions: list[Action] = [commit]
        free: dict[int, Any] = state.waiting
        state.waiting = {}
        if self.cancels and state.under_way:
            late, state.under_way = state.under_way, {}
            actions.append(Cancel(tuple(late), tuple(late.values())))
            free = self._in_order(state, free, late)
        if free:
            actions.append(Send(tuple(free), state.begin_step(free)))  # after the commit: all read its parameters
        return actions

    def _in_order(self, state: ServerState, waiting: dict[int, None], late: dict[int, int]) -> dict[int, Any]:
        """The waiting and the late workers, in the order of the members.

        Large dictionaries are several times faster to make in that order than in the order of arrival.
        """
        if len(waiting) + len(late) == len(state.members):
            return state.members
        return {worker: None for worker in state.members if worker in waiting or worker in late}


@dataclass(frozen=True, kw_only=True)
class Sync(Gather):
    """Commit the gradients of all workers together.

    >>> str(Sync())
    'sync'
    """

    name: ClassVar[str] = "sync"
    has_stale_pushes = False
    needs_all = True

    def pushes_per_commit(self, workers: int) -> int:
        return workers

    def enough(self, state: ServerState) -> int:
        return state.num_learners()


@dataclass(frozen=True, kw_only=True)
class Async(Gather):
    """Commit every gradient when it comes, however stale it is."""

    name: ClassVar[str] = "async"

    def pushes_per_commit(self, workers: int) -> int:
        return 1

    def enough(self, state: ServerState) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class GatherK(Gather):
    """Commit k pushes together."""

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_k(self, "k", self.k)

    def begin(self, workers: int) -> ServerState:
        if not self.counts_batches:
            check_enough_workers(self, "k", self.k, workers)
        return super().begin(workers)

    def pushes_per_commit(self, workers: int) -> int:
        return self.k

    def enough(self, state: ServerState) -> int:
        return self.k if self.counts_batches else min(self.k, state.num_learners())


@dataclass(frozen=True, kw_only=True)
class KSync(GatherK):
    """Commit the gradients of the first k workers and cancel the others (backup workers, Chen et al., 2016).

    >>> str(KSync(k=3))
    'k-sync(k=3)'
    """

    name: ClassVar[str] = "k-sync"
    cancels = True


@dataclass(frozen=True, kw_only=True)
class KBatchSync(GatherK):
    """Commit the first k mini-batches of any workers, which continue on the same parameters; cancel the rest."""

    name: ClassVar[str] = "k-batch-sync"
    counts_batches = True
    cancels = True


@dataclass(frozen=True, kw_only=True)
class KAsync(GatherK):
    """Commit the gradients of the first k workers, which wait for it; the others keep computing on old parameters."""

    name: ClassVar[str] = "k-async"


@dataclass(frozen=True, kw_only=True)
class KBatchAsync(GatherK):
    """Commit every k mini-batches of any workers, which continue at once with the newest parameters."""

    name: ClassVar[str] = "k-batch-async"
    counts_batches = True


def check_k(policy: ServerPolicy, option: str, k: int) -> None:
    """Raise if k is below 1."""
    if k < 1:
        raise UsageError(
            f"policy {policy.name!r}: {option} must be at least 1, got {k}; for example {policy.name}({option}=3)"
        )


def check_enough_workers(policy: ServerPolicy, option: str, k: int, workers: int) -> None:
    """Raise if a commit would need more workers than there are."""
    if k > workers:
        raise UsageError(
            f"policy {policy}: a commit needs {k} workers, but the run has {workers}; "
            f"use at most {option}={workers}, or more workers"
        )
