"""Levels of which most are zero: the gap to each that is not, its sign and its size, in Elias' omega code."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.bits import pack_bits, unpack_bits
from paceline.codecs.packet import Reader, put, refuse, words

LONGEST = 7  # bytes: omega codes of a gap below 2^31 and a level below 2^7 have 42 and 13 bits, the sign one

NOT_LEVELS = "its levels end early, are too large or too many"


def most_bytes(count: int) -> int:
    """The most bytes that ``write`` writes for this many levels."""
    return 8 + words(LONGEST * count)


def write(into: Tensor, at: int, levels: Tensor, negative: Tensor, most: int) -> int:
    """Write levels up to ``most`` and their signs; return where they end. If most is 1, a level's size is known."""
    places = torch.nonzero(levels).flatten()
    gaps, gap_lengths = omega(torch.diff(places, prepend=torch.tensor([-1])))
    sizes, size_lengths = omega(levels[places].to(torch.int64)) if most > 1 else (0, 0)
    codes = gaps | (negative[places].to(torch.int64) | sizes << 1) << gap_lengths
    lengths = gap_lengths + 1 + size_lengths
    stream = pack_bits(expanded(codes, lengths))
    at = put(into, at, torch.tensor([places.numel(), stream.numel()], dtype=torch.int32))
    return put(into, at, stream)


def read(packet: Reader, count: int, most: int) -> tuple[Tensor, Tensor]:
    """Read ``count`` levels up to ``most``, and which of them are negative."""
    levels, negative = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    coded, length = packet.number(), packet.number()
    bits = unpack_bits(packet.take(length, torch.uint8)).tolist()
    at, place = 0, -1
    try:
        for _ in range(coded):
            gap, at = one_omega(bits, at)
            place += gap
            negative[place] = bool(bits[at])
            level, at = one_omega(bits, at + 1) if most > 1 else (1, at + 1)
            levels[place] = level
            if level > most:
                raise refuse(NOT_LEVELS)
    except IndexError:
        raise refuse(NOT_LEVELS) from None
    return levels, negative


def omega(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of numbers from 1, their first bit lowest, and the lengths of these.

    >>> omega(torch.tensor([1, 2, 5]))
    (tensor([ 0,  1, 21]), tensor([1, 3, 6]))
    """
    codes, lengths = torch.zeros_like(numbers), torch.ones_like(numbers)
    while (numbers > 1).any():
        width = bit_lengths(numbers)
        longer = codes << width | reversed_bits(numbers, width)
        codes = torch.where(numbers > 1, longer, codes)
        lengths = torch.where(numbers > 1, lengths + width, lengths)
        numbers = torch.where(numbers > 1, width - 1, numbers)
    return codes, lengths


def one_omega(bits: list[int], at: int) -> tuple[int, int]:
    """Read one number; return it, and where the next code begins."""
    number = 1
    while bits[at]:
        width = number + 1
        if width > 32 or at + width > len(bits):
            raise IndexError
        number = int("".join(map(str, bits[at : at + width])), 2)
        at += width
    return number, at + 1


def bit_lengths(numbers: Tensor) -> Tensor:
    """The bits of whole numbers below 2^53."""
    return torch.frexp(numbers.to(torch.float64)).exponent.to(torch.int64)


def reversed_bits(numbers: Tensor, width: Tensor) -> Tensor:
    """Numbers of ``width`` bits with the highest bit lowest."""
    result = torch.zeros_like(numbers)
    for bit in range(int(width.max())):
        result = torch.where(width > bit, result << 1 | (numbers >> bit & 1), result)
    return result


def expanded(codes: Tensor, lengths: Tensor) -> Tensor:
    """The bits of all codes, one after the other, one in each element."""
    starts = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    return codes.repeat_interleave(lengths) >> within & 1
