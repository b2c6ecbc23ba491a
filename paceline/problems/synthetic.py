"""Synthetic problems whose optimum is known: ``quadratic`` and ``logistic``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.problems.models import VECTOR_MODELS
from paceline.problems.options import ProblemOptions, choose_model, refuse_model, refuse_normalise
from paceline.problems.problem import Metric, Problem, Recipe


def quadratic(options: ProblemOptions) -> Problem:
    """Minimise a noisy quadratic function; see :func:`make_quadratic`."""
    refuse_model("quadratic", options)
    refuse_normalise("quadratic", options)
    return make_quadratic(seed=options.seed)


def make_quadratic(
    *, dim: int = 32, num_examples: int = 4096, condition: float = 10.0, noise: float = 1.0, seed: int = 0
) -> Problem:
    """Minimise F(w) = mean_i 1/2 sum_j a_j (w_j - c_ij)^2; example i is the centre c_i.

    The curvatures a_j go from 1/condition to 1, so a rate below 2 is stable. F has its minimum at the mean centre,
    which is the whole test set: the test loss of w is exactly F(w) - min F. Centres deviate by ``noise``, so SGD
    with a small rate r and batches of b ends near r/b * noise^2/4 * sum_j a_j^2, not at zero.
    """
    generator = torch.Generator().manual_seed(seed)
    curvature = torch.logspace(0, -1, dim, base=condition)
    centres = torch.randn(dim, generator=generator) + noise * torch.randn(num_examples, dim, generator=generator)
    optimum = centres.double().mean(dim=0, keepdim=True).float()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * ((outputs - targets).square() * curvature.to(outputs)).sum(dim=1).mean()

    return Problem(
        name="quadratic",
        make_model=lambda: Point(dim),
        train=TensorDataset(centres, centres),
        test=TensorDataset(optimum, optimum),
        loss=loss,
        metric=Metric(name="excess", measure=loss, higher_is_better=False),
        target=0.02,
        recipe=Recipe(batch_size=32, epochs=5, optimizer="sgd(lr=0.1)"),
    )


class Point(nn.Module):
    """A vector of parameters, which is the output for every example; it starts at zero."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), -1)


def logistic(options: ProblemOptions) -> Problem:
    """Classify the two sides of a plane by logistic regression; one label in twenty is wrong."""
    refuse_normalise("logistic", options)
    dim, num_train, num_test, flipped = 32, 4096, 1024, 0.05
    generator = torch.Generator().manual_seed(options.seed)
    normal = torch.randn(dim, generator=generator)
    inputs = torch.randn(num_train + num_test, dim, generator=generator)
    flips = torch.rand(num_train + num_test, generator=generator) < flipped
    targets = ((inputs @ normal > 0) ^ flips).float().unsqueeze(1)
    return Problem(
        name="logistic",
        make_model=choose_model(
            "logistic", options, default="net1", fitting=VECTOR_MODELS, input_shape=(dim,), num_classes=1
        ),
        train=TensorDataset(inputs[:num_train], targets[:num_train]),
        test=TensorDataset(inputs[num_train:], targets[num_train:]),
        loss=F.binary_cross_entropy_with_logits,
        metric=Metric(name="accuracy", measure=sign_accuracy, higher_is_better=True),
        target=0.92,
        recipe=Recipe(batch_size=32, epochs=5, optimizer="sgd(lr=0.1)"),
    )


def sign_accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of examples whose logit has the sign of its target (0 or 1)."""
    return ((outputs > 0) == (targets > 0.5)).float().mean()
