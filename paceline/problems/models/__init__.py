"""The built-in networks by name: ``MODELS["cnn"]((1, 28, 28), 10)`` is a fresh one."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from paceline.problems.models.convolutional import cnn, lenet, resnet20
from paceline.problems.models.dense import mlp, net1, net2, net3
from paceline.problems.models.gpt import gpt, tiny_gpt

ModelFactory = Callable[[tuple[int, ...], int], nn.Module]
"""Shape of one input, number of classes -> a model initialised from torch's global generator."""

VECTOR_MODELS: dict[str, ModelFactory] = {"net1": net1, "net2": net2, "net3": net3, "mlp": mlp}
IMAGE_MODELS: dict[str, ModelFactory] = {**VECTOR_MODELS, "cnn": cnn, "lenet": lenet, "resnet20": resnet20}
TEXT_MODELS: dict[str, ModelFactory] = {"gpt": gpt, "tiny-gpt": tiny_gpt}
MODELS: dict[str, ModelFactory] = {**IMAGE_MODELS, **TEXT_MODELS}

__all__ = ["IMAGE_MODELS", "MODELS", "TEXT_MODELS", "VECTOR_MODELS", "ModelFactory"]
