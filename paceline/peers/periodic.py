"""Average the parameters of all workers after every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.peers.averaging import Means, as_real, exact, is_continuous
from paceline.peers.coded_averager import CodedAverager
from paceline.peers.coding import Coding
from paceline.peers.group import Peers
from paceline.peers.replicas import ReplicasExchange
from paceline.policies import Periodic, Progress


class PeriodicExchange(ReplicasExchange):
    """Average the models of ``peers`` when the policy says so."""

    def __init__(self, model: nn.Module, peers: Peers, policy: Periodic, coding: Coding | None = None) -> None:
        super().__init__(model, peers, coding)
        self._policy = policy
        self._changes = self.averager("parameters", len(self._trained))
        self._agreed_on: list[Tensor] = []  # the parameters that all had last, where changes of them are sent
        if coding is not None:
            self.common_state = (*self.common_state, "agreed_on")
        self._due = 0  # the step of the next exchange; 0: the policy was not asked yet
        self._share = 0.0  # of this worker in the last exchange, while what its codec has not sent is still to be added

    def started(self, progress: Progress) -> None:
        if not self._agreed_on:
            self._agree()
        due = progress.steps + self.period(progress)
        self._due = min(self._due or due, due)  # sooner if the run goes on with a shorter period

    def before_update(self) -> None:
        """Go on from what this worker has not sent too, so that it does not learn the same again.

        Until then all workers have the same parameters. One that has no examples goes on as it is: it may have no part
        of the next exchange.
        """
        if self._share and self._in_update and isinstance(self._changes, CodedAverager):
            self._changes.add_unsent([as_real(each) for each in self._trained], self._agreed_on, 1 / self._share)
            self._share = 0.0

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
        stop = self.average_changes().stop
        self.agreed()
        return stop

    def average_changes(self) -> Means:
        """Average the models: under a codec, by what each worker has changed since all had the same parameters."""
        if self.coding is None:
            return self.average()
        buffers = self.buffers()
        trained = [as_real(parameter) for parameter in self._trained]
        statistics = [as_real(buffer) for buffer in buffers if is_continuous(buffer)]
        changes = [own - before for own, before in zip(trained, self._agreed_on, strict=True)]
        stop, weight, numbers = self._backward.stop(), self.weight(), self.numbers()
        self._changes.start(
            [*changes, *statistics], weight=weight, tag=self._steps, stop=stop, numbers=numbers, now=True
        )
        means = self._changes.finish()
        self.follow_counts(buffers)
        if means.values is not None:
            news = [*map(torch.add, self._agreed_on, means.values), *means.values[len(changes) :]]
            for tensor, new in zip([*trained, *statistics], news, strict=True):
                tensor.copy_(new)
        self._changes.settle()
        if isinstance(self._changes, CodedAverager):
            self._share = self._changes.share
        return means

    def agreed(self) -> None:
        super().agreed()
        self._agree()

    def _agree(self) -> None:
        if self.coding is not None:
            self._agreed_on = [exact(as_real(parameter)) for parameter in self._trained]

    def state_dict(self) -> dict[str, Any]:
        coded = {} if self.coding is None else {"agreed_on": self._agreed_on, "share": self._share}
        return {**super().state_dict(), "due": self._due, **coded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._due, self._share = int(state.get("due", 0)), float(state.get("share", 0.0))
        self._agreed_on = [tensor.to(self._peers.device, copy=True) for tensor in state.get("agreed_on", [])]
