"""Average the parameters of all workers after every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from paceline.peers.group import Peers
from paceline.peers.replicas import ReplicasExchange
from paceline.policies import Periodic, Progress


class PeriodicExchange(ReplicasExchange):
    """Average the models of ``peers`` when the policy says so."""

    def __init__(self, model: nn.Module, peers: Peers, policy: Periodic) -> None:
        super().__init__(model, peers)
        self._policy = policy
        self._due = 0  # the step of the next exchange; 0: the policy was not asked yet

    def started(self, progress: Progress) -> None:
        due = progress.steps + self.period(progress)
        self._due = min(self._due or due, due)  # sooner if the run goes on with a shorter period

    def after_update(self, progress: Progress) -> bool:
        self.exchanges = progress.steps >= self._due
        if not self.exchanges:
            return False
        stop = self.exchange(progress)
        self._due = progress.steps + self.period(progress)
        return stop

    def period(self, progress: Progress) -> int:
        """Steps until the next exchange, as the policy decides."""
        return self._policy.period(progress)

    def exchange(self, progress: Progress) -> bool:
        """Exchange what is due; return whether a worker was asked to stop, if all learn it now."""
        stop = self.average().stop
        self.agreed()
        return stop

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "due": self._due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._due = int(state.get("due", 0))
