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

    Problems that read no files ignore ``data``; those without synthetic data ignore ``seed``.
    """

    data: Path | None = None
    model: str | None = None
    seed: int = 0


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
    return partial(fitting[name], input_shape, num_classes)


def refuse_model(problem: str, options: ProblemOptions) -> None:
    """Raise if a model was chosen for a problem that has its own."""
    if options.model is not None:
        raise UsageError(f"the problem {problem!r} has its own model; leave out --model {options.model}")
