"""Tensors as the shared-memory collectives want them: dense, in the order of their elements, of a type they know."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.collectives.core import SIZES
from paceline.errors import UsageError

_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in SIZES}


class Staged:
    """A tensor's elements, where the collectives can read and write them.

    That is the tensor's own memory if it is contiguous, else a copy, which ``settle`` brings back.
    """

    __slots__ = ("address", "count", "dense", "dtype", "target")

    def __init__(self, tensor: Tensor, *, reduced: bool = False) -> None:
        name = _NAMES.get(tensor.dtype)
        if name is not None and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg():
            self.dense = self.target = tensor
        else:
            check_dense(tensor)
            self.target = tensor
            self.dense = _as_known(tensor, reduced)
            name = _NAMES[self.dense.dtype]
        self.dtype = name
        self.address: int = self.dense.data_ptr()
        self.count: int = self.dense.numel()

    @property
    def nbytes(self) -> int:
        return self.count * SIZES[self.dtype]

    def settle(self) -> None:
        """Copy the elements back to where they belong, if they are elsewhere."""
        if self.dense is self.target or self.dense.data_ptr() == self.target.data_ptr():
            return
        with torch.no_grad():
            elements = self.dense
            if self.target.is_complex() and elements.is_floating_point():
                elements = torch.view_as_complex(elements)
            elif elements.dtype != self.target.dtype:
                elements = elements.view(self.target.dtype)
            self.target.copy_(elements.reshape(self.target.shape))


def check_dense(tensor: Tensor) -> None:
    """Refuse what has no plain memory."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError(
            f"collectives of backend 'paceline' want dense tensors, got one of layout {tensor.layout}"
            f"{', quantized' if tensor.is_quantized else ''}; convert it, for example by tensor.to_dense()"
        )


def _as_known(tensor: Tensor, reduced: bool) -> Tensor:
    """The same numbers, contiguous: complex ones as pairs, those of a rare type as bytes if they are only moved."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dense.is_complex():
        return torch.view_as_real(dense)
    if dense.dtype in _NAMES:
        return dense
    if reduced:
        raise UsageError(
            f"backend 'paceline' cannot reduce {tensor.dtype}; convert the tensor to one of {', '.join(SIZES)}"
        )
    return dense.reshape(-1).view(torch.uint8)


def row_counts(part: Staged, splits: Sequence[int], size: int, role: str) -> list[int]:
    """How many elements go to, or come from, each rank, if a tensor is split along its first dimension."""
    rows = part.target.shape[0] if part.target.dim() else 1
    if not splits and rows % size:
        raise UsageError(
            f"all_to_all_single: {rows} rows of {role} cannot be dealt evenly to {size} ranks; pass splits"
        )
    splits = splits or [rows // size] * size
    if len(splits) != size or sum(splits) != rows:
        raise UsageError(
            f"all_to_all_single: wanted {size} {role} split sizes that add up to {rows} rows, got {list(splits)}"
        )
    width = part.count // rows if rows else 0
    return [count * width for count in splits]
