"""Average the parameters of all workers at periods that depend on their losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from paceline.errors import UsageError
from paceline.peers.coding import Coding
from paceline.peers.group import Peers
from paceline.peers.periodic import PeriodicExchange
from paceline.policies import AdaComm, Progress


@dataclass
class _Losses:
    """The losses of a run, weighted by examples; ``own`` are this worker's, the others those of all workers."""

    own: float = 0.0  # since the last average
    own_examples: int = 0
    own_first: float = 0.0  # the first loss that this worker recorded
    own_first_examples: int = 0
    window: float = 0.0  # in the window under way
    window_examples: float = 0.0
    window_end: int = 0  # a step; 0: the run has not started
    loss: float | None = None  # the mean of the last window
    first_loss: float | None = None

    def add(self, loss: float, examples: int) -> None:
        """Count a step of this worker."""
        self.own += loss * examples
        self.own_examples += examples
        if not self.own_first_examples:
            self.own_first, self.own_first_examples = loss * examples, examples

    def told(self) -> tuple[float, float, float, float]:
        """The numbers that this worker adds to those of the others."""
        return self.own, self.own_examples, self.own_first, self.own_first_examples

    def hear(self, total: float, examples: float, first_total: float, first_examples: float) -> None:
        """Count the steps of all workers since the last average."""
        self.window += total
        self.window_examples += examples
        if self.first_loss is None and first_examples:
            self.first_loss = first_total / first_examples

    def end_window(self, end: int) -> None:
        """Have the mean of the window, and begin one until step ``end``."""
        if self.window_examples:
            self.loss = self.window / self.window_examples
        self.window, self.window_examples, self.window_end = 0.0, 0.0, end


class AdaCommExchange(PeriodicExchange):
    """Average the models of ``peers``, and on the way the losses on which the policy's next period depends."""

    def __init__(self, model: nn.Module, peers: Peers, policy: AdaComm, coding: Coding | None = None) -> None:
        super().__init__(model, peers, policy, coding)
        self._window = policy.window
        self._losses = _Losses()

    def started(self, progress: Progress) -> None:
        if not self._losses.window_end:
            self._losses.end_window(progress.steps + self._window)
        super().started(progress)

    def after_update(self, progress: Progress) -> bool:
        loss = self._backward.loss()
        if loss is not None and math.isfinite(loss):
            self._losses.add(loss, self._backward.examples)
        return super().after_update(progress)

    def numbers(self) -> Sequence[float]:
        return self._losses.told()

    def exchange(self, progress: Progress) -> bool:
        means = self.average_changes()
        self.agreed()
        self._losses.hear(*means.numbers)
        if progress.steps >= self._losses.window_end:
            if self._losses.first_loss is None:
                raise UsageError(
                    f"policy {self._policy} chooses its period by the loss, and no worker has recorded one in the "
                    f"first {progress.steps} steps; record it inside the step: step.record(loss=loss)"
                )
            self._losses.end_window(progress.steps + self._window)
        return means.stop

    def period(self, progress: Progress) -> int:
        return super().period(progress._replace(loss=self._losses.loss, first_loss=self._losses.first_loss))

    def agreed(self) -> None:
        super().agreed()
        self._losses.own, self._losses.own_examples = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "losses": asdict(self._losses)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._losses = _Losses(**state.get("losses", {}))
