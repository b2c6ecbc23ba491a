"""A worker's own steps between two pushes, and what it pushes of them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from paceline.policies.messages import PushKind
from paceline.store.copying import copy_all
from paceline.train_state import TrainState

_States: TypeAlias = list[dict[Tensor, dict[str, Any]]]  # what each optimizer remembers of each parameter


def make_local_steps(kind: PushKind, train_state: TrainState, *, momentum: float = 0.0) -> LocalSteps | None:
    """The local steps of a worker whose pushes are of this kind; None if it makes no steps of its own."""
    match kind:
        case PushKind.GRADIENT:
            return None
        case PushKind.DIFFERENCE:
            return DifferenceSteps(train_state)
        case PushKind.PARAMETERS:
            return ElasticSteps(train_state, momentum=momentum)


@dataclass
class _Memory:
    """What a worker remembers from push to push."""

    states: _States  # of its optimizers, which have them themselves while it is this worker's turn
    before: _States | None = None  # before the first step since the last push

    # Of a worker that pushes parameters:
    own: list[Tensor] = field(default_factory=list)  # parameters and buffers of its last push; none before the first
    difference: list[Tensor] = field(default_factory=list)  # what the server has added for them, to be taken from them
    velocity: list[Tensor] = field(default_factory=list)
    velocity_before: list[Tensor] = field(default_factory=list)  # as ``before``
    pushed: list[Tensor] = field(default_factory=list)  # as ``own``, until the server has answered


class LocalSteps(ABC):
    """Step a worker's model with its own optimizers, then put what it pushes in the place of the gradients.

    The optimizers remember the steps of earlier pushes. The schedulers step once a commit, as they do on the server: a
    step on parameters of a version has the rate of that version. One model may stand for many workers; ``become`` says
    for which.
    """

    def __init__(self, train_state: TrainState) -> None:
        self.made = 0  # steps since the last push
        self._train_state = replace(train_state, schedulers=())
        self._trained = [each for each in train_state.model.parameters() if each.requires_grad]
        self._first = self._states()  # of a worker that has just joined: Adagrad remembers zeros
        self._memory = self._new_memory()
        self._worker, self._others = 0, dict[int, _Memory]()
        self._scheduled = train_state
        self._version = 0  # the schedulers have stepped so often
        self._first_rates = copy.deepcopy(_rates_of(train_state))

    def become(self, worker: int) -> None:
        """Go on in the place of this worker, with what it remembers; none may be in the middle of its steps."""
        if worker != self._worker:
            self._memory.states = [dict(each.state) for each in self._train_state.optimizers]
            self._others[self._worker] = self._memory
            self._memory = self._others.pop(worker) if worker in self._others else self._new_memory()
            self._restore(self._memory.states)
            self._worker = worker

    def forget(self) -> None:
        """Remember no more than a worker that has just joined."""
        self._memory, self.made = self._new_memory(), 0
        self._restore(self._memory.states)

    def begin(self, version: int) -> None:
        """Begin a step, before its forward pass; before the first since a push the model was read of this version."""
        if not self.made:
            self._follow(version)
            self._memory.before = self._states()

    def step(self) -> None:
        """Update the model from its gradients."""
        self._train_state.update()
        self.made += 1

    @abstractmethod
    def end(self) -> bool:
        """Have what is pushed in the place of the gradients; False if it is not finite, and has to be undone."""

    @abstractmethod
    def answered(self, exchanged: Sequence[Tensor] | None) -> None:
        """Take the server's answer to the last push: what it has added, or None if it has not taken the push.

        A second answer to the same push is ignored.
        """

    def undo(self) -> None:
        """Take the steps since the last push out of what is remembered; the model is made anew before the next."""
        if self._memory.before is not None:
            self._restore(self._memory.before)
        self._memory.before, self.made = None, 0

    def _new_memory(self) -> _Memory:
        return _Memory(_copied(self._first))

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


class DifferenceSteps(LocalSteps):
    """Push the difference: the parameters after the steps, minus as they were read."""

    def __init__(self, train_state: TrainState) -> None:
        super().__init__(train_state)
        self._read: list[Tensor] = []  # the parameters before the first step

    def begin(self, version: int) -> None:
        super().begin(version)
        if not self.made:
            self._read = _clones(self._trained)

    @torch.no_grad()
    def end(self) -> bool:
        finite = True
        for parameter, read in zip(self._trained, self._read, strict=True):
            parameter.grad = torch.sub(parameter, read, out=read)
            finite = finite and bool(read.isfinite().all())
        self._read, self.made = [], 0
        if finite:
            self._memory.before = None
        return finite

    def answered(self, exchanged: Sequence[Tensor] | None) -> None:
        """Do nothing: the worker reads the parameters again, whatever has become of its push."""

    def undo(self) -> None:
        super().undo()
        self._read = []


class ElasticSteps(LocalSteps):
    """Push the parameters x, which stay the worker's own: what the server adds for them is taken from x.

    The first step after a push has its gradient at x, and ends with x minus that difference (EASGD, Zhang et al.,
    NeurIPS 2015). With a ``momentum`` every step first moves x by the velocity times the momentum, which becomes the
    velocity; what the optimizer then changes is added to both (EAMSGD). Buffers are the worker's own too. A push that
    the server has not taken leaves no trace.
    """

    def __init__(self, train_state: TrainState, *, momentum: float) -> None:
        super().__init__(train_state)
        self._model, self._momentum = train_state.model, momentum

    @torch.no_grad()
    def begin(self, version: int) -> None:
        super().begin(version)
        memory = self._memory
        if not self.made:
            assert not memory.pushed, "a worker goes on before its push is answered"
            if memory.own:
                copy_all(self._tensors(), memory.own)
            memory.velocity_before = _clones(memory.velocity)
        for parameter, velocity in zip(self._trained, memory.velocity, strict=False):
            parameter.add_(velocity.mul_(self._momentum))

    @torch.no_grad()
    def step(self) -> None:
        if self._momentum:
            self._step_with_velocity()
        else:
            super().step()
        if self.made == 1:
            for parameter, difference in zip(self._trained, self._memory.difference, strict=False):
                parameter.sub_(difference)

    def _step_with_velocity(self) -> None:
        before = _clones(self._trained)
        super().step()
        changes = [parameter - old for parameter, old in zip(self._trained, before, strict=True)]
        if not self._memory.velocity:  # this was the worker's first step
            self._memory.velocity = changes
            return
        for velocity, change in zip(self._memory.velocity, changes, strict=True):
            velocity.add_(change)

    @torch.no_grad()
    def end(self) -> bool:
        for parameter in self._trained:
            parameter.grad = parameter.detach()
        self._memory.pushed, self.made = _clones(self._tensors()), 0
        return all(bool(parameter.isfinite().all()) for parameter in self._trained)

    def answered(self, exchanged: Sequence[Tensor] | None) -> None:
        memory = self._memory
        if not memory.pushed:
            return
        if exchanged is None:
            self.undo()
            return
        pairs = zip(exchanged, self._trained, strict=True)
        memory.difference = [torch.empty_like(parameter).copy_(each) for each, parameter in pairs]
        memory.own, memory.pushed = memory.pushed, []
        memory.before, memory.velocity_before = None, []

    def undo(self) -> None:
        memory = self._memory
        if memory.before is not None:
            memory.velocity, memory.velocity_before = memory.velocity_before, []
        memory.pushed = []
        super().undo()

    def _tensors(self) -> list[Tensor]:
        return [*self._trained, *self._model.buffers()]


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


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
