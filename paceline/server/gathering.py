"""The pushes of a commit, added up as they come, so that a worker can go on before the commit is made."""

from __future__ import annotations

import cmath

import torch
from torch import Tensor

from paceline import native
from paceline.server.layout import Laid, ModelLayouts

if native.available():
    from paceline.native import _core


_HALVES = (torch.float16, torch.bfloat16)


class MeanOfPushes:
    """The mean of the gradients and buffers pushed since the last commit, weighted by their examples."""

    def __init__(self, layouts: ModelLayouts) -> None:
        self._layouts = layouts
        self._sum: Laid | None = None  # made when a commit first has more than one push
        self._totals: list[Tensor] = []  # where sums are made: there, or for halves, which are too small, in singles
        self._unit = 1  # the examples of the first push
        self._weight = 0.0  # of all pushes, in this unit
        self._used = 0  # bits of the parameters that any push has a gradient for
        self._count = 0

    def add(self, push: Laid, examples: int, used: bytes) -> None:
        """Add a push; its memory may change afterwards."""
        if self._sum is None:
            self._sum = Laid(self._layouts.up, torch.zeros_like(push.memory))
            self._totals = [flat.float() if flat.dtype in _HALVES else flat for flat in self._sum.flat]
        if self._count == 0:
            self._unit = max(1, examples)
        weight = examples / self._unit
        for total, part in zip(self._totals, push.flat, strict=True):
            if not (total.is_floating_point() or total.is_complex()):
                total.copy_(part)  # a count of batches seen: the last one's
            elif self._count == 0:
                total.copy_(part) if weight else total.zero_()
            elif weight:
                total.add_(part, alpha=weight)
        self._weight += weight
        self._used |= int.from_bytes(used, "little")
        self._count += 1

    def put(self, only: tuple[Laid, bytes] | None = None) -> None:
        """Put the mean where the optimizer looks for it; ``only`` is a push that makes up the commit alone."""
        if only is not None:
            push, used, weight = only[0], int.from_bytes(only[1], "little"), 1.0
        else:
            assert self._sum is not None, "a commit of pushes that were never added"
            push, used, weight = self._sum, self._used, self._weight
            for total, mean in zip(self._totals, push.flat, strict=True):
                if weight and (total.is_floating_point() or total.is_complex()):
                    total.div_(weight)
                if total is not mean:
                    mean.copy_(total)
        trained = self._layouts.trained
        for place, (parameter, gradient) in enumerate(zip(trained, push.views, strict=False)):
            parameter.grad = gradient.to(parameter.device) if used >> place & 1 else None
        for buffer, pushed in zip(self._layouts.buffers, push.views[len(trained) :], strict=True):
            if weight:
                buffer.copy_(pushed)
        self._weight, self._used, self._count = 0.0, 0, 0


def examine(layouts: ModelLayouts, push: Laid) -> tuple[str | None, int]:
    """Name the first trained parameter whose gradient holds a NaN or an infinity, or say that a buffer does.

    Beside it a checksum of the bits: the sum of their 64-bit words. One quick pass tells both; only if something is
    amiss are the numbers looked at one by one.
    """
    examined = [_examine(part) for part in push.flat]
    checksum = sum(words for _, words in examined) % 2**64
    return (None if all(finite for finite, _ in examined) else _not_finite(layouts, push)), checksum


def _not_finite(layouts: ModelLayouts, push: Laid) -> str | None:
    for name, view in zip(layouts.trained_names, push.views, strict=False):
        if not bool(torch.isfinite(view).all()):
            return name
    for buffer, view in zip(layouts.buffers, push.views[len(layouts.trained) :], strict=True):
        # What the server has there too belongs to it, such as the infinities of a mask.
        if not bool((torch.isfinite(view) | (view == buffer.to(view.device))).all()):
            return "a buffer"
    return None


def _examine(part: Tensor) -> tuple[bool, int]:
    """Whether a flat vector is finite, as far as a quick look tells, and the sum of its words."""
    if native.available() and part.dtype == torch.float32:
        return _core.examine(part.data_ptr(), part.nbytes)
    words = int(part.view(torch.int64).sum())
    if not (part.is_floating_point() or part.is_complex()):
        return True, words
    wide = torch.float32 if part.dtype in _HALVES else None
    return cmath.isfinite(part.sum(dtype=wide).item()), words


def fill_push(layouts: ModelLayouts, views: list[Tensor]) -> bytes:
    """Copy a worker's gradients and buffers to where its push is taken from; give the bits of the ones that it has."""
    used = 0
    for place, (parameter, view) in enumerate(zip(layouts.trained, views, strict=False)):
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
            continue
        used |= 1 << place
        view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
    for buffer, view in zip(layouts.buffers, views[len(layouts.trained) :], strict=True):
        view.copy_(buffer)
    return used.to_bytes(-(-len(layouts.trained) // 8), "little")


def adopt(layouts: ModelLayouts, memory: Tensor, *, found: bool = False) -> None:
    """Let the server's parameters and buffers lie in ``memory``, whose values they take if they were ``found`` there.

    Those on another device are copied by ``publish``.
    """
    for tensor, view in zip([*layouts.parameters, *layouts.buffers], layouts.down.views(memory), strict=True):
        if found:
            tensor.data.copy_(view)
        else:
            view.copy_(tensor.detach())
        if tensor.device.type == "cpu":
            tensor.data = view


def publish(layouts: ModelLayouts, memory: Tensor) -> None:
    """Copy what does not lie in ``memory`` there."""
    tensors = [*layouts.parameters, *layouts.buffers]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return
    for tensor, view in zip(tensors, layouts.down.views(memory), strict=True):
        if tensor.device.type != "cpu":
            view.copy_(tensor.detach())


def read_parameters(layouts: ModelLayouts, views: list[Tensor]) -> None:
    """Copy the server's parameters and buffers into a worker's model."""
    with torch.no_grad():
        for tensor, view in zip([*layouts.parameters, *layouts.buffers], views, strict=True):
            tensor.copy_(view)
