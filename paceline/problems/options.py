"""Options of a built-in problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from paceline.errors import UsageError, unknown_name
from paceline.problems.models import MODELS, ModelFactory


@dataclass(frozen=True, kw_only=True)
class ProblemOptions:
    """A problem's data directory, its model, and the seed of its synthetic data.

    Problems that read no files ignore ``data``; those without synthetic data ignore ``seed``. ``normalise`` is for
    images: each channel gets the mean 0 and the deviation 1 on the training data. ``xavier`` fills the weights of a
    model anew (Glorot and Bengio, 2010), and its biases with zeros.
    """

    data: Path | None = None
    model: str | None = None
    seed: int = 0
    normalise: bool = False
    xavier: bool = False


def choose_model(
    problem: str,
    options: ProblemOptions,
    *,
    default: str,
    fitting: Mapping[str, ModelFactory],
    input_shape: tuple[int, ...],
    num_classes: int,
) -> Callable[[], nn.Module]:
    """Return the function that makes the chosen model, or the default one, for the problem's shapes."""
    name = default if options.model is None else options.model
    if name not in MODELS:
        raise unknown_name("model", name, fitting)
    if name not in fitting:
        raise UsageError(f"the model {name!r} does not fit the problem {problem!r}; choose from {', '.join(fitting)}")
    make_model = partial(fitting[name], input_shape, num_classes)
    return partial(_fill_by_xavier, make_model) if options.xavier else make_model


def _fill_by_xavier(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Make a model and draw the weights of its linear layers and convolutions again; biases become 0."""
    model = make_model()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def refuse_model(problem: str, options: ProblemOptions) -> None:
    """Raise if a model, or how to fill it, was chosen for a problem that has its own."""
    chosen = "--xavier" if options.model is None else f"--model {options.model}"
    if options.model is not None or options.xavier:
        raise UsageError(f"the problem {problem!r} has its own model; leave out {chosen}")


def refuse_normalise(problem: str, options: ProblemOptions) -> None:
    """Raise if the data of a problem that has no images was to be normalised."""
    if options.normalise:
        raise UsageError(f"the problem {problem!r} has no images to normalise; leave out --normalise")
