"""The backend ``"paceline"`` of ``torch.distributed``: collectives of one host through shared memory.

    import paceline
    torch.distributed.init_process_group("paceline")

Tensors in CPU memory go through shared memory. Those on other devices go to the backend that ``OTHER_DEVICES`` names,
NCCL for CUDA. Ranks on several hosts use ``two_level.py``. If the compiled module is missing on one rank, all use
Gloo, and rank 0 says so once.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d

from paceline import native
from paceline.collectives.python_group import PythonGroup, reduction_named
from paceline.collectives.register import NAME
from paceline.collectives.untraced import untraced
from paceline.errors import CommError, UsageError

if native.available():
    from paceline.collectives.core import SharedGroup, Ticket
    from paceline.collectives.segment import host_identity
    from paceline.collectives.sparse import all_reduce_sparse
    from paceline.collectives.tensors import Staged, check_contiguous, row_counts
    from paceline.collectives.two_level import TwoLevelGroup
    from paceline.collectives.work import DONE, Announcer, Work

# The defaults of torch.distributed's own groups.
_ALLGATHER_OPTIONS = AllgatherOptions()
_ALLREDUCE_COALESCED_OPTIONS = c10d.AllreduceCoalescedOptions()
_ALLREDUCE_OPTIONS = c10d.AllreduceOptions()
_ALL_TO_ALL_OPTIONS = c10d.AllToAllOptions()
_BARRIER_OPTIONS = c10d.BarrierOptions()
_BROADCAST_OPTIONS = c10d.BroadcastOptions()
_GATHER_OPTIONS = c10d.GatherOptions()
_REDUCE_OPTIONS = c10d.ReduceOptions()
_REDUCE_SCATTER_OPTIONS = c10d.ReduceScatterOptions()
_SCATTER_OPTIONS = c10d.ScatterOptions()


def create(opts: Any, options: Any) -> Any:
    """Make a group for ``torch.distributed``; the result is a process group, or a Gloo backend."""
    if options is not None and opts.group_rank == 0:
        _tell_once(f"backend {NAME!r} has no options, and ignores the {type(options).__qualname__} of pg_options")
    where = opts.store, opts.group_rank, opts.group_size, opts.timeout
    hosts = _hosts(opts)
    without = next((rank for rank, host in enumerate(hosts) if host.startswith("!")), None)
    if without is None and len(set(hosts)) == 1:
        return ProcessGroup(*where, opts.group_id, opts.global_ranks_in_group)
    if without is None and len(set(hosts)) < len(hosts):
        return TwoLevelGroup(*where, opts.group_id, hosts)
    if without is not None and opts.group_rank == 0:
        _tell_once(f"backend {NAME!r} uses Gloo: on rank {without}, {hosts[without][1:]}")
    return c10d.ProcessGroupGloo(*where)


@functools.cache
def _tell_once(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _hosts(opts: Any) -> list[str]:
    """The host of each rank; or an exclamation mark and the reason why it cannot share memory."""
    keys = [f"host/{rank}" for rank in range(opts.group_size)]
    opts.store.set(keys[opts.group_rank], host_identity() if native.available() else f"!{native.reason()}")
    try:
        opts.store.wait(keys, opts.timeout)
    except RuntimeError as error:  # the exact type depends on the store
        missing = [rank for rank, key in enumerate(keys) if not opts.store.check([key])]
        raise CommError(
            f"group {opts.group_id!r}: rank {opts.group_rank} timed out: it waited "
            f"{opts.timeout.total_seconds():g} s for ranks {missing} to join; are they running?"
        ) from error
    return [opts.store.get(key).decode() for key in keys]


Method = TypeVar("Method", bound=Callable[..., Any])


def _by_device(method: Method) -> Method:
    """Run the method for CPU tensors; hand those of other devices to their backend."""

    @functools.wraps(method)
    def dispatch(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensor = _first_tensor(args)
        if tensor is None or tensor.is_cpu:
            return method(self, *args, **kwargs)
        self._get_backend(tensor.device)  # refuses devices that nobody serves
        return getattr(self._elsewhere, method.__name__)(*args, **kwargs)

    return dispatch  # type: ignore[return-value]


def _first_tensor(args: Sequence[Any]) -> Tensor | None:
    for argument in args:
        while isinstance(argument, list) and argument:
            argument = argument[0]
        if isinstance(argument, Tensor):
            return argument
    return None


@untraced
class ProcessGroup(PythonGroup):
    """The ranks of one host; made by ``init_process_group("paceline")`` and ``new_group``.

    The methods have the names and arguments that ``torch.distributed`` calls them by.
    """

    def __init__(
        self,
        store: c10d.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        part: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """``part`` has the group's ranks in the world, if it is only a part of it; messages name them.

        The options are those of ``SharedGroup``.
        """
        super().__init__(store, rank, size, timeout, name)
        title = f"{name} (ranks {', '.join(map(str, part))})" if part else name
        self._shared = SharedGroup(store, rank, size, timeout=timeout.total_seconds(), name=title, **options)
        self._announcer = Announcer(name)

    def shutdown(self) -> None:
        """Leave the group; calls of ranks that still wait for this one fail."""
        self._shared.close()
        self._announcer.close()
        super().shutdown()

    abort = shutdown

    # Memory -------------------------------------------------------------------------------------------------------

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Make a tensor that ``all_reduce`` reduces without a copy; all ranks must make the same call together."""
        if count < 0:
            raise UsageError(f"allocate: wanted a number of elements, got {count}")
        memory = memoryview(self._shared.allocate(max(1, count) * dtype.itemsize))
        return torch.frombuffer(memory, dtype=dtype)[:count]

    def has_spare_cores(self) -> bool:
        """Whether the host has more cores than the ranks' threads use, so that asynchronous calls run beside them."""
        return len(os.sched_getaffinity(0)) > self._size * torch.get_num_threads()

    # Reductions ---------------------------------------------------------------------------------------------------

    @_by_device
    def allreduce(self, tensors: list[Tensor], opts: Any = _ALLREDUCE_OPTIONS) -> Work:
        op = reduction_named(opts.reduceOp)
        if tensors[0].layout is torch.sparse_coo:
            for tensor in tensors:
                all_reduce_sparse(self._shared, tensor, op)
            return Work(tensors)
        staged = [Staged(tensor, reduction=op) for tensor in tensors]
        tickets = [
            self._shared.all_reduce(part.address, part.count, part.dtype, op, async_=opts.asyncOp, keep=part.dense)
            for part in staged
        ]
        return self._work(tensors, tickets, staged)

    @_by_device
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _ALLREDUCE_COALESCED_OPTIONS) -> Work:
        return self.allreduce(tensors, opts)

    @_by_device
    def reduce(self, tensors: list[Tensor], opts: Any = _REDUCE_OPTIONS) -> Work:
        op, root = reduction_named(opts.reduceOp), opts.rootRank
        staged = [Staged(tensor, reduction=op, read=self._rank != root) for tensor in tensors]
        tickets = [
            self._shared.reduce(part.address, part.count, part.dtype, op, root, async_=opts.asyncOp, keep=part.dense)
            for part in staged
        ]
        return self._work(tensors, tickets, staged)

    @_by_device
    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _REDUCE_SCATTER_OPTIONS
    ) -> Work:
        op = reduction_named(opts.reduceOp)
        tickets: list[Ticket | None] = []
        staged = []
        for output, pieces in zip(outputs, inputs, strict=True):
            self._check_pieces("reduce_scatter", "input", pieces, output, uneven=True)
            if any(piece.numel() != output.numel() for piece in pieces):
                started, parts = self._reduce_scatter_unevenly(output, pieces, op, opts.asyncOp)
                tickets += started
                staged.append(parts[self._rank])
                continue
            sources = [Staged(piece, reduction=op, read=True) for piece in pieces]
            target = Staged(output, reduction=op)
            tickets.append(self._reduce_scatter(sources, target, op, opts))
            staged.append(target)
        return self._work(outputs, tickets, staged)

    def _reduce_scatter(self, sources: Staged | list[Staged], target: Staged, op: str, opts: Any) -> Ticket | None:
        call = _pieces(sources), target.address, target.count, target.dtype, op
        return self._shared.reduce_scatter(*call, async_=opts.asyncOp, keep=(sources, target))

    def _reduce_scatter_unevenly(
        self, output: Tensor, pieces: list[Tensor], op: str, later: bool
    ) -> tuple[list[Ticket | None], list[Staged]]:
        """Make one reduction per piece, to the rank that gets it."""
        parts = [Staged(piece, reduction=op, read=True) for piece in pieces]
        target = Staged(output, reduction=op)
        with torch.no_grad():
            target.dense.view(-1).copy_(parts[self._rank].dense.view(-1))
        parts[self._rank] = target
        tickets = [
            self._shared.reduce(part.address, part.count, part.dtype, op, root, async_=later, keep=part.dense)
            for root, part in enumerate(parts)
        ]
        return tickets, parts

    @_by_device
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _REDUCE_SCATTER_OPTIONS) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @_by_device
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _REDUCE_SCATTER_OPTIONS
    ) -> Work:
        op = reduction_named(opts.reduceOp)
        tickets, staged = [], []
        for output, input in zip(outputs, inputs, strict=True):
            self._check_whole("reduce_scatter", whole=input, piece=output)
            source, target = Staged(input, reduction=op, read=True), Staged(output, reduction=op)
            tickets.append(self._reduce_scatter(source, target, op, opts))
            staged.append(target)
        return self._work(outputs, tickets, staged)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # Copies -------------------------------------------------------------------------------------------------------

    @_by_device
    def broadcast(self, tensors: list[Tensor], opts: Any = _BROADCAST_OPTIONS) -> Work:
        staged = [Staged(tensor, read=self._rank == opts.rootRank) for tensor in tensors]
        return self._work(tensors, [self._broadcast(part, opts.rootRank, opts) for part in staged], staged)

    def _broadcast(self, part: Staged, root: int, opts: Any) -> Ticket | None:
        return self._shared.broadcast(part.address, part.count, part.dtype, root, async_=opts.asyncOp, keep=part.dense)

    @_by_device
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALLGATHER_OPTIONS) -> Work:
        tickets: list[Ticket | None] = []
        staged = []
        for pieces, input in zip(outputs, inputs, strict=True):
            self._check_pieces("all_gather", "output", pieces, input, uneven=True)
            source, targets = Staged(input, read=True), [Staged(piece) for piece in pieces]
            staged += targets
            if any(piece.numel() != input.numel() for piece in pieces):
                with torch.no_grad():
                    targets[self._rank].dense.view(-1).copy_(source.dense.view(-1))
                tickets += [self._broadcast(target, root, opts) for root, target in enumerate(targets)]
                continue
            tickets.append(self._all_gather(source, targets, opts))
        return self._work([piece for pieces in outputs for piece in pieces], tickets, staged)

    def _all_gather(self, source: Staged, targets: Staged | list[Staged], opts: Any) -> Ticket | None:
        call = source.address, _pieces(targets), source.count, source.dtype
        return self._shared.all_gather(*call, async_=opts.asyncOp, keep=(source, targets))

    @_by_device
    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _ALLGATHER_OPTIONS
    ) -> Work:
        """Like ``allgather``, but with one list of outputs per rank instead of per input."""
        return self.allgather([list(pieces) for pieces in zip(*outputs, strict=True)], inputs, opts)

    @_by_device
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = _ALLGATHER_OPTIONS) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    @_by_device
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALLGATHER_OPTIONS
    ) -> Work:
        tickets, staged = [], []
        for output, input in zip(outputs, inputs, strict=True):
            self._check_whole("all_gather", whole=output, piece=input)
            source, target = Staged(input, read=True), Staged(output)
            tickets.append(self._all_gather(source, target, opts))
            staged.append(target)
        return self._work(outputs, tickets, staged)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_by_device
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _GATHER_OPTIONS) -> Work:
        tickets, staged = [], []
        for index, input in enumerate(inputs):
            source = Staged(input, read=True)
            targets = []
            if self._rank == opts.rootRank:
                self._check_pieces("gather", "output", outputs[index], input)
                targets = [Staged(piece) for piece in outputs[index]]
            call = source.address, _pieces(targets), source.count, source.dtype, opts.rootRank
            tickets.append(self._shared.gather(*call, async_=opts.asyncOp, keep=(source, targets)))
            staged += targets
        return self._work([part.target for part in staged], tickets, staged)

    @_by_device
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _SCATTER_OPTIONS) -> Work:
        tickets, staged = [], []
        for index, output in enumerate(outputs):
            target = Staged(output)
            sources = []
            if self._rank == opts.rootRank:
                self._check_pieces("scatter", "input", inputs[index], output)
                sources = [Staged(piece, read=True) for piece in inputs[index]]
            call = _pieces(sources), target.address, target.count, target.dtype, opts.rootRank
            tickets.append(self._shared.scatter(*call, async_=opts.asyncOp, keep=(sources, target)))
            staged.append(target)
        return self._work(outputs, tickets, staged)

    @_by_device
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _ALL_TO_ALL_OPTIONS) -> Work:
        for what, pieces in ("output", outputs), ("input", inputs):
            if len(pieces) != self._size:
                raise UsageError(f"all_to_all: wanted one {what} per rank ({self._size}), got {len(pieces)}")
        self._same_dtype("all_to_all", [*inputs, *outputs])
        sources, targets = [Staged(piece, read=True) for piece in inputs], [Staged(piece) for piece in outputs]
        ticket = self._shared.all_to_all_uneven(
            [source.address for source in sources],
            [source.count for source in sources],
            [target.address for target in targets],
            [target.count for target in targets],
            sources[0].dtype,
            async_=opts.asyncOp,
            keep=(sources, targets),
        )
        return self._work(outputs, [ticket], targets)

    @_by_device
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = _ALL_TO_ALL_OPTIONS,
    ) -> Work:
        self._same_dtype("all_to_all_single", [input, output])
        check_contiguous("all_to_all_single", input=input, output=output)
        source, target = Staged(input, read=True), Staged(output)
        input_counts = row_counts(input, source.count, input_splits, self._size, "input")
        output_counts = row_counts(output, target.count, output_splits, self._size, "output")
        # Even if this rank's pieces are equal: those of another may not be.
        ticket = self._shared.all_to_all_uneven(
            _addresses(source, input_counts),
            input_counts,
            _addresses(target, output_counts),
            output_counts,
            source.dtype,
            async_=opts.asyncOp,
            keep=(source, target),
        )
        return self._work([output], [ticket], [target])

    alltoall_base = all_to_all_single

    # Messages -----------------------------------------------------------------------------------------------------

    @_by_device
    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        part = Staged(tensors[0], read=True)
        ticket = self._shared.send(part.address, part.count, part.dtype, to, tag=tag, async_=True, keep=part.dense)
        return self._work([], [ticket], [])

    @_by_device
    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        part = Staged(tensors[0])
        ticket = self._shared.receive_later(part.address, part.count, part.dtype, source, tag=tag, keep=part.dense)
        return self._work(tensors, [ticket], [part])

    @_by_device
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        part = Staged(tensors[0])
        ticket = self._shared.receive_later(part.address, part.count, part.dtype, tag=tag, keep=part.dense)
        return self._work(tensors, [ticket], [part])

    def barrier(self, opts: Any = _BARRIER_OPTIONS) -> Work:
        device = opts.device
        if device is not None and device.type != "cpu":
            self._get_backend(device)  # refuses devices that nobody serves
            return self._elsewhere.barrier(opts)  # type: ignore[return-value]
        return self._work([], [self._shared.barrier(async_=opts.asyncOp)], [])

    # Refusals -----------------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        raise UsageError(
            f"backend {NAME!r} does not coalesce by device; call torch's _coalescing_manager without one, or the "
            "coalesced form of the collective"
        )

    # Inside -------------------------------------------------------------------------------------------------------

    def _work(self, outputs: Sequence[Tensor], tickets: Sequence[Ticket | None], staged: Sequence[Staged]) -> Work:
        pending = [ticket for ticket in tickets if ticket is not None]
        if not pending:  # a synchronous call, which has run already
            for part in staged:
                part.settle()
            return DONE
        return Work(outputs, pending, staged, self._announcer)

    def _check_whole(self, what: str, *, whole: Tensor, piece: Tensor) -> None:
        if whole.dtype != piece.dtype or whole.numel() != piece.numel() * self._size:
            raise UsageError(
                f"{what}: wanted a whole of {self._size} times the piece's {piece.numel()} elements of {piece.dtype}, "
                f"got {whole.numel()} of {whole.dtype}"
            )

    def _check_pieces(
        self, what: str, role: str, pieces: Sequence[Tensor], other: Tensor, *, uneven: bool = False
    ) -> None:
        """Refuse a list of the wrong length or type; if ``uneven``, only this rank's piece must have the right size."""
        if len(pieces) != self._size:
            raise UsageError(f"{what}: wanted one {role} per rank ({self._size}), got {len(pieces)}")
        fitting = [pieces[self._rank]] if uneven else pieces
        if any(piece.dtype != other.dtype for piece in pieces) or any(p.numel() != other.numel() for p in fitting):
            raise UsageError(
                f"{what}: wanted {role}s of {other.numel()} elements of {other.dtype}, "
                f"got {[(piece.numel(), str(piece.dtype)) for piece in pieces]}"
            )

    def _same_dtype(self, what: str, tensors: Sequence[Tensor]) -> None:
        if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
            raise UsageError(
                f"{what}: wanted tensors of one type, got {sorted({str(tensor.dtype) for tensor in tensors})}"
            )


def _pieces(parts: Staged | list[Staged]) -> int | list[int]:
    """The address of pieces that lie one after the other, or those of all pieces."""
    return parts.address if isinstance(parts, Staged) else [part.address for part in parts]


def _addresses(part: Staged, counts: Sequence[int]) -> list[int]:
    """The addresses at which each rank's elements begin."""
    width = part.dense.element_size()
    starts = [0]
    for count in counts[:-1]:
        starts.append(starts[-1] + count * width)
    return [part.address + start for start in starts]
