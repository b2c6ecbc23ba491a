"""RMSProp with Nesterov momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optim.dense import DenseOptimizer, as_real, require_at_least_zero, require_fraction


class NesterovRMSprop(DenseOptimizer):
    r"""Use RMSProp (Tieleman and Hinton, 2012) with Nesterov momentum on the scaled gradient.

    In the look-ahead form, with velocity :math:`V` and mean square :math:`A`,

    .. math::
        G &= \nabla L(W + \mu V) \\
        A &\leftarrow \alpha A + (1 - \alpha) G^2 \\
        V &\leftarrow \mu V - \eta\, G / (\sqrt A + \epsilon) \\
        W &\leftarrow W + V

    the gradient is needed at a point other than the parameters. So, like ``torch.optim.SGD``, this
    optimizer keeps the look-ahead point :math:`P = W + \mu V` as the parameters. With
    :math:`V = -\eta B` and :math:`D = G / (\sqrt A + \epsilon)`, the same iterates are

    .. math::
        B &\leftarrow \mu B + D \\
        P &\leftarrow P - \eta (D + \mu B)

    because :math:`P' = W' + \mu V' = (P - \mu V + V') + \mu V' = P - \eta D + \mu V'`. The two agree while
    the rate is fixed; when it changes, this form rescales the velocity with it and needs no correction.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    >>> optimizer = NesterovRMSprop([weight], lr=0.01)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
    ) -> None:
        require_at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        require_fraction(alpha=alpha, momentum=momentum)
        options = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, options)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Take one step at the look-ahead point."""
        point, gradient = as_real(parameter), as_real(gradient)
        if not state:
            state["square_avg"] = torch.zeros_like(point)
            state["momentum_buffer"] = torch.zeros_like(point)
        square_avg, buffer = state["square_avg"], state["momentum_buffer"]
        if group["weight_decay"]:
            gradient = gradient.add(point, alpha=group["weight_decay"])
        square_avg.mul_(group["alpha"]).addcmul_(gradient, gradient, value=1 - group["alpha"])
        scaled = gradient / square_avg.sqrt().add_(group["eps"])
        buffer.mul_(group["momentum"]).add_(scaled)
        point.add_(scaled.add_(buffer, alpha=group["momentum"]), alpha=-group["lr"])
