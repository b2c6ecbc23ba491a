"""Counts of a simulation while its virtual clock runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from paceline.policies.messages import VERSION, Push


@dataclass
class Tally:
    """Counts and sums of a run so far."""

    commit_times: list[float] = field(default_factory=list)
    pushes: int = 0  # committed
    examples: int = 0  # of these
    staleness: Counter[int] = field(default_factory=Counter)  # commits missed -> pushes
    computed: float = 0.0  # seconds of all workers, up to the ends of the steps under way
    thrown_away: float = 0.0  # part of these, in steps that were cancelled or dropped
    cancelled: int = 0
    dropped: int = 0

    def commit(self, pushes: tuple[Push, ...], examples: int, version: int, at: float) -> None:
        """Count one commit on parameters of that version."""
        self.pushes += len(pushes)
        self.examples += examples
        for read, count in Counter(map(VERSION, pushes)).items():
            self.staleness[version - read] += count
        self.commit_times.append(at)  # last: an interrupted run is summarized too, and counts commits by this list

    def commit_together(self, workers: int, examples: int, at: float) -> None:
        """Count one commit of all workers, each on the newest parameters."""
        self.pushes += workers
        self.examples += examples
        self.staleness[0] += workers
        self.commit_times.append(at)
