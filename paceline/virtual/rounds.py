"""Policies of peers without gradients: their decisions alone, on drawn times, for any number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from paceline.policies import Policy, Progress, parse_policy
from paceline.virtual.peers_clock import PeersClock
from paceline.virtual.scenario import Scenario


class Rounds(PeersClock):
    """Run the decisions of a policy of peers: when its workers exchange parameters, and who with whom.

    Under a policy with a ``period`` all workers all-reduce the parameters at its end. Under one with ``sends`` each
    waits, after every step, for the parameters that are sent to it.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, examples=scenario.worker_examples)
        self._policy: Any = parse_policy(scenario.policy)  # known by what it answers, so that a new one is known too
        self._nbytes = scenario.nbytes
        self._due = 0  # the step after which all exchange
        if hasattr(self._policy, "period"):
            self._exchange, self._due = self._all_reduce, self._policy.period(Progress())
        else:
            self._exchange = self._pass_on

    @staticmethod
    def fit(policy: Policy) -> bool:
        """Whether the policy answers the questions that are asked here."""
        return hasattr(policy, "period") or hasattr(policy, "sends")

    def run(self, *, commits: int | None = None, seconds: float = math.inf, stop: Sequence[object] = ()) -> None:
        """Run the clock until it has made ``commits``, reached ``seconds``, or ``stop`` is not empty."""
        self.seconds, made = seconds, self.tally.commit_times
        while not (self.over or stop or (commits is not None and len(made) >= commits)):
            self.begin()
            if not self.over:
                self.network.clocks[:] = self.ends
                self._exchange(len(made) + 1)
                self.end(len(self._ranks) * self.examples)

    def _all_reduce(self, step: int) -> None:
        if step == self._due:
            self.network.clocks[:] = self.network.collective(float(self.network.clocks.max()), self._nbytes, 1.0)
            self._due += self._policy.period(Progress(steps=step))

    def _pass_on(self, step: int) -> None:
        sends = self._policy.sends(step - 1, len(self._ranks))
        arrivals = [self.network.message(sender, self._nbytes) for sender, _ in sends]
        for (_, receiver), arrives in zip(sends, arrivals, strict=True):
            self.network.advance(receiver, arrives)
