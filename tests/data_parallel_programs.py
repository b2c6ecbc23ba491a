"""Programs with PyTorch's own data parallelism: every rank has a batch of its own and the same model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


class Convolutional(nn.Module):
    """A network with buffers, and a layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
        self.rare = nn.Linear(128, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, use_rare: bool = True) -> Tensor:
        x = self.features(x).flatten(1)
        return self.head(self.rare(x) if use_rare else x)  # type: ignore[no-any-return]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's images and labels."""
    random = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(8, 1, 12, 12, generator=random), torch.randint(10, (8,), generator=random)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    within: Callable[[int], contextlib.AbstractContextManager[Any]] = lambda step: contextlib.nullcontext(),
    **arguments: Any,
) -> dict[str, Tensor]:
    """Train, and give the losses and what the model became."""
    losses = []
    for step in range(steps):
        x, labels = batch(step)
        with within(step) as skip:
            loss = nn.functional.cross_entropy(model(x, **arguments), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
        if skip is None:
            optimizer.step()
            optimizer.zero_grad()
    return {"losses": torch.stack(losses), **model.state_dict()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp(directory: Path) -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())  # rank 0's parameters are those of all
    model = DistributedDataParallel(Convolutional(), bucket_cap_mb=0.03)
    return train(model, sgd(model))


def ddp_bucket_views(directory: Path) -> dict[str, Tensor]:
    model = DistributedDataParallel(Convolutional(), gradient_as_bucket_view=True, static_graph=True)
    return train(model, sgd(model))


def ddp_unused_parameters(directory: Path) -> dict[str, Tensor]:
    model = DistributedDataParallel(Convolutional(), find_unused_parameters=True)
    return train(model, sgd(model), use_rare=dist.get_rank() == 0) | train(model, sgd(model), use_rare=False)


def ddp_no_sync(directory: Path) -> dict[str, Tensor]:
    """Accumulate over every two steps."""
    model = DistributedDataParallel(Convolutional())

    @contextlib.contextmanager
    def accumulating() -> Any:
        with model.no_sync():
            yield True

    return train(model, sgd(model), within=lambda step: contextlib.nullcontext() if step % 2 else accumulating())


def ddp_join(directory: Path) -> dict[str, Tensor]:
    """Ranks with unequal numbers of batches."""
    model = DistributedDataParallel(Convolutional())
    with Join([model]):
        train(model, sgd(model), steps=2 + dist.get_rank())
    return model.state_dict()


def ddp_fp16_hook(directory: Path) -> dict[str, Tensor]:
    model = DistributedDataParallel(Convolutional(), bucket_cap_mb=0.03)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, sgd(model))


def ddp_power_sgd_hook(directory: Path) -> dict[str, Tensor]:
    model = DistributedDataParallel(Convolutional())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, sgd(model))


def ddp_in_two_groups(directory: Path) -> dict[str, Tensor]:
    """Two models at once, each in a group of its own."""
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    models = [DistributedDataParallel(Convolutional(), process_group=group) for group in groups]
    results = [train(model, sgd(model)) for model in models]
    return {f"{number}.{key}": value for number, result in enumerate(results) for key, value in result.items()}


def ddp_compiled(directory: Path) -> dict[str, Tensor]:
    model = torch.compile(DistributedDataParallel(Convolutional()), backend="aot_eager")
    return train(model, sgd(model))  # type: ignore[arg-type]


def zero_redundancy(directory: Path) -> dict[str, Tensor]:
    """ZeRO-1: each rank keeps the optimizer's state of its share of the parameters; rank 0 collects it at the end."""
    model = DistributedDataParallel(Convolutional())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=True)
    results = train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        results |= {f"moment.{number}": values["exp_avg"] for number, values in state.items()}
    return results


def post_local_sgd(directory: Path) -> dict[str, Tensor]:
    """Average parameters every two steps, as torch's own local SGD does."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = Convolutional()
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    return train(model, PostLocalSGDOptimizer(sgd(model), averager))
