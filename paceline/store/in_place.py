"""A worker's tensors on the way between hosts: large ones go from and to the model itself, small ones are copied."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from paceline.store.copying import lies_plainly
from paceline.store.layout import Arena, Layout, ModelLayouts, memory_of
from paceline.transport.pieces import Pieces

_LEAST = 1 << 16  # bytes: shorter ones are copied faster than they are sent or received one by one


class Gradients:
    """What a worker pushes: the gradients of its model, and its buffers."""

    def __init__(self, layouts: ModelLayouts) -> None:
        self._layouts = layouts
        self._memory = torch.zeros(layouts.up.nbytes, dtype=torch.uint8)
        self._views = layouts.up.views(self._memory)

    def pieces(self) -> tuple[Pieces, bytes]:
        """The memory to send, before any of it changes, and the bits of the parameters that have a gradient."""
        trained, used = self._layouts.trained, 0
        tensors: list[Tensor | None] = [parameter.grad for parameter in trained]
        for index, gradient in enumerate(tensors):
            used |= (gradient is not None) << index
        tensors += [*self._layouts.buffers, *self._layouts.reads]
        lying: dict[int, Tensor] = {}
        for index, (tensor, view) in enumerate(zip(tensors, self._views, strict=True)):
            if tensor is None:
                view.zero_()
            elif _lies_well(tensor, view):
                lying[index] = tensor
            else:
                view.copy_(tensor.detach().to_dense() if tensor.is_sparse else tensor.detach())
        return _joined(self._layouts.up, self._memory, lying), used.to_bytes(-(-len(trained) // 8), "little")


class Parameters:
    """Where a worker receives parameters and buffers: ``aside``, or in its model if it waits for them."""

    def __init__(self, layouts: ModelLayouts) -> None:
        self._layouts = layouts
        self.memory = torch.zeros(layouts.down.nbytes, dtype=torch.uint8)
        self.views = layouts.down.views(self.memory)
        self.aside = Pieces(memory_of(self.memory))
        self._lying: dict[int, Tensor] = {}  # tensors of the model that parameters come into

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self._layouts.parameters, *self._layouts.buffers]

    def in_model(self) -> Pieces:
        """The model's own memory where that can be, else what lies aside."""
        pairs = enumerate(zip(self._tensors, self.views, strict=True))
        self._lying = {index: tensor for index, (tensor, view) in pairs if _lies_well(tensor, view)}
        return _joined(self._layouts.down, self.memory, self._lying)

    def take(self, came: Pieces) -> None:
        """Put the parameters that came into the model, unless they came there."""
        lying = {} if came is self.aside else self._lying
        with torch.no_grad():
            for index, (tensor, view) in enumerate(zip(self._tensors, self.views, strict=True)):
                if index in lying:
                    increment_version(tensor)  # as any change in place does
                else:
                    tensor.copy_(view)

    def of_trained(self) -> list[Tensor]:
        """What came aside for the parameters that are trained."""
        pairs = zip(self._layouts.parameters, self.views, strict=False)
        return [view for parameter, view in pairs if parameter.requires_grad]


def with_differences(layouts: ModelLayouts, memory: Tensor, push: Arena) -> Pieces:
    """The parameters in ``memory`` to send, with what a commit has made of ``push`` in place of those trained."""
    trained = [index for index, parameter in enumerate(layouts.parameters) if parameter.requires_grad]
    pairs = zip(trained, push.views, strict=False)
    return _joined(layouts.down, memory, {index: view for index, view in pairs if view.numel()})


def _lies_well(tensor: Tensor, view: Tensor) -> bool:
    """Whether the tensor's bytes are those that travel, and many."""
    return lies_plainly(tensor, like=view) and tensor.nbytes >= _LEAST


def _joined(layout: Layout, memory: Tensor, lying: dict[int, Tensor]) -> Pieces:
    """The memory of a layout, with the tensors of ``lying`` in their places."""
    stretches, done, whole = [], 0, memory_of(memory)
    for index in sorted(lying, key=lambda index: layout.offsets[index]):
        start = layout.offsets[index]
        stretches += [whole[done:start], memory_of(lying[index].detach().view(-1).view(torch.uint8))]
        done = start + lying[index].nbytes
    return Pieces(*stretches, whole[done:])
