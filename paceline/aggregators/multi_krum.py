"""The mean of the pushes that are nearest to most others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.aggregators.krum import Krum
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class MultiKrum(Krum):
    """Take the mean of the ``keep`` pushes with the smallest scores of Krum (Blanchard et al., 2017).

    Without ``keep`` these are n - ``faulty`` - 2 of n pushes, the most for which resilience was proved (Damaskinos et
    al., 2019).

    >>> MultiKrum(faulty=1).num_kept(pushes=8)
    5
    """

    name: ClassVar[str] = "multi-krum"

    keep: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.keep < 1:
            raise UsageError(f"aggregator {self.name!r}: keep must be at least 1, got {self.keep}")

    @property
    def least(self) -> int:
        return max(super().least, (self.keep or 0) + self.faulty)  # of fewer, wrong ones would be kept

    def num_kept(self, pushes: int) -> int:
        return pushes - self.faulty - 2 if self.keep is None else self.keep
