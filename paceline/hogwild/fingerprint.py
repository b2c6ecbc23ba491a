"""Tells the data of problems apart without reading all of them."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.hogwild.arrays import CSR
from paceline.hogwild.problems import Problem

_WHOLE = 1 << 20  # numbers; of longer arrays as many are looked at, in blocks
_BLOCKS = 256


def fingerprint(problem: Problem) -> str:
    """A checksum of the arrays of a problem: their names, types and lengths, and a bounded sample of their numbers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, array in _arrays(problem):
        digest.update(f"{name} {array.dtype.str} {len(array)}\n".encode())
        for block in _sample(array):
            digest.update(block.tobytes())
    return digest.hexdigest()


def _arrays(data: Any) -> list[tuple[str, NDArray[Any]]]:
    found: list[tuple[str, NDArray[Any]]] = []
    for name in (each.name for each in fields(data)):
        value = getattr(data, name)
        if isinstance(value, np.ndarray):
            found.append((name, value))
        elif isinstance(value, CSR):
            found += _arrays(value)
    return found


def _sample(array: NDArray[Any]) -> list[NDArray[Any]]:
    """Blocks from all over an array, so that few pages of a mapped one are read."""
    if len(array) <= _WHOLE:
        return [array]
    size = _WHOLE // _BLOCKS
    starts = [block * (len(array) - size) // (_BLOCKS - 1) for block in range(_BLOCKS)]
    return [array[start : start + size] for start in starts]
