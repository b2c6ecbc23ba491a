"""Chooses the samples of each worker and step, so that an epoch covers every sample once.

All workers share one order per epoch. A step takes its next ``world_size * batch_size`` samples, and every rank a
contiguous slice of them. The position in an epoch is therefore one number, the samples consumed by all workers
together. Any other number of workers, with any batch size, can resume from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from paceline.errors import UsageError, check_whole, unknown_name
from paceline.seeding import derive_seed

Last = Literal["short", "drop", "pad"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Shard:
    """One rank's part of one step: its samples, and the sizes of all ranks' parts."""

    indices: Tensor  # int64, a view into the epoch's order; may be empty in the last step
    epoch: int
    number: int  # unique within the epoch; for a full batch the position of its first sample in the order
    total: int  # samples of this step over all ranks
    world_size: int
    consumed_after: int  # samples of the epoch taken by all ranks after this step

    def count(self, rank: int) -> int:
        """The number of samples of a rank in this step; over all ranks they sum to ``total``."""
        start, stop = _slice(self.total, rank, self.world_size)
        return stop - start


@dataclass(frozen=True)
class ShardedSampler:
    """Distribute an epoch's samples over the ranks of a world, shuffled, complete and resumable.

    ``last`` chooses the treatment of an incomplete last step. ``short`` divides it evenly: ranks may get fewer
    samples or none, and take part with that weight. ``drop`` leaves it out. ``pad`` fills it up with samples from
    the epoch's start.

    >>> sampler = ShardedSampler(num_samples=5, batch_size=2, rank=1, world_size=2, shuffle=False)
    >>> [shard.indices.tolist() for shard in sampler.epoch(0)]
    [[2, 3], [4]]
    """

    num_samples: int
    batch_size: int  # of each worker
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    shuffle: bool = True
    last: Last = "short"
    owed: tuple[int, ...] = ()  # samples that the epoch takes once more at its end, for those that were lost

    def __post_init__(self) -> None:
        if self.num_samples == 0:
            raise UsageError("the data set is empty: it has 0 samples, and an epoch needs at least 1")
        for option in ("num_samples", "batch_size", "world_size"):
            check_whole(option, getattr(self, option))
        if not 0 <= self.rank < self.world_size:
            wanted = f"use 0 to {self.world_size - 1}"
            raise UsageError(f"rank {self.rank} is outside a world of {self.world_size}; {wanted}")
        if self.last not in get_args(Last):
            raise unknown_name("ending of an epoch", self.last, get_args(Last))
        self._check_enough_samples()

    def _check_enough_samples(self) -> None:
        found = f"data set has {self.num_samples} samples"
        if self.world_size > self.num_samples:
            raise UsageError(f"{self.world_size} workers, but the {found}; use at most {self.num_samples} workers")
        most = self.num_samples // self.world_size
        if self.batch_size > self.num_samples:
            raise UsageError(f"batch of {self.batch_size} asked for, {found}; use a batch of at most {most}")
        if self.last == "drop" and self._step_size > self.num_samples:
            raise UsageError(
                f"last='drop' would drop everything: a step of {self.world_size} workers with batches of "
                f"{self.batch_size} takes {self._step_size} samples, {found}; use a batch of at most {most}"
            )

    @property
    def _step_size(self) -> int:
        return self.world_size * self.batch_size

    @property
    def _length(self) -> int:
        return self.num_samples + len(self.owed)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch taken from its start."""
        return self.steps_left(0)

    def steps_left(self, consumed: int) -> int:
        """Steps until the epoch's end after ``consumed`` samples."""
        left = self._length - consumed
        return left // self._step_size if self.last == "drop" else -(-left // self._step_size)

    def order(self, epoch: int) -> Tensor:
        """The order in which the epoch takes the samples; the same for every rank and every batch size."""
        if self.shuffle:
            generator = torch.Generator("cpu").manual_seed(derive_seed(self.seed, "epoch", epoch))
            order = torch.randperm(self.num_samples, generator=generator, device="cpu")
        else:
            order = torch.arange(self.num_samples, device="cpu")
        return torch.cat([order, torch.tensor(self.owed, device="cpu")]) if self.owed else order

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Shard]:
        """Yield this rank's shard of every step of the epoch after its first ``consumed`` samples."""
        if not 0 <= consumed <= self._length:
            raise UsageError(
                f"cannot go on after {consumed} samples of an epoch that has {self._length}; "
                "was the position saved with another data set?"
            )
        return self._shards(epoch, consumed)

    def _shards(self, epoch: int, consumed: int) -> Iterator[Shard]:
        order = self.order(epoch)
        for first in range(consumed, consumed + self.steps_left(consumed) * self._step_size, self._step_size):
            yield self.shard(order, epoch, first)

    def shard(self, order: Tensor, epoch: int, first: int) -> Shard:
        """This rank's shard of the step that begins after ``first`` samples of the epoch, which has this order."""
        left = self._length - first
        total = self._step_size if self.last == "pad" else min(self._step_size, left)
        return Shard(
            indices=take_part(order, first, total, self.rank, self.world_size),
            epoch=epoch,
            number=first + self.rank * self.batch_size,
            total=total,
            world_size=self.world_size,
            consumed_after=min(first + total, self._length),
        )


def _slice(total: int, rank: int, world_size: int) -> tuple[int, int]:
    return rank * total // world_size, (rank + 1) * total // world_size


def take_part(order: Tensor, first: int, total: int, rank: int, world_size: int) -> Tensor:
    """A rank's part of the step that takes ``total`` samples after the ``first`` ones of the epoch."""
    start, stop = _slice(total, rank, world_size)
    return take_places(order, first + start, first + stop)


def take_places(order: Tensor, start: int, stop: int) -> Tensor:
    """Positions start to stop of the endlessly repeated order."""
    if stop <= len(order):
        return order[start:stop]
    return order[torch.arange(start, stop, device="cpu") % len(order)]
