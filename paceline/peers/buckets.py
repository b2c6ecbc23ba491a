"""Plans which gradients share a bucket; it computes with sizes only."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # bytes; vector loads want it, and kernels give other bits on other alignments


@dataclass(frozen=True)
class Item:
    """One gradient to be placed in a bucket."""

    elements: int
    itemsize: int
    kind: Hashable  # only gradients of the same kind (dtype and device) share a bucket

    @property
    def nbytes(self) -> int:
        return self.elements * self.itemsize


def plan_buckets(items: Sequence[Item], order: Sequence[int], cap: int, first_cap: int) -> list[list[int]]:
    """Fill buckets with ``items`` in ``order`` (the order in which gradients come), each until it holds ``cap`` bytes.

    The first bucket closes at ``first_cap``, so that communication starts early. Buckets are returned in the order in
    which they are complete, which is also the order of reduction (Li et al., VLDB 2020).
    """
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    closed: list[list[int]] = []
    for index in order:
        item = items[index]
        bucket = open_buckets.setdefault(item.kind, [])
        bucket.append(index)
        filled[item.kind] = filled.get(item.kind, 0) + item.nbytes
        limit = min(first_cap, cap) if not closed else cap
        if filled[item.kind] >= limit:
            closed.append(open_buckets.pop(item.kind))
            filled[item.kind] = 0
    position = {index: when for when, index in enumerate(order)}
    return sorted([*closed, *open_buckets.values()], key=lambda bucket: position[bucket[-1]])


def aligned_offsets(sizes: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Lay out pieces of ``sizes`` elements so that each starts aligned; return their offsets and the total length."""
    step = max(1, ALIGNMENT // itemsize)
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // step) * step
    return offsets, end
