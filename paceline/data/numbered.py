"""The batches of a data set by number, for runs in which a server chooses the next batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from paceline.data.feed import NumberedFetch
from paceline.data.sampler import ShardedSampler, take_places


class NumberedBatches:
    """Read any batch of any epoch: the same samples on every worker, and the same random augmentation."""

    def __init__(
        self, dataset: Dataset[Any], sampler: ShardedSampler, collate: Callable[[Any], Any] | None = None
    ) -> None:
        self.sampler = sampler  # of a world of one: its steps are the batches
        self._dataset = dataset
        self._collate = collate or default_collate
        self._orders: dict[int, Tensor] = {}  # the sample orders of recent epochs

    def fetch(self, epoch: int, number: int) -> tuple[Any, int]:
        """Fetch batch ``number`` of ``epoch``; return it and its number of samples."""
        indices = self._indices(epoch, number)
        if type(self._dataset) is TensorDataset:
            return [tensor[indices] for tensor in self._dataset.tensors], len(indices)
        # Seeded by the position of the first sample, as in a DatasetFeed.
        first = number * self.sampler.batch_size
        fetch = NumberedFetch(self._dataset, self.sampler.seed, epoch)
        return self._collate(fetch.__getitems__([(first, indices.tolist())])), len(indices)

    def _indices(self, epoch: int, number: int) -> Tensor:
        if epoch not in self._orders:
            self._orders = {known: order for known, order in self._orders.items() if known >= epoch - 1}
            self._orders[epoch] = self.sampler.order(epoch)
        size = self.sampler.batch_size
        stop = (number + 1) * size
        if self.sampler.last != "pad":
            stop = min(stop, self.sampler.num_samples)
        return take_places(self._orders[epoch], number * size, stop)
