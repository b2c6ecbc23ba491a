"""The base of policies under which workers update their own parameters and exchange them from time to time."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.policies.base import PeersPolicy
from paceline.policies.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Periodic(PeersPolicy):
    """Exchange parameters every few steps; a subclass says after how many."""

    every: int  # steps between two exchanges

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise UsageError(
                f"policy {self.name!r}: every must be at least 1, got {self.every}; for example {self.name}(every=8)"
            )

    def period(self, progress: Progress) -> int:
        """Steps until the next exchange, asked at the start and after each exchange."""
        return self.every
