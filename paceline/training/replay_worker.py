"""The worker of a replay: computes the gradients of any push as a real worker does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.data.numbered import NumberedBatches
from paceline.problems import Problem
from paceline.replay.plan import RecordedPush
from paceline.seeding import derive_seed, seed_streams
from paceline.server.local_steps import LocalSteps
from paceline.server.part_sum import PartSum
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import Filled, fill_push, read_parameters
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.packets import PushPackets
from paceline.store.partition import layouts_of
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
        model: nn.Module,
        local: LocalSteps | None,
        rule: CommitRule,
        servers: int = 1,
    ) -> None:
        self._config, self._problem, self._batches = config, problem, batches
        self._model, self._local = model, local
        self._parts = PartSum(model) if rule.coded else None
        self._kind, self._codec = rule.kind, rule.codec
        self._packing: dict[int, PushPackets] = {}  # by rank
        self._packet_parts = layouts_of(model, servers, with_reads=rule.with_reads)
        self._last: dict[int, RecordedPush] = {}  # by rank
        self._layouts = ModelLayouts(self._model, with_reads=rule.with_reads)
        self._device = next(self._model.parameters()).device
        self._buffers: dict[int, list[Tensor]] = {}  # by rank, after its last step

    def compute(self, push: RecordedPush, parameters: list[Tensor], arena: Arena) -> ComputedPush:
        """Compute a push from the server's ``parameters`` and buffers into ``arena``."""
        read_parameters(self._layouts, parameters)
        rank = push.told.rank
        if not push.fresh:
            self._put_back_buffers(rank)
        self._remember(push)
        self._model.zero_grad()
        loss = 0.0
        for block, batch in enumerate(push.batches):
            data, _ = self._batches.fetch(batch.epoch, batch.number)
            if self._local is not None:
                self._local.begin(push.told.version)
            seed = self._batches.sampler.seed
            if self._parts is None:
                seed_streams(derive_seed(seed, rank, "step", push.told.step, block))
            else:
                seed_streams(derive_seed(seed, "part", batch.epoch, batch.number))
            loss = self._add_gradients(data, rank)
            if self._parts is not None:
                self._parts.add(batch.weight)
            if self._local is not None:
                self._local.step()
                self._model.zero_grad()
        if self._local is not None:
            self._local.end()
        if self._parts is not None:
            self._parts.end()
        if rank in self._packing:
            self._packing[rank].code()
            self._packing[rank].answered(taken=True)
        self._buffers[rank] = [buffer.detach().clone() for buffer in self._layouts.buffers]
        return ComputedPush(push, loss, arena, fill_push(self._layouts, arena))

    def answer(self, push: RecordedPush, committed: Arena) -> None:
        """Give the worker of a push what has become of it in its commit."""
        if self._local is not None:
            self._local.become(push.told.rank)
            self._local.answered(committed.views[: len(self._layouts.trained)])

    def _remember(self, push: RecordedPush) -> None:
        """Have what the push's worker remembers: nothing after it has joined, but for what a codec has kept."""
        rank, before = push.told.rank, self._last.get(push.told.rank)
        if self._local is not None:
            self._local.become(rank)
        if before is None or before.joined != push.joined:
            if self._local is not None:
                self._local.forget()
            if self._codec is not None and before is not None and before.codec.joined == push.codec.joined:
                self._packing[rank].begin_again(undone=push.codec.undone)
            elif self._codec is not None:
                seed = self._batches.sampler.seed
                self._packing[rank] = PushPackets(
                    self._codec, self._packet_parts, self._kind, seed=seed, rank=rank, since=push.codec.since
                )
        self._last[rank] = push

    def _add_gradients(self, data: list[Tensor], rank: int) -> float:
        inputs, targets = (tensor.to(self._device) for tensor in data)
        loss = loss_of(self._config, self._problem, self._model, inputs, targets, worker=rank)
        torch.autograd.backward(loss)
        return float(loss.detach())

    def _put_back_buffers(self, rank: int) -> None:
        with torch.no_grad():
            for buffer, kept in zip(self._layouts.buffers, self._buffers[rank], strict=True):
                buffer.copy_(kept)
