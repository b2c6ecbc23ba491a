"""The model, its optimizers, schedulers and scaler as one value that is updated, saved and loaded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import UsageError


class Stateful(Protocol):
    """Any object with ``state_dict`` and ``load_state_dict``, saved and resumed with the session."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """A model, and everything that changes with it in a step."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    schedulers: Sequence[LRScheduler] = ()
    scaler: torch.amp.GradScaler | None = None
    clip_norm: float | None = None
    stateful: Mapping[str, Stateful] = field(default_factory=dict)
    remembered: Optimizer | None = None  # what a server's aggregator remembers of each parameter, as its state

    @property
    def holders(self) -> list[Optimizer]:
        """All that has state for parameters."""
        return [*self.optimizers, self.remembered] if self.remembered is not None else [*self.optimizers]

    def clear_gradients(self) -> None:
        if self.scaler is not None and self.scaler.is_enabled():
            self.scaler._per_optimizer_states.clear()  # else gradients that never made a step count as unscaled
        for optimizer in self.optimizers:
            if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
                optimizer.zero_grad()
                continue
            for parameter in parameters_of(optimizer):  # as zero_grad does, without its profiler record
                parameter.grad = None

    def update(
        self,
        closure: Callable[[], Tensor] | None = None,
        *,
        clipped: bool = False,
        step: Callable[[Optimizer], None] | None = None,
    ) -> None:
        """Make one step from the parameters' gradients, as a hand-written loop would.

        An optimizer that evaluates the loss itself, such as LBFGS, calls ``closure`` for them instead.
        ``clipped``: the gradients are clipped already. ``step`` makes the step of each optimizer in another way.
        """
        if step is not None and (closure is not None or self.scaler is not None):
            raise UsageError("hogwild(record=true) takes no GradScaler and no minimize(closure); leave out record")
        if closure is not None:
            self._update_by(closure)
            return
        if self.clip_norm is not None and not clipped:
            self._clip(self.clip_norm)
        for optimizer in self.optimizers:
            if step is not None:
                step(optimizer)
            elif self.scaler is None:
                optimizer.step()
            elif has_gradients(optimizer):
                self.scaler.step(optimizer)
        if self.scaler is not None and any(map(has_gradients, self.optimizers)):
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()

    def step_schedulers(self, count: int = 1) -> None:
        """Step the schedulers for commits in which these optimizers did not step: others' did."""
        for optimizer in self.optimizers if self.schedulers else ():
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns that it has not stepped
        for _ in range(count):
            for scheduler in self.schedulers:
                scheduler.step()

    def highest_rate(self) -> float:
        """The highest learning rate of all parameters; some may have a rate of 0."""
        return max(float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "optimizer_names": [type(optimizer).__name__ for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "stateful": {name: thing.state_dict() for name, thing in self.stateful.items()},
            **({"remembered": self.remembered.state_dict()} if self.remembered is not None else {}),
        }

    def mismatch(self, state: Mapping[str, Any]) -> str | None:
        """Say why ``state`` cannot be loaded here, or ``None`` if it can; nothing is changed."""
        return (
            _tensor_mismatch(self.model.state_dict(), state["model"])
            or _count_mismatch("optimizers", len(self.optimizers), len(state["optimizers"]))
            or self._optimizer_mismatch(state["optimizer_names"])
            or self._group_mismatch(state["optimizers"])
            or _count_mismatch("schedulers (scheduler= of join())", len(self.schedulers), len(state["schedulers"]))
            or _presence_mismatch("a GradScaler", self.scaler is not None, state["scaler"] is not None)
            or _names_mismatch("stateful objects", self.stateful, state["stateful"])
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; call ``mismatch`` first."""
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        for name, thing in self.stateful.items():
            thing.load_state_dict(state["stateful"][name])
        if self.remembered is not None and "remembered" in state:  # else it was saved under another aggregator
            self.remembered.load_state_dict(state["remembered"])

    def has_unsaved_scheduler(self) -> bool:
        """Whether an optimizer seems to have a scheduler that is not saved."""
        saved = [getattr(thing, "optimizer", None) for thing in (*self.schedulers, *self.stateful.values())]
        return any(
            # torch sets this attribute when an optimizer is given to a scheduler
            hasattr(optimizer.step, "_wrapped_by_lr_sched") and not any(optimizer is known for known in saved)
            for optimizer in self.optimizers
        )

    def _update_by(self, closure: Callable[[], Tensor]) -> None:
        if self.scaler is not None or self.clip_norm is not None or len(self.optimizers) != 1:
            raise UsageError(
                "minimize(closure) takes one optimizer, no GradScaler, no clip_norm; clip inside the closure"
            )
        self.optimizers[0].step(closure)  # type: ignore[arg-type]  # torch says float, and passes tensors on
        for scheduler in self.schedulers:
            scheduler.step()

    def _clip(self, norm: float) -> None:
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)

    def _optimizer_mismatch(self, saved: Sequence[str]) -> str | None:
        for index, (optimizer, name) in enumerate(zip(self.optimizers, saved, strict=True)):
            if type(optimizer).__name__ != name:
                return f"optimizer {index} is {type(optimizer).__name__} here and {name} there"
        return None

    def _group_mismatch(self, saved: Sequence[Mapping[str, Any]]) -> str | None:
        for index, (optimizer, state) in enumerate(zip(self.optimizers, saved, strict=True)):
            here = [len(group["params"]) for group in optimizer.param_groups]
            there = [len(group["params"]) for group in state["param_groups"]]
            if here != there:
                return f"optimizer {index} has groups of {here} parameters here and of {there} there"
        return None


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether a parameter has a gradient: a worker whose batch is empty has none, and a scaler wants one."""
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer, in the order in which its state numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensor_mismatch(here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    names = _names_mismatch("the model's tensors", here, there)
    if names is not None:
        return names
    for name, value in here.items():
        other = there[name]
        if not (isinstance(value, Tensor) and isinstance(other, Tensor)):
            continue
        if value.shape != other.shape:
            return f"{name} has the shape {tuple(value.shape)} here and {tuple(other.shape)} there"
        if value.dtype != other.dtype:
            return f"{name} is {value.dtype} here and {other.dtype} there"
    return None


def _names_mismatch(what: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str | None:
    missing, extra = sorted(set(here) - set(there)), sorted(set(there) - set(here))
    if not missing and not extra:
        return None
    parts = [f"only here: {', '.join(missing[:3])}"] if missing else []
    parts += [f"only there: {', '.join(extra[:3])}"] if extra else []
    return f"{what} have other names ({'; '.join(parts)})"


def _count_mismatch(what: str, here: int, there: int) -> str | None:
    return None if here == there else f"there are {here} {what} here and {there} there"


def _presence_mismatch(what: str, here: bool, there: bool) -> str | None:
    if here == there:
        return None
    return f"{what} is used here and was not there" if here else f"{what} was used there and is not here"
