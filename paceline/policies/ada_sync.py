"""Commit few pushes while the loss is high and more as it falls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import UsageError
from paceline.policies.gather import Gather, check_enough_workers
from paceline.policies.messages import Push
from paceline.policies.state import ServerState

Base = Literal["k-sync", "k-batch-sync", "k-async", "k-batch-async"]
Rule = Literal["quadratic", "root"]


@dataclass
class AdaState(ServerState):
    """The present k, and the losses that determine the next one."""

    carried = (*ServerState.carried, "k", "first_loss", "num_first", "loss", "num_losses", "window_end")

    k: int = 1
    first_loss: float = 0.0  # mean of the pushes computed on the first parameters
    num_first: int = 0
    loss: float = 0.0  # mean of the pushes committed in this window
    num_losses: int = 0
    window_end: float = 0.0


@dataclass(frozen=True, kw_only=True)
class AdaSync(Gather):
    """Adapt k to the loss: many fast, noisy commits at first, fewer and better ones later (Dutta et al., 2021).

    After each window k is chosen from F0, the loss at the start, and F, that of the window. The rule ``quadratic`` is
    for commits that take a time of log(P / (P - k)), as under k-sync and k-async; ``root`` is for a time of k / P, as
    under k-batch-sync and k-batch-async. A k0 below 1 is for large mini-batches: k is 1 until the loss has fallen.

    >>> str(AdaSync(k0=2, window=30, over="k-async"))
    'ada-sync(k0=2.0, over=k-async, window=30.0)'
    """

    name: ClassVar[str] = "ada-sync"
    needs_loss: ClassVar[bool] = True

    k0: float = 1.0  # the best k at the start
    over: Base = "k-sync"  # the policy whose k is adapted
    rule: Rule = "quadratic"
    window: float = 60.0  # seconds of the driver's time between two choices of k

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.k0 < math.inf:
            raise UsageError(f"policy {self.name!r}: k0 must be above 0 and finite, got {self.k0:g}")
        if not (math.isfinite(self.window) and self.window >= 0):
            raise UsageError(f"policy {self.name!r}: window must be finite and at least 0, got {self.window}")

    @property
    def counts_batches(self) -> bool:  # type: ignore[override]  # in the others of the family a constant
        return "batch" in self.over

    @property
    def cancels(self) -> bool:  # type: ignore[override]
        return self.over.endswith("-sync")

    @property
    def first_k(self) -> int:
        """The k of the first window."""
        return max(1, round(self.k0))

    def new_state(self) -> AdaState:
        return AdaState(k=self.first_k, window_end=self.window)

    def begin(self, workers: int) -> ServerState:
        check_enough_workers(self, "k0", self.first_k, workers)
        return super().begin(workers)

    def pushes_per_commit(self, workers: int) -> int:
        return self.first_k

    def enough(self, state: ServerState) -> int:
        assert isinstance(state, AdaState)
        return state.k if self.counts_batches else min(state.k, state.num_learners())

    def committed(self, state: ServerState, pushes: tuple[Push, ...], at: float) -> None:
        assert isinstance(state, AdaState)
        for push in pushes:
            if push.loss is not None and math.isfinite(push.loss):
                state.num_losses += 1
                state.loss += (push.loss - state.loss) / state.num_losses
                if push.version == 0:
                    state.num_first += 1
                    state.first_loss += (push.loss - state.first_loss) / state.num_first
        if at >= state.window_end and state.num_losses:
            state.k = self.best_k(len(state.members), state.first_loss, state.loss)
            state.loss, state.num_losses = 0.0, 0
            state.window_end = at + self.window

    def best_k(self, workers: int, first_loss: float, loss: float) -> int:
        """The k for ``workers`` whose loss was ``first_loss`` at the start and is ``loss`` now."""
        if loss <= 0 or self.k0 >= workers:
            return max(1, workers)
        fallen = first_loss / loss
        if self.rule == "root":
            k = self.k0 * math.sqrt(fallen)
        else:
            b = self.k0**2 / (workers - self.k0) * fallen
            k = (math.sqrt(b * b + 4 * b * workers) - b) / 2
        return max(1, min(workers, round(k)))
