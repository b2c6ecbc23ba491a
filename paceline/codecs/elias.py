"""Levels of which most are zero: the gap to each that is not, its sign and its size, in Elias' gamma code.

Where the gaps are long, they are in his delta code, which is then shorter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.codecs.bits import pack_bits, unpack_bits
from paceline.codecs.packet import Reader, put, refuse, words

LONG = 24  # the mean gap from which on delta codes are shorter

NOT_LEVELS = "its levels end early, are too large or too many"


def most_bytes(count: int) -> int:
    """The most bytes that ``write`` writes for this many levels, up to 127."""
    return 8 + words(2 * count)  # a gap of 1, the sign and the level have 1, 1 and 13 bits; longer gaps fewer per value


def write(into: Tensor, at: int, levels: Tensor, negative: Tensor, most: int) -> int:
    """Write levels up to ``most`` and their signs; return where they end. If most is 1, a level's size is known."""
    places = torch.nonzero(levels).flatten()
    code = delta if has_long_gaps(places.numel(), levels.numel()) else gamma
    gaps, gap_lengths = code(torch.diff(places, prepend=torch.tensor([-1])))
    sizes, size_lengths = gamma(levels[places].to(torch.int64))
    if most == 1:
        sizes, size_lengths = torch.zeros_like(sizes), torch.zeros_like(sizes)
    codes = torch.stack([gaps, negative[places].to(torch.int64) | sizes << 1], 1).flatten()
    lengths = torch.stack([gap_lengths, size_lengths + 1], 1).flatten()
    stream = pack_bits(expanded(codes, lengths))
    at = put(into, at, torch.tensor([places.numel(), stream.numel()], dtype=torch.int32))
    return put(into, at, stream)


def read(packet: Reader, count: int, most: int) -> tuple[Tensor, Tensor]:
    """Read ``count`` levels up to ``most``, and which of them are negative."""
    levels, negative = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    coded, length = packet.number(), packet.number()
    bits = unpack_bits(packet.take(length, torch.uint8)).tolist()
    one_gap = one_delta if has_long_gaps(coded, count) else one_gamma
    at, place = 0, -1
    try:
        for _ in range(coded):
            gap, at = one_gap(bits, at)
            place += gap
            negative[place] = bool(bits[at])
            level, at = one_gamma(bits, at + 1) if most > 1 else (1, at + 1)
            levels[place] = level
            if level > most:
                raise refuse(NOT_LEVELS)
    except IndexError:
        raise refuse(NOT_LEVELS) from None
    return levels, negative


def has_long_gaps(coded: int, count: int) -> bool:
    """Whether the gaps between so many of all levels are in delta code."""
    return coded * LONG <= count


def gamma(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of numbers from 1, their first bit lowest, and the lengths of these.

    A code is as many zeros as the number has bits behind its first one; a one; those bits, the lowest first.

    >>> gamma(torch.tensor([1, 2, 5]))
    (tensor([ 1,  2, 12]), tensor([1, 3, 5]))
    """
    behind = bits_behind_the_first(numbers)
    rest = numbers ^ torch.ones_like(numbers) << behind
    return (rest << 1 | 1) << behind, 2 * behind + 1


def delta(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The same in a code that begins with the number of bits, in gamma code.

    >>> delta(torch.tensor([1, 2, 5]))
    (tensor([ 1,  2, 14]), tensor([1, 4, 5]))
    """
    behind = bits_behind_the_first(numbers)
    heads, lengths = gamma(behind + 1)
    return heads | (numbers ^ torch.ones_like(numbers) << behind) << lengths, lengths + behind


def bits_behind_the_first(numbers: Tensor) -> Tensor:
    return torch.frexp(numbers.to(torch.float64)).exponent.to(torch.int64) - 1


def one_gamma(bits: list[int], at: int) -> tuple[int, int]:
    """Read one number below 2^32; return it, and where the next code begins."""
    one = at
    while not bits[one]:
        one += 1
    end = one + 1 + one - at
    if one - at > 31 or end > len(bits):
        raise IndexError
    return number_of(bits[one + 1 : end]), end


def one_delta(bits: list[int], at: int) -> tuple[int, int]:
    width, at = one_gamma(bits, at)
    end = at + width - 1
    if width > 32 or end > len(bits):
        raise IndexError
    return number_of(bits[at:end]), end


def number_of(behind: list[int]) -> int:
    """The number whose bits behind the first one are these, the lowest first."""
    number = 1
    for bit in reversed(behind):
        number = 2 * number + bit
    return number


def expanded(codes: Tensor, lengths: Tensor) -> Tensor:
    """The bits of all codes, one after the other, one in each element."""
    starts = torch.cumsum(lengths, 0) - lengths
    within = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    return codes.repeat_interleave(lengths) >> within & 1
