"""A process group of virtual workers: collectives and messages that move real tensors and take virtual time."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.collectives.python_group import reduction_named
from paceline.errors import CommError, UsageError
from paceline.virtual.network import PeersNetwork
from paceline.virtual.turns import Turns

_HALVES = (torch.float16, torch.bfloat16)
_FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass
class _Collective:
    """A collective that some workers have called; ``ends`` is None until all have."""

    kind: str
    nbytes: float = 0.0  # of the worker with most; those of sparse tensors differ
    tensors: dict[int, Any] = field(default_factory=dict)  # of each worker that has called it
    ready: float = 0.0  # the clock of the last one
    takes_time: bool = False
    ends: float | None = None


class _Wait:
    """What a call returns: ``wait`` lets the others run until it is done, and sets the worker's clock."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class Meeting:
    """What the groups of all virtual workers share: the network, the turns, and the calls that are not complete."""

    def __init__(self, network: PeersNetwork, turns: Turns) -> None:
        self.network, self.turns = network, turns
        self.size = len(network.clocks)
        self.collectives: dict[int, _Collective] = {}  # by number
        self.messages: dict[tuple[int, int, int], deque[tuple[Tensor, float]]] = defaultdict(deque)


class VirtualGroup:
    """One virtual worker's process group, with the calls of torch's that ``Peers`` makes.

    The n-th call of a collective on one worker belongs to the n-th of every other. Sums go in the order of the ranks,
    half precisions in float32, as in the collectives of one host.
    """

    takes_turns = True  # one thread a worker

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._calls = 0
        self._takes_time = False

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._meeting.size

    @contextlib.contextmanager
    def taking_time(self) -> Iterator[None]:
        """Let calls inside the block take time and count bytes; others are free, on all workers alike."""
        self._takes_time = True
        try:
            yield
        finally:
            self._takes_time = False

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> _Wait:
        (tensor,) = tensors
        name = reduction_named(options.reduceOp)
        if name not in _FOLDS:
            raise UsageError(f"virtual workers have no reduction {name!r}; known: {', '.join(_FOLDS)}")
        reduce = functools.partial(_reduce, fold=_FOLDS[name])
        work = self._join(f"all-reduce ({name}) of {_describe(tensor)}", tensor, _nbytes(tensor), 1.0, reduce)
        if not options.asyncOp:
            work.wait()
        return work

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> _Wait:
        (tensor,) = tensors
        root = options.rootRank
        kind = f"broadcast of {_describe(tensor)} from worker {root}"
        return self._join(kind, tensor, _nbytes(tensor), 0.5, functools.partial(_broadcast, root=root))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Wait:
        (tensor,) = inputs
        pair, nbytes = (tensor, outputs[0]), _nbytes(tensor) * self.size()
        return self._join(f"all-gather of {_describe(tensor)}", pair, nbytes, 0.5, _gather)

    def barrier(self, *_: Any) -> _Wait:
        return self._join("barrier", None, 0.0, 1.0, lambda _: None)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> _Wait:
        """Send without waiting: only the receiver waits for a message."""
        (tensor,) = tensors
        network = self._meeting.network
        arrives = network.message(self._rank, _nbytes(tensor)) if self._takes_time else 0.0
        self._meeting.messages[self._rank, to, tag].append((tensor.detach().clone(), arrives))
        return _Wait(lambda: None)

    def recv(self, tensors: Sequence[Tensor], sender: int, tag: int = 0) -> _Wait:
        (tensor,) = tensors
        messages = self._meeting.messages[sender, self._rank, tag]

        def wait() -> None:
            self._meeting.turns.wait(self._rank, lambda: bool(messages), f"a message of worker {sender}")
            content, arrives = messages.popleft()
            with torch.no_grad():
                tensor.copy_(content)
            self._set_clock(arrives)

        return _Wait(wait)

    def _join(
        self, kind: str, tensors: Any, nbytes: float, share: float, act: Callable[[dict[int, Any]], None]
    ) -> _Wait:
        """Take part in the next collective; the last worker to come acts for all."""
        meeting, number = self._meeting, self._calls
        self._calls += 1
        collective = meeting.collectives.setdefault(number, _Collective(kind))
        if collective.kind != kind:
            other = next(iter(collective.tensors))
            raise CommError(
                f"worker {self._rank}: its collective {number} is the {kind}, and that of worker {other} the "
                f"{collective.kind}; do all make the same steps?"
            )
        collective.tensors[self._rank] = tensors
        collective.nbytes = max(collective.nbytes, nbytes)
        collective.takes_time = collective.takes_time or self._takes_time
        collective.ready = max(collective.ready, float(meeting.network.clocks[self._rank]))
        if len(collective.tensors) == self.size():
            del meeting.collectives[number]
            with torch.no_grad():
                act(collective.tensors)
            collective.tensors.clear()
            collective.ends = 0.0
            if collective.takes_time:
                collective.ends = meeting.network.collective(collective.ready, collective.nbytes, share)
        return _Wait(functools.partial(self._wait, collective, number))

    def _wait(self, collective: _Collective, number: int) -> None:
        what = f"the {collective.kind}, its collective {number}"
        self._meeting.turns.wait(self._rank, lambda: collective.ends is not None, what)
        assert collective.ends is not None
        self._set_clock(collective.ends)

    def _set_clock(self, at: float) -> None:
        if self._takes_time:
            self._meeting.network.advance(self._rank, at)


def _reduce(tensors: dict[int, Tensor], fold: Callable[[Tensor, Tensor], Tensor]) -> None:
    ordered = [tensors[rank] for rank in range(len(tensors))]
    first = ordered[0]
    total = first.to(torch.float32) if first.dtype in _HALVES else first.clone()
    for tensor in ordered[1:]:
        total = fold(total, tensor)
    for tensor in ordered:
        tensor.copy_(total)


def _broadcast(tensors: dict[int, Tensor], root: int) -> None:
    for rank, tensor in tensors.items():
        if rank != root:
            tensor.copy_(tensors[root])


def _gather(tensors: dict[int, tuple[Tensor, Sequence[Tensor]]]) -> None:
    for _, outputs in tensors.values():
        for rank, output in enumerate(outputs):
            output.copy_(tensors[rank][0])


def _nbytes(tensor: Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


def _describe(tensor: Tensor) -> str:
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"a sparse tensor of {kind}" if tensor.is_sparse else f"{tensor.numel()} numbers of {kind}"
