"""The parameters that pushes are committed to: all who drive a policy use this one store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.policies.messages import PushKind
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import publish
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.pending import ExchangedPushes, KeptPushes, Pending, PushKey, RunningMean, Share
from paceline.store.remembered import Remembered
from paceline.store.shard_state import clip
from paceline.train_state import TrainState


class ParameterStore:
    """Take pushes, and make commits of those that an action names.

    The parameters lie in ``memory`` with the layout ``layouts.down``. Pushes have the layout ``layouts.up``.
    """

    def __init__(self, train_state: TrainState, layouts: ModelLayouts, memory: Tensor, rule: CommitRule) -> None:
        self._train_state, self._layouts, self._memory, self._rule = train_state, layouts, memory, rule
        self.forget()

    def forget(self) -> None:
        """Drop the pushes that wait, as they are lost with a server that is killed."""
        self._pending: Pending
        if self._rule.kind is PushKind.PARAMETERS:
            self._pending = ExchangedPushes(self._layouts, self._memory)
        elif self._rule.keeps_pushes:
            remembered = self._train_state.remembered
            assert remembered is None or isinstance(remembered, Remembered)
            assert self._rule.aggregator.remembers == (remembered is not None), "see CommitRule.remembering"
            self._pending = KeptPushes(self._layouts, self._rule.aggregator, self._memory, remembered)
        else:
            self._pending = RunningMean(self._layouts.up)

    def take(self, key: PushKey, push: Arena, *, examples: int, used: bytes, alone: bool = False) -> None:
        """Take a push. Its memory may be used again at once, unless the next commit is of this push ``alone``.

        That of pushed parameters may not before their commit, which puts there what it has added.
        """
        self._pending.take(key, push, examples, int.from_bytes(used, "little"), alone=alone)

    def compare(self, shares: Sequence[Share] | None) -> Tensor:
        """Compare the pushes of a commit in pairs, if the rule ``compares``: a row for each trained parameter."""
        assert isinstance(self._pending, KeptPushes)
        return self._pending.compare(shares)

    def weigh(self, shares: Sequence[Share] | None, rows: Sequence[Tensor]) -> list[Share]:
        """Give the pushes of a commit their weights, by the rows of ``compare`` of each server, in order."""
        assert isinstance(self._pending, KeptPushes)
        return self._pending.weigh(shares, rows)

    def combine(self, shares: Sequence[Share] | None = None) -> bool:
        """Begin a commit: put the result of its pushes into the parameters' gradients, and into the buffers.

        False if no push counts, so that the commit changes nothing.

        Without ``shares`` the commit is of all pushes that wait, weighted by their examples. If the rule ``compares``,
        they are what ``weigh`` gives.
        """
        combined = self._pending.combine(shares)
        views, trained = combined.arena.views, self._layouts.trained
        for index, (parameter, gradient) in enumerate(zip(trained, views, strict=False)):
            parameter.grad = gradient.to(parameter.device) if combined.used >> index & 1 else None
        if combined.counts and len(views) > len(trained):
            with torch.no_grad():
                for buffer, pushed in zip(self._layouts.buffers, views[len(trained) :], strict=False):
                    buffer.copy_(pushed)
        return combined.counts

    def update(self, *, norm: float | None = None) -> None:
        """End the commit: step the optimizers, or add the differences, and have the parameters in the memory.

        ``norm`` is the norm of all gradients, if other servers hold a part of them.
        """
        if self._rule.kind is PushKind.GRADIENT:
            self._step(norm)
        else:
            self._add()
        publish(self._layouts, self._memory)
        for parameter in self._layouts.trained:  # faster than an optimizer's zero_grad, which a profiler can follow
            parameter.grad = None

    def _step(self, norm: float | None) -> None:
        longest = self._train_state.clip_norm
        if norm is not None and longest is not None:
            clip(self._layouts, longest, norm)
        self._train_state.update(clipped=norm is not None)

    @torch.no_grad()
    def _add(self) -> None:
        for parameter in self._layouts.trained:
            if parameter.grad is not None:
                parameter.add_(parameter.grad)
        self._train_state.step_schedulers()

    def commit(self, shares: Sequence[Share] | None = None) -> bool:
        """Make a commit of the pushes that are named, or of all that wait; False if no push counts."""
        if self._rule.compares:
            shares = self.weigh(shares, [self.compare(shares)])
        counts = self.combine(shares)
        self.update()
        return counts
