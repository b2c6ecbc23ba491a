"""The result of a replay."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from paceline.store.layout import Arena, ModelLayouts

Tell = Callable[[int, int], None]
"""Told now and then how many commits are done, and of how many."""


class Differs(Exception):
    """Bits differ from the run's; the text names the first difference."""


class ReplayedPush(NamedTuple):
    """A push, for a user to look at."""

    worker: int
    step: int
    version: int  # of the parameters that it was computed from
    loss: float
    gradients: dict[str, Tensor]  # by parameter name, without parameters that the loss did not depend on


def gradients_of(layouts: ModelLayouts, push: Arena, used: bytes) -> dict[str, Tensor]:
    """Copy the gradients of a push, by name; ``used`` has a bit for each parameter that has one."""
    bits = int.from_bytes(used, "little")
    named = zip(layouts.trained_names, push.views, strict=False)
    return {name: view.clone() for position, (name, view) in enumerate(named) if bits >> position & 1}


@dataclass(frozen=True)
class Replayed:
    """The result of a replay."""

    version: int  # of the last parameters
    commits: int
    pushes: int
    hashes: int  # number of hashes compared
    digest: str  # of the last parameters and buffers
    difference: str | None  # the first difference, if bits differ; everything before it is equal
    whole: bool  # whether the trace contains the run's end


def same_bits(first: float, second: float) -> bool:
    """Whether two numbers have the same bits; all NaN count as equal."""
    if math.isnan(first) and math.isnan(second):
        return True
    return struct.pack("<d", first) == struct.pack("<d", second)
