"""Where the tensors of a model lie in one stretch of bytes, the same on the server and on every worker."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from paceline.errors import UsageError

_ALIGNMENT = 64  # bytes: kernels give other bits on other alignments


class Layout:
    """Places for tensors of these shapes and dtypes, those of one dtype one behind the other.

    >>> layout = Layout([torch.zeros(3), torch.zeros(2, dtype=torch.int64), torch.zeros(5)])
    >>> layout.nbytes, layout.spans
    (192, [(torch.float32, 0, 128), (torch.int64, 128, 192)])
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self.offsets = [0] * len(tensors)  # first byte of each
        self.spans: list[tuple[torch.dtype, int, int]] = []  # first and last byte of each dtype's stretch
        self.nbytes = 0
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            start = self.nbytes
            for index, tensor in enumerate(tensors):
                if tensor.dtype == dtype:
                    self.offsets[index] = self.nbytes
                    self.nbytes += aligned(tensor.numel() * dtype.itemsize)
            self.spans.append((dtype, start, self.nbytes))

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in ``memory``, which is of bytes."""
        return [
            memory[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for (shape, dtype), offset in zip(self._shapes, self.offsets, strict=True)
        ]

    def padded(self, memory: Tensor) -> list[Tensor]:
        """A vector for each tensor, with the gap behind it."""
        return [
            memory[offset : offset + aligned(shape.numel() * dtype.itemsize)].view(dtype)
            for (shape, dtype), offset in zip(self._shapes, self.offsets, strict=True)
        ]

    def flat(self, memory: Tensor) -> list[Tensor]:
        """One vector for each dtype: all its tensors, with the gaps between them."""
        return [memory[start:stop].view(dtype) for dtype, start, stop in self.spans]


class Arena:
    """Memory of bytes with a layout: ``views`` are its tensors, ``flat`` the vectors of each dtype.

    ``padded`` are vectors of the tensors, each with the gap behind it. Without ``memory`` it is new, and all zeros.
    """

    def __init__(self, layout: Layout, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.memory = memory
        self.views = layout.views(memory)
        self.padded = layout.padded(memory)
        self.flat = layout.flat(memory)


def aligned(size: int) -> int:
    """The size of a tensor of so many bytes, with the gap behind it."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor of bytes, to be sent or received into."""
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # an array is a buffer, which its type does not say


class ModelLayouts:
    """The layouts of what travels: ``down`` of the parameters and buffers, ``up`` of a push.

    A push has the gradients of what is trained, then the buffers, then the trained parameters as its worker read them
    if it goes ``with_reads``. A server that holds only some of the parameters has those named in ``part``.
    """

    def __init__(
        self,
        model: nn.Module,
        part: Collection[str] | None = None,
        *,
        with_buffers: bool = True,
        with_reads: bool = False,
    ) -> None:
        named = [(name, each) for name, each in model.named_parameters() if part is None or name in part]
        buffers = [buffer for _, buffer in model.named_buffers()] if with_buffers else []
        self.parameters = [parameter for _, parameter in named]
        self.trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self.trained_names = [name for name, parameter in named if parameter.requires_grad]
        self._model, self._has_buffers = model, bool(buffers)
        self.only_cpu = all(tensor.device.type == "cpu" for tensor in [*self.parameters, *buffers])
        self.down = Layout([*self.parameters, *buffers])
        self.reads = self.trained if with_reads else []
        self.up = Layout([*self.trained, *buffers, *self.reads])

    @property
    def buffers(self) -> list[Tensor]:
        """The model's buffers as they are now: a forward pass may put others in their places."""
        return [buffer for _, buffer in self._model.named_buffers()] if self._has_buffers else []

    def check_trained(self) -> None:
        """Raise if something is trained now that was not, when the server was told of the model."""
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"{name} was frozen when the session began and is trained now: the server does not know of it. "
                    "Freeze and unfreeze parameters before join()"
                )

    @staticmethod
    def describe(model: nn.Module) -> tuple[tuple[str, tuple[int, ...], str, bool], ...]:
        """Name, shape, dtype of every tensor, and whether it is trained: equal on processes that fit together."""
        return tuple(
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        )
