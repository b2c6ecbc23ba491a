"""A random row of operations on overlapping groups, the same on all ranks, each checked against what it must give."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend_processes import join_world
from torch import Tensor

GROUPS = ([0, 1, 2, 3], [0, 1], [1, 2, 3], [0, 2, 3], [0, 3], [2])
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.int16, torch.complex64)
COUNTS = (0, 1, 3, 17, 1000, 4097, 70_001)

Check = Callable[[], None]


class Round:
    """One operation: all ranks draw the same, and those of the group take part."""

    def __init__(self, draw: random.Random, groups: list[Any], rank: int) -> None:
        place = draw.randrange(len(groups))
        self.members, self.group = GROUPS[place], groups[place]
        self.name = draw.choice(sorted(OPERATIONS))
        self.dtype, self.count, self.salt = draw.choice(DTYPES), draw.choice(COUNTS), draw.randrange(5)
        self.root = draw.choice(self.members)
        self.later, self.strided = draw.random() < 0.5, draw.random() < 0.3
        self.rank, self.size = rank, len(self.members)

    def value(self, rank: int, count: int | None = None) -> Tensor:
        """What a rank brings: small whole numbers, so that sums are exact in all types."""
        count = self.count if count is None else count
        return ((torch.arange(count) % 5 + rank + self.salt) % 7).to(self.dtype)

    def own(self, count: int | None = None) -> Tensor:
        return self.laid_out(self.value(self.rank, count))

    def empty(self, count: int | None = None) -> Tensor:
        return self.laid_out(torch.zeros(self.count if count is None else count, dtype=self.dtype))

    def laid_out(self, tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.numel(), 2, dtype=self.dtype)[:, 0].copy_(tensor) if self.strided else tensor

    def total(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).sum(0).to(self.dtype)

    def start(self) -> tuple[list[Any], Check]:
        """Begin it; give the works to wait for, and what to check then."""
        works, found, wanted = OPERATIONS[self.name](self)

        def check() -> None:
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other), vars(self)

        return [work for work in works if work is not None], check


Started = tuple[list[Any], list[Tensor], list[Tensor]]


def all_reduce(r: Round) -> Started:
    own = r.own()
    work = dist.all_reduce(own, group=r.group, async_op=r.later)
    return [work], [own], [r.total([r.value(rank) for rank in r.members])]


def broadcast(r: Round) -> Started:
    own = r.own()
    return [dist.broadcast(own, r.root, group=r.group, async_op=r.later)], [own], [r.value(r.root)]


def reduce(r: Round) -> Started:
    own = r.own()
    work = dist.reduce(own, r.root, group=r.group, async_op=r.later)
    wanted = r.total([r.value(rank) for rank in r.members]) if r.rank == r.root else r.value(r.rank)
    return [work], [own], [wanted]


def all_gather(r: Round) -> Started:
    whole = r.empty(r.count * r.size)
    work = dist.all_gather_single(whole, r.own(), r.group, r.later)
    return [work], [whole], [torch.cat([r.value(rank) for rank in r.members])]


def all_gather_unevenly(r: Round) -> Started:
    places = [r.empty(r.count + rank) for rank in r.members]
    work = dist.all_gather(places, r.own(r.count + r.rank), r.group, r.later)
    return [work], places, [r.value(rank, r.count + rank) for rank in r.members]


def reduce_scatter(r: Round) -> Started:
    share = r.empty()
    work = dist.reduce_scatter_single(share, r.own(r.count * r.size), group=r.group, async_op=r.later)
    total = r.total([r.value(rank, r.count * r.size) for rank in r.members])
    return [work], [share], [total.view(r.size, r.count)[r.members.index(r.rank)]]


def gather(r: Round) -> Started:
    places = [r.empty() for _ in r.members] if r.rank == r.root else []
    work = dist.gather(r.own(), places or None, r.root, r.group, r.later)
    return [work], places, [r.value(rank) for rank in r.members] if places else []


def scatter(r: Round) -> Started:
    share = r.empty()
    given = [r.laid_out(r.value(rank + 1)) for rank in r.members] if r.rank == r.root else None
    return [dist.scatter(share, given, r.root, r.group, r.later)], [share], [r.value(r.rank + 1)]


def all_to_all(r: Round) -> Started:
    """Each rank sends its own number of elements to everyone."""
    places = [r.empty(r.count // 3 + rank) for rank in r.members]
    pieces = [r.own(r.count // 3 + r.rank) for _ in r.members]
    work = dist.all_to_all(places, pieces, r.group, r.later)
    return [work], places, [r.value(rank, r.count // 3 + rank) for rank in r.members]


def ring(r: Round) -> Started:
    if r.size == 1:
        return [], [], []
    place, at = r.empty(), r.members.index(r.rank)
    right, left = r.members[(at + 1) % r.size], r.members[at - 1]
    works = [dist.irecv(place, left, r.group, tag=r.salt), dist.isend(r.own(), right, r.group, tag=r.salt)]
    if not r.later:
        for work in works:
            assert work is not None and work.wait()
    return works, [place], [r.value(left)]


def barrier(r: Round) -> Started:
    return [dist.barrier(r.group, r.later)], [], []


OPERATIONS: dict[str, Callable[[Round], Started]] = {
    operation.__name__: operation
    for operation in (
        all_reduce,
        broadcast,
        reduce,
        all_gather,
        all_gather_unevenly,
        reduce_scatter,
        gather,
        scatter,
        all_to_all,
        ring,
        barrier,
    )
}


def soak(directory: Path, rank: int, size: int, rounds: int, seed: int) -> int:
    """Run so many rounds; give how many this rank took part in."""
    join_world(directory, rank, size)
    groups = [dist.new_group(members) for members in GROUPS]
    draw, ours = random.Random(seed), random.Random(seed + 1 + rank)
    under_way: list[tuple[list[Any], Check]] = []
    done = 0
    for _ in range(rounds):
        one = Round(draw, groups, rank)
        if rank in one.members:
            under_way.append(one.start())
            done += 1
        # Each rank waits when it likes, for what it likes; at times through a future.
        while under_way and (len(under_way) > 30 or ours.random() < 0.4):
            works, check = under_way.pop(ours.randrange(len(under_way)))
            for work in works:
                work.get_future().wait() if ours.random() < 0.2 else work.wait()
            check()
    for works, check in under_way:
        for work in works:
            work.wait()
        check()
    dist.barrier()
    dist.destroy_process_group()
    return done
