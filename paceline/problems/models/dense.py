"""Fully connected networks; each flattens its input and gives logits (the softmax is in the loss)."""

from __future__ import annotations

import math

from torch import nn


def net1(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Softmax regression: one linear layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def net2(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """One hidden layer of 100 sigmoids."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 100),
        nn.Sigmoid(),
        nn.Linear(100, num_classes),
    )


def net3(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Three hidden layers: 300 sigmoids, 100 ReLUs, 50 sigmoids."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 300),
        nn.Sigmoid(),
        nn.Linear(300, 100),
        nn.ReLU(),
        nn.Linear(100, 50),
        nn.Sigmoid(),
        nn.Linear(50, num_classes),
    )


def mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two hidden layers of 2048 ReLUs: 23 MB on MNIST, much to send for little to compute."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(input_shape), 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, num_classes),
    )
