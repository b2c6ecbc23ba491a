"""Trainings on many workers with uneven batches, and by one worker on the joined ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from paceline.peers.connect import begin_exchange
from paceline.peers.exchange import BackwardPass
from paceline.peers.group import Peers
from paceline.policies import AllReduce
from paceline.problems import MODELS
from paceline.problems.models.gpt import GPT

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
STEPS = 5
CLASSES = 3


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def momentum(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), lr=0.01, eps=1e-4)  # a larger eps, or rounding decides gradients that are all but 0


def classify(model: nn.Module, inputs: Tensor) -> Tensor:
    """The mean loss of a classifier; what is to be found is a function of the inputs."""
    targets = inputs.detach().flatten(1).sum(1).mul(7).nan_to_num().long().remainder(CLASSES)
    return F.cross_entropy(model(inputs), targets)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def one_weight() -> nn.Linear:
    """The least model: the gradient of the mean of its outputs is the mean of its inputs."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


class Branches(nn.Module):
    """One classifier for each dtype, apart from each other, so that rounding in one does not reach the others."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float64)
        self.branches = nn.ModuleList(nn.Linear(6, CLASSES, dtype=dtype) for dtype in dtypes)


def branches_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    assert isinstance(model, Branches)
    losses = [classify(branch, inputs.to(next(branch.parameters()).dtype)) for branch in model.branches]
    return torch.stack([loss.double() for loss in losses]).sum()


class Odd(nn.Module):
    """Scalars, a parameter without elements, one that nobody uses, a frozen one, and a great many tiny ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.shifts = nn.ParameterList(nn.Parameter(torch.tensor(0.1 * place)) for place in range(40))

    def forward(self, inputs: Tensor) -> Tensor:
        shift = torch.stack(list(self.shifts)).sin().sum()
        logits: Tensor = self.linear(inputs * self.frozen) * self.scale + self.nothing.sum()
        return logits * shift


class Tied(nn.Module):
    """One matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.out = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
        return out


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(108, CLASSES)
    )


def channels_last(model: nn.Module) -> nn.Module:
    """The same with other strides."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True)
class Case:
    """A model, how inputs for it look, and its loss."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (6,)
    loss: Callable[[nn.Module, Tensor], Tensor] = classify
    tokens: int = 0  # how many, where inputs are tokens

    def inputs(self, count: int) -> Tensor:
        if self.tokens:
            return torch.randint(self.tokens, (count, *self.shape))
        dtypes = {p.dtype for p in self.build().parameters()}
        return torch.randn(count, *self.shape, dtype=torch.float64 if dtypes == {torch.float64} else torch.float32)


CASES = {
    "linear": Case(lambda: nn.Linear(6, CLASSES)),
    "mlp": Case(lambda: nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))),
    "net3": Case(lambda: MODELS["net3"]((1, 8, 8), CLASSES), (1, 8, 8)),
    "cnn": Case(convolutions, (2, 8, 8)),
    "channels last": Case(lambda: channels_last(convolutions()), (2, 8, 8)),
    "tied": Case(Tied),
    "dtypes": Case(Branches, loss=branches_loss),
    "odd": Case(Odd),
    "huge": Case(lambda: nn.Sequential(nn.Linear(1000, 400), nn.Linear(400, CLASSES)), (1000,)),
    "gpt": Case(lambda: GPT(vocab=11, context=5, num_layers=1, num_heads=2, width=8), (6,), loss=next_token, tokens=11),
    "double": Case(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()),
}


def uneven_sizes(workers: int, steps: int = STEPS) -> list[list[int]]:
    """Numbers of examples by step and worker: other totals in every step, and now and then a worker without any."""
    return [[(2 * rank + 3 * step + 1) % 5 for rank in range(workers)] for step in range(steps)]


def deal(case: Case, sizes: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    return [[case.inputs(count) for count in step] for step in sizes]


def borrowed(empty: Tensor, case: Case) -> Tensor:
    """What a worker without data computes on: anything at all."""
    if case.tokens:
        return case.inputs(1)
    return torch.full((1, *case.shape), float("nan"), dtype=empty.dtype)


def peers_of(group: Any) -> Peers:
    return Peers(group, group.rank(), group.size(), torch.device("cpu"))


def copy_for(group: Any, template: nn.Module) -> nn.Module:
    """The worker's own model; only worker 0 starts from the right parameters, the others get them from it."""
    model = copy.deepcopy(template)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(group.rank())
    return model


def train_on_workers(
    group: Any,
    case: Case,
    template: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    dealt: Sequence[Sequence[Tensor]],
    *,
    policy: AllReduce,
    known_total: bool,
) -> nn.Module:
    """One worker's part."""
    model = copy_for(group, template)
    optimizer = make_optimizer(model)
    exchange = begin_exchange(model, policy, peers_of(group))
    for batches in dealt:
        mine = batches[group.rank()]
        total = sum(map(len, batches)) if known_total else None
        optimizer.zero_grad()
        exchange.begin(BackwardPass(examples=len(mine), total=total))
        backward(case.loss(model, mine if len(mine) else borrowed(mine, case)))
        exchange.finish()
        optimizer.step()
        exchange.release()
    exchange.close()
    return model


def train_joined(
    case: Case,
    template: nn.Module,
    make_optimizer: Callable[[nn.Module], Optimizer],
    dealt: Sequence[Sequence[Tensor]],
) -> nn.Module:
    """The same by one worker, without us."""
    model = copy.deepcopy(template)
    optimizer = make_optimizer(model)
    for batches in dealt:
        optimizer.zero_grad()
        backward(case.loss(model, torch.cat(list(batches))))
        optimizer.step()
    return model


def differences(model: nn.Module, expected: nn.Module) -> Iterator[tuple[str, float]]:
    """How far the parameters are from what they should be, relative to their norms, and in units of the tolerance."""
    for (name, found), (_, wanted) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        distance = torch.linalg.vector_norm(found.detach().double() - wanted.detach().double())
        norm = torch.linalg.vector_norm(wanted.detach().double()).clamp(min=1e-3)
        yield name, float(distance / norm) / TOLERANCE[found.dtype]


def assert_close(model: nn.Module, expected: nn.Module) -> None:
    for name, distance in differences(model, expected):
        assert distance <= 1, f"{name}: {distance:.3g} times the tolerance"


def assert_moved(model: nn.Module, template: nn.Module) -> None:
    """Else equality would show nothing."""
    assert any(distance > 10 for _, distance in differences(model, template))
