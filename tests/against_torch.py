"""A script for workers: train with PyTorch's DistributedDataParallel, with ours and with a session; write all down.

``python against_torch.py DIRECTORY``; every worker writes its own file of tensors there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset

import paceline
from paceline.problems import MODELS

STEPS = 10


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def plain(model: nn.Module, inputs: Tensor, targets: Tensor, step: int) -> None:
    F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]


def accumulating(model: Any, inputs: Tensor, targets: Tensor, step: int) -> None:
    with model.no_sync():
        plain(model, inputs[:3], targets[:3], step)
        plain(model, inputs[3:5], targets[3:5], step)
    plain(model, inputs[5:], targets[5:], step)


def twice(model: nn.Module, inputs: Tensor, targets: Tensor, step: int) -> None:
    plain(model, inputs[:3], targets[:3], step)
    plain(model, inputs[3:], targets[3:], step)


def two_passes_one_backward(model: nn.Module, inputs: Tensor, targets: Tensor, step: int) -> None:
    losses = F.cross_entropy(model(inputs[:3]), targets[:3]) + F.cross_entropy(model(inputs[3:]), targets[3:])
    losses.backward()  # type: ignore[no-untyped-call]


def evaluating_before_backward(model: nn.Module, inputs: Tensor, targets: Tensor, step: int) -> None:
    loss = F.cross_entropy(model(inputs), targets)
    with torch.no_grad():
        model(inputs)
    loss.backward()  # type: ignore[no-untyped-call]


def in_eval_mode(model: nn.Module, inputs: Tensor, targets: Tensor, step: int) -> None:
    model.eval()  # as fine-tuning does, to leave the statistics alone
    plain(model, inputs, targets, step)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor, Tensor, int], None]]] = {
    "net3": (lambda: MODELS["net3"]((1, 8, 8), 10), plain),
    "batch norm": (with_batch_norm, plain),
    "accumulating": (lambda: MODELS["net3"]((1, 8, 8), 10), accumulating),
    "twice": (lambda: MODELS["net3"]((1, 8, 8), 10), twice),
    "two passes": (lambda: MODELS["net3"]((1, 8, 8), 10), two_passes_one_backward),
    "evaluating": (lambda: MODELS["net3"]((1, 8, 8), 10), evaluating_before_backward),
    "eval mode": (with_batch_norm, in_eval_mode),
}


def train(case: str, wrap: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    build, passes = CASES[case]
    torch.manual_seed(5 + dist.get_rank())  # worker 0's parameters count
    module = build()
    torch.manual_seed(50 + dist.get_rank())
    wrapped = wrap(module)
    optimizer = Adam(module.parameters(), lr=1e-3) if case == "net3" else SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        passes(wrapped, torch.randn(8, 1, 8, 8), torch.randint(10, (8,)), step)
        optimizer.step()
    return {name: value.clone() for name, value in module.state_dict().items()}


def train_with_session() -> dict[str, Tensor]:
    """Joins whatever the launcher's variables name."""
    model = MODELS["net3"]((1, 8, 8), 10)
    data = TensorDataset(torch.randn(30, 1, 8, 8), torch.randint(10, (30,)))
    with paceline.join(model, SGD(model.parameters(), lr=0.1)) as session:
        for inputs, targets in session.batches(data, 4, epochs=2):
            with session.step():
                plain(model, inputs, targets, session.steps)
        return {"steps": torch.tensor(session.steps), "workers": torch.tensor(session.world_size), **model.state_dict()}


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    found = {f"session/{key}": value for key, value in train_with_session().items()}
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    for case in CASES:
        for name, wrap in (("torch", nn.parallel.DistributedDataParallel), ("ours", paceline.DistributedDataParallel)):
            found.update({f"{name}/{case}/{key}": value for key, value in train(case, wrap).items()})
    save_file(found, directory / f"{dist.get_rank()}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
