"""The same-host collectives give what numpy gives, for every operation, type and size, on any number of ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from quick import in_turn, quick
from shared_ranks import Array, DirectoryStore, address, folded, numbers, run_ranks

from paceline.collectives.core import DTYPES, REDUCTIONS, SharedGroup, Ticket
from paceline.errors import LostContactError, UsageError
from paceline.native import _core

RANKS = [1, 2, 3, 4, 5]
SMALL = [0, 1, 3, 4095, 4097]
STAGED = 70_001  # several chunks for the wide types
LARGE = 1_000_003
OPS = [(dtype, op) for dtype in DTYPES for op in REDUCTIONS[1:]]


def defined(dtype: str) -> list[str]:
    return [op for op in REDUCTIONS[1:] if _core.can_reduce(DTYPES.index(dtype), REDUCTIONS.index(op))]


def same(found: Array, wanted: Array) -> None:
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize(("dtype", "size"), in_turn(DTYPES, RANKS))
def test_reductions_fold_the_ranks_in_order(dtype: str, size: int, tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        region = group.allocate(8 * STAGED + 64)
        for op in defined(dtype):
            for count in [*SMALL, STAGED]:
                arrays = [numbers(dtype, count, seed=rank) for rank in range(size)]
                wanted = folded(arrays, dtype, op)
                check_all_reduce(group, arrays[group.rank].copy(), wanted, dtype, op)
                check_in_place(group, region, arrays[group.rank], wanted, dtype, op)
                check_reduce(group, arrays[group.rank].copy(), wanted, dtype, op, root=count % size)
                check_reduce_scatter(group, arrays, dtype, op)

    run_ranks(work, size, tmp_path)


def check_all_reduce(group: SharedGroup, array: Array, wanted: Array, dtype: str, op: str) -> None:
    group.all_reduce(address(array), array.size, dtype, op)
    same(array, wanted)


def check_in_place(group: SharedGroup, region: _core.Region, array: Array, wanted: Array, dtype: str, op: str) -> None:
    ours = np.frombuffer(memoryview(region), dtype=array.dtype, count=array.size, offset=64)
    ours[:] = array
    group.all_reduce(region.address() + 64, array.size, dtype, op)
    same(ours, wanted)


def check_reduce(group: SharedGroup, array: Array, wanted: Array, dtype: str, op: str, root: int) -> None:
    before = array.copy()
    group.reduce(address(array), array.size, dtype, op, root)
    same(array, wanted if group.rank == root else before)


def check_reduce_scatter(group: SharedGroup, arrays: list[Array], dtype: str, op: str) -> None:
    count = arrays[0].size // group.size
    output = np.empty(count, dtype=arrays[0].dtype)
    group.reduce_scatter(address(arrays[group.rank]), address(output), count, dtype, op)
    piece = slice(group.rank * count, (group.rank + 1) * count)
    same(output, folded([array[piece] for array in arrays], dtype, op))


@pytest.mark.parametrize("size", quick([2, 3], 3))
def test_large_reductions(size: int, tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        region = group.allocate(8 * LARGE)
        for dtype in DTYPES:
            arrays = [numbers(dtype, LARGE, seed=rank) for rank in range(size)]
            wanted = folded(arrays, dtype, "sum" if dtype != "bool" else "bor")
            check_all_reduce(group, arrays[group.rank].copy(), wanted, dtype, "sum")
            ours = np.frombuffer(memoryview(region), dtype=arrays[0].dtype, count=LARGE)
            ours[:] = arrays[group.rank]
            group.all_reduce(region.address(), LARGE, dtype, "sum")
            same(ours, wanted)

    run_ranks(work, size, tmp_path)


def test_ten_million_elements(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        array = np.arange(10_000_000, dtype=np.float32) * (group.rank + 1)
        group.all_reduce(address(array), array.size, "float32", "sum")
        wanted = np.arange(10_000_000, dtype=np.float32)
        same(array, wanted + wanted * np.float32(2))

    run_ranks(work, 2, tmp_path)


@pytest.mark.parametrize("chosen", ["avx2", "baseline"])
def test_every_half_number_survives(chosen: str, tmp_path: Path) -> None:
    """All 65536 patterns plus zero are themselves, and sums round to the nearest even number."""
    best = _core.instruction_set()
    if not _core.choose_instruction_set(chosen):
        pytest.skip(f"this processor has no {chosen}")
    patterns = np.arange(65536, dtype=np.uint16)

    def work(group: SharedGroup) -> None:
        for dtype, kind in [("float16", np.float16), ("bfloat16", np.uint16)]:
            for other in [np.zeros(65536), np.random.default_rng(0).standard_normal(65536)]:
                second = folded([other.astype(np.float32), np.zeros(65536, np.float32)], "float32", "sum")
                halves = [patterns.view(kind), numbers(dtype, 65536, 1) if second.any() else np.zeros(65536, kind)]
                array = halves[group.rank].copy()
                group.all_reduce(address(array), array.size, dtype, "sum")
                wanted = folded(halves, dtype, "sum")
                not_a_number = is_nan(wanted, dtype)
                same(array[~not_a_number], wanted[~not_a_number])
                assert is_nan(array, dtype)[not_a_number].all()

    try:
        run_ranks(work, 2, tmp_path)
    finally:
        assert _core.choose_instruction_set(best)


def is_nan(array: Array, dtype: str) -> Array:
    limit = 0x7F80 if dtype == "bfloat16" else 0x7C00
    nan: Array = (array.view(np.uint16) & 0x7FFF) > limit
    return nan


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree(dtype: str, tmp_path: Path) -> None:
    best = _core.instruction_set()

    def work(group: SharedGroup) -> list[Array]:
        results = []
        for op in defined(dtype):
            array = numbers(dtype, 4097, seed=group.rank)
            group.all_reduce(address(array), array.size, dtype, op)
            results.append(array)
        return results

    try:
        assert _core.choose_instruction_set("baseline")
        (tmp_path / "a").mkdir()
        plain = run_ranks(work, 3, tmp_path / "a")
    finally:
        assert _core.choose_instruction_set(best)
    for found, wanted in zip(run_ranks(work, 3, tmp_path)[0], plain[0], strict=True):
        same(found, wanted)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_nan_wins(dtype: str, op: str, tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        array = np.full(100, float(group.rank), dtype=dtype)
        array[group.rank] = np.nan
        group.all_reduce(address(array), 100, dtype, op)
        assert np.isnan(array[:3]).all()
        assert (array[3:] == (0 if op == "min" else 2)).all()

    run_ranks(work, 3, tmp_path)


# Moving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "size"), in_turn(["uint8", "bfloat16", "int64"], RANKS[::-1]))
def test_moving(dtype: str, size: int, tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        for count in [*SMALL, 300_001]:
            root = count % size
            arrays = [numbers(dtype, count, seed=rank) for rank in range(size)]
            own, joined = arrays[group.rank], np.concatenate(arrays)
            check_broadcast(group, own.copy(), arrays[root], dtype, root)
            check_gathers(group, own, joined, dtype, root)
            check_scatter(group, joined, own, dtype, root)
            check_all_to_all(group, [np.roll(joined, rank) for rank in range(size)], dtype)

    run_ranks(work, size, tmp_path)


def check_broadcast(group: SharedGroup, array: Array, wanted: Array, dtype: str, root: int) -> None:
    group.broadcast(address(array), array.size, dtype, root)
    same(array, wanted)


def check_gathers(group: SharedGroup, own: Array, joined: Array, dtype: str, root: int) -> None:
    output = np.zeros_like(joined)
    group.all_gather(address(own), address(output), own.size, dtype)
    same(output, joined)
    apart = [np.zeros_like(own) for _ in range(group.size)]
    group.gather(
        address(own), [address(array) for array in apart] if group.rank == root else None, own.size, dtype, root
    )
    same(np.concatenate(apart), joined if group.rank == root else np.zeros_like(joined))


def check_scatter(group: SharedGroup, joined: Array, wanted: Array, dtype: str, root: int) -> None:
    output = np.zeros_like(wanted)
    group.scatter(address(joined) if group.rank == root else None, address(output), wanted.size, dtype, root)
    same(output, wanted)


def check_all_to_all(group: SharedGroup, inputs: list[Array], dtype: str) -> None:
    count = inputs[0].size // group.size
    output = np.zeros_like(inputs[0])
    group.all_to_all(address(inputs[group.rank]), address(output), count, dtype)
    piece = slice(group.rank * count, (group.rank + 1) * count)
    same(output, np.concatenate([array[piece] for array in inputs]))


@given(data=st.data(), size=st.integers(1, 4))
@settings(max_examples=15)
def test_uneven_exchange(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, size: int) -> None:
    sizes = st.sampled_from([0, 1, 7, 1000, 90_000])
    counts = data.draw(st.lists(st.lists(sizes, min_size=size, max_size=size), min_size=size, max_size=size))

    def work(group: SharedGroup) -> None:
        pieces = [numbers("int32", count, seed=group.rank * size + to) for to, count in enumerate(counts[group.rank])]
        places = [np.zeros(counts[source][group.rank], dtype=np.int32) for source in range(size)]
        group.all_to_all_uneven(
            [address(piece) for piece in pieces],
            [piece.size for piece in pieces],
            [address(place) for place in places],
            [place.size for place in places],
            "int32",
        )
        for source, place in enumerate(places):
            same(place, numbers("int32", counts[source][group.rank], seed=source * size + group.rank))

    run_ranks(work, size, tmp_path_factory.mktemp("store"))


# Messages -----------------------------------------------------------------------------------------------------


def ticket_of(ticket: Ticket | None) -> Ticket:
    assert ticket is not None
    return ticket


@pytest.mark.parametrize("size", [2, 3])
def test_large_messages_both_ways_at_once(size: int, tmp_path: Path) -> None:
    count = 300_000  # several times what a ring holds

    def work(group: SharedGroup) -> None:
        own, others = numbers("float64", count, group.rank), [np.zeros(count) for _ in range(size)]
        peers = [peer for peer in range(size) if peer != group.rank]
        tickets = [ticket_of(group.send(address(own), count, "float64", peer, async_=True)) for peer in peers]
        tickets += [group.receive_later(address(others[peer]), count, "float64", peer) for peer in peers]
        assert all(ticket.wait() for ticket in tickets)
        for peer in peers:
            same(others[peer], numbers("float64", count, peer))

    run_ranks(work, size, tmp_path)


@given(
    order=st.permutations(range(6)), lengths=st.lists(st.sampled_from([0, 1, 5000, 100_000]), min_size=6, max_size=6)
)
@settings(max_examples=15)
def test_messages_are_found_by_tag(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], lengths: list[int]
) -> None:
    """Two of each tag are sent in order; the receiver asks for the tags in any order and gets each tag in order."""

    def work(group: SharedGroup) -> None:
        if group.rank == 0:
            arrays = [np.full(length, place, dtype=np.float32) for place, length in enumerate(lengths)]
            tickets = [
                ticket_of(group.send(address(array), array.size, "float32", 1, tag=place // 2, async_=True))
                for place, array in enumerate(arrays)
            ]
            assert all(ticket.wait() for ticket in tickets)
            return
        seen = dict.fromkeys(range(3), 0)
        for tag in (place // 2 for place in order):
            place = tag * 2 + seen[tag]
            seen[tag] += 1
            array = np.zeros(lengths[place], dtype=np.float32)
            assert group.receive(address(array), array.size, "float32", 0, tag=tag) == 0
            assert (array == place).all()

    run_ranks(work, 2, tmp_path_factory.mktemp("store"))


def test_receive_from_anyone(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        array = np.full(50_000, group.rank, dtype=np.int64)
        if group.rank != 0:
            group.send(address(array), array.size, "int64", 0, tag=7)
            return
        sources = set()
        for _ in range(group.size - 1):
            source = group.receive(address(array), array.size, "int64", tag=7)
            assert (array == source).all()
            sources.add(source)
        assert sources == set(range(1, group.size))

    run_ranks(work, 4, tmp_path)


def test_messages_and_collectives_do_not_block_each_other(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        message, total = np.full(400_000, 1.0), np.ones(400_000)
        if group.rank == 0:
            reducing = ticket_of(group.all_reduce(address(total), total.size, "float64", "sum", async_=True))
            group.send(address(message), message.size, "float64", 1)
            assert reducing.wait()
        else:
            group.receive(address(message), message.size, "float64", 0)
            group.all_reduce(address(total), total.size, "float64", "sum")
        assert (total == 2).all()

    run_ranks(work, 2, tmp_path)


# Order, places, groups ----------------------------------------------------------------------------------------


def test_queued_calls_run_in_order_before_later_ones(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        array = np.ones(20_000)
        tickets = [ticket_of(group.all_reduce(address(array), 20_000, "float64", "sum", async_=True)) for _ in range(9)]
        group.all_reduce(address(array), 20_000, "float64", "sum")
        assert (array == 2.0**10).all()
        assert all(ticket.done() for ticket in tickets)

    run_ranks(work, 2, tmp_path)


@pytest.mark.parametrize("pinned", [False, True])
def test_ranks_on_one_core_keep_their_affinity(pinned: bool, tmp_path: Path) -> None:
    """A rank that waits for one on its own core moves away, if it may, and may run anywhere afterwards."""

    def work(group: SharedGroup) -> None:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cores)})  # of this thread
        if not pinned:
            os.sched_setaffinity(0, cores)
        for _ in range(200):
            group.barrier()
        assert os.sched_getaffinity(0) == ({min(cores)} if pinned else cores)

    run_ranks(work, 2, tmp_path)


def test_a_buffer_of_ours_may_meet_any_other(tmp_path: Path) -> None:
    """Places that differ, or lie in no region, are reduced all the same."""

    def work(group: SharedGroup) -> None:
        region = group.allocate(1 << 20)
        ours, other = np.frombuffer(memoryview(region), dtype=np.float32), np.zeros(50_000, dtype=np.float32)
        places = [ours[:50_000], ours[1000:51_000], other]
        for turn in range(6):
            array = places[(group.rank + turn) % 3] if turn < 3 else places[turn - 3]
            array[:] = group.rank + 1
            group.all_reduce(address(array), array.size, "float32", "sum")
            assert (array == 6).all()

    run_ranks(work, 3, tmp_path)


def test_what_is_kept_lives_until_the_ticket_is_done(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        results = []
        for _ in range(20):
            array = np.ones(30_000)
            group.all_reduce(address(array), array.size, "float64", "sum", async_=True, keep=array)
            results.append(array[:1])
        group.barrier()
        assert all(result[0] == 2 for result in results)

    run_ranks(work, 2, tmp_path)


def mixed_call(draw: random.Random, group: SharedGroup, dtype: str, count: int) -> Callable[[], None]:
    """Start a random collective, queued or not; what it returns waits for it and checks the result."""
    kind, async_, root = draw.choice(["all_reduce", "broadcast", "all_gather", "barrier"]), draw.random() < 0.5, 0
    seed = draw.randrange(1 << 30)
    arrays = [numbers(dtype, count, seed + rank) for rank in range(group.size)]
    own = arrays[group.rank].copy()
    if kind == "all_reduce":
        wanted = folded(arrays, dtype, "max")
        ticket, result = group.all_reduce(address(own), count, dtype, "max", async_=async_), own
    elif kind == "broadcast":
        root = draw.randrange(group.size)
        wanted = arrays[root]
        ticket, result = group.broadcast(address(own), count, dtype, root, async_=async_), own
    elif kind == "all_gather":
        wanted, result = np.concatenate(arrays), np.empty(count * group.size, dtype=own.dtype)
        ticket = group.all_gather(address(own), address(result), count, dtype, async_=async_)
    else:
        wanted = result = own
        ticket = group.barrier(async_=async_)

    def check() -> None:
        assert ticket is None or ticket.wait()
        assert own is not None
        same(result, wanted)

    return check


def test_soak_on_two_groups(tmp_path: Path) -> None:
    """Random operations, some queued, on two groups with the ranks in opposite orders."""
    rounds, size = 400, 3

    def work(first: SharedGroup) -> None:
        store = DirectoryStore(tmp_path)
        with SharedGroup(store, size - 1 - first.rank, size, timeout=60, name="second") as second:
            draw, pending = random.Random(1), list[Callable[[], None]]()
            for _ in range(rounds):
                group = draw.choice([first, second])
                count = draw.choice([0, 1, 100, 5000, 40_000])
                pending.append(mixed_call(draw, group, draw.choice(["float32", "int16", "float64"]), count))
                while len(pending) > draw.randrange(6):
                    pending.pop(0)()
            for check in pending:
                check()

    run_ranks(work, size, tmp_path)


def test_one_that_watches_does_not_wait_in_vain(tmp_path: Path) -> None:
    """Torch prints a warning of each wait at a store that ends without the key."""

    class Impatient(DirectoryStore):
        def wait(self, keys: list[str], timeout: timedelta) -> None:
            assert self.check(keys)

    looks = []

    def watch() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise LostContactError("rank 0 died")

    with pytest.raises(LostContactError):
        SharedGroup(Impatient(tmp_path), 1, 2, timeout=60, name="group", watch=watch)


# Wrong calls --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda group: group.all_reduce(0, 1, "float33", "sum"), "no dtype called 'float33'"),
        (lambda group: group.all_reduce(0, 1, "float32", "mean"), "no reduction called 'mean'"),
        (lambda group: group.all_reduce(0, 1, "int32", "avg"), "avg has no meaning for int32"),
        (lambda group: group.all_reduce(0, 1, "float16", "bxor"), "bxor has no meaning for float16"),
        (lambda group: group.broadcast(0, 1, "int8", 1), "root: wanted a rank from 0 to 0"),
        (lambda group: group.send(0, 1, "int8", 3), "receiver: wanted a rank"),
        (lambda group: group.gather(0, None, 1, "int8", 0), "must pass one piece per rank"),
        (lambda group: group.allocate(0), "wanted from 1 to 2"),
    ],
)
def test_wrong_calls_are_refused(wrong: Callable[[SharedGroup], object], says: str, tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        with pytest.raises(UsageError, match=says):
            wrong(group)
        group.barrier()  # nothing was broken

    run_ranks(work, 1, tmp_path)


def test_wrong_rank_is_refused(tmp_path: Path) -> None:
    from shared_ranks import DirectoryStore

    with pytest.raises(UsageError, match="got rank 2 of 2"):
        SharedGroup(DirectoryStore(tmp_path), 2, 2)
