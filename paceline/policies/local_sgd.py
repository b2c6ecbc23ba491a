"""Let every worker train by itself, and average the parameters periodically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.policies.periodic import Periodic


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Periodic):
    """Average the parameters after every ``every`` steps; each worker updates its own in between (Stich, ICLR 2019).

    The optimizer's state, such as momentum, is not averaged.

    >>> str(LocalSGD(every=8))
    'local-sgd(every=8)'
    """

    name: ClassVar[str] = "local-sgd"
