"""The parameters that pushes are committed to: one store for all who drive a policy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.aggregators import Aggregator, Mean
from paceline.store.gathering import publish
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.pending import KeptPushes, PushKey, RunningMean, Share
from paceline.store.shard_state import clip
from paceline.train_state import TrainState


class ParameterStore:
    """Take pushes, and commit those that an action names: the live server, replays and the virtual cluster have one.

    The parameters lie in ``memory`` with the layout ``layouts.down``. If ``adds_up``, every commit is of all pushes
    taken since the last, weighted by their examples, so that none has to be kept; as ``ServerPolicy.adds_up`` says.
    """

    def __init__(
        self,
        train_state: TrainState,
        layouts: ModelLayouts,
        memory: Tensor,
        *,
        adds_up: bool,
        aggregator: Aggregator | None = None,
    ) -> None:
        self._train_state, self._layouts, self._memory = train_state, layouts, memory
        self._adds_up, self._aggregator = adds_up, aggregator or Mean()
        self.forget()

    def forget(self) -> None:
        """Lose the pushes that wait, as a server that was killed has lost them."""
        self._pending: RunningMean | KeptPushes
        if self._adds_up and self._aggregator.adds_up:
            self._pending = RunningMean(self._layouts.up)
        else:
            self._pending = KeptPushes(self._layouts.up, len(self._layouts.trained), self._aggregator)

    def take(self, key: PushKey, push: Arena, *, examples: int, used: bytes, alone: bool = False) -> None:
        """Take a push; its memory may change afterwards, unless it is ``alone`` in the commit that follows at once."""
        self._pending.take(key, push, examples, int.from_bytes(used, "little"), alone=alone)

    def combine(self, shares: Sequence[Share] | None = None) -> None:
        """Begin a commit: put what its pushes come to where the optimizer looks for gradients, and into the buffers.

        Without ``shares`` it is the mean of all that were taken, by their examples.
        """
        combined = self._pending.combine(shares)
        views, trained = combined.arena.views, self._layouts.trained
        for index, (parameter, gradient) in enumerate(zip(trained, views, strict=False)):
            parameter.grad = gradient.to(parameter.device) if combined.used >> index & 1 else None
        if combined.counts and len(views) > len(trained):
            with torch.no_grad():
                for buffer, pushed in zip(self._layouts.buffers, views[len(trained) :], strict=True):
                    buffer.copy_(pushed)

    def update(self, *, norm: float | None = None) -> None:
        """End the commit: the optimizer steps, and the parameters are where they are read.

        ``norm`` is that of all gradients, where others hold a part of them.
        """
        longest = self._train_state.clip_norm
        if norm is not None and longest is not None:
            clip(self._layouts, longest, norm)
        self._train_state.update(clipped=norm is not None)
        publish(self._layouts, self._memory)
        for parameter in self._layouts.trained:  # zero_grad of an optimizer also prepares for a profiler
            parameter.grad = None

    def commit(self, shares: Sequence[Share] | None = None) -> None:
        """Make a commit of the pushes that are named, or of all."""
        self.combine(shares)
        self.update()
