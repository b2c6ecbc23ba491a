"""Codecs for those who stay with PyTorch's own DistributedDataParallel: a communication hook."""

# No "from __future__ import annotations": PyTorch compares those of the hook.

import functools
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from paceline.codecs import Codec, Parts, read_codec
from paceline.collectives.calls import Calls
from paceline.errors import UsageError
from paceline.peers.coding import Coding
from paceline.peers.flat import parts_of
from paceline.peers.group import Peers


class _Sum:
    """Gradients that are coded together: those of one of PyTorch's first buckets."""

    def __init__(self, name: str, gradients: Sequence[Tensor]) -> None:
        self.name, self.parts = name, Parts.of(gradients)
        self.flat = torch.zeros(self.parts.count, dtype=self.parts.dtype)
        self.views = parts_of(self.flat, gradients)
        self.missing = len(self.views)  # gradients that have not come in this step
        self.made = False  # in this step

    def put(self, view: Tensor, gradient: Tensor, size: int) -> bool:
        """Put the share of one of so many workers where it is summed; whether all are there."""
        if self.missing == len(self.views):
            self.made = False
        torch.div(gradient, size, out=view)
        self.missing -= 1
        return self.missing == 0

    def end(self) -> None:
        self.missing, self.made = len(self.views), True


class _Bucket:
    """One of PyTorch's buckets in a step, which waits for the sums that its gradients are in."""

    def __init__(self, bucket: GradBucket, places: Sequence[tuple[_Sum, Tensor]]) -> None:
        self._buffer, self.gradients, self.places = bucket.buffer(), bucket.gradients(), places
        self.future: torch.futures.Future[Tensor] = torch.futures.Future()

    @property
    def made(self) -> bool:
        return all(each.made for each, _ in self.places)

    def end(self) -> None:
        """Have the sums in the place of the gradients, and let PyTorch go on."""
        for gradient, (_, view) in zip(self.gradients, self.places, strict=True):
            gradient.copy_(view)
        self.future.set_result(self._buffer)


class CommHookState:
    """What a codec remembers under PyTorch's DistributedDataParallel; made by ``comm_hook``.

    PyTorch plans its buckets anew after the first step of a process. Gradients are coded together as in the first step
    all the same, so that what a codec remembers stays what it is, also in a process that loads it.
    """

    def __init__(self, codec: Codec, group: Any, scaler: torch.amp.GradScaler | None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # A group of its own: DDP may use its own one at the same time.
        own = dist.new_group(ranks)
        self._peers = Peers(own, dist.get_rank(own), len(ranks), torch.device("cpu"))
        self._coding = Coding(codec, self._peers, scaler)
        self._calls = Calls("codec", at_end=lambda: None)
        self._places: dict[Tensor, tuple[_Sum, Tensor]] = {}  # by parameter: its sum, and its place in it
        self._planned = False  # all parameters are known
        self._waiting: list[_Bucket] = []  # of this step
        self._changing = threading.Lock()  # that list

    @property
    def num_bytes(self) -> int:
        """The bytes that this worker has sent so far."""
        return self._peers.traffic.num_bytes

    def state_dict(self) -> dict[str, Any]:
        """All that is remembered on this worker; save it for every worker."""
        return self._coding.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to what ``state_dict`` gave on this worker, before a step."""
        self._coding.load_state_dict(state)

    def average(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket over all workers, while backward goes on."""
        if not self._planned:
            self._plan(bucket)
        came = _Bucket(bucket, [self._places[parameter] for parameter in bucket.parameters()])
        with self._changing:
            self._waiting.append(came)
        for gradient, (each, view) in zip(came.gradients, came.places, strict=True):
            if each.put(view, gradient, self._peers.size):
                self._calls.submit(functools.partial(self._sum, each)).add_done_callback(self._look)
        return came.future

    def _plan(self, bucket: GradBucket) -> None:
        gradients = bucket.gradients()
        shapes = ";".join(",".join(map(str, gradient.shape)) for gradient in gradients)
        made = _Sum(f"{bucket.index()} {shapes}", gradients)
        self._places.update((each, (made, view)) for each, view in zip(bucket.parameters(), made.views, strict=True))
        self._planned = bucket.is_last()

    def _sum(self, each: _Sum) -> None:
        coded = self._coding.sum_of(each.name, each.parts)
        with torch.no_grad(), self._peers.explain("averaging gradients"):
            self._coding.start_gradients(coded, each.flat).wait()
        coded.settle()
        each.end()

    def _look(self, ended: Future[None]) -> None:
        """Let those go on whose sums are made, or all of them fail if one could not be made."""
        error = ended.exception()
        with self._changing:
            over = [bucket for bucket in self._waiting if error is not None or bucket.made]
            self._waiting = [bucket for bucket in self._waiting if bucket not in over]
        for bucket in over:
            if error is None:
                bucket.end()
            else:
                bucket.future.set_exception(error)  # type: ignore[arg-type]  # as its documentation has it


def codec_hook(state: CommHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The hook; ``comm_hook`` gives it with its state."""
    return state.average(bucket)


def comm_hook(
    codec: str | Codec, group: Any = None, *, scaler: torch.amp.GradScaler | None = None
) -> tuple[CommHookState, Any]:
    """State and hook for PyTorch's ``DistributedDataParallel``; all workers must call it together.

    ``ddp.register_comm_hook(*paceline.comm_hook("top-k(density=0.001)"))``

    Keep the state to save what the codec remembers: ``state.state_dict()``, on every worker. ``group`` is the process
    group of the wrapper, if it has one, and ``scaler`` the one that scales the loss.
    """
    chosen = read_codec(codec)
    if chosen is None:
        raise UsageError(f"a hook wants a codec, got {codec!r}; without one register no hook")
    return CommHookState(chosen, group, scaler), codec_hook
