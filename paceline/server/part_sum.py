"""The sum of the gradients of several batches, each times its weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PartSum:
    """Add up the gradients of a model's batches, in their order, then put the sum in the place of the gradients.

    All who compute the same batches with the same weights come to the same bits.
    """

    def __init__(self, model: nn.Module) -> None:
        self.made = 0  # batches in the sum
        self._trained = [each for each in model.parameters() if each.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self._trained)

    @torch.no_grad()
    def add(self, weight: float) -> None:
        """Move the model's gradients into the sum."""
        for index, parameter in enumerate(self._trained):
            gradient, so_far = parameter.grad, self._sums[index]
            if gradient is not None:
                self._sums[index] = gradient * weight if so_far is None else so_far.add_(gradient, alpha=weight)
                parameter.grad = None
        self.made += 1

    def end(self) -> None:
        """Have the sum in the place of the gradients, and begin another one."""
        for parameter, total in zip(self._trained, self._sums, strict=True):
            parameter.grad = total
        self.forget()

    def forget(self) -> None:
        """Begin another sum."""
        self._sums, self.made = [None] * len(self._trained), 0
