"""Average seldom while the loss is high and more often as it falls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.periodic import Periodic
from paceline.policies.progress import Progress


@dataclass(frozen=True, kw_only=True)
class AdaComm(Periodic):
    """Average the parameters after a number of steps that falls with the loss (Wang and Joshi, SysML 2019).

    The number is ``every`` at first. After each ``window`` of steps it is chosen from F0, the loss in the first step,
    and F, that of the window, as ``every`` * sqrt(F / F0), rounded up. The optimizer's state is not averaged.

    >>> str(AdaComm(every=16, window=500))
    'ada-comm(every=16, window=500)'
    """

    name: ClassVar[str] = "ada-comm"
    needs_loss: ClassVar[bool] = True

    window: int = 100  # steps whose losses are averaged for the next choice

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise UsageError(f"policy {self.name!r}: window must be at least 1, got {self.window}")

    def period(self, progress: Progress) -> int:
        """Steps until the next average.

        >>> AdaComm(every=16).period(Progress(first_loss=2.0, loss=0.5))
        8
        """
        if progress.loss is None or progress.first_loss is None:
            return self.every
        if progress.loss <= 0 or progress.first_loss <= 0:
            return 1
        if progress.loss >= progress.first_loss:  # also an infinite one
            return self.every
        return max(1, math.ceil(self.every * math.sqrt(progress.loss / progress.first_loss)))
