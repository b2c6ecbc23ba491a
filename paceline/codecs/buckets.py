"""Values in buckets, and sums in an order that every machine follows."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


def in_buckets(values: Tensor, bucket: int) -> Tensor:
    """The values as rows of a bucket each, the last one filled up with zeros."""
    missing = -values.numel() % bucket
    return torch.nn.functional.pad(values, (0, missing)).view(-1, bucket)


def num_buckets(count: int, bucket: int) -> int:
    return -(-count // bucket)


def halving_sum(rows: Tensor) -> Tensor:
    """The sum of each row: its second half is added to its first, again and again.

    Rows are first filled up with zeros to a power of two. The order is fixed, since a processor's or a library's own
    would give other bits.

    >>> halving_sum(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([6.])
    """
    length = 1 << max(0, rows.shape[1] - 1).bit_length()
    rows = torch.nn.functional.pad(rows, (0, length - rows.shape[1]))
    while length > 1:
        length //= 2
        rows = rows[:, :length] + rows[:, length:]
    return rows[:, 0]


def exact_sqrt(values: Tensor) -> Tensor:
    """The square roots, rounded correctly as by processors; torch may call a library that does not."""
    return torch.from_numpy(numpy.sqrt(values.numpy()))
