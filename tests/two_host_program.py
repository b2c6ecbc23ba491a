"""Run by a test on every rank of two hosts: what the backend "paceline" gives there is what Gloo gives."""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline  # noqa: F401  registers the backend
from paceline.collectives.two_level import TwoLevelGroup

TYPES = ("float32", "float64", "bfloat16", "float16", "int8", "int32", "int64", "uint8")
WIDER = {"int16": "int32", "uint16": "int32", "uint32": "int64"}


def check_sums(gloo: dist.ProcessGroup) -> None:
    for name in (*TYPES, *WIDER):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            ours = (torch.arange(7000) % 3 + dist.get_rank() % 2).to(getattr(torch, name))
            theirs = ours.to(getattr(torch, WIDER.get(name, name)))
            dist.all_reduce(ours, op)
            dist.all_reduce(theirs, op, group=gloo)
            assert torch.equal(ours.double(), theirs.double()), (name, op)


def trained(group: dist.ProcessGroup, model: nn.Module) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    wrapped = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(4):
        own = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        optimizer.zero_grad()
        wrapped(own).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("paceline", timeout=timedelta(seconds=30))
    assert isinstance(dist.group.WORLD, TwoLevelGroup)
    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    check_sums(gloo)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 5))
    for ours, theirs in zip(trained(dist.group.WORLD, model), trained(gloo, model), strict=True):
        torch.testing.assert_close(ours, theirs)
    dist.destroy_process_group()
    (Path(sys.argv[1]) / str(rank)).touch()


if __name__ == "__main__":
    main()
