"""How commits are made of pushes, as one value that all who drive a policy give to their store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from paceline.aggregators import Aggregator, Mean, Needs, aggregator_of
from paceline.policies.messages import PushKind
from paceline.policies.server import ServerPolicy
from paceline.store.remembered import Remembered
from paceline.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class CommitRule:
    """How a policy's commits are made of pushes."""

    adds_up: bool  # every commit is of all pushes since the last, weighted by their examples
    aggregator: Aggregator = field(default_factory=Mean)
    kind: PushKind = PushKind.GRADIENT
    coded: bool = False  # a push is the weighted sum of the gradients of several batches

    @classmethod
    def of(cls, policy: ServerPolicy) -> Self:
        """The rule of a policy."""
        return cls(adds_up=policy.adds_up, aggregator=aggregator_of(policy), kind=policy.kind, coded=policy.coded)

    def remembering(self, train_state: TrainState) -> TrainState:
        """The same, with a place for what the aggregator remembers, if it remembers anything."""
        if not self.aggregator.remembers or train_state.remembered is not None:
            return train_state
        return replace(train_state, remembered=Remembered(train_state.model.parameters()))

    @property
    def keeps_pushes(self) -> bool:
        """Whether pushes are kept until their commit, and not added to a sum when they come."""
        return not self.adds_up or self.aggregator.needs is not Needs.SUM

    @property
    def compares(self) -> bool:
        """Whether the pushes of a commit are compared in pairs before they are combined."""
        return self.aggregator.needs is Needs.PAIRS

    @property
    def with_reads(self) -> bool:
        """Whether the parameters that a worker read travel with its push."""
        return self.aggregator.needs is Needs.READS
