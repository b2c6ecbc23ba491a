"""How many learners a worker should have, found by trying."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Answer = Literal["add", "remove", "keep"]


@dataclass(frozen=True, kw_only=True)
class AutoTuner:
    """Add learners while each of them raises the throughput enough (Koliousis et al., CROSSBOW, VLDB 2019).

    The first that does not is removed, and their number stays.

    >>> tuner = AutoTuner()
    >>> for throughput in (100.0, 150.0, 155.0):
    ...     answer, tuner = tuner.measured(throughput)
    ...     print(answer, tuner.learners)
    add 2
    add 3
    remove 2
    """

    gain: float = 0.1  # by which a learner must raise the throughput, relative to that without it
    learners: int = 1
    before: float | None = None  # the throughput with one learner fewer
    settled: bool = False

    def measured(self, throughput: float) -> tuple[Answer, AutoTuner]:
        """Hear the throughput with the present learners; answer what to do, and with it the tuner from then on."""
        if self.settled:
            return "keep", self
        if self.before is None or throughput > self.before * (1 + self.gain):
            return "add", replace(self, learners=self.learners + 1, before=throughput)
        return "remove", replace(self, learners=self.learners - 1, settled=True)
