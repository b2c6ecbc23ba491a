"""The checks of ``join()``, made before it waits for other processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from paceline.errors import UsageError, check_whole, unknown_name
from paceline.launch.environment import ServerAssignment
from paceline.policies import Policy
from paceline.policies.server import ServerPolicy
from paceline.sessions.nan_guard import OnNaN
from paceline.train_state import TrainState


def check_settings(*, on_nan: OnNaN, save_every: int | None, keep: int, log_every: int, seed: int | None) -> None:
    """Raise if a setting has a wrong type or value."""
    if on_nan not in get_args(OnNaN):
        raise unknown_name("on_nan choice", str(on_nan), get_args(OnNaN))
    for name, value in (("save_every", save_every), ("keep", keep), ("log_every", log_every)):
        if value is not None:
            check_whole(name, value)
    if seed is not None and not isinstance(seed, int):
        raise UsageError(f"seed must be a whole number, got {seed!r}")


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
    if train_state.clip_norm is not None and not train_state.clip_norm > 0:
        raise UsageError(f"clip_norm must be above 0, got {train_state.clip_norm}")
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


def check_for_server(train_state: TrainState, policy: Policy) -> None:
    """Raise if a server cannot make the updates."""
    if any(isinstance(each, torch.optim.LBFGS) for each in train_state.optimizers):
        raise UsageError(f"LBFGS evaluates a loss several times an update, and under {policy} the server updates")
    if any(isinstance(each, torch.optim.SparseAdam) for each in train_state.optimizers):
        raise UsageError(
            f"SparseAdam wants sparse gradients, and under {policy} gradients travel dense; use another optimizer, "
            "such as Adam or SGD, or --policy all-reduce"
        )
