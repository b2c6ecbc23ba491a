"""The backend "paceline": every operation, type, size and layout against an oracle, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_ranks import COMPLEX, KNOWN, LAYOUTS, ONLY_MOVED, array_of, bits, elements, laid_out, options, run_groups
from quick import quick
from shared_ranks import folded

from paceline.native import _core

SIZES = (0, 1, 3, 4095, 4097)
FEW_SIZES = (0, 3, 4097)
REDUCTIONS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
RANKS = pytest.mark.parametrize("size", quick(range(1, 6), 1, 2, 3))


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """The oracle: the ranks folded in order."""
    dtype = parts[0].dtype
    if dtype.is_complex:
        return torch.view_as_complex(reduced([torch.view_as_real(part) for part in parts], op))
    if dtype == torch.bool:
        op = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
    if parts[0].numel() == 0:
        return parts[0]
    name = str(dtype).removeprefix("torch.")
    return torch.from_numpy(np.asarray(folded([array_of(part) for part in parts], name, op))).view(dtype)


def is_defined(dtype: torch.dtype, op: str) -> bool:
    if dtype.is_complex:
        return op in ("sum", "avg")
    from paceline.collectives.core import _DTYPE, _REDUCTION

    return _core.can_reduce(_DTYPE[str(dtype).removeprefix("torch.")], _REDUCTION[op])


class Case:
    """One rank's view of a case: what each rank has, and tensors to put results in."""

    def __init__(self, group: Any, dtype: torch.dtype, count: int, number: int) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.dtype, self.count, self.number = dtype, count, number
        self.later = number % 2 == 1
        self.root = number % self.size
        self.layout = LAYOUTS[number // 2 % len(LAYOUTS)]
        self.parts = [self.made(count, rank) for rank in range(self.size)]
        self.wholes = [self.made(count * self.size, 100 + rank) for rank in range(self.size)]

    def made(self, count: int, seed: int) -> Tensor:
        return elements(self.dtype, count, 1000 * self.number + seed)

    def own(self) -> Tensor:
        return laid_out(self.parts[self.rank], self.layout)

    def own_whole(self) -> Tensor:
        return laid_out(self.wholes[self.rank], self.layout)

    def empty(self, count: int) -> Tensor:
        return laid_out(torch.zeros(count, dtype=self.dtype), self.layout)

    def pieces(self, whole: Tensor) -> list[Tensor]:
        return [laid_out(piece, self.layout) for piece in whole.view(self.size, self.count)]

    def options(self, kind: str, **more: Any) -> Any:
        return options(kind, later=self.later, root=self.root, **more)

    def check(self, work: Any, found: list[Tensor], wanted: list[Tensor]) -> None:
        work.wait()
        assert work.is_completed() and work.is_success()
        for one, other in zip(found, wanted, strict=True):
            assert bits(one) == bits(other), (self.group, self.dtype, self.count, self.layout, self.later)


def check_reductions(case: Case) -> None:
    group, rank = case.group, case.rank
    for op in REDUCTIONS:
        if not is_defined(case.dtype, op):
            continue
        how = getattr(dist.ReduceOp, op.upper())
        total = reduced(case.parts, op)
        own = case.own()
        case.check(group.allreduce([own], case.options("Allreduce", op=how)), [own], [total])
        own = case.own()
        work = group.reduce([own], case.options("Reduce", op=how))
        case.check(work, [own], [total if rank == case.root else case.parts[rank]])

        shares = reduced([whole.view(case.size, case.count) for whole in case.wholes], op)
        whole, share = case.own_whole(), case.empty(case.count)
        scattering = case.options("ReduceScatter", op=how)
        case.check(
            group.reduce_scatter_single(share, whole, scattering), [share, whole], [shares[rank], case.wholes[rank]]
        )
        share = case.empty(case.count)
        pieces = case.pieces(case.wholes[rank])
        case.check(group.reduce_scatter([share], [pieces], scattering), [share], [shares[rank]])

    two = [case.own(), case.own()[: case.count // 2]]
    total = reduced(case.parts, "sum")
    work = group.allreduce_coalesced(two, case.options("AllreduceCoalesced"))
    case.check(work, two[:1], [total])


def check_uneven_reductions(case: Case) -> None:
    counts = [case.count + rank for rank in range(case.size)]
    given = [[case.made(count, 10 * rank + place) for place, count in enumerate(counts)] for rank in range(case.size)]
    share = case.empty(counts[case.rank])
    pieces = [laid_out(piece, case.layout) for piece in given[case.rank]]
    work = case.group.reduce_scatter([share], [pieces], case.options("ReduceScatter"))
    wanted = reduced([pieces[case.rank] for pieces in given], "sum")
    case.check(work, [share, *pieces], [wanted, *given[case.rank]])


def check_copies(case: Case) -> None:
    group, rank, size, parts = case.group, case.rank, case.size, case.parts
    own = case.own()
    case.check(group.broadcast([own], case.options("Broadcast")), [own], [parts[case.root]])

    places = [case.empty(case.count) for _ in range(size)]
    case.check(group.allgather([places], [case.own()], case.options("Allgather")), places, parts)
    whole = case.empty(case.count * size)
    case.check(group.all_gather_single(whole, case.own(), case.options("Allgather")), [whole], [torch.cat(parts)])
    places = [case.empty(case.count) for _ in range(size)]
    at_root = rank == case.root
    work = group.gather([places] if at_root else [], [case.own()], case.options("Gather"))
    case.check(work, places, parts if at_root else [case.empty(case.count)] * size)

    share = case.empty(case.count)
    pieces = case.pieces(case.wholes[case.root])
    work = group.scatter([share], [pieces] if at_root else [], case.options("Scatter"))
    case.check(work, [share], [case.wholes[case.root].view(size, -1)[rank] if case.count else share])

    wanted = [whole.view(size, case.count)[rank] for whole in case.wholes]
    places = [case.empty(case.count) for _ in range(size)]
    case.check(group.alltoall(places, case.pieces(case.wholes[rank]), case.options("AllToAll")), places, wanted)
    whole = case.empty(case.count * size).contiguous()
    work = group.all_to_all_single(whole, case.own_whole().contiguous(), [], [], case.options("AllToAll"))
    case.check(work, [whole], [torch.cat(wanted)])


def check_uneven_copies(case: Case) -> None:
    group, rank, size = case.group, case.rank, case.size
    given = [case.made(case.count + r, r) for r in range(size)]
    places = [case.empty(case.count + r) for r in range(size)]
    own = laid_out(given[rank], case.layout)
    case.check(group.allgather([places], [own], case.options("Allgather")), places, given)

    # Rank r sends (r + 1) * s elements to rank s.
    sent = [[case.made((r + 1) * s, 10 * r + s) for s in range(size)] for r in range(size)]
    wanted = [pieces[rank] for pieces in sent]
    places = [case.empty((r + 1) * rank) for r in range(size)]
    pieces = [laid_out(piece, case.layout) for piece in sent[rank]]
    case.check(group.alltoall(places, pieces, case.options("AllToAll")), places, wanted)
    whole = case.empty(sum(piece.numel() for piece in wanted)).contiguous()
    source = torch.cat(sent[rank])
    splits = [piece.numel() for piece in wanted], [piece.numel() for piece in sent[rank]]
    case.check(group.all_to_all_single(whole, source, *splits, case.options("AllToAll")), [whole], [torch.cat(wanted)])


def check_coalesced(case: Case) -> None:
    """Two tensors of different sizes in one call."""
    group, rank, size = case.group, case.rank, case.size
    parts = [[case.made(count, 10 * r + count) for count in (case.count, 2)] for r in range(size)]
    own = [laid_out(part, case.layout) for part in parts[rank]]
    wholes = [torch.cat([parts[r][i] for r in range(size)]) for i in range(2)]

    places = [case.empty(whole.numel()) for whole in wholes]
    case.check(group.all_gather_single_coalesced(places, own, case.options("Allgather")), places, wholes)
    lists = [[case.empty(part.numel()) for part in parts[rank]] for _ in range(size)]
    work = group.allgather_coalesced(lists, own, case.options("Allgather"))
    case.check(work, [place for places in lists for place in places], [part for both in parts for part in both])
    if case.dtype in ONLY_MOVED.values():
        return
    given = [[case.made(count * size, 20 * r + count) for count in (case.count, 2)] for r in range(size)]
    wanted = [reduced([given[r][i] for r in range(size)], "sum").view(size, -1)[rank] for i in range(2)]
    shares = [case.empty(case.count), case.empty(2)]
    inputs = [laid_out(whole, case.layout) for whole in given[rank]]
    work = group.reduce_scatter_single_coalesced(shares, inputs, case.options("ReduceScatter"))
    case.check(work, shares, [part if part.numel() else shares[0] for part in wanted])


def check_messages(case: Case) -> None:
    group, rank, size = case.group, case.rank, case.size
    left, right = (rank - 1) % size, (rank + 1) % size
    first, second, place, other = case.own(), case.own_whole(), case.empty(case.count), case.empty(case.count * size)
    works = [group.send([first], right, 7), group.send([second], right, 8)]
    case.check(group.recv([other], left, 8), [other], [case.wholes[left]])
    arrived = group.recv_anysource([place], 7)
    case.check(arrived, [place], [case.parts[left]])
    assert arrived._source_rank() == left
    for work in works:
        work.wait()


def run_cases(size: int, dtypes: list[torch.dtype], counts: tuple[int, ...], *checks: Callable[[Case], None]) -> None:
    def work(group: Any) -> None:
        number = size
        for dtype in dtypes:
            for count in counts:
                number += 1
                for check in checks:
                    check(Case(group, dtype, count, number))
                group.barrier(options("Barrier", later=number % 2 == 0)).wait()

    run_groups(work, size)


@RANKS
def test_reductions(size: int) -> None:
    dtypes = [*KNOWN.values(), *COMPLEX.values()]
    run_cases(size, dtypes, SIZES if size in (2, 3) else FEW_SIZES, check_reductions)
    run_cases(size, dtypes, FEW_SIZES, check_uneven_reductions)


@RANKS
def test_moves(size: int) -> None:
    dtypes = [*KNOWN.values(), *COMPLEX.values(), *ONLY_MOVED.values()]
    run_cases(size, dtypes, SIZES if size in (2, 3) else FEW_SIZES, check_copies)
    run_cases(size, dtypes, FEW_SIZES, check_uneven_copies, check_coalesced)


@RANKS
def test_messages(size: int) -> None:
    run_cases(size, [*KNOWN.values(), *COMPLEX.values(), *ONLY_MOVED.values()], SIZES, check_messages)


def test_ten_million_elements() -> None:
    def work(group: Any) -> None:
        rank = group.rank()
        base = torch.arange(10_000_000, dtype=torch.float32)
        wanted = base + (base + 1) + (base + 2)
        for later in False, True:
            own = base + rank
            group.allreduce([own], options("Allreduce", later=later)).wait()
            assert torch.equal(own, wanted)
            own = base + rank
            group.broadcast([own], options("Broadcast", later=later, root=2)).wait()
            assert torch.equal(own, base + 2)
        half = torch.zeros(20_000_000, dtype=torch.uint8)[::2]
        sent = group.send([half + rank], (rank + 1) % 3, 0)
        group.recv([half], (rank - 1) % 3, 0).wait()
        sent.wait()
        assert torch.equal(half, torch.full_like(half, (rank - 1) % 3))

    run_groups(work, 3)


def shaped(base: Tensor) -> dict[str, Tensor]:
    """Tensors of odd shapes and strides, with the numbers 0 to 119."""
    return {
        "transposed": base.view(10, 12).t(),
        "channels last": base.view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "channels last 3d": base.view(1, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d),
        "a slice of a slice": torch.zeros(20, 30)[3:13, 5:17].copy_(base.view(10, 12)),
        "flipped storage": torch.zeros(240)[1::2].copy_(base),
        "with gradient": base.clone().requires_grad_(),
        "transposed, with gradient": base.view(10, 12).clone().t().requires_grad_(),
        "a scalar": base[7].clone(),
        "a scalar of a strided": base.view(10, 12).t()[3, 4],
        "one row": base[:12].view(1, 12).expand(1, 12),
        "no rows": base.view(10, 12)[:0],
        "no columns": base.view(10, 12)[:, 5:5],
        "a negated imaginary part": torch.complex(base, base).conj().imag,
        "a conjugate": torch.complex(base, 2 * base).view(10, 12).conj(),
        "a conjugate, transposed": torch.complex(base, 2 * base).view(10, 12).conj().t(),
    }


@pytest.mark.parametrize("later", [False, True])
def test_shapes_and_strides(later: bool) -> None:
    def work(group: Any) -> None:
        for name in shaped(torch.arange(120.0)):
            own = shaped(torch.arange(120.0) * (group.rank() + 1))[name]
            once = shaped(torch.arange(120.0))[name].detach()
            group.allreduce([own], options("Allreduce", later=later)).wait()
            assert torch.equal(own.detach(), (once * 6).view_as(once)), name
            assert own.stride() == shaped(torch.arange(120.0))[name].stride()
            group.broadcast([own], options("Broadcast", later=later, root=1)).wait()
            own = shaped(torch.arange(120.0) * (group.rank() + 1))[name]
            places = [torch.zeros_like(once) for _ in range(3)]
            group.allgather([places], [own], options("Allgather", later=later)).wait()
            for rank, place in enumerate(places):
                assert torch.equal(place, once * (rank + 1)), name
            share = torch.zeros_like(once)
            inputs = [[own, own, own]]
            group.reduce_scatter([share], inputs, options("ReduceScatter", later=later)).wait()
            assert torch.equal(share, once * 6), name

    run_groups(work, 3)


def test_rows_are_dealt_by_splits() -> None:
    """Splits count rows, of any shape."""

    def work(group: Any) -> None:
        rank = group.rank()
        for dtype in torch.float32, torch.complex64, torch.float8_e5m2:
            source = torch.arange(4 * 6).float().view(6, 2, 2).to(dtype)
            splits_in = [1, 5] if rank == 0 else [4, 2]
            splits_out = [1, 4] if rank == 0 else [5, 2]
            target = torch.zeros(sum(splits_out), 2, 2).to(dtype)
            group.all_to_all_single(target, source, splits_out, splits_in, options("AllToAll")).wait()
            wanted = torch.cat([source[:1], source[:4]] if rank == 0 else [source[1:], source[4:]])
            assert bits(target) == bits(wanted)

    run_groups(work, 2)


def test_an_expanded_input_is_read_and_an_expanded_output_refused() -> None:
    from paceline.errors import UsageError

    def work(group: Any) -> None:
        once = torch.tensor([[float(group.rank() + 1)]])
        places = [torch.zeros(3, 4) for _ in range(2)]
        group.allgather([places], [once.expand(3, 4)], options("Allgather")).wait()
        assert [place.sum().item() for place in places] == [12, 24]
        for later in False, True:
            with pytest.raises(UsageError, match="share"):
                group.allreduce([once.expand(3, 4)], options("Allreduce", later=later))
        group.barrier().wait()

    run_groups(work, 2)


def test_in_place_gather_and_scatter() -> None:
    """The input is a part of the output, or the other way round, as sharded training has it."""

    def work(group: Any) -> None:
        rank = group.rank()
        for count in 5, 300_000:
            whole = torch.full((3 * count,), -1.0)
            own = whole.view(3, count)[rank]
            own.fill_(rank)
            group.all_gather_single(whole, own, options("Allgather")).wait()
            assert torch.equal(whole.view(3, count)[:, 0], torch.arange(3.0))
            group.reduce_scatter_single(own, whole, options("ReduceScatter")).wait()
            assert torch.equal(own, torch.full((count,), 3.0 * rank))
            others = [other for other in range(3) if other != rank]
            assert all((whole.view(3, count)[other] == other).all() for other in others)

    run_groups(work, 3)


def test_memory_of_the_group_is_a_tensor() -> None:
    def work(group: Any) -> None:
        for dtype in torch.float32, torch.bfloat16, torch.complex64:
            tensor = group.allocate(50_000, dtype)
            assert tensor.shape == (50_000,) and tensor.dtype == dtype
            tensor.fill_(group.rank() + 1)
            group.allreduce([tensor]).wait()
            assert (tensor == 3).all()
            part = tensor[7:40_000]
            part.fill_(group.rank())
            group.allreduce([part]).wait()
            assert (part == 1).all() and (tensor[:7] == 3).all()
        assert group.allocate(0, torch.float32).shape == (0,)

    run_groups(work, 2)
