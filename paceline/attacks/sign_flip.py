"""The gradient with the other sign."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from paceline.attacks.base import Attack
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Push the gradient times -``scale`` (the reversed gradient of DRACO's experiments, Chen et al., 2018).

    >>> import torch
    >>> SignFlip(scale=10).push([torch.tensor([1.0, -2.0])])
    tensor([-10.,  20.])
    """

    name: ClassVar[str] = "sign-flip"

    scale: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.scale < math.inf:
            raise UsageError(f"attack {self.name!r}: scale must be finite and above 0, got {self.scale}")

    def push(self, gradients: Sequence[Tensor]) -> Tensor:
        (gradient,) = gradients
        return -self.scale * gradient
