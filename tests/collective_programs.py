"""Programs that call collectives in the ways libraries do: functional, differentiable, of objects, over meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as nn_functional

differentiable: Any = nn_functional


def functional_collectives(directory: Path) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(size * 4.0).view(size * 2, 2) + 100 * rank
    results = {
        "all_reduce": functional.all_reduce(x, "sum", group),
        "maximum": functional.all_reduce(x, "max", group),
        "all_gather": functional.all_gather_tensor(x, 1, group),
        "reduce_scatter": functional.reduce_scatter_tensor(x, "sum", 0, group),
        "broadcast": functional.broadcast(x, size - 1, group),
        "all_to_all": functional.all_to_all_single(x, None, None, group),
        "uneven": functional.all_to_all_single(
            torch.full((sum(range(size)),), float(rank)), [rank] * size, list(range(size)), group
        ),
        "shifted": functional.permute_tensor(x.flatten(), [(other + 1) % size for other in range(size)], group),
    }
    several = [x, 2 * x]
    for name, tensors in {
        "all_reduce_coalesced": functional.all_reduce_coalesced(several, "sum", group),
        "all_gather_coalesced": functional.all_gather_into_tensor_coalesced(several, group),
        "reduce_scatter_coalesced": functional.reduce_scatter_tensor_coalesced(several, "sum", [0, 0], group),
    }.items():
        results |= {f"{name}.{number}": tensor for number, tensor in enumerate(tensors)}
    return {name: tensor + 0 for name, tensor in results.items()}  # makes them wait


def gradients_through_collectives(directory: Path) -> dict[str, Tensor]:
    """The gradient of a loss that depends on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = (torch.arange(size * 3.0).view(size, 3) * (rank + 1)).requires_grad_()
    group = dist.group.WORLD
    assert group is not None
    terms = [
        differentiable.all_reduce(x).square().sum(),
        torch.stack(list(differentiable.all_gather(x))).square().sum() * (rank + 1),
        differentiable.broadcast(x.clone(), 0).square().sum(),
        differentiable.all_to_all_single(torch.empty_like(x), x).pow(3).sum(),
        functional.all_gather_tensor_autograd(x, 0, group).square().sum() * (rank + 1),
        functional.reduce_scatter_tensor_autograd(x, "sum", 0, group).square().sum(),
    ]
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return {"gradient": x.grad, "terms": torch.stack(terms)}


def objects(directory: Path) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[int] = [0] * size
    dist.all_gather_object(gathered, 10 + rank)
    told = ["nothing" if rank else "something long " * 100, rank]
    dist.broadcast_object_list(told, src=0)
    given: list[object] = [None]
    dist.scatter_object_list(given, [{"for": other} for other in range(size)] if rank == 0 else None, src=0)
    assert given == [{"for": rank}]
    assert told[1] == 0
    return {"gathered": torch.tensor(gathered), "length": torch.tensor(len(str(told[0])))}


def mesh_axes(directory: Path) -> dict[str, Tensor]:
    """Collectives along each axis of a mesh, and over its flattened form."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    results = {}
    for axis in ("data", "tensor"):
        x = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(x, group=mesh.get_group(axis))
        results[axis] = x
    x = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(x, group=mesh["data", "tensor"]._flatten("all").get_group())
    return results | {"all": x}


def ring_of_messages(directory: Path) -> dict[str, Tensor]:
    """Pass numbers around a ring, as ring attention does, in batches of sends and receives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    block, total = torch.full((1000,), float(rank)), torch.zeros(1000)
    for _ in range(size):
        total += block
        coming = torch.empty_like(block)
        calls = [
            dist.P2POp(dist.isend, block, (rank + 1) % size),
            dist.P2POp(dist.irecv, coming, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        block = coming
    return {"total": total}


def compiled_collectives(directory: Path) -> dict[str, Tensor]:
    """A compiled function that reduces, in torch's functional way and in the old one."""

    @torch.compile(backend="aot_eager")
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        group = dist.group.WORLD
        assert group is not None
        mean = functional.all_reduce(x * 2, "sum", group) / dist.get_world_size()
        total = x + 1
        dist.all_reduce(total)
        return mean.sin(), total.cos()

    mean, total = step(torch.arange(6.0) + dist.get_rank())
    return {"mean": mean, "total": total}
