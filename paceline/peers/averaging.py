"""Average parameters and buffers over all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.errors import CommError
from paceline.peers.group import Peers
from paceline.peers.tensors import send_tensors

_HALVES = (torch.float16, torch.bfloat16)
_TAG, _WEIGHT, _STOP = -3, -2, -1  # positions of the control numbers after the parameters
_TAG_PERIOD = 1 << 10  # sums over up to 16,000 workers stay exact in float32


class Averager:
    """Replace parameters and floating-point buffers by their weighted mean over all workers.

    They are sent in one flat tensor per dtype, half precisions as float32. Other buffers, such as counts, are copied
    from worker 0. ``buffers`` is called for each average, since a forward pass may replace them.
    """

    def __init__(self, parameters: Sequence[Tensor], buffers: Callable[[], list[Tensor]], peers: Peers) -> None:
        self._parameters, self._buffers, self._peers = parameters, buffers, peers
        self._flats: dict[torch.dtype, Tensor] = {}

    def average(self, *, weight: float, tag: int, stop: bool = False) -> bool:
        """Average; all workers call it together with the same ``tag``, else they raise that they are out of step.

        Return whether ``stop`` was true on any worker.
        """
        buffers = self._buffers()
        tensors = [tensor for tensor in (*self._parameters, *buffers) if _is_continuous(tensor)]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(torch.float32 if tensor.dtype in _HALVES else tensor.dtype, []).append(tensor)
        with self._peers.explain("averaging the parameters"), torch.no_grad():
            flats = [self._reduced(dtype, group, weight, tag, stop) for dtype, group in by_dtype.items()]
            send_tensors([buffer for buffer in buffers if not _is_continuous(buffer)], self._peers)
        for flat in flats:
            self._check_tag(flat[_TAG].item(), tag)
        # Only now: if an exchange fails, the parameters are as they were.
        with torch.no_grad():
            for flat, group in zip(flats, by_dtype.values(), strict=True):
                _put_back(flat, group)
        return any(flat[_STOP].item() > 0 for flat in flats)

    def _reduced(self, dtype: torch.dtype, tensors: Sequence[Tensor], weight: float, tag: int, stop: bool) -> Tensor:
        """The sum of all workers' tensors, each times its weight, and of the control numbers."""
        flat = self._flat(dtype, tensors)
        for tensor, part in zip(tensors, _parts(flat, tensors), strict=True):
            part.copy_(tensor.reshape(-1))
        flat[:_TAG].mul_(weight)
        flat[_TAG], flat[_WEIGHT], flat[_STOP] = tag % _TAG_PERIOD, weight, stop
        self._peers.all_reduce(flat, now=True).wait()
        return flat

    def _flat(self, dtype: torch.dtype, tensors: Sequence[Tensor]) -> Tensor:
        count = sum(tensor.numel() for tensor in tensors) - _TAG
        if dtype not in self._flats or len(self._flats[dtype]) != count:
            self._flats[dtype] = self._peers.buffer(count, dtype, self._peers.device)
        return self._flats[dtype]

    def _check_tag(self, found: complex, tag: int) -> None:
        wanted = tag % _TAG_PERIOD * self._peers.size
        if found != wanted:
            raise CommError(
                f"worker {self._peers.rank}: the workers have fallen out of step at its step {tag} (their sum should "
                f"be {wanted}, and is {found}); do all make the same number of steps?"
            )


def _parts(flat: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(flat[:_TAG], [tensor.numel() for tensor in tensors])


def _put_back(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Divide a sum by its weight, and copy it into the tensors."""
    total = flat[_WEIGHT].item()
    if total != 0:  # else no worker has used an example, and nothing has changed
        flat[:_TAG].div_(total)
        for tensor, part in zip(tensors, _parts(flat, tensors), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
