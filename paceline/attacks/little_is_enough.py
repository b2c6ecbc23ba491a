"""A small change in the direction in which honest gradients differ, which hides among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.attacks.base import Attack
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LittleIsEnough(Attack):
    """Push mean - ``z`` * deviation of the honest gradients, in each coordinate (Baruch et al., 2019).

    In the paper hostile workers estimate both from all of their data together. Here each has its own batch alone, which
    it divides into ``parts``: the mean is that of the parts' gradients. Their deviation over the root of the number of
    parts is that of the gradients of whole batches. A batch of one example has no deviation.

    >>> LittleIsEnough(z=1, parts=2).push([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 5.0])])
    tensor([1., 5.])
    """

    name: ClassVar[str] = "little-is-enough"

    z: float = 1.5  # of the paper's experiments on MNIST
    parts: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not math.isfinite(self.z):
            raise UsageError(f"attack {self.name!r}: z must be finite, got {self.z}")
        if self.parts < 2:
            raise UsageError(f"attack {self.name!r}: parts must be at least 2, got {self.parts}")

    @property
    def num_parts(self) -> int:
        return self.parts

    def push(self, gradients: Sequence[Tensor]) -> Tensor:
        parts = torch.stack(list(gradients))
        if len(parts) == 1:
            return parts[0]
        return parts.mean(dim=0) - self.z / math.sqrt(len(parts)) * parts.std(dim=0)
