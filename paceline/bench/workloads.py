"""The workloads of the benchmarks: models by name, each with its batch per worker and random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.problems import MODELS
from paceline.problems.models.gpt import GPT

IMAGE, COLOUR, CONTEXT, VOCABULARY = (1, 28, 28), (3, 32, 32), (64,), 65

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batch size per worker and step."""

    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch: int  # examples per worker and step

    @property
    def reads_tokens(self) -> bool:
        return self.input_shape == CONTEXT

    def model(self) -> nn.Module:
        """A new model with the same initial parameters on every call and worker."""
        torch.manual_seed(0)
        return self.make()

    def megabytes(self) -> float:
        return sum(p.numel() * p.element_size() for p in self.make().parameters()) / 1e6

    def examples(self, count: int, seed: int) -> Batch:
        """Inputs and labels, which depend only on the arguments."""
        random = torch.Generator().manual_seed(seed)
        if self.reads_tokens:
            text = torch.randint(VOCABULARY, (count, CONTEXT[0] + 1), generator=random)
            return text[:, :-1], text[:, 1:]
        return torch.randn(count, *self.input_shape, generator=random), torch.randint(10, (count,), generator=random)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross-entropy, averaged over the examples (and over their tokens)."""
        inputs, labels = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all benchmarks.

    Its rate is small, since rounding may flip a ReLU or max-pool whose inputs are nearly equal, and the difference then
    grows: at 0.02 the cnn differs by 3e-5 after 20 steps if one process only computes its batch in two halves.
    """
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def deep_mlp() -> nn.Module:
    """A smaller layer, then six square layers of 17 MB: 107 MB, so that every bucket cap makes a difference."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), *hidden, nn.Linear(2048, 10))


def _images(name: str, batch: int, shape: tuple[int, ...] = IMAGE) -> Workload:
    return Workload(make=lambda: MODELS[name](shape, 10), input_shape=shape, batch=batch)


def _text(dropout: float) -> Workload:
    return Workload(
        make=lambda: GPT(vocab=VOCABULARY, context=CONTEXT[0], dropout=dropout), input_shape=CONTEXT, batch=8
    )


# Without BatchNorm or dropout, several workers compute what one computes on the joined batch.
EXACT = {
    "net1": _images("net1", batch=128),
    "net2": _images("net2", batch=128),
    "net3": _images("net3", batch=128),
    "mlp": _images("mlp", batch=64),
    "cnn": _images("cnn", batch=32, shape=COLOUR),
    "gpt": _text(dropout=0.0),
}
INEXACT = {"resnet20": _images("resnet20", batch=16, shape=COLOUR), "gpt-dropout": _text(dropout=0.1)}
DEEP = {"deep": Workload(make=deep_mlp, input_shape=IMAGE, batch=64)}
WORKLOADS = {**EXACT, **INEXACT, **DEEP}
