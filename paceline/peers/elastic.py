"""Let the workers and a central average pull each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CommError
from paceline.peers.averaging import as_real, exact, is_continuous
from paceline.peers.coding import Coding
from paceline.peers.exchange import BackwardPass
from paceline.peers.group import Peers
from paceline.peers.replicas import ReplicasExchange
from paceline.policies import ElasticPolicy, Progress


class ElasticExchange(ReplicasExchange):
    """Exchange corrections between the workers of ``peers`` and the central average, which is the answer of the run.

    All workers have the same central average, and compute it from the same sum. The corrections are those of the
    parameters from before the update, so they are summed while the worker computes, if it has a core to spare.

    A worker's BatchNorm statistics stay its own. The central ones are the mean of the workers': momentum could make a
    variance negative.
    """

    common_state = ("highest", "central", "velocity")

    def __init__(self, model: nn.Module, peers: Peers, policy: ElasticPolicy, coding: Coding | None = None) -> None:
        super().__init__(model, peers, coding)
        self._corrections = self.averager("corrections", len(self._trained), equal=True)
        self._rule = policy.rule(peers.size)
        self._central: list[Tensor] = []  # of the parameters and then of the statistics
        self._velocity: list[Tensor] = []  # the last move of the central parameters
        self._differences: list[Tensor] = []  # of this worker from the central average; parameters' times alpha
        self._taken = False  # the differences of this update, in which there is to be an exchange
        self._exchanging = False  # the exchange has begun
        self._broken = False  # a step has failed whose exchange had begun
        self._updates = 0  # made in this run
        self._highest = 0.0  # learning rate since the last restart

    def started(self, progress: Progress) -> None:
        self._updates = progress.steps
        self._highest = self._highest or progress.rate
        if not self._central:
            self._central = [exact(tensor) for tensor in self._tensors()]
            self._velocity = [torch.zeros_like(central) for central in self._central[: len(self._trained)]]
        self._differences = [torch.empty_like(central) for central in self._central]

    def begin(self, backward: BackwardPass) -> None:
        super().begin(backward)
        if self._broken:
            raise CommError(
                f"worker {self.rank}, update {self._updates + 1}: a step failed after its exchange had begun, so the "
                "other workers cannot follow; end the run and resume it from its last checkpoint"
            )
        if not self._taken and self._rule.exchanges_in(self._updates + 1):
            self._taken = True
            self._take_differences()
            if self._peers.overlaps():
                self._start(now=False)

    def before_update(self) -> None:
        if self._taken and not self._exchanging:
            self._start(now=True)

    def after_update(self, progress: Progress) -> bool:
        self.exchanges = self._rule.exchanges_in(progress.steps)
        if self.exchanges and not self._exchanging:  # it failed, since a worker has died
            self._updates = progress.steps - 1
            self._take_differences()
            self._start(now=True)
        stop = self._exchanging and self._finish()
        self._taken = self._exchanging = False
        self._updates = progress.steps
        if self._rule.restarts_at(progress.rate, self._highest):
            self._highest = progress.rate
            self._load_central()
            for velocity in self._velocity:
                velocity.zero_()
        self._highest = max(self._highest, progress.rate)
        return stop

    def release(self, *, failed: bool = False) -> None:
        super().release(failed=failed)
        if failed:
            self._broken = self._broken or self._exchanging
            self._taken = False

    def _take_differences(self) -> None:
        for tensor, central, difference in zip(self._tensors(), self._central, self._differences, strict=True):
            torch.sub(tensor, central, out=difference)
        for correction in self._differences[: len(self._trained)]:
            correction.mul_(self._rule.alpha)

    def _start(self, *, now: bool) -> None:
        self._exchanging = True
        stop = self._backward.stop()
        self._corrections.start(self._differences, weight=1.0, tag=self._updates + 1, stop=stop, now=now)

    def _finish(self) -> bool:
        """Move the parameters and the central average; return whether a worker was asked to stop."""
        means = self._corrections.finish()
        assert means.values is not None, "all weights are 1"
        for velocity, mean in zip(self._velocity, means.values, strict=False):
            velocity.mul_(self._rule.momentum).add_(mean, alpha=self.world_size)
        for central, move in zip(self._central, [*self._velocity, *means.values[len(self._velocity) :]], strict=True):
            central.add_(move)
        for parameter, correction in zip(self._trained, self._differences, strict=False):
            as_real(parameter).sub_(correction)
        self._corrections.settle()
        return means.stop

    def load_answer(self) -> None:
        # All have it. But a worker that ends or saves must not leave others waiting in an exchange.
        self._averager.start(self._differences, weight=0.0, tag=self._updates, now=True)
        self._averager.finish()
        self.follow_counts(self.buffers())
        self._load_central()

    def _load_central(self) -> None:
        for tensor, central in zip(self._tensors(), self._central, strict=True):
            tensor.copy_(central)

    def _tensors(self) -> list[Tensor]:
        """This worker's parameters and then its statistics."""
        return [as_real(tensor) for tensor in (*self._trained, *self.buffers()) if is_continuous(tensor)]

    def state_dict(self) -> dict[str, Any]:
        common = {"highest": self._highest, "central": self._central, "velocity": self._velocity}
        return {**super().state_dict(), **common}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._highest = float(state.get("highest", 0.0))
        self._central, self._velocity = (
            [tensor.to(self._peers.device) for tensor in state.get(name, [])] for name in ("central", "velocity")
        )
