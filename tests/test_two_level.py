"""Groups over several hosts, which are names here: the sums of all ranks, whoever shares memory with whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_ranks import options
from host_ranks import on_hosts
from torch import nn

import paceline
from paceline.errors import CommError

LAYOUTS = ["aa", "aba", "aabb", "babca"]
FOLDS: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.sum,
    "AVG": torch.mean,
    "MIN": torch.amin,
    "MAX": torch.amax,
    "PRODUCT": torch.prod,
}


@pytest.mark.parametrize("hosts", LAYOUTS)
def test_reductions(hosts: str) -> None:
    cases = [(op, dtype, count) for op in FOLDS for dtype in (torch.float32, torch.float64) for count in (0, 1, 70_001)]

    def own(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        return torch.randn(count, dtype=dtype, generator=torch.Generator().manual_seed(rank))

    def work(group: Any) -> list[torch.Tensor]:
        found = []
        for number, (op, dtype, count) in enumerate(cases):
            tensor = own(group.rank(), dtype, count)
            asked = options("Allreduce", op=getattr(dist.ReduceOp, op), later=number % 2 == 0)
            group.allreduce([tensor], asked).wait()
            found.append(tensor)
        return found

    results = on_hosts(hosts, work)
    for number, (op, dtype, count) in enumerate(cases):
        wanted = FOLDS[op](torch.stack([own(rank, dtype, count) for rank in range(len(hosts))]), 0)
        torch.testing.assert_close(results[0][number], wanted)
        assert all(torch.equal(result[number], results[0][number]) for result in results)


def test_strided_tensors_several_at_once_and_futures() -> None:
    def work(group: Any) -> None:
        strided, whole = torch.ones(6, 2)[:, 0], torch.ones(5, dtype=torch.int64)
        group.allreduce_coalesced([strided, whole], options("AllreduceCoalesced")).wait()
        assert strided.tolist() == [3] * 6 and whole.tolist() == [3] * 5
        works = [group.allreduce([torch.full((4,), float(n))], options("Allreduce", later=True)) for n in range(5)]
        values = [work.get_future().wait()[0] for work in works]
        assert [value.tolist() for value in values] == [[3.0 * n] * 4 for n in range(5)]
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)

    on_hosts("aab", work)


def test_a_callback_may_wait_for_another_sum() -> None:
    def work(group: Any) -> None:
        def and_again(future: Any) -> Any:
            (value,) = future.value()
            return group.allreduce([value], options("Allreduce", later=True)).get_future().wait()

        first = group.allreduce([torch.ones(3)], options("Allreduce", later=True)).get_future()
        (value,) = first.then(and_again).wait()
        assert value.tolist() == [9.0] * 3

    on_hosts("aab", work)


def test_the_rest_goes_over_gloo() -> None:
    def work(group: Any) -> None:
        rank = group.rank()
        told = torch.full((3,), float(rank))
        group.broadcast([told], options("Broadcast", root=2)).wait()
        pieces = [torch.zeros(1) for _ in range(3)]
        group.allgather([pieces], [torch.tensor([float(rank)])], options("Allgather")).wait()
        group.barrier().wait()
        assert told.tolist() == [2.0] * 3 and [piece.item() for piece in pieces] == [0.0, 1.0, 2.0]
        assert group._get_backend(torch.device("cpu")) is group and group.group_name == "g"
        assert [device.type for device in group._device_types] == ["cpu"]

    on_hosts("aba", work)


def test_sessions_train_as_one_worker_would() -> None:
    data = torch.randn(9, 3)

    def work(group: Any) -> torch.Tensor:
        model = nn.Linear(3, 2)
        with torch.no_grad():  # threads share one random stream
            model.weight.copy_(torch.arange(6.0).reshape(2, 3) / 10)
            model.bias.zero_()
        mine = data if group is None else data[3 * group.rank() : 3 * group.rank() + 3]
        with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group) as session:
            for _ in range(4):
                with session.step(examples=len(mine)):
                    model(mine).square().mean().backward()
        return model.weight.detach().clone()

    results, alone = on_hosts("aab", work), work(None)
    for result in results:
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-6)
        assert torch.equal(result, results[0])


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_rank_that_leaves_fails_the_others_long_before_their_time_is_up(gone: int) -> None:
    def work(group: Any) -> None:
        group.allreduce([torch.ones(5)]).wait()
        if group.rank() == gone:
            group.shutdown()
            return
        with pytest.raises(CommError, match="over several hosts, in all_reduce"):
            group.allreduce([torch.ones(5)]).wait()

    on_hosts("aab", work, timeout=300.0)
