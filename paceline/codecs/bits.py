"""Small numbers packed into bytes, the lowest bit first."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from paceline.codecs import kernels


def packed_bytes(count: int, width: int) -> int:
    """The bytes of so many numbers of ``width`` bits."""
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Whole numbers as ``width`` bits each, the lowest bit first.

    >>> pack(torch.tensor([1, 2, 3]), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    if kernels.native is not None and numbers.dtype == torch.uint8 and width > 0:
        out = torch.empty(packed_bytes(numbers.numel(), width), dtype=torch.uint8)
        kernels.native.pack(numbers.data_ptr(), numbers.numel(), width, out.data_ptr())
        return out
    shifts = torch.arange(width, dtype=numbers.dtype)
    bits = (numbers.unsqueeze(1) >> shifts) & 1
    return pack_bits(bits.flatten())


def unpack(data: Tensor, count: int, width: int) -> Tensor:
    """The numbers that ``pack`` has packed, as int64."""
    if kernels.native is not None and 0 < width <= 8:
        numbers = torch.empty(count, dtype=torch.uint8)
        kernels.native.unpack(data.data_ptr(), count, width, numbers.data_ptr())
        return numbers.to(torch.int64)
    bits = unpack_bits(data)[: count * width].view(count, width)
    return (bits.to(torch.int64) << torch.arange(width)).sum(1)


def pack_bits(bits: Tensor) -> Tensor:
    """Bits, one in each element, as bytes."""
    return torch.from_numpy(numpy.packbits(bits.to(torch.uint8).numpy(), bitorder="little"))


def unpack_bits(data: Tensor) -> Tensor:
    """The bits of bytes, one in each element."""
    return torch.from_numpy(numpy.unpackbits(data.numpy(), bitorder="little"))
