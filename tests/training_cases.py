"""Small trainings of every kind that a user may write, as one table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from loops import Parts
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, SparseAdam, lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

_numbers = torch.Generator().manual_seed(7)
INPUTS = torch.randn(40, 6, generator=_numbers)
TARGETS = torch.randint(3, (40,), generator=_numbers)
DATASET = TensorDataset(INPUTS, TARGETS)


def mlp(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), *layers, nn.Tanh(), nn.Linear(12, 3))


def classifier(model: nn.Module, *optimizers: Optimizer, **more: Any) -> Parts:
    def loss(batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    source = DataLoader(DATASET, batch_size=8, shuffle=True)
    return Parts(model=model, optimizers=optimizers, **{"loss": loss, "source": source, **more})


def momentum(model: nn.Module, lr: float = 0.1) -> SGD:
    return SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)


def sgd(**more: Any) -> Parts:
    model = mlp()
    return classifier(model, momentum(model), **more)


def adam_groups() -> Parts:
    model = mlp()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.02, "weight_decay": 0.1},
        {"params": model[2].parameters(), "betas": (0.8, 0.99)},
    ]
    return classifier(model, Adam(groups, lr=0.01))


def own_clipping() -> Parts:
    parts = sgd()
    parts.before_update = lambda: nn.utils.clip_grad_norm_(parts.model.parameters(), 0.1)
    return parts


def autocast(dtype: torch.dtype, scale: float = 1024.0, **more: Any) -> Parts:
    """Mixed precision whose scale doubles every third good step, so that it overflows again and again."""
    model = mlp()

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return F.cross_entropy(model(batch[0]), batch[1])

    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return classifier(model, momentum(model), loss=loss, scaler=scaler, **more)


def unscale_and_clip() -> Parts:
    parts = autocast(torch.float16)

    def clip() -> None:
        assert parts.scaler is not None
        parts.scaler.unscale_(parts.optimizers[0])
        nn.utils.clip_grad_norm_(parts.model.parameters(), 0.1)

    parts.before_update = clip
    return parts


def scheduled(make: Callable[[Optimizer], lr_scheduler.LRScheduler]) -> Callable[[], Parts]:
    def build() -> Parts:
        parts = sgd()
        parts.schedulers = [make(parts.optimizers[0])]
        return parts

    return build


def sequential(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    second = lr_scheduler.CosineAnnealingLR(optimizer, 12)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [4])


class Halving:
    """A schedule that is an object, whose attributes torch saves."""

    def __init__(self) -> None:
        self.every = 6

    def __call__(self, step: int) -> float:
        return float(0.5 ** (step // self.every))


SCHEDULERS: dict[str, Callable[[Optimizer], lr_scheduler.LRScheduler]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "lambda-object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Halving()),
    "one-cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=21),
    "sequential": sequential,
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "warm-restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3, 2),
    "multi-step": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 11, 11]),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.2, step_size_up=3),
    "chained": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
}


def two_optimizers() -> Parts:
    model = mlp()
    first, second = Adam(model[0].parameters(), lr=0.01), momentum(model[2])
    schedulers = [lr_scheduler.StepLR(first, 3), lr_scheduler.ExponentialLR(second, 0.9)]
    return classifier(model, first, second, schedulers=schedulers)


def rate_as_tensor() -> Parts:
    model = mlp()
    optimizer = Adam(model.parameters(), lr=torch.tensor(0.01))
    return classifier(model, optimizer, schedulers=[lr_scheduler.ExponentialLR(optimizer, 0.9)])


class Tied(nn.Module):
    """An autoencoder of words whose decoder is its encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 5)
        self.out = nn.Linear(5, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.embed(words))
        return out


def tied() -> Parts:
    model = Tied()
    words = DataLoader(TensorDataset(torch.arange(40) % 10, torch.arange(40) % 7), batch_size=8, shuffle=True)
    return classifier(model, momentum(model), source=words)


def frozen() -> Parts:
    model = mlp()
    model[0].requires_grad_(False)
    return classifier(model, momentum(model))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(20, 6, sparse=True, mode="sum")
        self.out = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.embed(words))
        return out


def sparse() -> Parts:
    model = Bag()
    words = DataLoader(TensorDataset((INPUTS[:, :3].abs() * 6).long() % 20, TARGETS), batch_size=8)
    optimizers = SparseAdam(model.embed.parameters(), lr=0.01), Adam(model.out.parameters(), lr=0.01)
    return classifier(model, *optimizers, source=words)


def dropout() -> Parts:
    model = mlp(nn.Dropout(0.3))
    return classifier(model, momentum(model))


def batch_norm() -> Parts:
    model = mlp(nn.BatchNorm1d(12))
    return classifier(model, momentum(model))


class Counted(IterableDataset[Any]):
    """Data that can only be read from its start, and differs from pass to pass."""

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(40).tolist()
        return ((INPUTS[place], TARGETS[place]) for place in order)


def iterable() -> Parts:
    return sgd(source=DataLoader(Counted(), batch_size=8))


def evaluating() -> Parts:
    model = mlp(nn.Dropout(0.3), nn.BatchNorm1d(12))
    parts = classifier(model, momentum(model))

    def evaluate(_: Tensor) -> None:
        model.eval()
        with torch.no_grad():
            parts.loss((INPUTS, TARGETS))
        model.train()

    parts.after_update = evaluate
    return parts


def random_step() -> Parts:
    """Noise from all three streams in every step."""
    model = mlp()

    def loss(batch: Any) -> Tensor:
        noise = torch.randn(()) + random.gauss(0, 1) + float(numpy.random.normal())
        return F.cross_entropy(model(batch[0] + 0.01 * noise), batch[1])

    return classifier(model, momentum(model), loss=loss)


def compiled(backend: str) -> Callable[[], Parts]:
    def build() -> Parts:
        torch._dynamo.reset()  # else a graph of an earlier model is taken, which no session watched
        model = mlp()
        faster: Any = torch.compile(model, backend=backend)
        parts = classifier(model, momentum(model))
        parts.model = faster
        parts.loss = lambda batch: F.cross_entropy(faster(batch[0]), batch[1])
        return parts

    return build


CASES: dict[str, Callable[[], Parts]] = {
    "momentum": sgd,
    "adam with groups": adam_groups,
    "clipping by hand": own_clipping,
    "clip_norm": lambda: sgd(clip_norm=0.1),
    "fp16": lambda: autocast(torch.float16),
    "fp16 that overflows": lambda: autocast(torch.float16, scale=2.0**20),
    "bf16": lambda: autocast(torch.bfloat16),
    "fp16, clipping by hand": unscale_and_clip,
    "fp16, clip_norm": lambda: autocast(torch.float16, clip_norm=0.1),
    **{f"{name} schedule": scheduled(make) for name, make in SCHEDULERS.items()},
    "two optimizers": two_optimizers,
    "rate as a tensor": rate_as_tensor,
    "tied": tied,
    "frozen": frozen,
    "sparse": sparse,
    "dropout": dropout,
    "batch norm": batch_norm,
    "no shuffling": lambda: sgd(source=DataLoader(DATASET, batch_size=7)),
    "loader with workers": lambda: sgd(source=DataLoader(DATASET, 8, shuffle=True, num_workers=1)),
    "iterable data set": iterable,
    "accumulation": lambda: sgd(accumulate=4),
    "accumulation, fp16": lambda: autocast(torch.float16, accumulate=2),
    "evaluation in mid-run": evaluating,
    "all random streams": random_step,
}


class Augmented(Dataset[Any]):
    """A data set whose samples are changed at random, from all three streams, whenever they are read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(6) + random.random() + float(numpy.random.normal())
        return INPUTS[place] + 0.1 * noise, TARGETS[place]
