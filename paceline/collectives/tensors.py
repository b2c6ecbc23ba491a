"""Prepares tensors for the shared-memory collectives: dense, contiguous, of a known type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.collectives.core import SIZES
from paceline.errors import UsageError

_NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in SIZES}
_OF_PAIRS = ("", "sum", "avg")  # operations on complex numbers that may work on their parts


class Staged:
    """A tensor's elements in memory that the collectives can use.

    It is the tensor's own memory if contiguous, else a copy, which ``settle`` copies back unless the tensor is only
    ``read``.
    """

    __slots__ = ("address", "count", "dense", "dtype", "target")

    def __init__(self, tensor: Tensor, *, reduction: str = "", read: bool = False) -> None:
        name = _NAMES.get(tensor.dtype)
        if name is not None and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg():
            self.dense = self.target = tensor
        else:
            check_dense(tensor)
            if not read:
                _check_written(tensor)
            self.dense = _as_known(tensor, reduction)
            self.target = self.dense if read else tensor
            name = _NAMES[self.dense.dtype]
        self.dtype = name
        self.address: int = self.dense.data_ptr() if tensor.is_cpu else 0
        self.count: int = self.dense.numel()
        if self.address == 0 and self.count:
            raise UsageError(
                f"collectives of backend 'paceline' want all tensors of a call in CPU memory, got a "
                f"{type(tensor).__name__} on {tensor.device} that has none"
            )

    def settle(self) -> None:
        """Copy the elements back to the tensor, if they are a copy."""
        if self.dense is self.target or self.dense.data_ptr() == self.target.data_ptr():
            return
        with torch.inference_mode():  # the tensor may have been made in it
            elements = self.dense
            if self.target.is_complex() and elements.is_floating_point():
                elements = torch.view_as_complex(elements)
            elif elements.dtype != self.target.dtype:
                elements = elements.view(self.target.dtype)
            self.target.copy_(elements.reshape(self.target.shape))


def check_dense(tensor: Tensor) -> None:
    """Refuse sparse and quantized tensors."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UsageError(
            f"collectives of backend 'paceline' want dense tensors, got one of layout {tensor.layout}"
            f"{', quantized' if tensor.is_quantized else ''}; convert it, for example by tensor.to_dense()"
        )


def check_contiguous(what: str, **tensors: Tensor) -> None:
    """Refuse tensors that are not contiguous, in the words of torch's own backends."""
    for role, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise UsageError(
                f"{what}: Tensors must be contiguous, got an {role} of shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; pass {role}.contiguous(), for example"
            )


def _check_written(tensor: Tensor) -> None:
    """Refuse a result whose elements share memory."""
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(
            f"a collective cannot write to a tensor whose elements share memory, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}; pass tensor.clone(), for example"
        )


def _as_known(tensor: Tensor, reduction: str) -> Tensor:
    """The same numbers, contiguous: complex ones as pairs, unknown types as bytes if they are only copied."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if dense.is_complex() and reduction in _OF_PAIRS:
        return torch.view_as_real(dense)
    if dense.dtype in _NAMES:
        return dense
    if reduction:
        raise UsageError(
            f"backend 'paceline' cannot reduce {tensor.dtype} by {reduction}; convert the tensor to one of "
            f"{', '.join(SIZES)}"
        )
    return dense.reshape(-1).view(torch.uint8)


def row_counts(tensor: Tensor, count: int, splits: Sequence[int], size: int, role: str) -> list[int]:
    """The number of a tensor's ``count`` elements for each rank: whole rows of its first dimension."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits and rows % size:
        raise UsageError(
            f"all_to_all_single: {rows} rows of {role} cannot be divided evenly among {size} ranks; pass splits"
        )
    splits = splits or [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise UsageError(
            f"all_to_all_single: wanted {size} {role} split sizes that add up to {rows} rows, got {list(splits)}"
        )
    width = count // rows if rows else 0
    return [count * width for count in splits]
