"""Let the workers of one host update memory that all of them share, without locks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.base import PeersPolicy
from paceline.policies.sparse import ThreadedPolicy


@dataclass(frozen=True, kw_only=True)
class Hogwild(ThreadedPolicy, PeersPolicy):
    """Update parameters that lie in memory shared by all workers, without locks (Niu et al., NeurIPS 2011).

    The workers of a module are processes; those of a sparse problem are ``threads``. An update may overwrite another.

    With ``record`` each parameter has a version: workers copy it before a step and update it one after the other, and
    what each of them has read and written is recorded, so that the run can be replayed.

    >>> str(Hogwild(record=True))
    'hogwild(record=true)'
    """

    name: ClassVar[str] = "hogwild"
    races: ClassVar[bool] = True
    shares_memory: ClassVar[bool] = True

    record: bool = False  # of a module's run

    def check_processes(self, processes: int) -> None:
        if self.threads:
            raise UsageError(
                f"policy {self}: threads are for sparse problems; the workers of a module are processes, as in "
                f"paceline run --workers {self.threads} --policy {self.name}"
            )


@dataclass(frozen=True, kw_only=True)
class HogwildEASGD(PeersPolicy):
    """Let each worker and a center in shared memory pull each other after every ``period`` steps, without locks.

    It is EASGD (Zhang et al., NeurIPS 2015) without a lock on the center (You et al., SC 2017): of a worker's
    parameters x and the center z, alpha (x - z) is added to z and taken from x.

    >>> str(HogwildEASGD(period=10, alpha=0.1))
    'hogwild-easgd(period=10, alpha=0.1)'
    """

    name: ClassVar[str] = "hogwild-easgd"
    shares_memory: ClassVar[bool] = True

    period: int
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        example = "for example hogwild-easgd(period=10, alpha=0.1)"
        if self.period < 1:
            raise UsageError(f"policy {self.name!r}: period must be at least 1, got {self.period}; {example}")
        if not 0 < self.alpha < 1:
            raise UsageError(f"policy {self.name!r}: alpha must be above 0 and below 1, got {self.alpha}; {example}")
