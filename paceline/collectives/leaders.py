"""The leaders of several hosts: they compare their hosts' operations, then sum over Gloo."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.collectives.descriptions import LENGTH, difference, packed, unpacked

# Gloo lacks these types, and adds booleans as bytes. In wider types the low bits are the same.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_OF_TRUTH_VALUES = {"sum": "max", "product": "min"}
_SIGN = -(1 << 63)


class Leaders:
    """A group of one rank of each host; ``ranks`` are their ranks in the whole group."""

    def __init__(self, store: c10d.Store, ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self._ranks = ranks
        self._group: Any = gloo(store, "leaders", ranks.index(rank), len(ranks), timeout)
        self.others = [other for other in ranks if other != rank]

    def objection(self, described: str, trouble: str = "") -> str:
        """Exchange this host's operation, or its error; return the reason why the hosts cannot go on, else empty.

        All leaders return the same.
        """
        told = [torch.empty(LENGTH, dtype=torch.uint8) for _ in self._ranks]
        self._group.allgather([told], [packed(f"!{trouble}" if trouble else described)]).wait()
        texts = dict(zip(self._ranks, map(unpacked, told), strict=True))
        troubles = [text[1:] for text in texts.values() if text.startswith("!")]
        if troubles:
            return troubles[0]
        differing = difference(texts)
        return f"the hosts differ: {differing}" if differing else ""

    def reduce(self, tensor: Tensor, op: str) -> None:
        """Reduce a tensor over the leaders, in place."""
        if tensor.dtype in _WIDER:
            wide = tensor.to(_WIDER[tensor.dtype])
            self._over_gloo(wide, op)
            tensor.copy_(wide)
        elif tensor.dtype is torch.bool:
            self._over_gloo(tensor.view(torch.uint8), _OF_TRUTH_VALUES.get(op, op))
        elif tensor.dtype is torch.uint64:
            self._reduce_unsigned(tensor.view(torch.int64), op)
        else:
            self._over_gloo(tensor, op)

    def _reduce_unsigned(self, bits: Tensor, op: str) -> None:
        """Reduce unsigned numbers as signed ones; min and max flip the highest bit, since only the order differs."""
        shift = _SIGN if op in ("min", "max") else 0
        shifted = bits ^ shift
        self._over_gloo(shifted, op)
        bits.copy_(shifted ^ shift)

    def _over_gloo(self, tensor: Tensor, op: str) -> None:
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op.upper())
        self._group.allreduce([tensor], options).wait()


def gloo(store: c10d.Store, name: str, rank: int, size: int, timeout: timedelta) -> Any:
    """A Gloo group with its own key prefix in the store."""
    return c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, size, timeout)
