"""What a program may do wrong with the backend "paceline": the error says what, and where it can, which rank."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _DistributedBackendOptions, _make_nccl_premul_sum

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_ranks import options, outcomes_of, run_groups
from shared_ranks import DEADLINE, hurried

from paceline.collectives.backend import ProcessGroup, create
from paceline.errors import CommError, UsageError
from paceline.native import _core

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
Call = Callable[[Any], Any]


def reduces(tensor: Tensor, op: Any = SUM, later: bool = False) -> Call:
    return lambda group: group.allreduce([tensor.clone()], options("Allreduce", op=op, later=later))


def broadcasts(tensor: Tensor, root: int) -> Call:
    return lambda group: group.broadcast([tensor.clone()], options("Broadcast", root=root))


def deals(splits: list[int], received: list[int]) -> Call:
    return lambda group: group.all_to_all_single(
        torch.zeros(sum(received)), torch.zeros(sum(splits)), received, splits, options("AllToAll")
    )


DIFFERENT: list[tuple[list[Call], str]] = [
    ([reduces(torch.zeros(5)), reduces(torch.zeros(6))], r"rank \d is in all_reduce\(\d float32, sum\), rank \d in"),
    ([reduces(torch.zeros(5)), reduces(torch.zeros(5).int())], r"float32, sum\).*int32, sum\)|int32.*float32"),
    ([reduces(torch.zeros(5)), reduces(torch.zeros(5), MAX)], r"sum\).*max\)|max\).*sum\)"),
    ([reduces(torch.zeros(5)), broadcasts(torch.zeros(5), 0)], r"all_reduce.*broadcast|broadcast.*all_reduce"),
    ([reduces(torch.zeros(9000)), lambda group: group.barrier()], r"all_reduce.*barrier|barrier.*all_reduce"),
    ([broadcasts(torch.zeros(5), 0), broadcasts(torch.zeros(5), 1)], r"root 0\).*root 1\)|root 1\).*root 0\)"),
    ([deals([2, 3], [2, 1]), deals([2, 4], [3, 4])], r"rank 0 expects 4 bytes from rank 1, which sends 8"),
    (
        [lambda group: group.send([torch.zeros(5)], 1, 0), lambda group: group.recv([torch.zeros(6)], 0, 0)],
        r"rank 1 is in receive\(6 float32\) of group 'g', but rank 0 sent it send\(5 float32\)",
    ),
]


@pytest.mark.parametrize(("calls", "message"), DIFFERENT)
def test_ranks_that_differ_are_told_so(calls: list[Call], message: str) -> None:
    def work(group: Any) -> str:
        group.barrier().wait()
        with pytest.raises(CommError) as error:
            calls[group.rank()](group).wait()
            for _ in range(3):
                group.barrier().wait()
        after = group.barrier(options("Barrier", later=True))
        with pytest.raises(CommError, match=re.escape(str(error.value))):
            after.wait()
        assert after.is_completed() and not after.is_success() and isinstance(after.exception(), CommError)
        return str(error.value)

    for text in run_groups(work, 2):
        assert re.search(message, text) and "'g'" in text, text


def tensor_list(*counts: int) -> list[Tensor]:
    return [torch.zeros(count) for count in counts]


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


three = torch.zeros(3)
four = torch.zeros(2, 2)
gathers, scatters, everyone = options("Allgather"), options("ReduceScatter"), options("AllToAll")
REFUSED: list[tuple[Call, str]] = [
    (lambda g: g.allreduce([sparse()], options("Allreduce", op=dist.ReduceOp.MAX)), "by sum and avg, got max"),
    (lambda g: g.broadcast([sparse()], options("Broadcast")), "dense tensors, got one of layout torch.sparse_coo"),
    (lambda g: g.send([sparse()], 1, 0), "dense tensors"),
    (lambda g: g.allreduce([torch.zeros(3, device="meta")], options("Allreduce")), "nothing for tensors on meta"),
    (lambda g: g.allgather([tensor_list(3, 3)], [torch.zeros(3, device="meta")], gathers), "CPU memory.* on meta"),
    (lambda g: g.reduce_scatter_single(three, torch.zeros(6, device="meta"), scatters), "CPU memory.* on meta"),
    (lambda g: g.allreduce([torch._efficientzerotensor(3)], options("Allreduce")), "CPU memory"),
    (
        lambda g: g.allreduce([three], options("Allreduce", op=_make_nccl_premul_sum(2.0))),
        "no reduction .*PREMUL_SUM.*; known: sum, avg",
    ),
    (lambda g: g.allreduce([three.int()], options("Allreduce", op=dist.ReduceOp.AVG)), "avg has no meaning for int32"),
    (lambda g: g.allreduce([three], options("Allreduce", op=dist.ReduceOp.BAND)), "band has no meaning for float32"),
    (
        lambda g: g.allreduce([three.to(torch.float8_e5m2)], options("Allreduce")),
        "cannot reduce torch.float8_e5m2 by sum",
    ),
    (
        lambda g: g.allreduce([three.to(torch.complex64)], options("Allreduce", op=dist.ReduceOp.PRODUCT)),
        "cannot reduce torch.complex64 by product",
    ),
    (
        lambda g: g.reduce_scatter_single(
            three.to(torch.complex64), torch.zeros(6, dtype=torch.complex64), options("ReduceScatter", op=MAX)
        ),
        "cannot reduce torch.complex64 by max",
    ),
    (lambda g: g.broadcast([three], options("Broadcast", root=2)), "root: wanted a rank from 0 to 1"),
    (lambda g: g.send([three], 5, 0), "receiver: wanted a rank from 0 to 1"),
    (lambda g: g.recv([three], -3, 0), "sender: wanted a rank from 0 to 1"),
    (lambda g: g.allgather([[three]], [three], gathers), r"wanted one output per rank \(2\), got 1"),
    (lambda g: g.allgather([[]], [three], gathers), r"wanted one output per rank \(2\), got 0"),
    (lambda g: g.allgather([tensor_list(3, 3, 3)], [three], gathers), "got 3"),
    (lambda g: g.allgather([tensor_list(2, 2)], [three], gathers), "wanted outputs of 3 elements"),
    (lambda g: g.allgather([[three.int(), three.int()]], [three], gathers), "of torch.float32"),
    (lambda g: g.all_gather_single(torch.zeros(5), three, gathers), "wanted a whole of 2 times the piece's 3"),
    (lambda g: g.all_gather_single(torch.zeros(6).int(), three, gathers), "got 6 of torch.int32"),
    (lambda g: g.reduce_scatter([three], [[three]], scatters), r"wanted one input per rank \(2\), got 1"),
    (lambda g: g.reduce_scatter([three], [tensor_list(4, 4)], scatters), "wanted inputs of 3"),
    (lambda g: g.reduce_scatter_single(three, torch.zeros(5), scatters), "wanted a whole of 2 times"),
    (lambda g: g.alltoall([three], tensor_list(3, 3), everyone), r"one output per rank \(2\), got 1"),
    (lambda g: g.alltoall(tensor_list(3, 3), [three, three.int()], everyone), "tensors of one type"),
    (lambda g: g.all_to_all_single(four, four.t(), [], [], everyone), "Tensors must be contiguous, got an input"),
    (lambda g: g.all_to_all_single(four.t(), four, [], [], everyone), "Tensors must be contiguous, got an output"),
    (lambda g: g.all_to_all_single(three, three, [], [], everyone), "3 rows of input cannot be divided evenly"),
    (lambda g: g.all_to_all_single(three, three, [1, 1], [1, 2], everyone), "2 output split sizes that add up to 3"),
    (lambda g: g.all_to_all_single(three, three, [1, 2], [-1, 4], everyone), r"input split sizes.* got \[-1, 4\]"),
    (lambda g: g.all_to_all_single(three, three, [1, 2], [3], everyone), "2 input split sizes"),
    (lambda g: g._start_coalescing(torch.device("cpu")), "does not coalesce by device"),
]


def test_what_cannot_be_is_refused_and_harms_nothing() -> None:
    """Every mistake is found before anything is sent, so the group goes on."""

    def work(group: Any) -> None:
        for call, message in REFUSED:
            with pytest.raises(UsageError, match=message):
                call(group)
        own = torch.ones(3)
        group.allreduce([own]).wait()
        assert torch.equal(own, torch.full((3,), 2.0))

    run_groups(work, 2)


@pytest.mark.parametrize("later", [False, True])
def test_only_the_root_of_a_gather_or_scatter_needs_a_list(later: bool) -> None:
    def work(group: Any) -> None:
        if group.rank() == 0:
            with pytest.raises(UsageError, match=r"wanted one output per rank \(2\), got 1"):
                group.gather([[three]], [three], options("Gather", later=later))
            with pytest.raises(UsageError, match="wanted inputs of 3 elements"):
                group.scatter([three], [tensor_list(3, 4)], options("Scatter", later=later))
        group.barrier().wait()

    run_groups(work, 2)


def test_a_rank_that_raises_and_leaves_is_named() -> None:
    def work(group: Any) -> None:
        if group.rank() == 1:
            raise LookupError("my own mistake")
        group.allreduce([torch.zeros(100_000)]).wait()

    first, second, third = outcomes_of(work, 3)
    assert isinstance(second, LookupError)
    for outcome in first, third:
        assert isinstance(outcome, CommError)
        assert re.search(
            r"rank 1 \(process \d+\) left the group while others were in all_reduce\(100000 float32, sum\), "
            r"collective 1 of group 'g'",
            str(outcome),
        )


def test_a_late_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = threading.Barrier(3)

    def work(group: Any) -> None:
        try:
            if group.rank() != 2:
                group.allreduce([torch.zeros(10)]).wait()
        finally:
            noticed.wait(DEADLINE)

    monkeypatch.setattr(_core, "join", hurried(0.3))
    for outcome in outcomes_of(work, 3)[:2]:
        assert isinstance(outcome, CommError)
        late = (
            r"timed out: it waited the whole timeout of 0\.3 s for rank 2 \(process \d+\) in all_reduce\(10 float32, "
        )
        assert re.search(late, str(outcome))


def test_a_closed_group_says_so() -> None:
    def work(group: Any) -> None:
        group.shutdown()
        group.shutdown()
        calls: list[Call] = [reduces(three), lambda g: g.barrier(), lambda g: g.send([three], 0, 0)]
        for call in calls:
            with pytest.raises(CommError, match="the group is closed"):
                call(group)

    run_groups(work, 1)


def test_ranks_that_do_not_come_are_named() -> None:
    place = _DistributedBackendOptions()
    place.store, place.group_rank, place.group_size = dist.HashStore(), 1, 4  # type: ignore[attr-defined]
    place.timeout, place.group_id = timedelta(seconds=0.2), "g"
    place.store.set("host/2", "here")
    with pytest.raises(CommError, match=r"group 'g': rank 1 timed out: it waited 0\.2 s for ranks \[0, 3\] to join"):
        create(place, None)


def test_options_of_another_backend_are_ignored_with_one_warning() -> None:
    def make() -> None:
        place = _DistributedBackendOptions()
        place.store, place.group_rank, place.group_size = dist.HashStore(), 0, 1  # type: ignore[attr-defined]
        place.timeout, place.group_id = timedelta(seconds=DEADLINE), "g"
        create(place, dist.ProcessGroupGloo._Options()).shutdown()  # type: ignore[attr-defined]

    with pytest.warns(
        UserWarning, match="'paceline' has no options, and ignores the ProcessGroupGloo._Options of pg_options"
    ) as told:
        make()
        make()
    assert len(told) == 1


def test_a_part_of_the_world_is_named_by_its_ranks() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]

    def be(rank: int) -> str:
        place = _DistributedBackendOptions()
        place.store, place.group_rank, place.group_size = store, rank, 2
        place.timeout, place.group_id, place.global_ranks_in_group = timedelta(seconds=DEADLINE), "g", [1, 3]
        group = create(place, None)
        assert group.group_name == "g"
        if rank == 1:
            group.shutdown()
            return ""
        with pytest.raises(CommError) as caught:
            group.allreduce([torch.zeros(3)]).wait()
        group.shutdown()
        return str(caught.value)

    with ThreadPoolExecutor(2) as ranks:
        message, _ = ranks.map(be, range(2))
    assert re.search(r"rank 1 \(process \d+\) left the group .* of group 'g \(ranks 1, 3\)'", message), message


def test_joining_keeps_its_time(tmp_path: Path) -> None:
    """Whatever the store does when it waits for nothing; a file's raises another error than the others."""
    stores = [dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 2)]  # type: ignore[attr-defined]
    for store in stores:
        place = _DistributedBackendOptions()
        place.store, place.group_rank, place.group_size = store, 1, 2
        place.timeout, place.group_id = timedelta(seconds=0.2), "g"
        with pytest.raises(CommError, match=r"group 'g': rank 1 timed out: it waited 0\.2 s for ranks \[0\] to join"):
            create(place, None)
        with pytest.raises(
            CommError, match=r"group 'h': rank 1 timed out waiting for rank 0, whose address is not in the store"
        ):
            ProcessGroup(store, 1, 2, timedelta(seconds=0.2), "h")


def test_allocating_less_than_nothing_is_refused() -> None:
    def work(group: Any) -> None:
        with pytest.raises(UsageError, match="wanted a number of elements, got -3"):
            group.allocate(-3, torch.float32)
        with pytest.raises(UsageError, match="wanted from 1 to 2"):
            group.allocate(1 << 62, torch.float32)
        assert group.allocate(3, torch.float32).shape == (3,)

    run_groups(work, 1)
