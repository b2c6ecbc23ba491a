"""Sums of sparse tensors on the backend "paceline" are the sums of the dense ones."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_ranks import options, run_groups

from paceline.errors import CommError


@hypothesis.given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.booleans(), st.randoms())
@hypothesis.settings(max_examples=15)
def test_sparse_sums(ranks: int, rows: int, entries: int, later: bool, random: Any) -> None:
    places = [[random.randrange(rows) for _ in range(entries * (rank % 2 + 1))] for rank in range(ranks)]

    def own(rank: int) -> torch.Tensor:
        values = torch.arange(2.0 * len(places[rank])).reshape(-1, 2) + rank  # repeated places add up
        indices = torch.tensor([places[rank]], dtype=torch.int64)
        return torch.sparse_coo_tensor(indices, values, (rows, 2), check_invariants=True)

    def work(group: Any) -> torch.Tensor:
        tensor = own(group.rank()).coalesce()
        group.allreduce([tensor], options("Allreduce", later=later)).wait()
        average = own(group.rank()).coalesce()
        group.allreduce([average], options("Allreduce", op=dist.ReduceOp.AVG)).wait()
        torch.testing.assert_close(average.to_dense() * group.size(), tensor.to_dense())
        return tensor.to_dense()

    wanted = sum((own(rank).to_dense() for rank in range(ranks)), torch.zeros(rows, 2))
    for found in run_groups(work, ranks):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("second", ["longer", "of another type", "averaged", "of rows"])
def test_sparse_tensors_that_differ_are_told_so_and_harm_nothing(second: str) -> None:
    def work(group: Any) -> None:
        other = group.rank() == 1
        rows = 1000 if other and second == "longer" else 4
        values = torch.ones(1, 2 if other and second == "of rows" else 1)
        dtype = torch.float64 if other and second == "of another type" else torch.float32
        op = dist.ReduceOp.AVG if other and second == "averaged" else dist.ReduceOp.SUM
        shape = rows, values.shape[1]
        tensor = torch.sparse_coo_tensor(torch.tensor([[rows - 1]]), values.to(dtype), shape, check_invariants=True)
        with pytest.raises(CommError, match=r"rank 0 is in all_reduce\(sum\) of sparse .*, rank 1 in all_reduce\("):
            group.allreduce([tensor], options("Allreduce", op=op))
        group.barrier().wait()

    run_groups(work, 2)
