"""A worker's own steps between reading the parameters and pushing what has become of them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.train_state import TrainState

_States: TypeAlias = list[dict[Tensor, dict[str, Any]]]  # what each optimizer remembers of each parameter


class LocalSteps:
    """Step a worker's model with its own optimizers, then put the difference in the place of the gradients.

    The optimizers remember the steps of earlier pushes. The schedulers step once a commit, as they do on the server: a
    step on parameters of a version has the rate of that version. One model may stand for many workers; ``become`` says
    for which.
    """

    def __init__(self, train_state: TrainState) -> None:
        self.made = 0  # steps since the last push
        self._train_state = replace(train_state, schedulers=())
        self._trained = [each for each in train_state.model.parameters() if each.requires_grad]
        self._read: list[Tensor] = []  # the parameters before the first of these steps
        self._before: _States | None = None  # what the optimizers remembered then
        self._first = self._states()  # of a worker that has just joined: Adagrad remembers zeros
        self._worker, self._others = 0, dict[int, _States]()
        self._scheduled = train_state
        self._version = 0  # the schedulers have stepped so often
        self._first_rates = copy.deepcopy(_rates_of(train_state))

    def become(self, worker: int) -> None:
        """Go on in the place of this worker, with what its optimizers remember."""
        if worker != self._worker:
            self._others[self._worker] = [dict(each.state) for each in self._train_state.optimizers]
            self._restore(self._others.pop(worker) if worker in self._others else _copied(self._first))
            self._worker = worker

    def forget(self) -> None:
        """Let the optimizers remember no more than those of a worker that has just joined."""
        self._restore(_copied(self._first))
        self._before, self.made = None, 0

    def step(self, version: int) -> None:
        """Update the model from its gradients; before the first step it has the parameters of this version."""
        if not self.made:
            self._follow(version)
            self._read = [each.detach().clone() for each in self._trained]
            self._before = self._states()
        self._train_state.update()
        self.made += 1

    @torch.no_grad()
    def end(self) -> bool:
        """Have the difference, new minus read, in the place of the gradients; False if it is not finite.

        Then it should be undone.
        """
        finite = True
        for parameter, read in zip(self._trained, self._read, strict=True):
            parameter.grad = torch.sub(parameter, read, out=read)
            finite = finite and bool(read.isfinite().all())
        self._read, self.made = [], 0
        self._before = None if finite else self._before
        return finite

    def undo(self) -> None:
        """Take the steps since the last push out of what the optimizers remember; the model is read anew anyway."""
        if self._before is not None:
            self._restore(self._before)
        self._before, self._read, self.made = None, [], 0

    def _states(self) -> _States:
        """A copy of what the optimizers remember."""
        return _copied([dict(each.state) for each in self._train_state.optimizers])

    def _restore(self, states: _States) -> None:
        for optimizer, state in zip(self._train_state.optimizers, states, strict=True):
            optimizer.state.clear()
            optimizer.state.update(state)

    def _follow(self, version: int) -> None:
        """Have the rates of this version."""
        if version < self._version:  # the server has gone back to a checkpoint
            _set_rates(self._scheduled, copy.deepcopy(self._first_rates))
            self._version = 0
        self._scheduled.step_schedulers(version - self._version)
        self._version = version


def _copied(states: _States) -> _States:
    return [{parameter: copy.deepcopy(state) for parameter, state in each.items()} for each in states]


def _rates_of(train_state: TrainState) -> tuple[list[Any], list[Any]]:
    """The state of the schedulers, and all that they may have set."""
    groups = [group for optimizer in train_state.optimizers for group in optimizer.param_groups]
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return [scheduler.state_dict() for scheduler in train_state.schedulers], settings


def _set_rates(train_state: TrainState, rates: tuple[list[Any], list[Any]]) -> None:
    schedules, settings = rates
    for scheduler, state in zip(train_state.schedulers, schedules, strict=True):
        scheduler.load_state_dict(state)
    groups = [group for optimizer in train_state.optimizers for group in optimizer.param_groups]
    for group, values in zip(groups, settings, strict=True):
        group.update(values)
