"""Tensors of a model as one flat tensor per dtype, in which they are exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.peers.averaging import as_real, exchanged_dtype, is_continuous


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Group continuous tensors by the dtype in which they are exchanged."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if is_continuous(tensor):
            real = as_real(tensor)
            groups.setdefault(exchanged_dtype(real), []).append(real)
    return groups


def count(tensors: Iterable[Tensor]) -> int:
    """The elements of all tensors."""
    return sum(tensor.numel() for tensor in tensors)


def parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat``, one in the shape of each tensor."""
    pieces = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def flatten(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy all tensors into ``flat``, which has as many elements."""
    for tensor, part in zip(tensors, parts_of(flat, tensors), strict=True):
        part.copy_(tensor)


def unflatten(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy ``flat`` into the tensors."""
    for tensor, part in zip(tensors, parts_of(flat, tensors), strict=True):
        tensor.copy_(part)
