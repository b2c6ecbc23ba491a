"""Groups over several hosts: sums go through shared memory inside a host, and over Gloo between one leader of each.

The rest, which training needs less often, goes over Gloo between all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.collectives.core import SharedGroup
from paceline.collectives.python_group import PythonGroup, reduction_named
from paceline.collectives.tensors import Staged
from paceline.collectives.untraced import untraced
from paceline.collectives.work import Announcer, Work
from paceline.errors import CommError

_ALLREDUCE_OPTIONS = c10d.AllreduceOptions()


@untraced
class TwoLevelGroup(PythonGroup):
    """The ranks of several hosts; ``hosts`` names each rank's, and at least one has several."""

    def __init__(
        self, store: c10d.Store, rank: int, size: int, timeout: timedelta, name: str, hosts: Sequence[str]
    ) -> None:
        super().__init__(store, rank, size, timeout, name)
        self._serve("cpu", _gloo(store, "all", rank, size, timeout))
        leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self._local: SharedGroup | None = None
        if len(here) > 1:
            title = f"{name}, host of rank {here[0]}"
            place = here.index(rank), len(here)
            self._local = SharedGroup(store, *place, timeout=timeout.total_seconds(), name=title)
        self._broken = False
        self._leaders: Any = None
        if rank in leaders:
            self._leaders = _gloo(store, "leaders", leaders.index(rank), len(leaders), timeout)
        # One thread, so that calls keep their order; it waits for the network, not for the interpreter.
        self._announcer = Announcer(name)
        self._calls = ThreadPoolExecutor(1, thread_name_prefix=f"paceline group {name}")

    def shutdown(self) -> None:
        """Leave the group; ranks that still wait for this one are told."""
        self._break_off()
        self._calls.shutdown()
        self._announcer.close()
        super().shutdown()

    abort = shutdown

    def allreduce(self, tensors: list[Tensor], opts: Any = _ALLREDUCE_OPTIONS) -> Any:
        """Reduce inside the hosts, between their leaders, and hand the result out again."""
        if not tensors[0].is_cpu or tensors[0].layout is not torch.strided:
            return self._elsewhere.allreduce(tensors, opts)
        op = reduction_named(opts.reduceOp)
        staged = [Staged(tensor, reduction=op) for tensor in tensors]
        call = _Call(self._calls.submit(self._reduce_all, staged, op, opts.reduceOp))
        work = Work(tensors, [call], staged, self._announcer)
        if not opts.asyncOp:
            work.wait()
        return work

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _ALLREDUCE_OPTIONS) -> Any:
        return self.allreduce(tensors, opts)

    def _reduce_all(self, staged: Sequence[Staged], op: str, torch_op: Any) -> None:
        try:
            for part in staged:
                self._reduce(part, op, torch_op)
        except RuntimeError as error:
            self._break_off()  # or the others would wait for the results until their time is up
            raise CommError(
                f"rank {self._rank} of group {self._name!r}, over several hosts, in all_reduce: {error}"
            ) from error

    def _reduce(self, part: Staged, op: str, torch_op: Any) -> None:
        if self._broken:
            raise CommError(f"group {self._name!r} is closed, or broken by an earlier failure")
        where = part.address, part.count, part.dtype
        if self._local is not None:
            self._local.reduce(*where, "sum" if op == "avg" else op, root=0)
        if self._leaders is not None:
            options: Any = c10d.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM if op == "avg" else torch_op
            self._leaders.allreduce([part.dense], options).wait()
            if op == "avg":
                part.dense.div_(self._size)
        if self._local is not None:
            self._local.broadcast(*where, root=0)

    def _break_off(self) -> None:
        """Tell those who wait for this rank: the host's by the shared group, the other leaders by the end of Gloo's."""
        self._broken = True
        if self._local is not None:
            self._local.close()
        self._leaders = None


def _gloo(store: c10d.Store, name: str, rank: int, size: int, timeout: timedelta) -> Any:
    return c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, size, timeout)


def _over_gloo(name: str) -> Callable[..., Any]:
    def call(self: TwoLevelGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._elsewhere, name)(*args, **kwargs)

    return call


for _name in (
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
):
    setattr(TwoLevelGroup, _name, _over_gloo(_name))


class _Call:
    """A reduction under way on the group's thread, in the place of a ticket."""

    is_message = False  # calls end in their order
    source = -1

    def __init__(self, call: Future[None]) -> None:
        self._call = call

    def wait(self, timeout: float | None = None) -> bool:
        with contextlib.suppress(NotYet):
            self._call.result(timeout)
        return self._call.done()

    def done(self) -> bool:
        return self._call.done()
