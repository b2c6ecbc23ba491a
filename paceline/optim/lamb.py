"""Layer-wise adaptive moments for large batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optim.dense import (
    DenseOptimizer,
    as_real,
    norm,
    ratio_or_one,
    require_at_least_zero,
    require_fraction,
)


class LAMB(DenseOptimizer):
    r"""Use Adam's direction, scaled to the norm of the layer's weights (You et al., ICLR 2020).

    .. math::
        r &= \hat m / (\sqrt{\hat v} + \epsilon) + \beta w \\
        w &\leftarrow w - \eta\, \|w\| / \|r\| \cdot r

    where :math:`\hat m` and :math:`\hat v` are Adam's moments with bias correction and :math:`\beta` is the
    weight decay; the ratio is 1 when either norm is 0.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = LAMB(layer.parameters(), lr=2e-3)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
    ) -> None:
        require_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        require_fraction(beta1=betas[0], beta2=betas[1])
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Take one step along Adam's direction, scaled to the norm of the parameter."""
        weight, gradient = as_real(parameter), as_real(gradient)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        direction = _adam_direction(gradient, state, betas=group["betas"], eps=group["eps"])
        direction.add_(weight, alpha=group["weight_decay"])
        weight_norm, direction_norm = norm(weight), norm(direction)
        ratio = ratio_or_one(weight_norm, direction_norm, unless_zero=(weight_norm, direction_norm))
        weight.add_(direction.mul_(ratio), alpha=-group["lr"])


def _adam_direction(gradient: Tensor, state: dict[str, Any], *, betas: tuple[float, float], eps: float) -> Tensor:
    mean: Tensor = state["exp_avg"]
    square: Tensor = state["exp_avg_sq"]
    step: float = state["step"].item()
    beta1, beta2 = betas
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (square / (1 - beta2**step)).sqrt_().add_(eps)
    direction: Tensor = (mean / (1 - beta1**step)).div_(scale)
    return direction
