"""The times of a step: forward, backward, exposed communication, waiting, optimizer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from paceline.peers.reducer import Outcome


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one update on this worker, measured on its host (a GPU may still be computing).

    ``waited`` is the time in which slower workers were still computing. ``communication`` is the rest of the exchange
    that was not hidden by backward.
    """

    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0
    waited: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.communication + self.waited + self.optimizer


class StepClock:
    """Measure one step: call ``start``, run the model, then call ``computed`` and ``updated``.

    ``model`` is the module that the user calls; a hook on it marks the end of the forward pass. If it was compiled in
    place (``model.compile()``), it gets no hook, since it would compile that too; its forward counts as backward.
    """

    def __init__(self, model: nn.Module) -> None:
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        self._hook = None if compiled else model.register_forward_hook(self._forward_done)
        self._forward = self._backward = 0.0

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def start(self, *, fresh: bool) -> None:
        """Begin a block; ``fresh`` if it is the first of its update (accumulating blocks add up)."""
        if fresh:
            self._forward = self._backward = 0.0
        self._mark = self._forward_end = time.perf_counter()

    def _forward_done(self, *_: object) -> None:
        if torch.is_grad_enabled():  # an evaluation inside the step is not its forward pass
            self._forward_end = time.perf_counter()

    def computed(self, outcome: Outcome | None) -> None:
        """Mark the end of the block's backward pass and of its exchange, if there was one."""
        self._done = time.perf_counter()
        ended = outcome.backward_ended if outcome is not None else self._done
        self._forward += self._forward_end - self._mark
        self._backward += max(0.0, ended - self._forward_end)

    def updated(self, outcome: Outcome | None, rank: int) -> Timing:
        """Mark the end of the optimizer's step, and return all times."""
        exposed = outcome.exposed_seconds if outcome is not None else 0.0
        waited = min(exposed, outcome.waited_seconds[rank]) if outcome is not None else 0.0
        return Timing(
            forward=self._forward,
            backward=self._backward,
            communication=exposed - waited,
            waited=waited,
            optimizer=time.perf_counter() - self._done,
        )
