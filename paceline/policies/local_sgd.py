"""Let every worker train by itself, and average the parameters periodically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.base import PeersPolicy


@dataclass(frozen=True, kw_only=True)
class LocalSGD(PeersPolicy):
    """Average the parameters after every ``every`` steps; each worker updates its own in between (Stich, ICLR 2019).

    The optimizer's state, such as momentum, is not averaged.

    >>> str(LocalSGD(every=8))
    'local-sgd(every=8)'
    """

    name: ClassVar[str] = "local-sgd"

    every: int  # steps between two averages

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 1:
            raise UsageError(
                f"policy {self.name!r}: every must be at least 1, got {self.every}; for example local-sgd(every=8)"
            )

    def averages_after(self, steps: int) -> bool:
        """Whether the workers average their parameters after this many steps.

        >>> [steps for steps in range(1, 10) if LocalSGD(every=4).averages_after(steps)]
        [4, 8]
        """
        return steps % self.every == 0
