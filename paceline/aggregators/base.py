"""The base of every aggregator: a frozen value with a name and a text form, which works on tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

import torch
from torch import Tensor

from paceline.spec import check_types, to_spec


class Needs(Enum):
    """What has to be kept of the pushes until their commit."""

    SUM = auto()  # their weighted sum: a push is added to it when it comes
    PUSHES = auto()  # each push
    READS = auto()  # each push, and the parameters that its worker read for it
    PAIRS = auto()  # each push; at the commit, a number for each pair of them


@dataclass(frozen=True, kw_only=True)
class Aggregator(ABC):
    """How the pushes of a commit combine into one; a subclass is a frozen dataclass and one line in ``AGGREGATORS``."""

    name: ClassVar[str]  # as users type it, with hyphens
    needs: ClassVar[Needs] = Needs.PUSHES
    whole: ClassVar[bool] = False  # whether pairs are compared with their buffers, and by which gradients there are

    def __post_init__(self) -> None:
        check_types("aggregator", self.name, self)

    def __str__(self) -> str:
        """The text form, which ``parse_aggregator`` reads back to an equal aggregator."""
        return to_spec(self.name, self)

    @property
    def least(self) -> int:
        """The number of pushes that a commit must have; a smaller one changes nothing."""
        return 1

    @property
    def remembers(self) -> bool:
        """Whether ``correct`` remembers something of each parameter from push to push."""
        return False

    def correct(self, push: Tensor, read: Tensor, now: Tensor, remembered: Tensor | None = None) -> Tensor:
        """Correct the gradients of a parameter that its worker has ``read``, given the parameter as it is ``now``.

        Called before ``combine`` for each push that has gradients of the parameter, in order, if ``needs`` is
        ``READS``. If the aggregator ``remembers``, it has a tensor like the parameter to change in place: real numbers
        in at least single precision, at first 0.
        """
        return push

    def compare(self, one: Tensor, other: Tensor) -> float:
        """A number for two vectors, the same for either order, such as their squared distance.

        Two pushes are cut into such vectors, by parameters and servers; the number of the pushes is the sum over them.
        Called if ``needs`` is ``PAIRS``.
        """
        return 0.0

    def weigh(self, pairs: Tensor, weights: Sequence[float]) -> Sequence[float]:
        """Give the weights by which ``combine`` takes the pushes; those of weight 0 it is not given.

        ``pairs`` is a symmetric matrix in double precision: the numbers that ``compare`` gives for all pushes, or
        infinity for pushes that are of different groups. Called before ``combine``, if ``needs`` is ``PAIRS``.
        """
        return weights

    @abstractmethod
    def combine(self, pushes: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Combine one vector of each push into a new one, in at least single precision.

        No weight is 0. Of pushes that are all the same the result is that push times the sum of the weights. A vector
        is only a part of a push, that of one dtype and one server, so each coordinate's result must depend on that
        coordinate alone.
        """


def total_of(weights: Sequence[float]) -> float:
    """The sum of the weights; exactly 1 if it is 1 but for rounding.

    >>> total_of([0.1] * 10)
    1.0
    """
    total = math.fsum(weights)
    return 1.0 if math.isclose(total, 1.0, rel_tol=1e-9) else total


def as_real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
