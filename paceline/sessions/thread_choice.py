"""Gives torch one thread if a script's steps are small, as ``paceline train`` does for its problems."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.threads import OperationCounter, is_small


class ThreadChoice:
    """Sets one thread if the operations of the first block are few and nobody but the launcher chose the number.

    Operations decide, not time: the bits of a run depend on its threads. Worker 0 decides for all, and the decision is
    saved, since a resumed run may begin with a smaller batch. Nothing is counted of a model on another device, and
    nothing is set where something was compiled, which would be compiled again for another number of threads.
    """

    def __init__(self, model: nn.Module, threads: int) -> None:
        self._threads = threads  # that the launcher chose
        self._model = model
        self._counter: OperationCounter | None = None
        self._operations = 0  # of the first block
        self._set = False

    def begin(self) -> None:
        """A block begins: count, if it is the first."""
        on_cpu = all(parameter.device.type == "cpu" for parameter in self._model.parameters())
        if not self._operations and on_cpu:
            self._counter = OperationCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    def end(self, *, failed: bool) -> None:
        """A block has ended; one that failed does not count."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._operations = 0 if failed else self._counter.total
            self._counter = None

    def decide(self, share: Callable[[Any], Any]) -> bool:
        """Whether one thread is enough, as worker 0 found; ``share`` gives its value to all."""
        small = self._operations > 0 and is_small(self._operations) and not _has_compiled()
        return bool(share(small))

    def apply(self) -> None:
        """Set one thread, unless the script has set another number than the launcher."""
        if torch.get_num_threads() == self._threads:
            torch.set_num_threads(1)
            self._set = True

    def close(self) -> None:
        """Set the launcher's number again, for what the script does after its session."""
        if self._set:
            torch.set_num_threads(self._threads)


def _has_compiled() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    compiler = sys.modules.get("torch._dynamo")  # imported by every optimizer
    return compiler is not None and compiler.utils.counters["stats"]["unique_graphs"] > 0
