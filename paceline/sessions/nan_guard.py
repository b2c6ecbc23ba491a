"""The treatment of a loss that is NaN or infinite: stop the run, skip the step on all workers, or ignore it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.errors import CommError, NonFiniteLossError

OnNaN = Literal["stop", "skip", "ignore"]


@dataclass(frozen=True)
class Where:
    """Which worker found a bad loss, at which step, and the last checkpoint."""

    rank: int
    world_size: int
    step: int
    checkpoint: Path | None

    def __str__(self) -> str:
        return f"worker {self.rank}, step {self.step}"

    @property
    def way_back(self) -> str:
        return f"the last good checkpoint is {self.checkpoint}" if self.checkpoint else "there is no checkpoint"


class SkipUpdate(Exception):
    """Raised inside an optimizer that evaluates the loss itself, to abandon its update."""


@dataclass
class NaNGuard:
    """Keep losses that are not finite out of the parameters, and such parameters out of checkpoints.

    ``locate`` is called only for an error message, since it looks for checkpoints.
    """

    on_nan: OnNaN
    locate: Callable[[], Where]
    each_skips: bool = False  # whether a worker may skip an update that others make
    _buffers: list[Tensor] = field(default_factory=list)  # of the model, as they were before the update

    def skips(self, own: float | None, everybody: float | None) -> bool:
        """Tell whether to skip the update, all workers alike; raise if a bad loss is to stop the run.

        ``everybody`` is the mean over all workers, known where losses were recorded before backward.
        """
        if self.on_nan == "ignore":
            return False
        bad = next((loss for loss in (own, everybody) if loss is not None and not math.isfinite(loss)), None)
        if bad is None:
            return False
        where = self.locate()
        together = where.world_size == 1 or (everybody is not None and not math.isfinite(everybody))
        if self.on_nan == "skip" and not together and not self.each_skips:
            raise self._error(bad, "workers can only skip together if the loss is recorded before backward()")
        if self.on_nan == "skip":
            return True
        if own is not None and math.isfinite(own):
            raise CommError(f"{where}: the loss of another worker is {bad}")
        raise self._error(bad, "the parameters were left as they were before this step")

    def check_closure(self, loss: float, *, first: bool) -> None:
        """Refuse a bad loss inside an optimizer that evaluates it several times; only the first can be skipped."""
        if self.on_nan != "ignore" and not math.isfinite(loss):
            if self.on_nan == "skip" and first:
                raise SkipUpdate
            raise self._error(loss, "the update that was under way was given up")

    def remember_buffers(self, model: nn.Module, *, always: bool = False) -> None:
        """Copy the buffers, if steps may be skipped: forward passes change them (BatchNorm)."""
        if always or self.on_nan == "skip":
            self._buffers = [buffer.detach().clone() for buffer in model.buffers()]

    def restore_buffers(self, model: nn.Module) -> None:
        """Undo the changes of a skipped update's forward passes to the buffers."""
        if self._buffers:
            with torch.no_grad():
                for buffer, before in zip(model.buffers(), self._buffers, strict=True):
                    buffer.copy_(before)

    def check_parameters(self, model: nn.Module) -> None:
        """Refuse to save parameters that are not finite."""
        if self.on_nan == "ignore":
            return
        for name, parameter in model.named_parameters():
            if not torch.isfinite(parameter).all():
                where = self.locate()
                raise NonFiniteLossError(
                    f"{where}: {name} is no longer finite, so no checkpoint is written; {where.way_back}. "
                    "Lower the learning rate, or save it all the same (on_nan='ignore', --on-nan ignore)"
                )

    def _error(self, loss: float, left: str) -> NonFiniteLossError:
        where = self.locate()
        return NonFiniteLossError(
            f"{where}: the loss is {loss}; {left}; {where.way_back}. "
            "Lower the learning rate, or skip such steps (on_nan='skip', --on-nan skip)"
        )
