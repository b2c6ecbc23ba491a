"""Small numbers packed into bytes, by torch operations."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


def packed_bytes(count: int, width: int) -> int:
    """The bytes of so many numbers of ``width`` bits."""
    return -(-count * width // 8)


def pack(numbers: Tensor, width: int) -> Tensor:
    """Whole numbers as ``width`` bits each, the lowest bit first.

    >>> pack(torch.tensor([1, 2, 3]), 4)
    tensor([33,  3], dtype=torch.uint8)
    """
    shifts = torch.arange(width, dtype=numbers.dtype)
    bits = (numbers.unsqueeze(1) >> shifts) & 1
    return pack_bits(bits.flatten())


def unpack(data: Tensor, count: int, width: int) -> Tensor:
    """The numbers that ``pack`` has packed, as int64."""
    bits = unpack_bits(data)[: count * width].view(count, width)
    return (bits.to(torch.int64) << torch.arange(width)).sum(1)


def pack_bits(bits: Tensor) -> Tensor:
    """Bits, one in each element, as bytes."""
    return torch.from_numpy(numpy.packbits(bits.to(torch.uint8).numpy(), bitorder="little"))


def unpack_bits(data: Tensor) -> Tensor:
    """The bits of bytes, one in each element."""
    return torch.from_numpy(numpy.unpackbits(data.numpy(), bitorder="little"))
