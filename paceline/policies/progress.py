"""How far a run has come, as far as a decision may depend on it."""

from __future__ import annotations

from typing import NamedTuple


class Progress(NamedTuple):
    """How far a run has come; the same on all workers."""

    steps: int = 0  # updates made
    epoch: int = 0  # of the last update, from 0
    rate: float = 0.0  # the learning rate of the next update
    decayed: bool = False  # whether a rate was ever below the highest before it; the rise of a warm-up is no decay
    loss: float | None = None  # the mean over the workers and the policy's last window; None: not known
    first_loss: float | None = None  # the mean over the workers in the run's first step
