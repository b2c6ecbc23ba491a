"""A problem some of whose workers are hostile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from paceline.attacks.base import Attack
from paceline.errors import UsageError
from paceline.problems import Problem


@dataclass(frozen=True, kw_only=True)
class AttackedProblem(Problem):
    """A problem whose workers 0 to ``hostile`` - 1 attack.

    Only their gradients are wrong: they evaluate, save and report as all workers do. Where workers make steps of their
    own, a hostile one makes them with the wrong gradients.
    """

    attack: Attack
    hostile: int  # at least 1

    @classmethod
    def of(cls, problem: Problem, attack: Attack, hostile: int) -> Self:
        """Let workers attack a problem; raise if the attack cannot be on its data."""
        _, target = problem.train[0]
        if not attack.fits(torch.as_tensor(target)):
            raise UsageError(f"attack {attack} wants classes to change, and the problem {problem.name!r} has none")
        values = {field.name: getattr(problem, field.name) for field in fields(Problem)}
        return cls(**values, attack=attack, hostile=hostile)

    def batch_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor, *, worker: int) -> Tensor:
        if worker >= self.hostile:
            return super().batch_loss(model, inputs, targets, worker=worker)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        losses, gradients = [], []
        num_parts = max(1, min(self.attack.num_parts, len(inputs)))
        for part in zip(*(tensor.chunk(num_parts) for tensor in (inputs, targets)), strict=True):
            loss = self._hostile_loss(model, *part)
            losses.append(loss.detach())
            with torch.autocast(inputs.device.type, enabled=False):
                gradients.append(torch.autograd.grad(loss, trained, allow_unused=True))
        pushes = [self._push_of(each) for each in zip(*gradients, strict=True)]
        given: Tensor = _GivesGradients.apply(torch.stack(losses).mean(), pushes, *trained)  # type: ignore[no-untyped-call]
        return given

    def _hostile_loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(inputs)
        return self.loss(outputs, self.attack.relabel(targets, outputs))

    def _push_of(self, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """What is pushed for a parameter; nothing for one that the loss does not depend on."""
        found = [gradient for gradient in gradients if gradient is not None]
        return self.attack.push(found) if found else None


class _GivesGradients(torch.autograd.Function):
    """A loss whose backward pass gives the parameters gradients that are there already.

    So they come where gradients are expected: when a reducer or a cancelled step listens for them.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(None if each is None else each * scale.to(each.dtype) for each in ctx.gradients)
