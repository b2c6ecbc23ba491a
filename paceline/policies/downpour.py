"""Several local steps between two pushes, of which the server adds the sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.gather import Async
from paceline.policies.messages import PushKind


@dataclass(frozen=True, kw_only=True)
class Downpour(Async):
    """Let each worker make ``period`` steps of its own, and add what they changed at once (Dean et al., 2012).

    The worker then reads the parameters again. With a period of 1 and plain SGD this is async, but for rounding.

    >>> str(Downpour(period=4))
    'downpour(period=4)'
    """

    name: ClassVar[str] = "downpour"
    kind: ClassVar[PushKind] = PushKind.DIFFERENCE

    period: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.period < 1:
            raise UsageError(
                f"policy {self.name!r}: period must be at least 1, got {self.period}; for example downpour(period=4)"
            )

    @property
    def local_steps(self) -> int:
        return self.period
