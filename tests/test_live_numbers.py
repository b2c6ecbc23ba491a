"""Under ``sync`` the workers of a live server compute what one process does on their joined batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from live import Cluster
from same_bits import assert_same
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import TensorDataset

from paceline.data.sampler import ShardedSampler
from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState

WORKERS, BATCH, EPOCHS, SEED = 3, 4, 3, 5
SAMPLES = 26  # an epoch is rounds of 3 batches of 4, and a last round of one batch of 2
DATA = TensorDataset(torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1)), torch.arange(SAMPLES) % 3)

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Optimize = Callable[[nn.Module], Optimizer]


def momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01, eps=1e-3)


def classify(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def state_of(model: nn.Module, optimize: Optimize, *, schedule: bool = False, **options: Any) -> TrainState:
    optimizer = optimize(model)
    schedulers: list[LRScheduler] = [StepLR(optimizer, 3, gamma=0.5)] if schedule else []
    return TrainState(model=model, optimizers=[optimizer], schedulers=schedulers, **options)


def trained_by_workers(train_state: TrainState, loss: Loss, data: TensorDataset = DATA) -> Cluster:
    """The server's train state after all epochs; the workers' own, whose optimizers do nothing, have others."""

    def work(session: WorkerSession, own: TrainState) -> None:
        for inputs, targets in session.batches(data, BATCH, epochs=EPOCHS):
            with session.step():
                torch.autograd.backward(loss(own.model, inputs, targets))
        assert_same(own.model.state_dict(), train_state.model.state_dict())

    workers = []
    for _ in range(WORKERS):
        model = copy.deepcopy(train_state.model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        workers.append(TrainState(model=model, optimizers=[SGD(model.parameters(), lr=100.0)]))
    with Cluster("sync", train_state, workers=WORKERS, seed=SEED) as cluster:
        cluster.run(workers, work)
    return cluster


def rounds() -> list[list[Tensor]]:
    """The batches of every round: batches in order, three at a time, across the ends of epochs."""
    sampler = ShardedSampler(SAMPLES, BATCH, seed=SEED)
    batches = [shard.indices for epoch in range(EPOCHS) for shard in sampler.epoch(epoch)]
    return [batches[start : start + WORKERS] for start in range(0, len(batches), WORKERS)]


def train_alone(train_state: TrainState, loss: Loss) -> None:
    """The same on the joined batch of every round."""
    for batches in rounds():
        inputs, targets = DATA[cast(Any, torch.cat(batches))]
        train_state.clear_gradients()
        torch.autograd.backward(loss(train_state.model, inputs, targets))
        train_state.update()


@pytest.mark.parametrize("optimize", [momentum, adam])
@pytest.mark.parametrize("options", [{}, {"schedule": True}, {"clip_norm": 0.05}], ids=str)
def test_sync_is_one_process_on_the_joined_batch(optimize: Optimize, options: dict[str, Any]) -> None:
    model = mlp()
    alone = state_of(copy.deepcopy(model), optimize, **options)
    together = state_of(model, optimize, **options)
    train_alone(alone, classify)
    cluster = trained_by_workers(together, classify)
    assert [commit.examples for commit in cluster.host.commits] == [sum(map(len, batches)) for batches in rounds()]
    for mine, theirs in zip(together.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    if options.get("schedule"):
        assert together.optimizers[0].param_groups[0]["lr"] == alone.optimizers[0].param_groups[0]["lr"]


class Chooser(nn.Module):
    """One of two branches, by the first target of the batch; a third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        branch = self.branches[int(targets[0]) % 2]
        return F.cross_entropy(branch(self.shared(inputs)), targets)


def choose(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return cast(Tensor, model(inputs, targets))


@pytest.mark.parametrize("optimize", [momentum, adam])
def test_parameters_that_some_workers_do_not_use(optimize: Optimize) -> None:
    """Each counts with zeros for those who do not use it; used by nobody, its optimizer does not see it at all."""
    model = Chooser()
    alone = state_of(copy.deepcopy(model), optimize)
    together = state_of(model, optimize)
    trained_by_workers(together, choose)
    for batches in rounds():
        alone.clear_gradients()
        total = sum(len(places) for places in batches)
        for places in batches:
            inputs, targets = DATA[cast(Any, places)]
            torch.autograd.backward(choose(alone.model, inputs, targets) * (len(places) / total))
        alone.update()
    for mine, theirs in zip(together.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    unused = [*model.branches[2].parameters()]
    assert not any(parameter in together.optimizers[0].state for parameter in unused)


def test_sparse_gradients() -> None:
    table = nn.Sequential(nn.Embedding(3, 5, sparse=True), nn.Linear(5, 3))

    def look_up(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(targets), targets)

    def plain(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    alone, together = state_of(copy.deepcopy(table), plain), state_of(table, plain)
    train_alone(alone, look_up)
    trained_by_workers(together, look_up)
    for mine, theirs in zip(together.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_buffers_are_averaged_like_gradients() -> None:
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=0.5), nn.Linear(6, 3))
    reference = copy.deepcopy(model)
    trained_by_workers(state_of(model, lambda model: SGD(model.parameters(), lr=0.0)), classify)
    expected = {name: buffer.clone() for name, buffer in reference[0].named_buffers()}
    for batches in rounds():
        total = sum(len(places) for places in batches)
        seen: list[dict[str, Tensor]] = []
        for places in batches:
            reference[0].load_state_dict({**reference[0].state_dict(), **expected})
            reference(DATA.tensors[0][places])
            seen.append({name: buffer.clone() * len(places) for name, buffer in reference[0].named_buffers()})
        for name in ("running_mean", "running_var"):
            expected[name] = torch.stack([part[name] for part in seen]).sum(0) / total
        expected["num_batches_tracked"] += 1
    for name, buffer in model[0].named_buffers():
        torch.testing.assert_close(buffer, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def cast_and_classify(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs.to(dtype)).float(), targets)

    model = nn.Linear(6, 3).to(dtype)
    alone = state_of(copy.deepcopy(model), momentum)
    train_alone(alone, cast_and_classify)
    trained_by_workers(state_of(model, momentum), cast_and_classify)
    tolerance = 2e-2 if dtype != torch.float64 else 1e-6
    torch.testing.assert_close(model.weight, alone.model.weight, rtol=tolerance, atol=tolerance)


class Masked(nn.Module):
    """Has infinities in a buffer, as the masks of attention do."""

    mask: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf, 0.0]))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.steps += 1
        return cast(Tensor, self.linear(inputs) + self.mask.nan_to_num(neginf=-1.0))


def test_infinities_that_belong_to_a_buffer() -> None:
    model = Masked()
    before = model.linear.weight.detach().clone()
    cluster = trained_by_workers(state_of(model, momentum), classify)
    assert len(cluster.host.commits) == len(rounds())
    assert not torch.equal(model.linear.weight, before)
    assert model.mask.tolist() == [0.0, -torch.inf, 0.0]
    assert float(model.steps) == len(rounds())
