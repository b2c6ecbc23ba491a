"""What the ranks of real worlds do in tests of the backend "paceline"."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from backend_processes import join_world, wait_for
from shared_ranks import hurried
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

from paceline import native
from paceline.collectives import backend
from paceline.collectives.backend import ProcessGroup
from paceline.native import _core


def full(value: float, count: int = 4) -> Tensor:
    return torch.full((count,), float(value))


# The whole interface ----------------------------------------------------------------------------------------------


def every_function(directory: Path, rank: int, size: int, name: str) -> dict[str, Any]:
    """Call what ``torch.distributed`` offers, and give every result, to be compared with another backend's."""
    join_world(directory, rank, size, backend=name)
    results = functions_of(rank, size, None)
    results["objects"] = objects_of(rank, size)
    odd = dist.new_group([1, 2])
    if rank > 0:
        results["subgroup"] = functions_of(rank - 1, 2, odd)
        results["subgroup's ranks"] = [dist.get_rank(odd), dist.get_world_size(odd), dist.get_global_rank(odd, 0)]
        dist.destroy_process_group(odd)
    results["after it"] = functions_of(rank, size, None)
    dist.destroy_process_group()
    return results


def functions_of(rank: int, size: int, group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    root = dist.get_global_rank(group, size - 1) if group else size - 1
    right, left = ((rank + offset) % size for offset in (1, -1))
    if group:
        right, left = dist.get_global_rank(group, right), dist.get_global_rank(group, left)
    for later in False, True:

        def keep(name: str, work: Any, tensors: list[Tensor], later: bool = later) -> None:
            if later:
                work.wait()
            found[f"{name}, {'later' if later else 'now'}"] = [tensor.tolist() for tensor in tensors]

        own = full(rank + 1)
        keep("all_reduce", dist.all_reduce(own, group=group, async_op=later), [own])
        own = full(rank + 1)
        keep("max", dist.all_reduce(own, dist.ReduceOp.MAX, group=group, async_op=later), [own])
        own = full(rank + 1)
        work = dist.reduce(own, root, group=group, async_op=later)
        keep("reduce", work, [own] if rank == size - 1 else [])
        own = full(rank + 1)
        keep("broadcast", dist.broadcast(own, root, group=group, async_op=later), [own])
        places = [full(0) for _ in range(size)]
        keep("all_gather", dist.all_gather(places, full(rank), group=group, async_op=later), places)
        whole = full(0, 4 * size)
        keep("all_gather_single", dist.all_gather_single(whole, full(rank), group, later), [whole])
        share = full(0)
        pieces = [full(rank + i) for i in range(size)]
        keep("reduce_scatter", dist.reduce_scatter(share, pieces, group=group, async_op=later), [share])
        share, whole = full(0), torch.cat(pieces)
        keep("reduce_scatter_single", dist.reduce_scatter_single(share, whole, group=group, async_op=later), [share])
        places = [full(0) for _ in range(size)] if rank == size - 1 else []
        keep("gather", dist.gather(full(rank), places or None, root, group, later), places)
        share = full(0)
        given = [full(i) for i in range(size)] if rank == size - 1 else None
        keep("scatter", dist.scatter(share, given, root, group, later), [share])
        places = [full(0) for _ in range(size)]
        keep("all_to_all", dist.all_to_all(places, pieces, group, later), places)
        whole = full(0, 4 * size)
        keep("all_to_all_single", dist.all_to_all_single(whole, torch.cat(pieces), None, None, group, later), [whole])
        keep("barrier", dist.barrier(group, later), [])

        place, sent = full(0), full(10 * rank)
        if later:
            works = [dist.isend(sent, right, group, tag=3), dist.irecv(place, left, group, tag=3)]
            for work in works:
                assert work is not None and work.wait()
        elif rank == 0:
            dist.send(sent, right, group, tag=3)
            dist.recv(place, left, group, tag=3)
        else:
            found["from whom"] = dist.recv(place, None, group, tag=3)
            dist.send(sent, right, group, tag=3)
        found[f"ring, {later}"] = place.tolist()

    place = full(0)
    batch = [dist.P2POp(dist.isend, full(rank), right, group), dist.P2POp(dist.irecv, place, left, group)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    found["batch_isend_irecv"] = place.tolist()

    world = group or dist.group.WORLD
    assert world is not None
    whole = functional.all_gather_single(full(rank), 0, world)
    share = functional.reduce_scatter_single(whole, "sum", 0, world)
    total = functional.all_reduce(full(rank), "avg" if size == 2 else "sum", world)
    dealt = functional.all_to_all_single(full(rank, size), None, None, world)
    found["functional"] = [tensor.tolist() for tensor in (whole, share, total, dealt)]
    return found


def objects_of(rank: int, size: int) -> list[Any]:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 1000})
    told: list[Any] = [["from 1", 1]] if rank == 1 else [None]
    dist.broadcast_object_list(told, 1)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, [rank]), gathered, 0)
    share: list[Any] = [None]
    dist.scatter_object_list(share, [f"for {i}" for i in range(size)] if rank == 0 else None, 0)
    return [everyone, told, gathered, share]


def coalescing(directory: Path, rank: int, size: int) -> None:
    """The forms of torch's coalescing manager that work, and those that are refused."""
    join_world(directory, rank, size)
    for later in False, True:
        tensors = [full(rank + 1), full(rank + 2, 10_000)]
        with _coalescing_manager(async_ops=later) as coalesced:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if later:
            coalesced.wait()
        assert [tensor[0].item() for tensor in tensors] == [3, 5]
        wholes = [full(0, 8), full(0, 20_000)]
        with _coalescing_manager(async_ops=later) as coalesced:
            for whole in wholes:
                dist.all_gather_single(whole, full(rank, whole.numel() // 2))
        if later:
            coalesced.wait()
        assert [whole[[0, -1]].tolist() for whole in wholes] == [[0, 1], [0, 1]]
        shares = [full(0), full(0, 10_000)]
        with _coalescing_manager(async_ops=later) as coalesced:
            for share, whole in zip(shares, wholes, strict=True):
                dist.reduce_scatter_single(share, whole)
        if later:
            coalesced.wait()
        assert [share[0].item() for share in shares] == [2 * rank, 2 * rank]
    try:
        with _coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(full(1))
    except ValueError as error:
        assert "does not coalesce by device" in str(error)
    else:
        raise AssertionError("a coalescing by device was not refused")
    dist.destroy_process_group()


def many_groups(directory: Path, rank: int, size: int) -> list[int]:
    """Several groups at once, asynchronously and from several threads; destroy all of them, and begin anew."""
    open_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for turn in range(2):
        join_world(directory / str(turn), rank, size, backend=["cpu:paceline,cuda:nccl", "paceline"][turn])
        assert isinstance(dist.group.WORLD, ProcessGroup) and dist.group.WORLD.name() == "paceline"
        assert dist.get_backend() == ("paceline" if turn else "cpu:paceline,cuda:nccl")
        pairs = {pair: dist.new_group(list(pair)) for pair in itertools.combinations(range(size), 2)}
        mine = [group for pair, group in pairs.items() if rank in pair]
        assert len({group.group_name for group in mine}) == len(mine)
        works, tensors = [], []
        for _ in range(20):
            for group in [*mine, None]:
                tensors.append(full(rank, 50_000))
                works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
        for work in reversed(works):
            assert work is not None and work.wait()
        members = [sum(pair) for pair in pairs if rank in pair] + [sum(range(size))]
        assert [tensor[0].item() for tensor in tensors] == members * 20

        def talk(group: Any) -> None:
            for _ in range(50):
                dist.barrier(group)

        threads = [threading.Thread(target=talk, args=(group,)) for group in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        dist.barrier()
        dist.destroy_process_group()
        del works, work  # they keep their groups open
    return [open_before, len(os.listdir("/proc/self/fd"))]  # noqa: PTH208


def fallback(directory: Path, rank: int, size: int, obstacle: str) -> list[Any]:
    """One rank cannot share memory: all use Gloo."""
    if obstacle == "no module" and rank == 1:
        native._reason = "the compiled module is missing (no compiler)"
    elif obstacle == "another host" and rank == 1:
        backend.host_identity = lambda: "elsewhere"  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        join_world(directory, rank, size)
        half = dist.new_group([0, 1])
    total = full(rank + 1)
    dist.all_reduce(total, group=half)
    dist.barrier()
    dist.destroy_process_group()
    return [total[0].item(), [str(warning.message) for warning in told]]


# Deaths -----------------------------------------------------------------------------------------------------------


def mixed_until_failure(directory: Path, rank: int, size: int) -> list[Any]:
    """Collectives without end, until one fails: its message, and when that was."""
    join_world(directory, rank, size)
    draw = random.Random(0)
    small, large, places = full(1), full(1, 300_000), [full(0, 5000) for _ in range(size)]
    dist.barrier()
    (directory / f"ready {rank}").touch()
    try:
        while True:
            kind = draw.randrange(6)
            if kind == 0:
                dist.all_reduce(small, dist.ReduceOp.MAX)
            elif kind == 1:
                dist.all_reduce(large, dist.ReduceOp.MAX)
            elif kind == 2:
                dist.broadcast(large, draw.randrange(size))
            elif kind == 3:
                dist.all_gather(places, places[0].clone())
            elif kind == 4:
                works = [dist.all_reduce(large, dist.ReduceOp.MAX, async_op=True) for _ in range(3)]
                for work in works:
                    assert work is not None
                    work.wait()
            else:
                work = dist.all_reduce(small, dist.ReduceOp.MAX, async_op=True)
                assert work is not None
                work.get_future().wait()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic()]


def ddp_until_failure(directory: Path, rank: int, size: int) -> list[Any]:
    """Train with PyTorch's own wrapper, until it fails."""
    join_world(directory, rank, size)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (directory / f"ready {rank}").touch()
    try:
        while True:
            optimizer.zero_grad()
            model(torch.ones(8, 128)).sum().backward()
            optimizer.step()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic()]


def waits_for_a_slow_rank(directory: Path, rank: int, size: int) -> list[Any]:
    """Rank 1 comes late to a collective, in time at first and then too late."""
    _core.join = hurried(3.0)
    join_world(directory, rank, size)
    if rank == 1:
        time.sleep(0.3)
    dist.barrier()
    if rank == 1:
        wait_for(directory / "noticed")
        return ["", ""]
    messages = []
    for later in False, True:
        try:
            work = dist.all_reduce(full(1), async_op=later)
            if work is not None:
                work.get_future().wait()
        except Exception as error:
            messages.append(str(error))
    (directory / "noticed").touch()
    return messages


# Endings ----------------------------------------------------------------------------------------------------------


def many_lives(directory: Path, rank: int, size: int, lives: int) -> list[list[int]]:
    """Create and destroy the world again and again; give the descriptors, threads and mappings after some of them."""
    counts = []
    for life in range(lives):
        place = directory / str(life)
        join_world(place, rank, size)
        tensor = full(1, 10_000)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.get_future().wait()
        sent = dist.isend(full(1), 1 - rank)
        received = dist.irecv(full(1), 1 - rank)
        assert sent is not None and sent.wait() and received is not None and received.get_future().wait()
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        del work, sent, received
        counts.append(
            [
                len(os.listdir("/proc/self/fd")),  # noqa: PTH208
                len(os.listdir("/proc/self/task")),  # noqa: PTH208
                Path("/proc/self/maps").read_text().count("memfd:paceline"),
            ]
        )
    return counts
