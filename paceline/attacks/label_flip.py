"""Honest gradients of wrong labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.attacks.base import Attack


@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Train on wrong labels: class c of C becomes C - 1 - c (Fang et al., 2020).

    >>> import torch
    >>> LabelFlip().relabel(torch.tensor([0, 9, 3]), outputs=torch.zeros(3, 10))
    tensor([9, 0, 6])
    """

    name: ClassVar[str] = "label-flip"

    def fits(self, target: Tensor) -> bool:
        return not target.is_floating_point() or bool(((target == 0) | (target == 1)).all())

    def relabel(self, targets: Tensor, outputs: Tensor) -> Tensor:
        if targets.is_floating_point():  # 0 or 1 for each output
            return 1 - targets
        # Classes are in the last dimension, as in a language model, or behind that of the examples, as torch has them.
        classes = outputs.shape[-1] if outputs.shape[:-1] == targets.shape else outputs.shape[1]
        return classes - 1 - targets

    def push(self, gradients: Sequence[Tensor]) -> Tensor:
        (gradient,) = gradients
        return gradient
