"""Numbered mini-batches, handed out one by one, so that an epoch covers every sample once whoever computes what."""

from __future__ import annotations

import heapq
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.data.sampler import ShardedSampler


class BatchQueue:
    """Hand out the batches of a data set by number; those given back, as of cancelled steps, go out first."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, seed: int) -> None:
        self._dataset = dataset
        num_samples: int = len(dataset)  # type: ignore[arg-type]  # a Dataset with a length
        self._sampler = ShardedSampler(num_samples, batch_size, seed=seed)
        self._orders: dict[int, Tensor] = {}  # of the epochs under way
        self._next = 0
        self._returned: list[int] = []

    def take(self) -> int:
        """Give the number of the next batch."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._next += 1
        return self._next - 1

    def give_back(self, number: int) -> None:
        """Let the batch be handed out again."""
        heapq.heappush(self._returned, number)

    def fetch(self, number: int) -> tuple[Tensor, Tensor]:
        """Read a batch: its inputs and targets."""
        epoch, place = divmod(number, self._sampler.steps_per_epoch)
        size = self._sampler.batch_size
        samples = self._order(epoch)[place * size : (place + 1) * size]
        if type(self._dataset) is TensorDataset:
            inputs, targets = (tensor[samples] for tensor in self._dataset.tensors)
        else:
            inputs, targets = default_collate([self._dataset[sample] for sample in samples.tolist()])
        return inputs, targets

    def _order(self, epoch: int) -> Tensor:
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known >= epoch - 1}
            self._orders[epoch] = self._sampler.order(epoch)
        return self._orders[epoch]
