"""Problems that classify images: ``digits``, ``mnist`` and ``cifar10``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.problems.models import IMAGE_MODELS
from paceline.problems.options import ProblemOptions, choose_model
from paceline.problems.problem import Metric, Problem, Recipe
from paceline.problems.readers import (
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
    images = images.unsqueeze(1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(_DIGITS_SPLIT_SEED))
    test, train = order[:_DIGITS_TEST], order[_DIGITS_TEST:]
    scale = _Scale(largest=16).fitted(images[train], options)
    return _classification(
        "digits",
        options,
        default_model="cnn",
        train=scale.apply(images[train], labels[train]),
        test=scale.apply(images[test], labels[test]),
        target=0.97,
        recipe=Recipe(batch_size=32, epochs=15, optimizer="sgd(lr=0.05, momentum=0.9)"),
    )


def mnist(options: ProblemOptions) -> Problem:
    """Classify handwritten digits of 28x28 pixels (LeCun et al., 1998), from the four idx files."""
    train_images, train_labels = read_mnist(options.data, "train")
    test_images, test_labels = read_mnist(options.data, "t10k")
    train_images, test_images = train_images.unsqueeze(1), test_images.unsqueeze(1)
    scale = _Scale(largest=255, mean=(0.1307,), deviation=(0.3081,)).fitted(train_images, options)
    return _classification(
        "mnist",
        options,
        default_model="net3",
        train=scale.apply(train_images, train_labels),
        test=scale.apply(test_images, test_labels),
        target=0.97,
        recipe=Recipe(batch_size=128, epochs=10, optimizer="sgd(lr=0.05, momentum=0.9)"),
    )


def cifar10(options: ProblemOptions) -> Problem:
    """Classify small colour photographs of ten kinds (Krizhevsky, 2009), from the binary version."""
    images, labels = read_cifar10_train(options.data)
    scale = _Scale(largest=255, mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))
    scale = scale.fitted(images, options)
    return _classification(
        "cifar10",
        options,
        default_model="resnet20",
        train=scale.apply(images, labels),
        test=scale.apply(*read_cifar10_test(options.data)),
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


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """How pixels become inputs: on the scale from 0 to 1, minus a mean of each channel, over its deviation."""

    largest: int  # value of a pixel
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def fitted(self, images: Tensor, options: ProblemOptions) -> _Scale:
        """The same with the statistics of these images, if the options say so.

        They are made of how often each value comes. So they do not depend on the order of a sum, nor on the number of
        threads.
        """
        if not options.normalise:
            return self
        values = torch.arange(self.largest + 1, dtype=torch.float64) / self.largest
        means, deviations = [], []
        for channel in images.unbind(1):
            shares = torch.bincount(channel.flatten(), minlength=len(values)).double() / channel.numel()
            mean = (shares * values).sum()
            means.append(mean.item())
            deviations.append((shares * (values - mean).square()).sum().sqrt().item() or 1.0)
        return replace(self, mean=tuple(means), deviation=tuple(deviations))

    def apply(self, images: Tensor, labels: Tensor) -> TensorDataset:
        """Make inputs of the images, and targets of the labels."""
        shape = (len(self.mean), 1, 1)
        inputs = images.float().div_(self.largest)  # in place from here: CIFAR-10 takes 600 MB
        inputs.sub_(torch.tensor(self.mean).view(shape)).div_(torch.tensor(self.deviation).view(shape))
        return TensorDataset(inputs, labels.long())
