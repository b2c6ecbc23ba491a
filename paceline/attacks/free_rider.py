"""Nothing at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.attacks.base import Attack


@dataclass(frozen=True, kw_only=True)
class FreeRider(Attack):
    """Push zeros, as a worker would that takes the model and does no work for it (Lin et al., 2019).

    It counts as an honest worker with as many examples. ``gaussian`` with a small deviation hides it.
    """

    name: ClassVar[str] = "free-rider"

    def push(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.zeros_like(gradients[0])
