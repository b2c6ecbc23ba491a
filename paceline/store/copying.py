"""Copies of tensors between processes: large ones go past the processor's caches, which they would only empty."""

from __future__ import annotations

import cmath
import math
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from paceline import native

if native.available():
    from paceline.native import _core

HALVES = (torch.float16, torch.bfloat16)
_LARGE = _core.PAST_CACHE_FROM if native.available() else math.inf  # bytes of a tensor


class Look(NamedTuple):
    """What a look at numbers has shown."""

    finite: bool  # all of them, as far as a quick look tells: sums that overflow make it false too
    checksum: int  # the sum of their 64-bit words


def look_at(vector: Tensor) -> Look:
    """Look at a vector of whole 64-bit words in one pass."""
    if native.available() and vector.dtype == torch.float32:
        return Look(*_core.examine(vector.data_ptr(), vector.nbytes))
    words = int(vector.view(torch.int64).sum())
    if not (vector.is_floating_point() or vector.is_complex()):
        return Look(True, words)
    wide = torch.float32 if vector.dtype in HALVES else None
    return Look(cmath.isfinite(vector.sum(dtype=wide).item()), words)


def copy(to: Tensor, tensor: Tensor) -> None:
    """Copy a tensor, as ``to.copy_(tensor)`` without autograd does."""
    if to.nbytes >= _LARGE and lies_plainly(to) and lies_plainly(tensor, like=to):
        _core.copy_past_cache(to.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        increment_version(to)  # as any change in place does
    else:
        with torch.no_grad():
            to.copy_(tensor)


def copy_all(to: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy tensors, each as ``copy`` does: the small ones in one call, which is quicker."""
    small = [tensor.nbytes < _LARGE for tensor in to]
    if not all(small):
        for each, tensor, is_small in zip(to, tensors, small, strict=True):
            if not is_small:
                copy(each, tensor)
        to, tensors = list(compress(to, small)), list(compress(tensors, small))
    if to:
        with torch.no_grad():
            torch._foreach_copy_(to, tensors)


def copy_and_look(to: Tensor, tensor: Tensor, padded: Tensor) -> Look:
    """Copy a tensor and look at it, in one pass if possible; ``padded`` is ``to`` with the zeros behind it."""
    if native.available() and tensor.dtype == torch.float32 and lies_plainly(tensor, like=to):
        return Look(*_core.copy_examined(to.data_ptr(), tensor.data_ptr(), tensor.nbytes))
    to.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
    return look_at(padded)


def lies_plainly(tensor: Tensor, like: Tensor | None = None) -> bool:
    """Whether the tensor's numbers lie one behind the other in this host's memory, of the same kind as another's."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and (like is None or (tensor.dtype == like.dtype and tensor.shape == like.shape))
    )
