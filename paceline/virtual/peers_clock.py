"""The clocks of virtual peers, and the count of the steps that all of them have made."""

from __future__ import annotations

import math

import numpy as np

from paceline.policies import parse_policy
from paceline.seeding import derive_seed
from paceline.virtual.cluster import standing_still
from paceline.virtual.network import PeersNetwork
from paceline.virtual.recording import RunRecord, exchange_spans
from paceline.virtual.scenario import Scenario
from paceline.virtual.tally import Tally

_PATIENCE = 1000  # commits at one time


class PeersClock:
    """The time of each worker, in steps of drawn length; ``network`` advances it by messages.

    A commit is a step that all workers have made. The clock is ``over`` once the next commit would be after
    ``seconds``. Every byte that is sent counts ``scale`` times.
    """

    def __init__(self, scenario: Scenario, *, examples: int, scale: float = 1.0) -> None:
        self._policy, self._delay = parse_policy(scenario.policy), scenario.compute
        self._random = np.random.Generator(np.random.PCG64(derive_seed(scenario.seed, "delays")))
        self.seconds = math.inf
        self._ranks = np.arange(scenario.workers)
        self.network = PeersNetwork(scenario.workers, scenario.link, scenario.exchange_seconds, scale=scale)
        self.tally, self.failed, self.examples = Tally(), 0.0, examples
        self._draws = np.zeros(scenario.workers)  # of the step under way
        self._begins = np.zeros(scenario.workers)
        self._still = 0  # commits since the clock last moved
        self.record: RunRecord | None = None  # where to write what the workers do, if anybody asks
        self.loss: float | None = None  # of the step under way, as far as it is known
        self.over = False

    @property
    def now(self) -> float:
        """The time up to which all is known."""
        if self.over:
            return self.seconds
        return self.tally.commit_times[-1] if self.tally.commit_times else 0.0

    @property
    def computed(self) -> float:
        """Seconds that workers have computed, up to now."""
        return self.tally.computed + float(np.clip(self.now - self._begins, 0.0, self._draws).sum())

    @property
    def dead(self) -> list[int]:
        """The workers that have failed: none, since peers without failures are simulated."""
        return []

    def mean_times(self) -> list[float]:
        """The mean compute time of a mini-batch on each worker."""
        return [self._delay.mean(worker) for worker in range(len(self._ranks))]

    def begin(self) -> None:
        """Draw the times of the next step."""
        self._begins = self.network.clocks.copy()
        self._draws = self._delay.sample(self._random, self._ranks, self._begins)
        self.over = bool(self.ends.max() > self.seconds)

    @property
    def ends(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The times at which the workers have computed the step under way."""
        return self._begins + self._draws

    def end(self, examples: int) -> None:
        """All workers have made the step, of this many examples."""
        at = float(self.network.clocks.max())
        if at > self.seconds:  # because of its messages
            self.over = True
            return
        self._still = 0 if at > self.now else self._still + 1
        if self._still > _PATIENCE and self.seconds < math.inf:
            raise standing_still(self._policy, self._delay, at)
        if self.record is not None:
            step = len(self.tally.commit_times)
            for worker, kind, start, end in exchange_spans(self._begins, self.ends, self.network.clocks):
                self.record.span(worker, kind, step, start, end)
            self.record.committed("step", at, self.network.bytes_out, examples, loss=self.loss)
        self.tally.computed += float(self._draws.sum())
        self._draws = np.zeros_like(self._draws)
        self.tally.commit_together(len(self._ranks), examples, at)
