"""Sources of a worker's batches: a sharded sampler over a data set, or the user's own loader."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from paceline.data.sampler import Last, Shard, ShardedSampler, take_part
from paceline.errors import UsageError, check_whole, unknown_name
from paceline.seeding import capture_streams, derive_seed, restore_streams, seed_streams


@dataclass(frozen=True, slots=True)
class Fetched:
    """One batch, and the feed's position after it."""

    data: Any
    examples: int | None  # in this worker's batch; None if unknown
    total: int | None  # in all workers' batches of this step; None if only they know
    consumed: int  # the feed's position after this batch


class Used(NamedTuple):
    """One batch of every worker, as far as all workers know of it."""

    epoch: int
    start: int  # the position before it
    workers: tuple[Hashable, ...]  # whose batches they were, by rank
    owed: tuple[int, ...]  # samples taken once more at the epoch's end, as known then
    total: int | None  # samples in all workers' batches; None if only they know
    update: int  # in which it was used, counted by this worker


class Feed(Protocol):
    """A source of batches that can start at any position of an epoch."""

    @property
    def unit(self) -> str:
        """The unit of its positions, such as samples."""
        ...

    @property
    def shared(self) -> bool:
        """Whether a position is one of all workers, from which any number of them can go on."""
        ...

    def start(self, epoch: int, consumed: int, owed: tuple[int, ...] = ()) -> Iterator[Fetched]:
        """Go to position ``consumed`` of ``epoch`` at once, and return an iterator over the batches after it.

        ``owed`` are samples that a shared feed gives once more at the epoch's end.
        """
        ...

    def take_back(self, batches: Sequence[Fetched]) -> None:
        """Give these batches again, if positions are this worker's own."""
        ...

    def samples_of(self, workers: Collection[Hashable], used: Sequence[Used]) -> list[int]:
        """The samples that these workers had in batches of a shared feed."""
        ...

    def capture(self) -> dict[str, Any]:
        """The state that, with the epoch's number, determines the order of an epoch that starts now."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a captured state."""
        ...


class DatasetFeed:
    """Batches of a map-style data set in the order of a ``ShardedSampler``; positions count samples.

    With ``seeded_fetch`` each batch is fetched with random streams seeded from its number, so that random
    augmentations do not depend on what came before; in a DataLoader's worker processes that is always so.
    """

    unit = "samples"
    shared = True

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

    def start(self, epoch: int, consumed: int, owed: tuple[int, ...] = ()) -> Iterator[Fetched]:
        shards = replace(self._sampler, owed=owed).epoch(epoch, consumed)
        if type(self._dataset) is TensorDataset and not self._options:
            for shard in shards:
                indices = _to_fetch(shard)
                data = [tensor[indices] for tensor in self._dataset.tensors]
                yield Fetched(data, len(shard.indices), shard.total, shard.consumed_after)
            return
        pending, requested = itertools.tee(shards)  # a loader with workers requests batches in advance
        for data, shard in zip(self._loader(epoch, requested), pending, strict=False):
            yield Fetched(data, len(shard.indices), shard.total, shard.consumed_after)

    def take_back(self, batches: Sequence[Fetched]) -> None:
        pass

    def samples_of(self, workers: Collection[Hashable], used: Sequence[Used]) -> list[int]:
        found: list[int] = []
        for (epoch, owed), batches in itertools.groupby(used, key=lambda each: (each.epoch, each.owed)):
            order = replace(self._sampler, owed=owed).order(epoch)
            for batch in batches:
                for rank, worker in enumerate(batch.workers):
                    if worker in workers and batch.total is not None:  # else they were of the worker's own loader
                        found += take_part(order, batch.start, batch.total, rank, len(batch.workers)).tolist()
        return found

    def capture(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        pass

    def _loader(self, epoch: int, shards: Iterable[Shard]) -> DataLoader[Any]:
        # A separate generator: making a loader's iterator draws a number, which must not come from the user's streams.
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self._sampler.seed, "loader", epoch))
        in_workers = self._options.get("num_workers", 0) > 0
        seed = self._sampler.seed if self._seeded_fetch or in_workers else None
        requests: Any = ([(shard.number, _to_fetch(shard).tolist())] for shard in shards)
        fetch = NumberedFetch(self._dataset, seed, epoch)
        return DataLoader(fetch, batch_sampler=requests, generator=generator, **self._options)


class LoaderFeed:
    """The batches of the user's own loader or iterable; positions count batches.

    To resume in the middle of an epoch, the batches before are drawn again and discarded. This is slower than
    ``session.batches(dataset, ...)``, but correct for any sampler and for iterable data sets.

    A worker whose loader gives fewer batches than another's repeats its last one at weight 0, so that all workers make
    the same number of steps. ``largest`` gives the maximum of a number over all workers.
    """

    unit = "batches"
    shared = False

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        several: bool,
        largest: Callable[[int], int],
        seeds: tuple[int, int] | None = None,
    ) -> None:
        self._loader = loader
        self._several = several  # whether the run has begun with several workers
        self._largest = largest
        self._last: Fetched | None = None  # repeated at weight 0 when no batches are left
        self._again: deque[Fetched] = deque()  # batches to give again
        self._seeds = seeds  # run seed and rank, if every batch's streams are seeded from its number

    def start(self, epoch: int, consumed: int, owed: tuple[int, ...] = ()) -> Iterator[Fetched]:
        set_epoch = getattr(getattr(self._loader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        self._seed(epoch, -1)
        batches = iter(self._loader)
        self._last = None
        for number in range(consumed):
            self._seed(epoch, number)
            data = next(batches, None)
            if data is not None:  # else only repeated batches follow
                self._last = Fetched(data, 0, None, consumed)
        own = self._rest(batches, epoch, consumed)
        return self._as_long_as_the_longest(own) if self._several else own

    def take_back(self, batches: Sequence[Fetched]) -> None:
        self._again.extend(batches)

    def samples_of(self, workers: Collection[Hashable], used: Sequence[Used]) -> list[int]:
        return []

    def capture(self) -> dict[str, Any]:
        """The state that determines the next epoch's order: the random streams and the loader's own generators."""
        state: dict[str, Any] = {"generators": [generator.get_state() for generator in self._generators()]}
        if self._seeds is None:
            state["streams"] = capture_streams()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._several and self._generators():
            raise UsageError(
                "a loader with a generator of its own cannot be resumed on several workers, since a checkpoint holds "
                "only worker 0's; leave the generator out, or give session.batches the data set"
            )
        for generator, saved in zip(self._generators(), state["generators"], strict=False):
            generator.set_state(saved)
        if "streams" in state:
            restore_streams(state["streams"])

    def _generators(self) -> list[torch.Generator]:
        sampler = getattr(self._loader, "sampler", None)
        found = [getattr(holder, "generator", None) for holder in (self._loader, sampler)]
        return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())

    def _rest(self, batches: Iterator[Any], epoch: int, consumed: int) -> Iterator[Fetched]:
        for number in itertools.count(consumed):
            self._seed(epoch, number)
            try:
                data = next(batches)
            except StopIteration:
                return
            yield Fetched(data, count_examples(data), None, number + 1)

    def _seed(self, epoch: int, number: int) -> None:
        if self._seeds is not None:
            seed_streams(derive_seed(*self._seeds, "fetch", epoch, number))

    def _as_long_as_the_longest(self, own: Iterator[Fetched]) -> Iterator[Fetched]:
        """Ask before every batch whether any worker has one left: the length of an iterable is unknown."""
        while True:
            batch = self._again.popleft() if self._again else next(own, None)
            if not self._largest(int(batch is not None)):
                return
            if batch is None and self._last is None:
                raise UsageError(
                    "this worker's loader gave no batch, but those of others did; give it a share of the data"
                )
            batch = batch or replace(
                cast(Fetched, self._last), examples=0, consumed=cast(Fetched, self._last).consumed + 1
            )
            self._last = batch
            yield batch


class Indexed(NamedTuple):
    """A map-style data set, and the options of its batches."""

    dataset: Any
    batch_size: int
    shuffle: bool
    last: Last
    options: Mapping[str, Any]  # of a DataLoader


def resolve(
    source: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    last: Last,
    loader_options: Mapping[str, Any],
    open_loaders: bool,
) -> Indexed | Iterable[Any]:
    """Classify the source given to ``batches``: a data set, or a source of ready batches.

    With ``open_loaders`` a DataLoader over a whole data set is replaced by the data set.
    """
    if open_loaders and isinstance(source, DataLoader) and _can_be_sharded(source) and batch_size is None:
        batch_size, loader_options = source.batch_size, {**_options_of(source), **loader_options}
        shuffle, last = isinstance(source.sampler, RandomSampler), "drop" if source.drop_last else "short"
        source = source.dataset
    _check_options(loader_options)
    if batch_size is not None:
        check_whole("batch_size", batch_size)
    if isinstance(source, IterableDataset):
        return DataLoader(source, batch_size=batch_size, **loader_options)
    if batch_size is not None or loader_options or isinstance(source, Dataset):
        _check_indexable(source, batch_size, loader_options)
        assert batch_size is not None
        return Indexed(source, batch_size, shuffle, last, loader_options)
    if not isinstance(source, Iterable):
        raise UsageError(f"batches() wants a data set, a loader or an iterable of batches, got {type(source).__name__}")
    return source


def make_feed(
    source: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    last: Last,
    loader_options: Mapping[str, Any],
    rank: int,
    world_size: int,
    several: bool,
    seed: int,
    seeded_fetch: bool,
    largest: Callable[[int], int],
) -> Feed:
    """Make the feed for ``source``: a data set, a loader, or any iterable of batches.

    ``several`` tells whether the run has begun with several workers, of which one may be left.
    """
    found = resolve(
        source,
        batch_size=batch_size,
        shuffle=shuffle,
        last=last,
        loader_options=loader_options,
        open_loaders=several,
    )
    if isinstance(found, Indexed):
        sampler = ShardedSampler(
            num_samples=len(found.dataset),
            batch_size=found.batch_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            shuffle=found.shuffle,
            last=found.last,
        )
        return DatasetFeed(found.dataset, sampler, seeded_fetch=seeded_fetch, loader_options=found.options)
    seeds = (seed, rank) if seeded_fetch else None
    return LoaderFeed(found, several=several, largest=largest, seeds=seeds)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that the sharded sampler sets, and names that a DataLoader does not have."""
    ours = {"drop_last": "last='drop'", "shuffle": "shuffle=", "generator": "join(seed=)"}
    for name in ("batch_sampler", "sampler", *ours):
        if name in options:
            raise UsageError(f"{name} cannot be given here; use {ours.get(name, 'a DataLoader of your own with it')}")
    known = inspect.signature(DataLoader.__init__).parameters.keys() - {"self", "dataset", "batch_size"}
    for name in options:
        if name not in known:
            raise unknown_name("option of batches()", name, known)


def _check_indexable(source: Any, batch_size: int | None, loader_options: Mapping[str, Any]) -> None:
    if isinstance(source, DataLoader) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        wrong = [*(["batch_size"] if batch_size is not None else []), *sorted(loader_options)]
        raise UsageError(f"{type(source).__name__} makes its own batches; leave out {', '.join(wrong)}")
    if batch_size is None:
        raise UsageError("batches(dataset) needs a batch_size; only a DataLoader has its own")


def _can_be_sharded(loader: DataLoader[Any]) -> bool:
    """Whether a loader uses a whole data set with one of torch's samplers, so that workers can share it."""
    sampler = loader.sampler
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) is SequentialSampler


def _options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    names = ["num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"]
    if loader.num_workers > 0:
        names += ["prefetch_factor", "persistent_workers"]
    return {name: getattr(loader, name) for name in names}


def _to_fetch(shard: Shard) -> Tensor:
    """The shard's samples; for an empty one a borrowed sample, so that its worker takes part at weight 0."""
    return shard.indices if len(shard.indices) else torch.tensor([0])


def count_examples(data: Any) -> int | None:
    """Count the examples of a batch: the length of the first tensor or array found in it, or None."""
    if hasattr(data, "ndim") and hasattr(data, "__len__"):
        return len(data) if data.ndim else 1
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return next((count for count in map(count_examples, data) if count is not None), None)
    return None


class NumberedFetch(Dataset[Any]):
    """Fetch a whole batch, seeding the random streams from its number if given a seed."""

    def __init__(self, dataset: Dataset[Any], seed: int | None, epoch: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch = epoch

    def __getitems__(self, requests: Sequence[tuple[int, list[int]]]) -> list[Any]:
        ((number, indices),) = requests
        if self._seed is not None:
            seed_streams(derive_seed(self._seed, "batch", self._epoch, number))
        if hasattr(self._dataset, "__getitems__"):
            return list(self._dataset.__getitems__(indices))
        return [self._dataset[index] for index in indices]
