"""Let each worker and a center in memory that all share pull each other, without locks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.peers.group import Peers
from paceline.peers.without_locks import WithoutLocks
from paceline.policies import HogwildEASGD, Progress


class HogwildEASGDExchange(WithoutLocks):
    """Exchange between each worker of ``peers`` and the center, which is the answer of the run.

    A worker reads the center, and adds to it what it takes from its own parameters, whatever others do meanwhile.
    BatchNorm's statistics stay each worker's own, and are averaged in the answer.
    """

    common_state = ("memory", "center")

    def __init__(self, model: nn.Module, peers: Peers, policy: HogwildEASGD) -> None:
        super().__init__(model, peers, policy)
        self._period, self._alpha = policy.period, policy.alpha
        self._answer: list[Tensor] = []  # the center as it was when all looked at it last, or in a checkpoint

    def first_values(self) -> Sequence[Tensor]:
        return self._answer or self._trained

    def enter(self) -> None:
        pass

    def after_update(self, progress: Progress) -> bool:
        if progress.steps % self._period == 0:
            with torch.no_grad():
                self._pull()
        return super().after_update(progress)

    def _pull(self) -> None:
        self.races.read()
        moves = [
            torch.sub(parameter, center).mul_(self._alpha)
            for parameter, center in zip(self._trained, self.shared, strict=True)
        ]
        self.races.write()
        for parameter, center, move in zip(self._trained, self.shared, moves, strict=True):
            center.add_(move)
            parameter.sub_(move)
        self.races.wrote()

    def load_answer(self) -> None:
        self.rest()
        answer = [center.clone() for center in self.shared]
        self.confirm()
        self.average()
        self._answer = answer
        with torch.no_grad():
            for parameter, value in zip(self._trained, answer, strict=True):
                parameter.copy_(value)

    def conclude(self) -> None:
        self.load_answer()
        self.forget_memory()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "center": self._answer}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._answer = [*state.get("center", [])]
