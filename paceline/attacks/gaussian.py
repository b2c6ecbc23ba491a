"""Noise in the place of the gradient."""

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
class Gaussian(Attack):
    """Push normal noise of mean 0 and this deviation (200 in Krum's experiments, Blanchard et al., 2017).

    With a deviation like that of honest gradients it is a free rider that is hard to see.
    """

    name: ClassVar[str] = "gaussian"

    deviation: float = 200.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.deviation < math.inf:
            raise UsageError(f"attack {self.name!r}: deviation must be finite and above 0, got {self.deviation}")

    def push(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.randn_like(gradients[0]) * self.deviation
