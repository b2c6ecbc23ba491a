"""Programs with PyTorch's own DDP and a codec as its communication hook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from backend_processes import join_world
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import paceline

STEPS = 5


def hooks(directory: Path, rank: int, size: int) -> Any:
    """Train under torch's hook and ours, and under a codec that remembers, whole and loaded again."""
    join_world(directory, rank, size, backend="gloo")
    sparse = "top-k(density=0.1)"
    whole, resumed = train(rank, STEPS, sparse), train(rank, STEPS, sparse, load_before=3)
    anew = {
        codec: [resumed_anew(rank, codec), train(rank, STEPS, codec)["model"]]
        for codec in (sparse, "qsgd(raw_below=0)", "threshold(tau=0.01, adaptive=0.2)", "power-sgd(rank=1)")
    }
    found = {
        "torch": train(rank, STEPS, None)["model"],
        "ours": train(rank, STEPS, "cast(to=fp16)")["model"],
        "whole": whole,
        "resumed": resumed,
        "anew": anew,
        "twice": train(rank, STEPS, "power-sgd(rank=1)")["model"],
        "scaled": [train(rank, STEPS, codec, scaled=True)["model"] for codec in (sparse, "power-sgd(rank=1)")],
    }
    return as_numbers(found)


def as_numbers(state: Any) -> Any:
    """The same with lists in the place of tensors."""
    if isinstance(state, Tensor):
        return state.tolist()
    if isinstance(state, list):
        return [as_numbers(value) for value in state]
    return {name: as_numbers(value) for name, value in state.items()} if isinstance(state, dict) else state


def resumed_anew(rank: int, codec: str) -> Any:
    """The model after a run whose second half is another process's: its first step has PyTorch's first buckets."""
    half = train(rank, 3, codec)
    return train(rank, STEPS, codec, first=3, start=half)["model"]


def train(
    rank: int,
    steps: int,
    codec: str | None,
    *,
    load_before: int | None = None,
    first: int = 0,
    start: dict[str, Any] | None = None,
    scaled: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 3))
    if start is not None:
        own.load_state_dict(start["model"])
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)
    ddp = DistributedDataParallel(own, bucket_cap_mb=0.0005)  # with other buckets after the first step
    if codec is None:
        ddp.register_comm_hook(None, fp16_compress_hook)
        remembered = None
    else:
        remembered, hook = paceline.comm_hook(codec, scaler=scaler)
        ddp.register_comm_hook(remembered, hook)
        if start is not None:
            remembered.load_state_dict(start["hook"])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(first, steps):
        if remembered is not None and step == load_before:
            remembered.load_state_dict(remembered.state_dict())
        optimizer.zero_grad()
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        scaler.scale(ddp(inputs).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return {
        "model": own.state_dict(),
        "hook": None if remembered is None else remembered.state_dict(),
        "bytes": None if remembered is None else remembered.num_bytes,
    }
