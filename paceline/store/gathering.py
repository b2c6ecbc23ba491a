"""The pushes of a commit, added up as they come, so that a worker can go on before the commit is made."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.store.copying import HALVES, copy_all, copy_and_look, look_at
from paceline.store.layout import Arena, ModelLayouts


class MeanOfPushes:
    """The mean of the gradients and buffers pushed since the last commit, weighted by their examples."""

    def __init__(self, layouts: ModelLayouts) -> None:
        self._layouts = layouts
        self._sum: Arena | None = None  # made when a commit first has more than one push
        self._totals: list[Tensor] = []  # where sums are made: there, or for halves, which are too small, in singles
        self._unit = 1  # the examples of the first push
        self._weight = 0.0  # of all pushes, in this unit
        self._used = 0  # bits of the parameters that any push has a gradient for
        self._count = 0

    def add(self, push: Arena, examples: int, used: bytes) -> None:
        """Add a push; its memory may change afterwards."""
        if self._sum is None:
            self._sum = Arena(self._layouts.up, torch.zeros_like(push.memory))
            self._totals = [flat.float() if flat.dtype in HALVES else flat for flat in self._sum.flat]
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

    def put(self, only: tuple[Arena, bytes] | None = None) -> None:
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
        for index, (parameter, gradient) in enumerate(zip(trained, push.views, strict=False)):
            parameter.grad = gradient.to(parameter.device) if used >> index & 1 else None
        for buffer, pushed in zip(self._layouts.buffers, push.views[len(trained) :], strict=True):
            if weight:
                buffer.copy_(pushed)
        self._weight, self._used, self._count = 0.0, 0, 0


def examine(layouts: ModelLayouts, push: Arena) -> tuple[str | None, int]:
    """Name the first trained parameter whose gradient holds a NaN or an infinity, or say that a buffer does.

    Beside it a checksum of the bits: the sum of their 64-bit words. One quick pass tells both; only if something is
    amiss are the numbers looked at one by one.
    """
    looks = [look_at(part) for part in push.flat]
    checksum = sum(look.checksum for look in looks) % 2**64
    return (None if all(look.finite for look in looks) else _not_finite(layouts, push)), checksum


def _not_finite(layouts: ModelLayouts, push: Arena) -> str | None:
    for name, view in zip(layouts.trained_names, push.views, strict=False):
        if not bool(torch.isfinite(view).all()):
            return name
    for buffer, view in zip(layouts.buffers, push.views[len(layouts.trained) :], strict=True):
        # What the server has there too belongs to it, such as the infinities of a mask.
        if not bool((torch.isfinite(view) | (view == buffer.to(view.device))).all()):
            return "a buffer"
    return None


class Filled(NamedTuple):
    """A push that lies where it is taken from."""

    used: bytes  # one bit per parameter: it has a gradient
    finite: bool  # as a quick look tells
    checksum: int  # as ``examine`` gives it


def fill_push(layouts: ModelLayouts, push: Arena) -> Filled:
    """Copy a worker's gradients and buffers to where its push is taken from, and look at them on the way."""
    used, finite, checksum = 0, True, 0
    tensors = [*(parameter.grad for parameter in layouts.trained), *layouts.buffers]
    for index, (tensor, view, padded) in enumerate(zip(tensors, push.views, push.padded, strict=True)):
        if tensor is None:
            view.zero_()
            continue
        used |= 1 << index
        look = copy_and_look(view, tensor, padded)
        finite, checksum = finite and look.finite, checksum + look.checksum
    trained = len(layouts.trained)
    bits = used & ((1 << trained) - 1)
    return Filled(bits.to_bytes(-(-trained // 8), "little"), finite, checksum % 2**64)


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
    copy_all([*layouts.parameters, *layouts.buffers], views)
