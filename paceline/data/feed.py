"""Where a worker's batches come from: our sharded sampler over a data set, or the user's own loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.data.sampler import Shard, ShardedSampler
from paceline.seeding import derive_seed, seed_streams


@dataclass(frozen=True, slots=True)
class Fetched:
    """One batch, and where the feed stands once it has been used."""

    data: Any
    examples: int  # in this worker's batch
    total: int | None  # in all workers' batches of this step, where that is known without asking them
    consumed: int  # the feed's position behind this batch


class Feed(Protocol):
    """A source of batches that can start an epoch anywhere in its middle."""

    shuffles_by_streams: bool  # order drawn from the global random streams, which must be put back to resume

    def start(self, epoch: int, consumed: int) -> Iterator[Fetched]:
        """Go to position ``consumed`` of ``epoch`` at once, and give the batches behind it one by one."""
        ...


class DatasetFeed:
    """Batches of a map-style data set in the order of a ``ShardedSampler``; positions count samples.

    With ``seeded_fetch`` each batch is fetched with random streams seeded from its number, so that random
    augmentations do not depend on what came before; in a DataLoader's worker processes that is always so.
    """

    shuffles_by_streams = False

    def __init__(
        self,
        dataset: Dataset[Any],
        sampler: ShardedSampler,
        *,
        seeded_fetch: bool = False,
        loader_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._dataset = dataset
        self._sampler = sampler
        self._seeded_fetch = seeded_fetch
        self._options = dict(loader_options or {})

    def start(self, epoch: int, consumed: int) -> Iterator[Fetched]:
        shards = self._sampler.epoch(epoch, consumed)
        if type(self._dataset) is TensorDataset and not self._options:
            for shard in shards:
                data = [tensor[shard.indices] for tensor in self._dataset.tensors]
                yield Fetched(data, len(shard.indices), shard.total, shard.consumed_after)
            return
        pending, requested = itertools.tee(shards)  # a loader with workers asks ahead of what it has given
        for data, shard in zip(self._loader(epoch, requested), pending, strict=False):
            yield Fetched(data, len(shard.indices), shard.total, shard.consumed_after)

    def _loader(self, epoch: int, shards: Iterable[Shard]) -> DataLoader[Any]:
        # A generator of its own: making a loader's iterator draws a number, and the user's streams stay theirs.
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self._sampler.seed, "loader", epoch))
        in_workers = self._options.get("num_workers", 0) > 0
        seed = self._sampler.seed if self._seeded_fetch or in_workers else None
        requests: Any = ([shard] for shard in shards)
        return DataLoader(
            _ShardFetch(self._dataset, seed), batch_sampler=requests, generator=generator, **self._options
        )


class LoaderFeed:
    """The batches of the user's own loader or iterable; positions count batches.

    An epoch is taken up in its middle by drawing the batches before it again and letting them go: slower than
    ``session.batches(dataset, ...)``, but right for any sampler and for iterable data sets.
    """

    shuffles_by_streams = True

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def start(self, epoch: int, consumed: int) -> Iterator[Fetched]:
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        rest = iter(self._loader)
        for _ in range(consumed):
            next(rest, None)
        return (
            Fetched(data, count_examples(data), None, number)
            for number, data in enumerate(rest, consumed + 1)
        )


def count_examples(data: Any) -> int:
    """Count the examples of a batch: the length of the first tensor found in it."""
    if isinstance(data, Tensor):
        return len(data) if data.ndim else 1
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return next((count for count in map(count_examples, data) if count), 0)
    return 0


class _ShardFetch(Dataset[Any]):
    """Fetch a whole shard, seeding the random streams from its number if given a seed."""

    def __init__(self, dataset: Dataset[Any], seed: int | None) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitems__(self, shards: Sequence[Shard]) -> list[Any]:
        (shard,) = shards
        if self._seed is not None:
            seed_streams(derive_seed(self._seed, "batch", shard.epoch, shard.number))
        places = shard.indices.tolist()
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(places))
        return [self._dataset[place] for place in places]
