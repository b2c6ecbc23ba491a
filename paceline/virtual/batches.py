"""Numbered mini-batches, handed out one by one, so that an epoch covers every sample once on any workers."""

from __future__ import annotations

import heapq
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.numbered import NumberedBatches
from paceline.data.sampler import ShardedSampler


class BatchQueue:
    """Hand out the batches of a data set by number; returned batches, such as those of cancelled steps, go first."""

    def __init__(self, dataset: Dataset[Any], batch_size: int, seed: int) -> None:
        num_samples: int = len(dataset)  # type: ignore[arg-type]  # a Dataset with a length
        self._batches = NumberedBatches(dataset, ShardedSampler(num_samples, batch_size, seed=seed))
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

    def examples(self, number: int) -> int:
        """The number of examples of a batch."""
        sampler = self._batches.sampler
        return min(sampler.batch_size, sampler.num_samples - number % sampler.steps_per_epoch * sampler.batch_size)

    def fetch(self, number: int) -> tuple[Tensor, Tensor]:
        """Read a batch: its inputs and targets."""
        (inputs, targets), _ = self._batches.fetch(*divmod(number, self._batches.sampler.steps_per_epoch))
        return inputs, targets
