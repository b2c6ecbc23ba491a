"""Where the time of a step goes: forward, backward, exposed communication, waiting, optimizer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from paceline.peers.reducer import Outcome


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one update on this worker, as its host saw them (a GPU may still be at work).

    ``communication`` is what backward did not hide, without ``waited``, the part in which slower workers were still
    computing.
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
    """Take the times of one step: ``start``, then the model's forward pass, ``computed``, ``updated``.

    ``model`` is the module that the user calls. One that was compiled in place (``model.compile()``) would compile the
    hook too; its forward pass is counted as backward.
    """

    def __init__(self, model: nn.Module) -> None:
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        self._hook = None if compiled else model.register_forward_hook(self._forward_done)
        self._forward = self._backward = 0.0

    def close(self) -> None:
        """Take the hook off the model."""
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
        """The block's backward is over, and its exchange if there was one."""
        self._done = time.perf_counter()
        ended = outcome.backward_ended if outcome is not None else self._done
        self._forward += self._forward_end - self._mark
        self._backward += max(0.0, ended - self._forward_end)

    def updated(self, outcome: Outcome | None, rank: int) -> Timing:
        """The optimizer has stepped."""
        exposed = outcome.exposed_seconds if outcome is not None else 0.0
        waited = min(exposed, outcome.waited_seconds[rank]) if outcome is not None else 0.0
        return Timing(
            forward=self._forward,
            backward=self._backward,
            communication=exposed - waited,
            waited=waited,
            optimizer=time.perf_counter() - self._done,
        )
