"""Programs with ``torch.distributed.pipelining``: every rank has some of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

WIDTH, MICRO_BATCHES, STEPS = 16, 4, 3
CPU = torch.device("cpu")


def _layers(stages: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(stages)]


def _train(schedule: Any, parts: list[nn.Module], *, first: bool, last: bool) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD([parameter for part in parts for parameter in part.parameters()], lr=0.1)
    random = torch.Generator().manual_seed(7)
    results: dict[str, Tensor] = {}
    for step in range(STEPS):
        x, target = torch.randn(2, 8, WIDTH, generator=random)
        losses: list[Tensor] = []
        arguments = {"target": target, "losses": losses} if last else {}
        output = schedule.step(*([x] if first else []), **arguments)
        optimizer.step()
        optimizer.zero_grad()
        if last:
            results |= {f"losses.{step}": torch.stack(losses), f"output.{step}": output}
    for number, part in enumerate(parts):
        results |= {f"{number}.{name}": value for name, value in part.state_dict().items()}
    return results


def _one_stage_each(schedule: Any) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = _layers(size)[rank]
    stage = PipelineStage(layer, rank, size, CPU)
    return _train(
        schedule(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss), [layer], first=rank == 0, last=rank == size - 1
    )


def _two_stages_each(schedule: Any) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = _layers(2 * size)
    numbers = [rank, rank + size]
    stages = [PipelineStage(layers[number], number, 2 * size, CPU) for number in numbers]
    parts = [layers[number] for number in numbers]
    return _train(
        schedule(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss), parts, first=rank == 0, last=rank == size - 1
    )


def gpipe(directory: Path) -> dict[str, Tensor]:
    return _one_stage_each(ScheduleGPipe)


def one_forward_one_backward(directory: Path) -> dict[str, Tensor]:
    return _one_stage_each(Schedule1F1B)


def interleaved(directory: Path) -> dict[str, Tensor]:
    return _two_stages_each(ScheduleInterleaved1F1B)


def zero_bubble(directory: Path) -> dict[str, Tensor]:
    return _two_stages_each(ScheduleInterleavedZeroBubble)


def split_by_tracing(directory: Path) -> dict[str, Tensor]:
    """One model, cut by torch itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(*_layers(size))
    cuts = {str(number): SplitPoint.BEGINNING for number in range(1, size)}
    pipe = pipeline(model, mb_args=(torch.zeros(8 // MICRO_BATCHES, WIDTH),), split_spec=cuts)
    stage = pipe.build_stage(rank, CPU)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    return _train(schedule, [pipe.get_stage_module(rank)], first=rank == 0, last=rank == size - 1)
