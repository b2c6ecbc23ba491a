"""Rising indices as gaps in Golomb-Rice code: all quotients in unary, after all remainders in a fixed width.

Apart from each other both can be read and written by operations on whole tensors. A remainder may carry one bit more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.bits import pack, pack_bits, packed_bytes, unpack, unpack_bits
from paceline.codecs.packet import Reader, fill, put, refuse, words


def shift_of(count: int, total: int) -> int:
    """The bits of a remainder for ``count`` indices below ``total``: near the best for gaps that are random."""
    mean = total * 177 // (256 * max(1, count))  # times ln 2, about
    return max(0, mean.bit_length() - 1)


def most_bytes(count: int, total: int) -> int:
    """The most bytes that ``write`` writes for this many indices, with a bit each."""
    shift = shift_of(count, total)
    return 4 + words(packed_bytes(count, shift + 1)) + words(packed_bytes(count + (total >> shift), 1))


def write(into: Tensor, at: int, indices: Tensor, total: int, bits: Tensor | None = None) -> int:
    """Write rising indices below ``total``, each with a bit of its own if there are ``bits``; return where they end."""
    shift = shift_of(indices.numel(), total)
    if kernels.native is not None:
        return _write_natively(into, at, indices, shift, bits)
    gaps = torch.diff(indices, prepend=torch.tensor([-1])) - 1
    low, width = gaps & ((1 << shift) - 1), shift
    if bits is not None:
        low, width = low << 1 | bits, shift + 1
    ends = torch.cumsum((gaps >> shift) + 1, 0)
    unary = torch.zeros(int(ends[-1]) if ends.numel() else 0, dtype=torch.uint8)
    unary[ends - 1] = 1
    packed = pack_bits(unary)
    at = put(into, at, torch.tensor([packed.numel()], dtype=torch.int32))
    return put(into, put(into, at, pack(low, width)), packed)


def read(packet: Reader, count: int, total: int, *, bits: bool = False) -> tuple[Tensor, Tensor]:
    """Read indices, and their bits or zeros."""
    if count > total:  # before so much memory is taken
        raise refuse(f"{count} indices of {total} values")
    shift = shift_of(count, total)
    width = shift + bits
    length = packet.number()
    remainders, quotients = packet.take(packed_bytes(count, width), torch.uint8), packet.take(length, torch.uint8)
    if kernels.native is not None:
        return _read_natively(remainders, quotients, count, total, bits=bits)
    low = unpack(remainders, count, width)
    ends = torch.nonzero(unpack_bits(quotients)).flatten()
    if ends.numel() != count:
        raise refuse(f"{ends.numel()} quotients for {count} indices")
    gaps = (torch.diff(ends, prepend=torch.tensor([-1])) - 1 << shift) + (low >> bits)
    indices = torch.cumsum(gaps + 1, 0) - 1
    if count and int(indices[-1]) >= total:
        raise refuse(f"index {int(indices[-1])} of {total} values")
    return indices, low & bits


def _write_natively(into: Tensor, at: int, indices: Tensor, shift: int, bits: Tensor | None) -> int:
    count, start = indices.numel(), into.data_ptr()
    low = at + 4
    unary = words(low + packed_bytes(count, shift + (bits is not None)))
    addresses = (indices.data_ptr(), bits.data_ptr() if bits is not None else 0)
    into[unary - 4 : unary] = 0
    length = kernels.native.to_gaps(*addresses, count, shift, start + low, start + unary)
    put(into, at, torch.tensor([length], dtype=torch.int32))
    return fill(into, unary + length)


def _read_natively(low: Tensor, unary: Tensor, count: int, total: int, *, bits: bool) -> tuple[Tensor, Tensor]:
    indices, found = torch.empty(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    addresses = (indices.data_ptr(), found.data_ptr() if bits else 0)
    shift = shift_of(count, total)
    if not kernels.native.from_gaps(low.data_ptr(), unary.data_ptr(), unary.numel(), count, shift, total, *addresses):
        raise refuse(f"its quotients are not those of {count} indices below {total}")
    return indices, found
