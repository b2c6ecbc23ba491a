"""One training loop twice: as it is written by hand, and with a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import paceline

EPOCHS = 4


def nothing(*_: object) -> None:
    """What a case does at a place where it does nothing."""


@dataclass(kw_only=True)
class Parts:
    """All that a loop needs; a case makes it anew, with weights from torch's global stream."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    loss: Callable[[Any], Tensor]  # of one batch
    source: Any
    source_options: Mapping[str, Any] = field(default_factory=dict)  # of session.batches
    schedulers: Sequence[LRScheduler] = ()
    scaler: torch.amp.GradScaler | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    before_update: Callable[[], object] = nothing
    after_update: Callable[[Tensor], object] = nothing  # is given the loss
    stateful: Mapping[str, Any] = field(default_factory=dict)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "stateful": {name: thing.state_dict() for name, thing in self.stateful.items()},
            "stream": torch.get_rng_state(),
        }


def train_by_hand(parts: Parts, epochs: int = EPOCHS) -> list[Tensor]:
    """The loop as it is written without us; gives the losses."""
    losses = []
    batches = (batch for _ in range(epochs) for batch in parts.source)
    for number, batch in enumerate(batches, 1):
        loss = parts.loss(batch)
        parts.backward(loss)
        losses.append(loss.detach())
        if number % parts.accumulate:
            continue
        parts.before_update()
        if parts.clip_norm is not None:
            for optimizer in parts.optimizers if parts.scaler is not None else ():
                assert parts.scaler is not None
                parts.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parts.model.parameters(), parts.clip_norm)
        for optimizer in parts.optimizers:
            if parts.scaler is not None:
                parts.scaler.step(optimizer)
            else:
                optimizer.step()
        if parts.scaler is not None:
            parts.scaler.update()
        for scheduler in parts.schedulers:
            scheduler.step()
        for optimizer in parts.optimizers:
            optimizer.zero_grad()
        parts.after_update(loss.detach())
    return losses


class Crash(Exception):
    """Ends a loop as a fault in the user's code would: nothing more is saved."""


def train_by_session(
    parts: Parts, epochs: int = EPOCHS, *, crash_at: int | None = None, **options: Any
) -> list[Tensor]:
    """The same loop with a session; ``crash_at`` that many updates it is given up."""
    losses = []
    with paceline.join(
        parts.model,
        parts.optimizers,
        scheduler=parts.schedulers,
        scaler=parts.scaler,
        clip_norm=parts.clip_norm,
        stateful=parts.stateful,
        **options,
    ) as session:
        batches = session.batches(parts.source, epochs=epochs, **parts.source_options)
        for number, batch in enumerate(batches, 1):
            updates = number % parts.accumulate == 0
            with session.step(accumulate=not updates) as step:
                loss = parts.loss(batch)
                parts.backward(loss)
                if updates:
                    parts.before_update()
                step.record(loss=loss.detach())
            losses.append(loss.detach())
            if updates:
                parts.after_update(loss.detach())
            if session.steps == crash_at:
                raise Crash
    return losses
