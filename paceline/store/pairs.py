"""Numbers for pairs of pushes, by which an aggregator weighs whole pushes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from paceline.aggregators import Aggregator

_BLOCK = 1 << 16  # values of a vector that are compared together: those of all pushes stay in a cache


def compare_pushes(aggregator: Aggregator, pushes: Sequence[Sequence[Tensor]]) -> Tensor:
    """A row for each tensor: the aggregator's number for each pair of pushes."""
    return torch.tensor([_compare(aggregator, tensors) for tensors in zip(*pushes, strict=True)], dtype=torch.float64)


def _compare(aggregator: Aggregator, tensors: Sequence[Tensor]) -> list[float]:
    pairs = [*combinations(range(len(tensors)), 2)]
    numbers = [0.0] * len(pairs)
    for block in zip(*(torch.split(tensor.reshape(-1), _BLOCK) for tensor in tensors), strict=True):
        for place, (one, other) in enumerate(pairs):
            numbers[place] += aggregator.compare(block[one], block[other])
    return numbers


def matrix_of(rows: Sequence[Tensor], pushes: int) -> Tensor:
    """The symmetric matrix of all pairs, from the rows of all servers.

    The rows are added one after the other, in the order of the model's parameters. So the bits do not depend on the
    number of servers.
    """
    one, other = torch.triu_indices(pushes, pushes, offset=1)
    total = torch.zeros(len(one), dtype=torch.float64)
    for part in rows:
        for row in part:
            total += row
    matrix = torch.zeros(pushes, pushes, dtype=torch.float64)
    matrix[one, other] = matrix[other, one] = total
    return matrix


def keep_apart(matrix: Tensor, groups: Sequence[int]) -> Tensor:
    """Have infinity for the pairs of pushes that are of different groups."""
    group = torch.tensor(groups)
    matrix[group != group[:, None]] = torch.inf
    return matrix
