"""The largest values of a tensor, exactly, with one answer where values are equal."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(values: Tensor, count: int) -> Tensor:
    """The indices of the ``count`` largest absolute values, in rising order; of equal ones the first.

    >>> largest(torch.tensor([1.0, -3.0, 2.0, 1.0]), 3)
    tensor([0, 1, 2])
    """
    sizes = values.abs()
    least = torch.topk(sizes, count).values.amin() if count else torch.tensor(torch.inf)
    above = torch.nonzero(sizes > least).flatten()
    equal = torch.nonzero(sizes == least).flatten()[: count - above.numel()]
    return torch.cat([above, equal]).sort().values
