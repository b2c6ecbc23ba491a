"""The workers as the server knows them, and what each has cost and given."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from paceline.server.demand import Demand
from paceline.store.layout import Arena
from paceline.transport.listening import Peer


@dataclass(kw_only=True)
class Figures:
    """What one worker has done, over all its incarnations."""

    pushes: int = 0  # committed or to be
    cancelled: int = 0
    dropped: int = 0  # came too late
    refused: int = 0  # not finite
    examples: int = 0
    staleness: int = 0  # sum over its committed pushes
    computing_seconds: float = 0.0  # as it says itself, of pushes
    waiting_seconds: float = 0.0  # from its push to its next step
    thrown_away_seconds: float = 0.0  # from the beginning of steps to their cancelling
    bytes_in: int = 0  # of tensors, to the server, on a network or through memory
    bytes_out: int = 0

    def as_dict(self) -> dict[str, Any]:
        """All of it, and the mean staleness in place of the sum."""
        values = dict(self.__dict__)
        values["staleness"] = self.staleness / self.pushes if self.pushes else None
        return values


class Standing(Enum):
    """Whether a member takes part in the policy's rounds, and if not, why."""

    IN_ROUNDS = auto()
    RESTING = auto()  # there was no batch for it
    AVERAGING = auto()  # it waits for a mean, so that a round must not wait for it
    AVERAGING_AT_REST = auto()  # there was no batch for it, and then it asked for a mean

    @property
    def rests(self) -> bool:
        return self in (Standing.RESTING, Standing.AVERAGING_AT_REST)


@dataclass(kw_only=True, eq=False)
class Member:
    """A worker that takes part."""

    rank: int
    peer: Peer
    gradients: Arena  # where its pushes are
    local: bool  # shares the server's memory
    figures: Figures
    life: int = 0  # its incarnation, as the policy knows it
    standing: Standing = Standing.IN_ROUNDS
    demand: Demand | None = None  # what it has asked steps for; None before, and after it was told that none are left
    ask: int = 0  # the number of its last asking
    step: int = -1  # the one that it was sent last
    step_began: float = 0.0
    pushed_at: float | None = None  # and no new step since then
    first_epoch: int = -1  # the epoch that it came in, if it came after the run's first one
