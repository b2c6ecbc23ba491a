"""A process group that refuses what Gloo would answer with a crash of the whole process."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class MismatchError(AssertionError):
    """The workers do not call the same collectives, or hand over memory that is not the tensor's alone."""


class CarefulGroup:
    """Pass collectives on to ``group`` if they are the same on all workers; ``log`` is shared by these."""

    def __init__(self, group: Any, log: dict[int, Any]) -> None:
        self._group = group
        self._log = log
        self._number = 0

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        self._check("allreduce", tensors)
        return self._group.allreduce(tensors, options)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        self._check("broadcast", tensors)
        return self._group.broadcast(tensors, options)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any:
        self._check("allgather", inputs)
        return self._group.allgather(outputs, inputs)

    def _check(self, name: str, tensors: list[Tensor]) -> None:
        (tensor,) = tensors
        call = (name, "sparse" if tensor.is_sparse else tensor.numel(), tensor.dtype)
        first = self._log.setdefault(self._number, call)
        if first != call:
            raise MismatchError(f"worker {self.rank()}, collective {self._number}: {call}, and {first} elsewhere")
        if not tensor.is_sparse and not tensor.is_contiguous():
            raise MismatchError(f"worker {self.rank()}: {name} of a tensor with strides {tensor.stride()}")
        self._number += 1
