"""Average the parameters of all workers after every few steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.peers.averaging import Averager
from paceline.peers.exchange import BackwardPass, PeersExchange
from paceline.peers.group import Peers
from paceline.policies import LocalSGD


class LocalSGDExchange(PeersExchange):
    """Let the workers of ``peers`` update their own ``model``, and average the models when the policy says so.

    An average is weighted by the examples that each worker has used since the last one. Buffers such as BatchNorm's are
    averaged with the parameters.
    """

    replicas_differ = True

    def __init__(self, model: nn.Module, peers: Peers, policy: LocalSGD) -> None:
        super().__init__(model, peers)
        self._policy = policy
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._averager = Averager(self._trained, self.buffers, peers)
        self._steps = 0  # since the last average
        self._examples = 0  # of this worker in these steps
        self._asked_to_stop: Callable[[], bool] = lambda: False
        self._gradients: list[Tensor | None] | None = None  # from before a pass over borrowed data

    def accumulate(self, *, examples: int, total: int | None) -> None:
        self._leave_out_borrowed()
        self._examples += examples
        if examples == 0:
            self._gradients = [None if each.grad is None else each.grad.clone() for each in self._trained]

    def begin(self, backward: BackwardPass) -> None:
        self._asked_to_stop = backward.stop
        self.accumulate(examples=backward.examples, total=backward.total)

    def finish(self) -> None:
        self._leave_out_borrowed()

    def updated(self, steps: int) -> bool:
        self._steps += 1
        if not self._policy.averages_after(steps):
            return False
        stop = self._average()
        self._steps = self._examples = 0
        return stop

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        own = [tensor.detach().clone() for tensor in (*self._trained, *self.buffers())]
        self.conclude()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip((*self._trained, *self.buffers()), own, strict=True):
                    tensor.copy_(value)

    def conclude(self) -> None:
        if self._steps:  # else all workers already have the average
            self._average()

    def _average(self) -> bool:
        """Average the models; True if a worker was asked to stop."""
        return self._averager.average(weight=self._examples, tag=self._steps, stop=self._asked_to_stop())

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "examples": self._examples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._examples = int(state.get("steps", 0)), int(state.get("examples", 0))

    def _leave_out_borrowed(self) -> None:
        """Restore the gradients from before a pass over borrowed data."""
        if self._gradients is not None:
            for parameter, gradient in zip(self._trained, self._gradients, strict=True):
                parameter.grad = gradient
            self._gradients = None
