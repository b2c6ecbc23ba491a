"""The largest values of a tensor, exactly or about so many, with one answer where values are equal."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.codecs import kernels

SAMPLE = 16_384  # values from which a first guess is made


def largest(values: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest absolute values, in rising order; of equal ones the first.

    >>> largest(torch.tensor([1.0, -3.0, 2.0, 1.0]), 3)
    tensor([0, 1, 2])
    """
    if kernels.native is None or values.numel() <= SAMPLE:
        return _largest(values, count)
    # A few more than wanted, by a sample: one look at all values, and a second one at few.
    share = count / values.numel() * SAMPLE
    found = at_least(values, _least_of_sample(values, math.ceil(1.25 * share + 4 * math.sqrt(share)) + 4, SAMPLE))
    if found.numel() < count:
        return _largest(values, count)
    return found[_largest(values[found], count)]


def about_largest(values: Tensor, count: int, sample: int) -> Tensor:
    """About the ``count`` largest: all that are at least as large as a threshold, which is guessed from a sample.

    From 0.8 to 1.3 times the count are taken as they are; of more than that the largest are chosen, and for fewer all
    values are looked at again (Lin et al., 2018).
    """
    found = at_least(values, _least_of_sample(values, max(1, count * sample // max(1, values.numel())), sample))
    if found.numel() < 0.8 * count:
        return largest(values, count)
    return found if found.numel() <= 1.3 * count else found[largest(values[found], count)]


def at_least(values: Tensor, least: float) -> Tensor:
    """The indices of all values whose absolute value is at least so much, in rising order."""
    if kernels.native is None or values.numel() >= 1 << 31:
        return torch.nonzero(values.abs() >= least).flatten()
    indices = torch.empty(values.numel(), dtype=torch.int32)
    count = kernels.native.at_least(values.data_ptr(), values.numel(), least, indices.data_ptr())
    return indices[:count].to(torch.int64)


def _largest(values: Tensor, count: int) -> Tensor:
    sizes = values.abs()
    least = torch.topk(sizes, count).values.amin() if count else torch.tensor(torch.inf)
    above = torch.nonzero(sizes > least).flatten()
    equal = torch.nonzero(sizes == least).flatten()[: count - above.numel()]
    return torch.cat([above, equal]).sort().values


def _least_of_sample(values: Tensor, count: int, sample: int) -> float:
    """The ``count``-th largest absolute value of so many values, which are as far apart as they can be."""
    every = values[:: max(1, values.numel() // max(1, sample))].abs()
    return float(torch.topk(every, min(count, every.numel())).values.amin()) if every.numel() else 0.0
