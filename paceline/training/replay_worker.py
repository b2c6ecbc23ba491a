"""The worker of a replay: computes the gradients of any push as a real worker does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.numbered import NumberedBatches
from paceline.policies.messages import PushKind
from paceline.problems import Problem
from paceline.replay.plan import RecordedPush
from paceline.seeding import derive_seed, seed_streams
from paceline.server.local_steps import LocalSteps
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import Filled, fill_push, read_parameters
from paceline.store.layout import Arena, ModelLayouts
from paceline.train_state import TrainState
from paceline.training.train import TrainConfig, loss_of


@dataclass(frozen=True)
class ComputedPush:
    """A computed push, with the contents that a worker would send."""

    recorded: RecordedPush
    loss: float
    gradients: Arena
    filled: Filled


class ReplayWorker:
    """Computes the pushes of all workers of a run, one after the other, on one model."""

    def __init__(
        self,
        config: TrainConfig,
        problem: Problem,
        batches: NumberedBatches,
        *,
        train_state: TrainState,
        rule: CommitRule,
    ) -> None:
        self._config, self._problem, self._batches = config, problem, batches
        self._model = train_state.model
        self._local = LocalSteps(train_state) if rule.kind is PushKind.DIFFERENCE else None
        self._joined: dict[int, int] = {}  # by rank: how often it had joined before its last step
        self._layouts = ModelLayouts(self._model, with_reads=rule.with_reads)
        self._device = next(self._model.parameters()).device
        self._buffers: dict[int, list[Tensor]] = {}  # by rank, after its last step

    def compute(self, push: RecordedPush, parameters: list[Tensor], arena: Arena) -> ComputedPush:
        """Compute a push from the server's ``parameters`` and buffers into ``arena``."""
        read_parameters(self._layouts, parameters)
        rank = push.told.rank
        if not push.fresh:
            self._put_back_buffers(rank)
        if self._local is not None:
            self._begin_local_steps(self._local, push)
        self._model.zero_grad()
        loss = 0.0
        for block, batch in enumerate(push.batches):
            data, _ = self._batches.fetch(*batch)
            seed_streams(derive_seed(self._batches.sampler.seed, rank, "step", push.told.step, block))
            loss = self._add_gradients(data)
            if self._local is not None:
                self._local.step(push.told.version)
                self._model.zero_grad()
        if self._local is not None:
            self._local.end()
        self._buffers[rank] = [buffer.detach().clone() for buffer in self._layouts.buffers]
        return ComputedPush(push, loss, arena, fill_push(self._layouts, arena))

    def _begin_local_steps(self, local: LocalSteps, push: RecordedPush) -> None:
        """Have what the optimizer of the push's worker remembers, which is nothing after it has joined."""
        rank = push.told.rank
        local.become(rank)
        if self._joined.get(rank) != push.joined:
            local.forget()
        self._joined[rank] = push.joined

    def _add_gradients(self, data: list[Tensor]) -> float:
        inputs, targets = (tensor.to(self._device) for tensor in data)
        loss = loss_of(self._config, self._problem, self._model, inputs, targets)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _put_back_buffers(self, rank: int) -> None:
        with torch.no_grad():
            for buffer, kept in zip(self._layouts.buffers, self._buffers[rank], strict=True):
                buffer.copy_(kept)
