"""The base of this package's optimizers: the loop over dense gradients, and the checks of options."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor

from paceline.errors import UsageError


class DenseOptimizer(torch.optim.Optimizer):
    """An optimizer written as ``update``, the rule for one parameter that has a dense gradient."""

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change ``parameter`` and its ``state`` in place; runs without recording gradients."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; ``closure``, if given, computes the loss first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            # All gradients are checked before the first update, so that an error leaves nothing half done.
            for parameter, gradient, group in list(self._gradients()):
                self.update(parameter, gradient, self.state[parameter], group)
        return loss

    def _gradients(self) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.layout != torch.strided:
                    raise UsageError(
                        f"{type(self).__name__} needs dense gradients, but a parameter of shape "
                        f"{tuple(parameter.shape)} has a sparse one ({parameter.grad.layout}); "
                        "give that parameter to torch.optim.SparseAdam or make its layer dense"
                    )
                yield parameter, parameter.grad, group


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of real numbers, which elementwise rules treat as two parameters."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def norm(tensor: Tensor) -> Tensor:
    """The Euclidean norm, in at least float32: float16 would overflow on an ordinary layer."""
    length: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return length


def ratio_or_one(above: Tensor, below: Tensor, *, unless_zero: tuple[Tensor, Tensor]) -> Tensor:
    """``above / below``, or 1 when either of two norms is 0; without waiting for a device."""
    first, second = unless_zero
    return torch.where((first > 0) & (second > 0), above / below, torch.ones_like(above))


def require_at_least_zero(**options: float) -> None:
    """Raise ``UsageError`` for the first option that is negative or NaN."""
    for name, value in options.items():
        if not value >= 0:
            raise UsageError(f"{name} must be at least 0, got {value}")


def require_fraction(**options: float) -> None:
    """Raise ``UsageError`` for the first option outside [0, 1)."""
    for name, value in options.items():
        if not 0 <= value < 1:
            raise UsageError(f"{name} must be at least 0 and below 1, got {value}")
