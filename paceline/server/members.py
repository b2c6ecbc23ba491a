"""The workers that have joined the server, and the figures of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor

from paceline.server.demand import Demand
from paceline.store.behind import Behind
from paceline.store.codec_memory import CodecMemory
from paceline.store.layout import Arena
from paceline.transport.listening import Peer


@dataclass(kw_only=True)
class Figures:
    """The figures of one worker over all its incarnations."""

    pushes: int = 0  # accepted
    cancelled: int = 0
    dropped: int = 0  # late
    refused: int = 0  # not finite, or messages and packets that cannot be
    examples: int = 0
    staleness: int = 0  # sum over its committed pushes
    computing_seconds: float = 0.0  # of its pushes, as the worker measured
    waiting_seconds: float = 0.0  # from its push to its next step
    thrown_away_seconds: float = 0.0  # from the beginning of each cancelled step to its cancel
    forgotten: int = 0  # times that what its codec has kept back was lost, since it died or has joined again
    bytes_in: int = 0  # of tensors pushed, over a network or through memory, before a codec makes them fewer
    bytes_out: int = 0  # of tensors sent to it
    received: int = 0  # bytes that its connections' sockets have given, with all that is around tensors
    sent: int = 0  # bytes that they have taken

    def as_dict(self) -> dict[str, Any]:
        """All figures, with the mean staleness in place of the sum."""
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

    @property
    def averages(self) -> bool:
        return self in (Standing.AVERAGING, Standing.AVERAGING_AT_REST)


class GivenBatch(NamedTuple):
    """A batch that a member computes."""

    epoch: int = -1
    number: int = -1  # -1: it uses data of its own, or there is none
    weight: float = 1.0  # of its gradients, in a sum


@dataclass(kw_only=True, eq=False)
class Member:
    """A worker that has joined."""

    rank: int
    peer: Peer
    gradients: Arena  # the memory of its pushes
    packets: Tensor | None  # where its pushes are received, if they go through a codec
    last: Tensor | None = None  # the parameters of its last push that was taken, if those go through a codec
    behind: Behind | None  # what it has of the parameters, if these go through a codec
    remembers: CodecMemory | None = None  # what its codec remembers, if that is in memory of this host
    local: bool  # whether it shares the server's memory
    figures: Figures
    incarnation: int = 0  # of its process, and one more each time that it has come back
    life: int = 0  # its incarnation, as the policy knows it
    standing: Standing = Standing.IN_ROUNDS
    demand: Demand | None = None  # what it has asked steps for; None before, and after it was told that none are left
    ask: int = 0  # the number of its last request
    step: int = -1  # the last step that it was sent
    step_began: float = 0.0
    batches: list[GivenBatch] = field(default_factory=list)  # that it was given with its step, if that is of a round
    parts: deque[GivenBatch] = field(default_factory=deque)  # those of them for which it has to ask yet
    pushed_at: float | None = None  # when it pushed, until its next step
    taken: int = -1  # the step of its last push that was taken
    exchanges: int = -1  # the step of its last push of parameters, until another comes
    exchanged: bool = False  # whether that was committed: what was added lies in the place of the push
    counted: tuple[int, int] = (0, 0)  # bytes of its connection that are in the figures: received, sent
    first_epoch: int = -1  # in which it joined; -1 if the server began in that epoch

    @property
    def given(self) -> list[GivenBatch]:
        """Those of its batches of a round that it has got."""
        return self.batches[: len(self.batches) - len(self.parts)]
