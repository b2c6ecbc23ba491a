"""Makes optimizers by name: torch's own and those of this package."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import re
from collections.abc import Callable
from types import GenericAlias, UnionType
from typing import Any, get_args, get_origin

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from paceline.errors import UsageError, unknown_name
from paceline.optim.lamb import LAMB
from paceline.optim.lars import LARS
from paceline.optim.rmsprop_nesterov import NesterovRMSprop
from paceline.spec import Value, fit_options, parse_call


def _kebab(class_name: str) -> str:
    """``SparseAdam`` is sparse-adam, but ``AdamW``, ``NAdam`` and ``RMSprop`` stay one word."""
    return re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "-", class_name).lower()


def _torch_optimizers() -> dict[str, type[Optimizer]]:
    classes = [item for item in vars(torch.optim).values() if isinstance(item, type)]
    return {_kebab(item.__name__): item for item in classes if issubclass(item, Optimizer) and item is not Optimizer}


OPTIMIZERS: dict[str, type[Optimizer]] = {
    **_torch_optimizers(),
    "rmsprop-nesterov": NesterovRMSprop,
    "lars": LARS,
    "lamb": LAMB,
}


def make_optimizer(spec: str, parameters: ParamsT) -> Optimizer:
    """Build the optimizer that a text like ``sgd(lr=0.1, momentum=0.9, nesterov=true)`` describes.

    Options are the arguments of the optimizer's class; those left out keep its defaults.

    >>> layer = torch.nn.Linear(3, 2)
    >>> make_optimizer("adamw(lr=3e-4, betas=(0.9, 0.95))", layer.parameters()).defaults["betas"]
    (0.9, 0.95)
    """
    name, values = parse_call(spec)
    if name not in OPTIMIZERS:
        raise unknown_name("optimizer", name, OPTIMIZERS)
    build: Callable[..., Optimizer] = OPTIMIZERS[name]
    options = _checked(name, build, values)
    try:
        return build(parameters, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"optimizer {spec!r} cannot be made: {error}") from error


def _checked(name: str, build: Callable[..., Optimizer], values: dict[str, Value]) -> dict[str, Value]:
    arguments = dict(inspect.signature(build, eval_str=True).parameters)
    del arguments["params"]
    wanted = {option: _without_tensor(argument.annotation) for option, argument in arguments.items()}
    required = [option for option, argument in arguments.items() if argument.default is argument.empty]
    options = fit_options("optimizer", name, wanted, required, values)
    lr = options.get("lr")
    if isinstance(lr, float) and not math.isfinite(lr):  # torch accepts these
        raise UsageError(f"optimizer {name!r}: lr must be a finite number, got {lr}")
    return options


def _without_tensor(hint: Any) -> Any:
    """Drop ``Tensor`` from the types of an option: text cannot hold one, so errors should not offer it."""
    choices = tuple(_without_tensor(choice) for choice in get_args(hint) if choice is not torch.Tensor)
    if get_origin(hint) is UnionType:
        return functools.reduce(operator.or_, choices)
    return GenericAlias(tuple, choices) if get_origin(hint) is tuple else hint
