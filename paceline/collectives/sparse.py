"""Sums of sparse tensors: each rank gathers all ranks' entries and adds them in the order of the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.collectives.core import SharedGroup
from paceline.collectives.descriptions import LENGTH, RANKS_DIFFER, difference, packed, unpacked
from paceline.collectives.tensors import Staged
from paceline.errors import CommError, UsageError


def all_reduce_sparse(group: SharedGroup, tensor: Tensor, op: str) -> None:
    """Sum a sparse tensor over all ranks, in place; it blocks, since sizes must be exchanged first."""
    if op not in ("sum", "avg"):
        raise UsageError(f"sparse tensors can be reduced by sum and avg, got {op}; convert them by tensor.to_dense()")
    own = tensor.detach().coalesce()
    _compare(group, f"all_reduce({op}) of sparse {own.dtype}, shape {tuple(own.shape)}, sparse in {own.sparse_dim()}")
    entries = _gather_counts(group, own._nnz())
    indices = _gather(group, own.indices().t(), entries).t()
    values = _gather(group, own.values(), entries)
    total = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False).coalesce()
    with torch.no_grad():
        tensor.copy_(total / group.size if op == "avg" else total)


def _compare(group: SharedGroup, described: str) -> None:
    """Refuse tensors that differ between ranks; entries outside the shape would be written outside the memory."""
    own, all_told = packed(described), torch.empty(group.size, LENGTH, dtype=torch.uint8)
    group.all_gather(own.data_ptr(), all_told.data_ptr(), LENGTH, "uint8")
    differing = difference({rank: unpacked(told) for rank, told in enumerate(all_told)})
    if differing:
        raise CommError(f"{RANKS_DIFFER} in a sum of group {group.name!r}: {differing}")


def _gather_counts(group: SharedGroup, count: int) -> list[int]:
    own, counts = torch.tensor([count]), torch.empty(group.size, dtype=torch.int64)
    group.all_gather(own.data_ptr(), counts.data_ptr(), 1, "int64")
    return counts.tolist()


def _gather(group: SharedGroup, rows: Tensor, counts: list[int]) -> Tensor:
    """Concatenate the rows of all ranks."""
    gathered = rows.new_empty((sum(counts), *rows.shape[1:]))
    for rank, piece in enumerate(torch.split(gathered, counts)):
        if rank == group.rank:
            piece.copy_(rows)
        part = Staged(piece)
        group.broadcast(part.address, part.count, part.dtype, rank)
    return gathered
