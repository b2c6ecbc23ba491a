"""The checks of ``join()``, made before it waits for other processes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.aggregators import aggregator_of
from paceline.errors import UsageError, check_whole, unknown_name
from paceline.launch.environment import ServerAssignment
from paceline.policies import Policy
from paceline.policies.server import ServerPolicy
from paceline.sessions.nan_guard import OnNaN
from paceline.train_state import TrainState


def check_settings(
    *, on_nan: OnNaN, save_every: int | None, keep: int, log_every: int, seed: int | None, clip_norm: float | None
) -> None:
    """Raise if a plain setting is not what it should be."""
    if on_nan not in get_args(OnNaN):
        raise unknown_name("on_nan choice", on_nan, get_args(OnNaN))
    check_whole("keep", keep)
    check_whole("log_every", log_every)
    if save_every is not None:
        check_whole("save_every", save_every)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise UsageError(f"seed must be a whole number, got {seed!r}")
    if clip_norm is not None and not as_number(clip_norm) > 0:
        raise UsageError(f"clip_norm must be a number above 0, got {clip_norm!r}; leave it out to clip nothing")


def check_places(*, run: object, resume: object, group: Any) -> None:
    """Raise if the run's directory, its checkpoint or its process group cannot be one."""
    if run is not None and not _is_path(run):
        raise UsageError(f"run must be the path of a directory, got {run!r}; give one, such as run='runs/mine'")
    if not (isinstance(resume, bool) or _is_path(resume)):
        raise UsageError(f"resume must be True, False or the path of a checkpoint, got {resume!r}")
    if group is not None and not all(hasattr(group, name) for name in ("rank", "size", "allreduce")):
        raise UsageError(
            f"group must be a process group of torch.distributed that this process is in, got {group!r}; make one with "
            "torch.distributed.new_group(), or leave it out for the group of all workers"
        )


def _is_path(given: object) -> bool:
    return isinstance(given, str | Path) and bool(str(given))


def check_named(*, stateful: object, config: object) -> None:
    """Raise if these are no dictionaries."""
    for what, given, example in (
        ("stateful", stateful, "{'sampler': sampler}"),
        ("config", config, "{'note': 'a try'}"),
    ):
        if given is not None and not isinstance(given, Mapping):
            raise UsageError(f"{what} must be a dictionary of names, such as {example}, got {type(given).__name__}")


def as_number(value: Any) -> float:
    """A number as a float; NaN if it is none."""
    try:
        return math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers raises the last
        return math.nan


def as_tensor(where: str, value: Any) -> Tensor:
    """A number or tensor as a tensor without a gradient."""
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{where}: mean() wants a number or a tensor, got {value!r}") from None


def as_weight(where: str, examples: Any) -> float:
    """The weight of a worker with this many examples; 1 if it has not said how many."""
    weight = 1.0 if examples is None else as_number(examples)
    if not 0 <= weight < math.inf:
        raise UsageError(
            f"{where}: examples must be a number of at least 0, got {examples!r}; leave it out to weigh all workers "
            "alike"
        )
    return weight


def as_tuple(what: str, given: Any, kind: type) -> tuple[Any, ...]:
    """One object of a kind, or several of them, as a tuple."""
    if isinstance(given, kind):
        return (given,)
    if isinstance(given, Iterable):
        items = tuple(given)
        if all(isinstance(item, kind) for item in items):
            return items
    raise UsageError(f"{what} must be a torch {kind.__name__} or several, got {type(given).__name__}")


def check_train_state(train_state: TrainState) -> None:
    """Raise if these objects cannot be trained together."""
    if not isinstance(train_state.model, nn.Module):
        raise UsageError(f"model must be a torch module, got {type(train_state.model).__name__}")
    inside = {id(parameter) for parameter in train_state.model.parameters()}
    for optimizer in train_state.optimizers:
        groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in inside for parameter in groups):
            raise UsageError(
                "the optimizer has parameters that are not in the model, so they would be neither saved nor averaged; "
                "join one module that holds them all, such as nn.ModuleList([model, other])"
            )
    if train_state.scaler is not None and not isinstance(train_state.scaler, torch.amp.GradScaler):
        raise UsageError(f"scaler must be a torch.amp.GradScaler, got {type(train_state.scaler).__name__}")
    for name, thing in train_state.stateful.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(f"stateful {name!r} needs the methods state_dict and load_state_dict")
    if not train_state.optimizers:
        raise UsageError("join() needs at least one optimizer")
    for scheduler in train_state.schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau needs a metric: step it yourself with scheduler.step(value), and pass it as "
                "stateful={'scheduler': scheduler} to have it saved"
            )


def check_role(policy: Policy, assignment: ServerAssignment | None) -> None:
    """Raise if a process that was started as a server, or as the worker of a server, would train without one."""
    if assignment is None or isinstance(policy, ServerPolicy):
        return
    if assignment.role == "server":
        what = "the server of this run"
    elif assignment.joining:
        what = f"a worker of the server at {assignment.address}"
    else:
        return
    raise UsageError(
        f"this process was started as {what}, which needs a policy with a server, and found {policy}; give one to "
        "join(policy=...), or to the command, on all hosts the same: --policy async"
    )


def check_for_server(train_state: TrainState, policy: Policy, workers: int | None) -> None:
    """Raise if a server cannot make the updates; ``workers`` is their number, if it is known."""
    if isinstance(policy, ServerPolicy):
        aggregator_of(policy, workers)
    if any(isinstance(each, torch.optim.LBFGS) for each in train_state.optimizers):
        raise UsageError(f"LBFGS evaluates a loss several times an update, and under {policy} the server updates")
    if any(isinstance(each, torch.optim.SparseAdam) for each in train_state.optimizers):
        raise UsageError(
            f"SparseAdam wants sparse gradients, and under {policy} gradients travel dense; use another optimizer, "
            "such as Adam or SGD, or --policy all-reduce"
        )
