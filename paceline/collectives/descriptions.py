"""Short texts as tensors of a fixed size, so that ranks can compare their operations before they start."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

LENGTH = 2048  # enough for the shape of any tensor
_CUT = LENGTH - 1  # the last byte is always zero
RANKS_DIFFER = "the ranks differ"  # the beginning of every error about operations that differ, in native/ too


def packed(text: str) -> Tensor:
    """The text as bytes, cut and padded with zeros to the fixed size."""
    return torch.frombuffer(bytearray(text.encode()[:_CUT].ljust(LENGTH, b"\0")), dtype=torch.uint8)


def unpacked(described: Tensor) -> str:
    """The text of ``packed``."""
    return ctypes.string_at(described.data_ptr()).decode(errors="replace")


def difference(texts: dict[int, str]) -> str:
    """Name two ranks whose texts differ; empty if all are equal."""
    (first, said), *others = texts.items()
    for rank, text in others:
        if text != said:
            return f"rank {first} is in {said}, rank {rank} in {text}"
    return ""
