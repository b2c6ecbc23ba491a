"""Trainings in which the server's gradients tell which samples are in them, and how often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from live import Cluster
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState


class Seen(nn.Module):
    """One parameter for each sample: the gradient of a batch's mean names its samples.

    It is called in several modules, so that a step can be cancelled inside.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(samples))
        self.before, self.after = nn.Identity(), nn.Identity()

    def forward(self, places: Tensor) -> Tensor:
        return cast(Tensor, self.after(self.seen[self.before(places)]))


class Ledger(SGD):
    """Keeps the gradients of every step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.gradients: list[Tensor] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        # A commit of pushes without examples leaves no gradient.
        self.gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone())
        super().step()


def samples(count: int) -> TensorDataset:
    """A data set that consists of its own indices."""
    return TensorDataset(torch.arange(count))


def seen_state(count: int) -> TrainState:
    model = Seen(count)
    return TrainState(model=model, optimizers=[Ledger(model)])


def times_used(cluster: Cluster, *, since: int = 0) -> list[float]:
    """How often each sample is in the commits: a commit's mean over its examples times their number."""
    ledger = cast(Ledger, cluster.train_state.optimizers[0])
    assert len(ledger.gradients) == len(cluster.host.commits)
    total = sum(
        gradient * commit.examples
        for gradient, commit in zip(ledger.gradients[since:], cluster.host.commits[since:], strict=True)
    )
    return [round(float(number), 3) for number in cast(Tensor, total)]


def train(
    session: WorkerSession,
    model: nn.Module,
    data: Any,
    *,
    before_step: Callable[[], None] = lambda: None,
    **options: Any,
) -> list[bool]:
    """Go through the batches; tell of each block whether it was cancelled."""
    cancelled = []
    for (places,) in session.batches(data, **options):
        with session.step() as step:
            before_step()
            loss = model(places).mean()
            step.record(loss=loss)
            loss.backward()
        cancelled.append(step.cancelled)
    return cancelled
