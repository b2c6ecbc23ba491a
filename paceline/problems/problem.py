"""A problem to train: a model, its data, its loss and its metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.errors import UsageError

Measure = Callable[[Tensor, Tensor], Tensor]
"""Outputs and targets of one batch -> one number, the mean over the batch's examples."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """The metric of a problem on its test data."""

    name: str
    measure: Measure
    higher_is_better: bool

    def reaches(self, value: float, target: float) -> bool:
        """Whether ``value`` is at least as good as ``target``."""
        return value >= target if self.higher_is_better else value <= target


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The default training options of a problem."""

    batch_size: int = 64
    epochs: int = 10
    optimizer: str = "sgd(lr=0.1, momentum=0.9)"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A model, data, loss and metric to train with the command, the virtual cluster and the studies.

    A problem of your own is a Python file with a function ``problem()`` that returns a ``Problem``;
    ``paceline train path/to/file.py`` trains it.
    """

    name: str
    make_model: Callable[[], nn.Module]  # makes a new model, initialised from torch's global generator
    train: Dataset[Any]  # of (input, target) pairs
    test: Dataset[Any]
    loss: Measure
    metric: Metric
    target: float | None = None  # the metric's value that counts as solved
    recipe: Recipe = field(default_factory=Recipe)

    def batch_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor, *, worker: int) -> Tensor:
        """The loss of a batch, whose ``backward()`` gives the gradients that this worker computes."""
        return self.loss(model(inputs), targets)

    def __post_init__(self) -> None:
        if not isinstance(self.metric, Metric):
            raise UsageError(
                f"problem {self.name!r}: metric must be a paceline.Metric, got {type(self.metric).__name__}"
            )
        for name in ("make_model", "loss"):
            if not callable(getattr(self, name)):
                raise UsageError(f"problem {self.name!r}: {name} must be a function, got {getattr(self, name)!r}")
