"""A user's mistake: an exception, and a function that raises it in its backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Mistake(Exception):
    """Of the user's."""


class Fails(torch.autograd.Function):
    """Does nothing, and fails in its backward pass."""

    @staticmethod
    def forward(context: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise Mistake
