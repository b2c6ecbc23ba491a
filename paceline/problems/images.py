"""Problems that classify images: ``digits``, ``mnist`` and ``cifar10``."""

from __future__ import annotations

from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.problems.models import IMAGE_MODELS
from paceline.problems.options import ProblemOptions, choose_model
from paceline.problems.problem import Metric, Problem, Recipe
from paceline.problems.readers import (
    Examples,
    read_cifar10_test,
    read_cifar10_train,
    read_digits,
    read_mnist,
)

_DIGITS_TEST = 360
_DIGITS_SPLIT_SEED = 1998  # fixed, so that accuracies of runs with different seeds are comparable


def digits(options: ProblemOptions) -> Problem:
    """Classify handwritten digits of 8x8 pixels: 1437 to train on, 360 to test; included in the package."""
    with resources.as_file(resources.files("paceline.problems") / "files" / "digits.csv.gz") as path:
        images, labels = read_digits(path)
    inputs = images.unsqueeze(1).float() / 16
    targets = labels.long()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(_DIGITS_SPLIT_SEED))
    test, train = order[:_DIGITS_TEST], order[_DIGITS_TEST:]
    return _classification(
        "digits",
        options,
        default_model="cnn",
        train=TensorDataset(inputs[train], targets[train]),
        test=TensorDataset(inputs[test], targets[test]),
        target=0.97,
        recipe=Recipe(batch_size=32, epochs=15, optimizer="sgd(lr=0.05, momentum=0.9)"),
    )


def mnist(options: ProblemOptions) -> Problem:
    """Classify handwritten digits of 28x28 pixels (LeCun et al., 1998), from the four idx files."""
    mean, std = (0.1307,), (0.3081,)
    train_images, train_labels = read_mnist(options.data, "train")
    test_images, test_labels = read_mnist(options.data, "t10k")
    return _classification(
        "mnist",
        options,
        default_model="net3",
        train=_normalised((train_images.unsqueeze(1), train_labels), mean, std),
        test=_normalised((test_images.unsqueeze(1), test_labels), mean, std),
        target=0.97,
        recipe=Recipe(batch_size=128, epochs=10, optimizer="sgd(lr=0.05, momentum=0.9)"),
    )


def cifar10(options: ProblemOptions) -> Problem:
    """Classify small colour photographs of ten kinds (Krizhevsky, 2009), from the binary version."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _classification(
        "cifar10",
        options,
        default_model="resnet20",
        train=_normalised(read_cifar10_train(options.data), mean, std),
        test=_normalised(read_cifar10_test(options.data), mean, std),
        target=0.7,
        recipe=Recipe(batch_size=128, epochs=30, optimizer="sgd(lr=0.1, momentum=0.9, weight_decay=0.0001)"),
    )


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of examples whose largest logit is the target's."""
    return (outputs.argmax(dim=1) == targets).float().mean()


def _classification(
    name: str,
    options: ProblemOptions,
    *,
    default_model: str,
    train: TensorDataset,
    test: TensorDataset,
    target: float,
    recipe: Recipe,
) -> Problem:
    make_model = choose_model(
        name,
        options,
        default=default_model,
        fitting=IMAGE_MODELS,
        input_shape=tuple(train.tensors[0].shape[1:]),
        num_classes=10,
    )
    return Problem(
        name=name,
        make_model=make_model,
        train=train,
        test=test,
        loss=F.cross_entropy,
        metric=Metric(name="accuracy", measure=accuracy, higher_is_better=True),
        target=target,
        recipe=recipe,
    )


def _normalised(examples: Examples, mean: tuple[float, ...], std: tuple[float, ...]) -> TensorDataset:
    """Scale each channel to mean 0 and deviation 1, given its statistics on the scale from 0 to 1."""
    images, labels = examples
    shape = (len(mean), 1, 1)
    inputs = images.float().div_(255)  # in place from here: CIFAR-10 takes 600 MB
    inputs.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))
    return TensorDataset(inputs, labels.long())
