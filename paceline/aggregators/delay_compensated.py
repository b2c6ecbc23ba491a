"""The mean of gradients that are corrected for what the parameters have changed since they were computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.aggregators.base import Needs
from paceline.aggregators.mean import Mean
from paceline.errors import UsageError

_EPSILON = 1e-7  # the paper's


@dataclass(frozen=True, kw_only=True)
class DelayCompensated(Mean):
    """Add ``scale * g * g * (now - read)`` to each gradient g, then take the mean (DC-ASGD, Zheng et al., 2017).

    That is the gradient at the parameters ``now``, to first order: g * g stands for the diagonal of the Hessian. A
    gradient of the newest parameters stays as it is. With ``momentum`` the scale is divided by the root of a moving
    mean of g * g, which the server remembers (DC-ASGD-a; there scale is 2 and momentum 0.95).

    >>> DelayCompensated(scale=0.5).correct(torch.tensor([2.0]), read=torch.tensor([1.0]), now=torch.tensor([0.9]))
    tensor([1.8000])
    """

    name: ClassVar[str] = "delay-compensated"
    needs: ClassVar[Needs] = Needs.READS

    scale: float  # lambda in the paper
    momentum: float | None = None  # None: a constant scale

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.scale < math.inf:
            raise UsageError(f"aggregator {self.name!r}: scale must be finite and at least 0, got {self.scale}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise UsageError(
                f"aggregator {self.name!r}: momentum must be at least 0 and below 1, got {self.momentum}; "
                f"for example {self.name}(scale=2.0, momentum=0.95)"
            )

    @property
    def remembers(self) -> bool:
        return self.momentum is not None

    def correct(self, push: Tensor, read: Tensor, now: Tensor, remembered: Tensor | None = None) -> Tensor:
        gradient = push.to(torch.promote_types(push.dtype, torch.float32))
        slope = gradient
        if self.momentum is not None:
            assert remembered is not None
            remembered.mul_(self.momentum).add_(gradient.abs().square_(), alpha=1 - self.momentum)
            slope = gradient / (remembered + _EPSILON).sqrt_()
        # In this order nothing overflows if the parameters have not changed.
        return (now - read).to(gradient.dtype).mul_(slope).mul_(gradient).mul_(self.scale).add_(gradient)
