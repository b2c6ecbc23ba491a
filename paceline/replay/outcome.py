"""What a replay comes to."""

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
    """Bits differ; the text says which, for the first time."""


class ReplayedPush(NamedTuple):
    """A push, to look at."""

    worker: int
    step: int
    version: int  # of the parameters that it was computed from
    loss: float
    gradients: dict[str, Tensor]  # by the parameter's name; none for one that had no part in the loss


def gradients_of(layouts: ModelLayouts, push: Arena, used: bytes) -> dict[str, Tensor]:
    """Copy the gradients of a push, by name; ``used`` has a bit for each parameter that has one."""
    bits = int.from_bytes(used, "little")
    named = zip(layouts.trained_names, push.views, strict=False)
    return {name: view.clone() for position, (name, view) in enumerate(named) if bits >> position & 1}


@dataclass(frozen=True)
class Replayed:
    """What a replay came to."""

    version: int  # of the parameters now
    commits: int
    pushes: int
    hashes: int  # compared
    digest: str  # of the parameters and buffers now
    difference: str | None  # the first, if bits differ; all that was before it is equal
    whole: bool  # the trace has the run's end


def same_bits(first: float, second: float) -> bool:
    """Whether two numbers are the same to the last bit; one NaN is as good as another."""
    if math.isnan(first) and math.isnan(second):
        return True
    return struct.pack("<d", first) == struct.pack("<d", second)
