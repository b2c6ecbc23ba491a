"""Average tensors over all workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import OutOfStepError
from paceline.peers.group import Peers, Pending

_HALVES = (torch.float16, torch.bfloat16)
_TAG_PERIOD = 1 << 10  # sums over up to 16,000 workers stay exact in float32


class Means(NamedTuple):
    """The result of an average; ``values`` are valid until the averager's next one."""

    values: list[Tensor] | None  # None: all weights were 0
    stop: bool = False  # whether a worker was asked to stop
    numbers: tuple[float, ...] = ()  # the sums of the workers' numbers


@dataclass
class _Sum:
    """The tensors of one dtype in one flat tensor, with the control numbers after them."""

    flat: Tensor
    parts: dict[int, Tensor]  # by the tensor's place among all
    num_control: int
    work: Pending


class Averager:
    """Find the weighted means of tensors over all workers of ``peers``, also while the workers compute.

    They are sent in one flat tensor per dtype, half precisions as float32. After them come control numbers: a tag that
    must be the same everywhere, the weight, whether a worker was asked to stop, the time that each worker has computed
    since the last average, and ``numbers`` to be summed.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._flats: dict[torch.dtype, Tensor] = {}
        self._sums: list[_Sum] = []  # under way
        self._tag = 0
        self._left_at = time.perf_counter()  # the last average
        self._exposed = 0.0  # seconds that nothing was computed in, because of the one under way

    def start(
        self,
        tensors: Sequence[Tensor],
        *,
        weight: float,
        tag: int,
        stop: bool = False,
        numbers: Sequence[float] = (),
        now: bool = False,
    ) -> None:
        """Start an average; all workers call it together. ``now`` runs it here, which is faster than waiting."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_dtype.setdefault(exchanged_dtype(tensor), []).append(place)
        began = time.perf_counter()
        seconds = [0.0] * self._peers.size
        seconds[self._peers.rank] = began - self._left_at
        control = [tag % _TAG_PERIOD, weight, float(stop), *seconds, *numbers]
        self._tag, self._sums = tag, []
        with self._peers.explain("averaging the parameters"), torch.no_grad():
            for dtype, places in by_dtype.items():
                sizes = [tensors[place].numel() for place in places]
                flat = self._flat(dtype, sum(sizes) + len(control))
                parts = dict(zip(places, torch.split(flat[: -len(control)], sizes), strict=True))
                for place, part in parts.items():
                    parts[place] = part.view(tensors[place].shape).copy_(tensors[place])
                if weight:
                    flat[: -len(control)].mul_(weight)
                else:
                    flat.zero_()  # not times 0: statistics of borrowed data may be NaN
                flat[-len(control) :] = torch.tensor(control, dtype=dtype)
                work = self._peers.all_reduce(flat, now=now)
                self._sums.append(_Sum(flat, parts, len(control), work))
        self._exposed = time.perf_counter() - began if now else 0.0

    def finish(self) -> Means:
        """Wait for the average; raise if the workers are out of step."""
        values: dict[int, Tensor] = {}
        began = time.perf_counter()
        total, stop, waited = 0.0, 0.0, 0.0
        numbers: list[float] = []
        for each in self._sums:
            with self._peers.explain("averaging the parameters"):
                each.work.wait()
            tag, total, stop, *rest = each.flat[-each.num_control :].tolist()
            self._check_tag(tag)
            seconds, numbers = rest[: self._peers.size], rest[self._peers.size :]
            waited = max(seconds) - seconds[self._peers.rank]
            if total:
                each.flat[: -each.num_control].div_(total)
            values.update(each.parts)
        self._sums = []
        self._left_at = time.perf_counter()
        self._peers.traffic.waited_seconds += min(waited, self._exposed + self._left_at - began)
        return Means([values[place] for place in sorted(values)] if total else None, stop > 0, tuple(numbers))

    def settle(self) -> None:
        """All workers use the means."""

    def _flat(self, dtype: torch.dtype, count: int) -> Tensor:
        if dtype not in self._flats or len(self._flats[dtype]) != count:
            self._flats[dtype] = self._peers.buffer(count, dtype, self._peers.device)
        return self._flats[dtype]

    def _check_tag(self, found: float) -> None:
        wanted = self._tag % _TAG_PERIOD * self._peers.size
        if found != wanted:
            raise OutOfStepError(
                f"worker {self._peers.rank}: the workers have fallen out of step at its step {self._tag} (their sum "
                f"should be {wanted}, and is {found:g}); do all make the same number of steps?"
            )


def exchanged_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a tensor is sent: half precisions as float32."""
    return torch.float32 if tensor.dtype in _HALVES else tensor.dtype


def is_continuous(tensor: Tensor) -> bool:
    """Whether a mean of such tensors makes sense."""
    return tensor.is_floating_point() or tensor.is_complex()


def exact(tensor: Tensor) -> Tensor:
    """A copy in at least single precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)


def as_real(tensor: Tensor) -> Tensor:
    """The tensor itself without its gradient, complex numbers as pairs."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
