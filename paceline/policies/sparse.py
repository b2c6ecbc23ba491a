"""Threads of one process that update shared parameters, for problems whose updates touch few of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.base import PeersPolicy, Policy


@dataclass(frozen=True, kw_only=True)
class SparsePolicy(Policy):
    """How the threads of the sparse engine share the parameters; a subclass is one scheme."""

    deterministic: ClassVar[bool] = False  # whether the same seed and number of threads give the same bits
    races: ClassVar[bool] = False  # whether several threads write at the same time


def check_for_module(policy: Policy) -> None:
    """Raise if a policy is for sparse problems alone."""
    if isinstance(policy, SparsePolicy) and not isinstance(policy, PeersPolicy):
        raise UsageError(
            f"policy {policy.name!r} is for sparse problems (svm, matrix-completion, graph-cut); for a module use "
            "hogwild, which has no locks either, or all-reduce"
        )


@dataclass(frozen=True, kw_only=True)
class Serial(SparsePolicy):
    """Make one update after the other, on one thread.

    >>> str(Serial())
    'serial'
    """

    name: ClassVar[str] = "serial"
    deterministic: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class ThreadedPolicy(SparsePolicy):
    """A scheme of several threads."""

    threads: int = 0  # 0: as many as are fastest here, by a short measurement

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threads <= 256:
            raise UsageError(f"policy {self.name!r}: threads must be from 1 to 256, or 0 to choose, got {self.threads}")


@dataclass(frozen=True, kw_only=True)
class Atomic(ThreadedPolicy):
    """As ``hogwild``, but each change of a coordinate is a compare-and-swap, so none is lost."""

    name: ClassVar[str] = "atomic"
    races: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Locked(ThreadedPolicy):
    """Lock the coordinates of an update while it is computed and made (AIG of Niu et al., NIPS 2011)."""

    name: ClassVar[str] = "locked"


@dataclass(frozen=True, kw_only=True)
class RoundRobin(ThreadedPolicy):
    """Compute gradients at the same time, and apply them in turn (Langford et al., NIPS 2009)."""

    name: ClassVar[str] = "round-robin"


@dataclass(frozen=True, kw_only=True)
class Average(ThreadedPolicy):
    """Train a copy on each thread, and average them after each epoch (Zinkevich et al., NIPS 2010)."""

    name: ClassVar[str] = "average"
    deterministic: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Cyclades(ThreadedPolicy):
    """Run only updates side by side that share no coordinate: the bits of ``serial`` (Pan et al., NIPS 2016)."""

    name: ClassVar[str] = "cyclades"
    deterministic: ClassVar[bool] = True

    batch: int = 0  # updates of a round, of all threads; 0: as many as are best for the data

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.batch <= 1 << 20:
            raise UsageError(f"policy 'cyclades': batch must be from 1 to {1 << 20}, or 0 to choose, got {self.batch}")
