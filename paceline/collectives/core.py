"""Collectives between processes of one host, on raw memory.

    group = SharedGroup(store, rank, size)
    group.all_reduce(array.ctypes.data, array.size, "float32", "sum")

Every method takes addresses and numbers of elements. With ``async_=True`` it returns a ``Ticket`` at once, and the
memory must stay valid until the ticket is done: pass its owner as ``keep``. Calls run in order, on the calling thread
or, if asynchronous, on a native one, without the interpreter's lock. Reductions fold the ranks in order, so all ranks
get the same bits in every run.

If a rank dies, leaves or calls another collective, the call fails on all others with a ``CommError`` that names the
rank. The group is then broken: every later call fails with the same message.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self, cast

from paceline.collectives.segment import Store, Watch, check_ranks, meet, memory_objection, watch_nothing
from paceline.errors import UsageError, unknown_name
from paceline.native import _core

# The order is that of the enumerations in native/kernels.h and native/segment.h.
SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
SIZES |= {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "bool": 1}
DTYPES = tuple(SIZES)
REDUCTIONS = ("", "sum", "avg", "min", "max", "product", "band", "bor", "bxor")
_KINDS = (
    "barrier",
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_uneven",
    "allocate",
    "send",
    "receive",
)
_KIND = {name: number for number, name in enumerate(_KINDS)}
_DTYPE = {name: number for number, name in enumerate(DTYPES)}
_REDUCTION = {name: number for number, name in enumerate(REDUCTIONS) if name}
_ALL_REDUCE = _KIND["all_reduce"]

ANY_SOURCE = -1

# One address for contiguous pieces, or one per rank.
Pieces = int | Sequence[int]


class Ticket:
    """An asynchronous call under way."""

    def __init__(self, ticket: _core.Ticket, owner: list[object], *, is_message: bool) -> None:
        self._ticket = ticket
        self._owner = owner  # of the memory in use
        self.is_message = is_message  # later calls may then be done earlier

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most ``timeout`` seconds; return whether it is. Raise if it failed."""
        done = self._ticket.wait(-1.0 if timeout is None else max(0.0, timeout))
        if done:
            self._owner.clear()
        return done

    def done(self) -> bool:
        """Whether it has succeeded or failed."""
        return self._ticket.done()

    @property
    def source(self) -> int:
        """The rank that sent the message of a finished receive."""
        return self._ticket.source()


class SharedGroup:
    """The ranks of one host that call the collectives together; ``name`` must be new in the store.

    Errors name the ranks by ``numbers``, if they are part of a larger group. ``watch`` is called now and then while the
    ranks meet, and raises to give up.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: float = 1800.0,
        name: str = "paceline",
        numbers: Sequence[int] | None = None,
        watch: Watch = watch_nothing,
    ) -> None:
        check_ranks(rank, size)
        self.rank, self.size, self.name = rank, size, name
        meeting = meet(store, rank, size, timeout=timeout, name=name, watch=watch)
        self._group = _core.join(
            meeting.file, rank, size, meeting.cores, timeout, name, meeting.life, numbers or range(size)
        )
        # The owners of memory in use, oldest first. Only collectives end in their order.
        self._kept: dict[bool, deque[tuple[_core.Ticket, list[object]]]] = {False: deque(), True: deque()}
        self._keeping = threading.Lock()

    # Collectives --------------------------------------------------------------------------------------------------

    def barrier(self, *, async_: bool = False) -> Ticket | None:
        """Wait until all ranks have called it."""
        return self._call("barrier", "uint8", 0, async_=async_)

    def all_reduce(
        self, address: int, count: int, dtype: str, op: str, *, async_: bool = False, keep: object = None
    ) -> Ticket | None:
        """Reduce in place, on all ranks. Memory from ``allocate`` is not copied if all ranks pass the same offset."""
        # Not through _call, which is slower: this is called for small tensors in tight loops.
        ticket = self._group.collective(
            _ALL_REDUCE,
            self._dtype(dtype),
            check_reduction(op, dtype),
            -1,
            count,
            address,
            address,
            None,
            None,
            None,
            None,
            async_,
        )
        return None if ticket is None else self._keep(ticket, keep, is_message=False)

    def reduce(
        self, address: int, count: int, dtype: str, op: str, root: int, *, async_: bool = False, keep: object = None
    ) -> Ticket | None:
        """Reduce in place on ``root``; the other ranks' memory stays as it is."""
        return self._call("reduce", dtype, count, address, address, op=op, root=root, async_=async_, keep=keep)

    def broadcast(
        self, address: int, count: int, dtype: str, root: int, *, async_: bool = False, keep: object = None
    ) -> Ticket | None:
        """Copy the root's elements to all ranks."""
        return self._call("broadcast", dtype, count, address, address, root=root, async_=async_, keep=keep)

    def all_gather(
        self, input: int, outputs: Pieces, count: int, dtype: str, *, async_: bool = False, keep: object = None
    ) -> Ticket | None:
        """Copy every rank's ``count`` elements to all ranks."""
        targets = self._pieces(outputs, count, dtype)
        return self._call("all_gather", dtype, count, input, outputs=targets, async_=async_, keep=keep)

    def gather(
        self,
        input: int,
        outputs: Pieces | None,
        count: int,
        dtype: str,
        root: int,
        *,
        async_: bool = False,
        keep: object = None,
    ) -> Ticket | None:
        """Copy every rank's ``count`` elements to ``root``; only the root needs ``outputs``."""
        targets = self._pieces(outputs, count, dtype) if self.rank == root else None
        return self._call("gather", dtype, count, input, outputs=targets, root=root, async_=async_, keep=keep)

    def scatter(
        self,
        inputs: Pieces | None,
        output: int,
        count: int,
        dtype: str,
        root: int,
        *,
        async_: bool = False,
        keep: object = None,
    ) -> Ticket | None:
        """Give each rank its ``count`` elements of the root's ``inputs``."""
        pieces = self._pieces(inputs, count, dtype) if self.rank == root else None
        targets = [output] * self.size
        return self._call("scatter", dtype, count, inputs=pieces, outputs=targets, root=root, async_=async_, keep=keep)

    def reduce_scatter(
        self, inputs: Pieces, output: int, count: int, dtype: str, op: str, *, async_: bool = False, keep: object = None
    ) -> Ticket | None:
        """Reduce the pieces of ``inputs``, ``count`` elements each; rank r gets the r-th."""
        pieces = self._pieces(inputs, count, dtype)
        return self._call("reduce_scatter", dtype, count, 0, output, op=op, inputs=pieces, async_=async_, keep=keep)

    def all_to_all(
        self, inputs: Pieces, outputs: Pieces, count: int, dtype: str, *, async_: bool = False, keep: object = None
    ) -> Ticket | None:
        """Give each rank its piece of every rank's ``inputs``, ``count`` elements each."""
        pieces, targets = self._pieces(inputs, count, dtype), self._pieces(outputs, count, dtype)
        return self._call("all_to_all", dtype, count, inputs=pieces, outputs=targets, async_=async_, keep=keep)

    def all_to_all_uneven(
        self,
        inputs: Sequence[int],
        input_counts: Sequence[int],
        outputs: Sequence[int],
        output_counts: Sequence[int],
        dtype: str,
        *,
        async_: bool = False,
        keep: object = None,
    ) -> Ticket | None:
        """Like ``all_to_all`` with pieces of any sizes, in elements; the ranks' sizes must match."""
        width = SIZES[_known("dtype", dtype, _DTYPE)]
        return self._call(
            "all_to_all_uneven",
            dtype,
            0,
            inputs=inputs,
            outputs=outputs,
            input_sizes=[width * count for count in input_counts],
            output_sizes=[width * count for count in output_counts],
            async_=async_,
            keep=keep,
        )

    # Messages -----------------------------------------------------------------------------------------------------

    def send(
        self,
        address: int,
        count: int,
        dtype: str,
        to: int,
        *,
        tag: int = 0,
        async_: bool = False,
        keep: object = None,
    ) -> Ticket | None:
        """Send to one rank; done when the memory may be changed again, perhaps before the message has arrived."""
        self._check_rank("receiver", to)
        sent = self._group.message(_KIND["send"], self._dtype(dtype), to, tag, count, address, async_)
        return self._keep(sent, keep, is_message=True) if isinstance(sent, _core.Ticket) else None

    def receive(self, address: int, count: int, dtype: str, source: int = ANY_SOURCE, *, tag: int = 0) -> int:
        """Receive from one rank, or from the first that sends with this tag; return the sender."""
        if source != ANY_SOURCE:
            self._check_rank("sender", source)
        return cast(int, self._group.message(_KIND["receive"], self._dtype(dtype), source, tag, count, address, False))

    def receive_later(
        self, address: int, count: int, dtype: str, source: int = ANY_SOURCE, *, tag: int = 0, keep: object = None
    ) -> Ticket:
        """Like ``receive``, but return at once; the ticket has the source."""
        if source != ANY_SOURCE:
            self._check_rank("sender", source)
        ticket = self._group.message(_KIND["receive"], self._dtype(dtype), source, tag, count, address, True)
        return self._keep(cast(_core.Ticket, ticket), keep, is_message=True)

    # Memory and the end -------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> _core.Region:
        """Make memory that is reduced without a copy: ``nbytes`` on each rank; all must make the same call together.

        The result has the buffer interface (``numpy.frombuffer``, ``torch.frombuffer``) and ``address()``. It stays
        valid while it is referenced, even after ``close``.
        """
        if not 1 <= nbytes < 1 << 63:
            raise UsageError(f"allocate: wanted from 1 to 2**63 - 1 bytes, got {nbytes}")
        return self._group.allocate(nbytes, memory_objection(self.size, nbytes))

    def close(self) -> None:
        """Leave the group. Calls under way fail, here and on ranks that still wait for this one."""
        self._group.close()
        for kept in self._kept.values():
            kept.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside -------------------------------------------------------------------------------------------------------

    def _call(
        self,
        kind: str,
        dtype: str,
        count: int,
        input: int = 0,
        output: int = 0,
        *,
        op: str | None = None,
        root: int | None = None,
        inputs: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        output_sizes: Sequence[int] | None = None,
        async_: bool = False,
        keep: object = None,
    ) -> Ticket | None:
        type_number = self._dtype(dtype)
        reduction = 0 if op is None else check_reduction(op, dtype)
        if root is not None:
            self._check_rank("root", root)
        ticket = self._group.collective(
            _KIND[kind],
            type_number,
            reduction,
            -1 if root is None else root,
            count,
            input,
            output,
            inputs,
            outputs,
            input_sizes,
            output_sizes,
            async_,
        )
        return None if ticket is None else self._keep(ticket, keep, is_message=False)

    def _keep(self, ticket: _core.Ticket, owner: object, *, is_message: bool) -> Ticket:
        """Keep the owner of the memory until the ticket is done, even if the caller drops both."""
        owners = [owner]
        if owner is not None:
            with self._keeping:
                kept = self._kept[is_message]
                while kept and kept[0][0].done():
                    kept.popleft()
                if is_message and any(other.done() for other, _ in kept):
                    kept = self._kept[True] = deque(entry for entry in kept if not entry[0].done())
                kept.append((ticket, owners))
        return Ticket(ticket, owners, is_message=is_message)

    def _pieces(self, pieces: Pieces | None, count: int, dtype: str) -> Sequence[int]:
        if pieces is None:
            raise UsageError(f"rank {self.rank} is the root and must pass one piece per rank, got none")
        if isinstance(pieces, int):
            stride = count * SIZES[_known("dtype", dtype, _DTYPE)]
            return range(pieces, pieces + stride * self.size, stride) if stride else [pieces] * self.size
        return pieces

    def _dtype(self, dtype: str) -> int:
        return _DTYPE[_known("dtype", dtype, _DTYPE)]

    def _check_rank(self, role: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"{role}: wanted a rank from 0 to {self.size - 1} of group {self.name!r}, got {rank}")


def check_reduction(op: str, dtype: str) -> int:
    """Return the reduction's number; raise if the type cannot be reduced."""
    number = _REDUCTION[_known("reduction", op, _REDUCTION)]
    if not _core.can_reduce(_DTYPE[_known("dtype", dtype, _DTYPE)], number):
        raise UsageError(f"{op} has no meaning for {dtype}; convert the tensor, or choose another reduction")
    return number


def _known(kind: str, name: str, table: dict[str, int]) -> str:
    if name not in table:
        raise unknown_name(kind, name, table)
    return name
