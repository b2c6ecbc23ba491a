"""Groups over several hosts: sums use shared memory inside a host, and Gloo between one leader of each host.

All other collectives, which training needs less often, use Gloo between all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.collectives.calls import Calls
from paceline.collectives.core import SharedGroup, check_reduction
from paceline.collectives.descriptions import LENGTH, packed, unpacked
from paceline.collectives.leaders import Leaders, gloo
from paceline.collectives.python_group import PythonGroup, reduction_named
from paceline.collectives.tensors import Staged
from paceline.collectives.untraced import untraced
from paceline.collectives.work import Announcer, Work
from paceline.errors import CommError

_ALLREDUCE_OPTIONS = c10d.AllreduceOptions()
_LEADERS_FIRST = 1.0  # second by which ranks wait longer than their leader, which knows the reason of a timeout


class _RefusedError(CommError):
    """The leaders refused the operation together, so all of them know the reason."""


@untraced
class TwoLevelGroup(PythonGroup):
    """The ranks of several hosts; ``hosts`` names each rank's, and at least one host has several ranks."""

    def __init__(
        self, store: c10d.Store, rank: int, size: int, timeout: timedelta, name: str, hosts: Sequence[str]
    ) -> None:
        super().__init__(store, rank, size, timeout, name)
        self._serve("cpu", gloo(store, "all", rank, size, timeout))
        leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        self._local: SharedGroup | None = None
        if len(here) > 1:
            self._local = SharedGroup(
                store,
                here.index(rank),
                len(here),
                timeout=timeout.total_seconds() + _LEADERS_FIRST,
                name=f"{name}, host of rank {here[0]}",
                numbers=here,
            )
        self._leaders = Leaders(store, leaders, rank, timeout) if rank in leaders else None
        self._trouble = ""  # this host's error, for the other hosts
        self._closed = False
        self._announcer = Announcer(name)
        self._calls = Calls(name, self._leave)

    def shutdown(self) -> None:
        """Leave the group; calls of ranks that still wait for this one fail."""
        self._closed = True
        self._calls.fail(CommError(f"group {self._name!r} is closed"))
        if self._local is not None:
            self._local.close()
        self._calls.leave()
        self._announcer.close()
        super().shutdown()

    abort = shutdown

    def allreduce(self, tensors: list[Tensor], opts: Any = _ALLREDUCE_OPTIONS) -> Any:
        """Reduce inside the hosts, then between their leaders, then broadcast inside the hosts."""
        if not tensors[0].is_cpu or tensors[0].layout is not torch.strided:
            return self._elsewhere.allreduce(tensors, opts)
        op = reduction_named(opts.reduceOp)
        staged = [Staged(tensor, reduction=op) for tensor in tensors]
        for part in staged:  # on every rank before anything is sent, so that all refuse alike
            check_reduction(op, part.dtype)
        call = _Call(self._calls.submit(functools.partial(self._reduce_all, staged, op)))
        work = Work(tensors, [call], staged, self._announcer)
        if not opts.asyncOp:
            work.wait()
        return work

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _ALLREDUCE_OPTIONS) -> Any:
        return self.allreduce(tensors, opts)

    def _reduce_all(self, staged: Sequence[Staged], op: str) -> None:
        try:
            with torch.inference_mode():  # in any mode of the caller
                for part in staged:
                    self._reduce(part, op)
        except Exception as error:
            if not isinstance(error, _RefusedError) and not self._closed:
                self._trouble = str(error)
            raise CommError(
                f"rank {self._rank} of group {self._name!r}, over several hosts, in all_reduce: {error}"
            ) from error

    def _reduce(self, part: Staged, op: str) -> None:
        where = part.address, part.count, part.dtype
        if self._local is not None:
            self._local.reduce(*where, "sum" if op == "avg" else op, root=0)
        refusal = self._reduce_between_hosts(part, op) if self._leaders is not None else ""
        if self._local is not None:
            verdict = packed(refusal)
            self._local.broadcast(verdict.data_ptr(), LENGTH, "uint8", root=0)
            refusal = unpacked(verdict)
        if refusal:
            raise _RefusedError(refusal)
        if self._local is not None:
            self._local.broadcast(*where, root=0)

    def _reduce_between_hosts(self, part: Staged, op: str) -> str:
        """Do a leader's part; return the reason of a failure, for the other ranks of the host."""
        assert self._leaders is not None
        try:
            refusal = self._leaders.objection(f"all_reduce({part.count} {part.dtype}, {op})")
            if refusal:
                return refusal
            self._leaders.reduce(part.dense, "sum" if op == "avg" else op)
        except RuntimeError as error:
            return f"no answer from one of the other hosts, whose leaders are ranks {self._leaders.others}: {error}"
        if op == "avg":
            part.dense.div_(self._size)
        return ""

    def _leave(self) -> None:
        """Fail the calls that wait for this rank: the host's through the shared group, other leaders' through Gloo."""
        if self._local is not None:
            self._local.close()
        if self._leaders is not None and self._trouble:
            with contextlib.suppress(RuntimeError):
                self._leaders.objection("", self._trouble)
        self._leaders = None


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
    """A reduction under way on the group's thread, with the interface of a ticket."""

    is_message = False  # calls end in order
    source = -1

    def __init__(self, call: Future[None]) -> None:
        self._call = call

    def wait(self, timeout: float | None = None) -> bool:
        with contextlib.suppress(NotYet):
            self._call.result(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        return self._call.done()

    def done(self) -> bool:
        return self._call.done()
