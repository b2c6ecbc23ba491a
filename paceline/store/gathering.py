"""Copies between a model and the memory of pushes and parameters, and checks of pushes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.store.copying import copy_all, copy_and_look, look_at
from paceline.store.layout import Arena, ModelLayouts


def examine(layouts: ModelLayouts, push: Arena) -> tuple[str | None, int]:
    """Name the first tensor of a push that has a NaN or an infinity, or None; and give a checksum of the push.

    The checksum is the sum of the bits as 64-bit words. One quick pass gives both. Only if it finds something are the
    numbers checked one by one.
    """
    looks = [look_at(part) for part in push.flat]
    checksum = sum(look.checksum for look in looks) % 2**64
    return (None if all(look.finite for look in looks) else _not_finite(layouts, push)), checksum


def _not_finite(layouts: ModelLayouts, push: Arena) -> str | None:
    for name, view in zip(layouts.trained_names, push.views, strict=False):
        if not bool(torch.isfinite(view).all()):
            return name
    for buffer, view in zip(layouts.buffers, push.views[len(layouts.trained) :], strict=False):
        # A value that the server's buffer has too is no error, such as the infinities of a mask.
        if not bool((torch.isfinite(view) | (view == buffer.to(view.device))).all()):
            return "a buffer"
    reads = push.views[len(push.views) - len(layouts.reads) :]
    return None if all(bool(torch.isfinite(view).all()) for view in reads) else "a parameter that was read"


class Filled(NamedTuple):
    """A push that was copied to where the server reads it."""

    used: bytes  # one bit per parameter: it has a gradient
    finite: bool  # as far as a quick look tells
    checksum: int  # as ``examine`` gives it


def fill_push(layouts: ModelLayouts, push: Arena) -> Filled:
    """Copy a worker's push to where the server reads it, and check it on the way."""
    used, finite, checksum = 0, True, 0
    tensors = [*(parameter.grad for parameter in layouts.trained), *layouts.buffers, *layouts.reads]
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
    """Move the server's parameters and buffers into ``memory``; if values were ``found`` there, take those.

    Tensors of other devices stay there; ``publish`` copies them.
    """
    for tensor, view in zip([*layouts.parameters, *layouts.buffers], layouts.down.views(memory), strict=True):
        if found:
            tensor.data.copy_(view)
        else:
            view.copy_(tensor.detach())
        if tensor.device.type == "cpu":
            tensor.data = view


def publish(layouts: ModelLayouts, memory: Tensor) -> None:
    """Copy the tensors of other devices into ``memory``."""
    if layouts.only_cpu:
        return
    for tensor, view in zip([*layouts.parameters, *layouts.buffers], layouts.down.views(memory), strict=True):
        if tensor.device.type != "cpu":
            view.copy_(tensor.detach())


def read_parameters(layouts: ModelLayouts, views: list[Tensor]) -> None:
    """Copy the server's parameters and buffers into a worker's model."""
    copy_all([*layouts.parameters, *layouts.buffers], views)
