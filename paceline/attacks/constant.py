"""One number in the place of every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.attacks.base import Attack
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Constant(Attack):
    """Push ``value`` in every coordinate (-100 in DRACO's experiments, Chen et al., 2018).

    >>> Constant(value=-1).push([torch.tensor([0.5, 0.25])])
    tensor([-1., -1.])
    """

    name: ClassVar[str] = "constant"

    value: float = -100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        largest = torch.finfo(torch.float32).max
        if not abs(self.value) <= largest:
            raise UsageError(f"attack {self.name!r}: value must be a number of single precision, got {self.value}")

    def push(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.full_like(gradients[0], self.value)
