"""Layer-wise adaptive rate scaling for large batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from paceline.optim.dense import DenseOptimizer, norm, ratio_or_one, require_at_least_zero, require_fraction


class LARS(DenseOptimizer):
    r"""Use SGD with momentum and a rate per layer, for large batches (You, Gitman and Ginsburg, 2017).

    .. math::
        \lambda &= \text{trust} \cdot \|w\| / (\|g\| + \beta \|w\| + \epsilon) \\
        v &\leftarrow m v + \eta \lambda (g + \beta w) \\
        w &\leftarrow w - v

    with weight decay :math:`\beta`; :math:`\lambda = 1` when either norm is 0. Parameters of at most one
    dimension (biases, normalisation) get :math:`\lambda = 1` and no decay, unless ``adapt_vectors`` is set.

    The paper's :math:`v` has the rate inside, so after a change of rate the momentum still moves at the old
    one. Goyal et al. (2017) correct that by multiplying :math:`v` with :math:`\eta_{new} / \eta_{old}`. With
    ``momentum_correction`` (the default) the buffer holds :math:`v / \eta`, which is the same thing and also
    survives a rate of 0; without it, the buffer is the paper's :math:`v`.

    >>> layer = torch.nn.Linear(3, 2)
    >>> optimizer = LARS(layer.parameters(), lr=3.2, weight_decay=1e-4)
    >>> layer(torch.ones(1, 3)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        eps: float = 1e-8,
        adapt_vectors: bool = False,
        momentum_correction: bool = True,
    ) -> None:
        require_at_least_zero(lr=lr, weight_decay=weight_decay, trust=trust, eps=eps)
        require_fraction(momentum=momentum)
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
            "adapt_vectors": adapt_vectors,
            "momentum_correction": momentum_correction,
        }
        super().__init__(params, options)

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Take one momentum step with the layer's own rate."""
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].mul_(group["momentum"])
        if parameter.ndim > 1 or group["adapt_vectors"]:
            gradient = _adapted(parameter, gradient, group)
        if group["momentum_correction"]:
            parameter.add_(buffer.add_(gradient), alpha=-group["lr"])
        else:
            parameter.sub_(buffer.add_(gradient, alpha=group["lr"]))


def _adapted(parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    decay = group["weight_decay"]
    weight_norm, gradient_norm = norm(parameter), norm(gradient)
    local = ratio_or_one(
        group["trust"] * weight_norm,
        gradient_norm + decay * weight_norm + group["eps"],
        unless_zero=(weight_norm, gradient_norm),
    )
    return local * gradient.add(parameter, alpha=decay)
