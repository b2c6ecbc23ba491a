"""Hashes of parameters and checksums of batches, to compare runs bit for bit."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

DIGEST_BYTES = 16


def hash_of(tensors: Iterable[Tensor]) -> bytes:
    """Hash the bits of tensors, in their order."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        digest.update(_bytes_of(tensor))
    return digest.digest()


def state_tensors(model: nn.Module) -> list[Tensor]:
    """The tensors of a model that a server keeps: its parameters, then its buffers."""
    return [*model.parameters(), *model.buffers()]


def checksum_of(data: Any) -> int:
    """A checksum of all tensors in ``data``, such as a batch; never 0."""
    check = 1
    for leaf in tree_leaves(data):
        check = zlib.crc32(_bytes_of(leaf) if isinstance(leaf, Tensor) else repr(leaf).encode(), check)
    return check or 1


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]  # an array is a buffer
