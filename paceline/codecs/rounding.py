"""The random numbers of stochastic rounding, from a counter: the same for the same seed, tensor, step and element."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.seeding import derive_seed

BITS = 24  # of each random number


class Key(NamedTuple):
    """Two words of 32 bits that number a tensor's random numbers of one step."""

    first: int
    second: int


def key_of(seed: int, number: int, step: int) -> Key:
    """The key of a piece in a step."""
    mixed = derive_seed(seed, "codec", number, step)
    return Key(mixed & 0xFFFFFFFF, mixed >> 31 & 0xFFFFFFFF)


def uniform(key: Key, count: int) -> Tensor:
    """Numbers in [0, 1), multiples of 2^-24, each a hash of the key and its index; as float32."""
    counter = (torch.arange(count) + key.first) & 0xFFFFFFFF
    return (_mixed(_mixed(counter) ^ key.second) >> (32 - BITS)).to(torch.float32) * 2.0**-BITS


def _mixed(words: Tensor) -> Tensor:
    """A permutation of the words of 32 bits in which every bit depends on every other (Wellons, 2018: lowbias32)."""
    words = words ^ (words >> 16)
    words = (words * 0x7FEB352D) & 0xFFFFFFFF
    words = words ^ (words >> 15)
    words = (words * 0x846CA68B) & 0xFFFFFFFF
    return words ^ (words >> 16)
