"""Let every worker train by itself, pulled to a central average that the workers pull in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from paceline.errors import UsageError
from paceline.policies.base import PeersPolicy

_DROP = 0.5  # the rate has dropped when it is at most this fraction of its highest value since the last restart
_BETA = 0.9  # alpha times the number of workers, as Zhang et al. chose it


class ElasticRule(NamedTuple):
    """What the workers x_i and the central average z do to each other, in numbers.

    c_i = alpha (x_i - z), with x_i from before the update; then x_i <- x_i - c_i, beside the update, and
    z <- z + sum_i c_i + momentum (z - z_before).
    """

    alpha: float
    momentum: float = 0.0
    every: int = 1  # updates from one exchange to the next
    restarts: bool = False  # whether a drop of the learning rate sets all workers to z

    def exchanges_in(self, step: int) -> bool:
        """Whether there is an exchange in this update, counted from 1.

        >>> [step for step in range(1, 10) if ElasticRule(alpha=0.5, every=4).exchanges_in(step)]
        [4, 8]
        """
        return step % self.every == 0

    def restarts_at(self, rate: float, highest: float) -> bool:
        """Whether the learning rate has dropped so far from its ``highest`` value since the last restart.

        A rate that falls a little in every step must not restart in every step: z would stand still.

        >>> rule = ElasticRule(alpha=0.5, restarts=True)
        >>> rule.restarts_at(0.01, 0.1), rule.restarts_at(0.099, 0.1)
        (True, False)
        """
        return self.restarts and 0 < rate <= _DROP * highest


@dataclass(frozen=True, kw_only=True)
class ElasticPolicy(PeersPolicy, ABC):
    """The base of policies with a central average."""

    alpha: float | None = None  # how far a worker is pulled to the central average in an exchange

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and not 0 < self.alpha <= 1:
            raise UsageError(f"policy {self.name!r}: alpha must be above 0 and at most 1, got {self.alpha}")

    def check_processes(self, processes: int) -> None:
        self.rule(processes)

    @abstractmethod
    def rule(self, workers: int) -> ElasticRule:
        """The rule for this many workers; raise if the exchange alone would make them diverge."""

    def _checked(self, rule: ElasticRule, workers: int) -> ElasticRule:
        # With u for the last move of z, the distance d of the workers' mean from z follows
        # d' = (1 - (P+1) alpha) d - mu u and u' = P alpha d + mu u: below this alpha it shrinks to 0.
        limit = 2 * (1 + rule.momentum) / (workers + 1 + rule.momentum)
        if workers > 1 and rule.alpha >= limit:
            raise UsageError(
                f"policy {self} diverges on {workers} workers: alpha must be below {limit:.3g} there, and is "
                f"{rule.alpha:g}; leave it out, or choose about 1/{workers}"
            )
        return rule


@dataclass(frozen=True, kw_only=True)
class SyncEASGD(ElasticPolicy):
    """Exchange with the central average in every step (Zhang et al., NeurIPS 2015; You et al., SC 2017).

    Without ``alpha`` it is 0.9 / workers.

    >>> str(SyncEASGD(alpha=0.25))
    'sync-easgd(alpha=0.25)'
    >>> SyncEASGD().rule(workers=3).alpha
    0.3
    """

    name: ClassVar[str] = "sync-easgd"

    def rule(self, workers: int) -> ElasticRule:
        return self._checked(ElasticRule(alpha=_BETA / workers if self.alpha is None else self.alpha), workers)


@dataclass(frozen=True, kw_only=True)
class SMA(ElasticPolicy):
    """Synchronous model averaging: the central average has momentum and restarts (Koliousis et al., CROSSBOW, 2019).

    Each worker is ``learners`` processes on one device, each with a replica of its own; ``auto`` finds how many.
    Without ``alpha`` it is 1 / learners of all workers.

    >>> str(SMA(every=2))
    'sma(every=2)'
    >>> SMA(learners=2).rule(workers=4)
    ElasticRule(alpha=0.25, momentum=0.9, every=1, restarts=True)
    """

    name: ClassVar[str] = "sma"

    momentum: float = 0.9  # of the central average
    every: int = 1  # updates from one exchange to the next
    learners: int | Literal["auto"] = 1  # of each worker

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise UsageError(f"policy {self.name!r}: momentum must be at least 0 and below 1, got {self.momentum}")
        for option, count in (("every", self.every), ("learners", self.learners)):
            if count != "auto" and count < 1:
                raise UsageError(f"policy {self.name!r}: {option} must be at least 1, got {count}")

    @property
    def processes_per_worker(self) -> int:
        if self.learners == "auto":
            raise UsageError(
                f"policy {self}: the learners of auto are found by paceline train and paceline run, given --policy "
                f"'{self}'; elsewhere say how many, as in sma(learners=2)"
            )
        return self.learners

    def rule(self, workers: int) -> ElasticRule:
        alpha = 1 / workers if self.alpha is None else self.alpha
        rule = ElasticRule(alpha=alpha, momentum=self.momentum, every=self.every, restarts=True)
        return self._checked(rule, workers)
