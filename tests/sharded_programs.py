"""Programs that split a model over the ranks: its parameters, its layers' matrices, or both over a mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

WIDTH, CLASSES, STEPS = 32, 12, 3


class Block(nn.Module):
    """The two-layer half of a transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def train(
    model: nn.Module,
    shard: int,
    optimizer: torch.optim.Optimizer | None = None,
    clip: bool = False,
    parallel_loss: bool = False,
) -> dict[str, Tensor]:
    """Train on the batches of one data shard, and give the losses and all parameters, put together again."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(shard)
    numbers = []
    for _ in range(STEPS):
        x = torch.randn(4, 8, WIDTH, generator=random)
        labels = torch.randint(CLASSES, (32,), generator=random)
        logits = model(x).flatten(0, 1)
        if parallel_loss:
            with loss_parallel():
                loss = nn.functional.cross_entropy(logits, labels)
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = nn.functional.cross_entropy(logits.float(), labels)
            loss.backward()  # type: ignore[no-untyped-call]
        numbers.append(full(loss))
        if clip:
            numbers.append(full(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {"numbers": torch.stack(numbers), **{name: full(value) for name, value in model.state_dict().items()}}


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().float()


def sharded(model: Net, mesh: DeviceMesh | None = None, policy: MixedPrecisionPolicy | None = None) -> Net:
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    return model


def fsdp(directory: Path) -> dict[str, Tensor]:
    return train(sharded(Net()), dist.get_rank(), clip=True)


def fsdp_bfloat16(directory: Path) -> dict[str, Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return train(sharded(Net(), policy=policy), dist.get_rank())


def first_fsdp(directory: Path) -> dict[str, Tensor]:
    """FSDP as it was before ``fully_shard``."""
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, dist.get_rank(), optimizer)
    with FullyShardedDataParallel.summon_full_params(model):
        return losses | {name: value.clone() for name, value in model.named_parameters()}


def fsdp_full_state(directory: Path) -> dict[str, Tensor]:
    """Collect the whole state on rank 0, and hand it out again."""
    model = sharded(Net())
    train(model, dist.get_rank())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    again = sharded(Net())
    set_model_state_dict(again, {name: value.double() for name, value in state.items()}, options=options)
    return {f"collected.{name}": value for name, value in state.items()} | {
        f"handed_out.{name}": full(value) for name, value in again.state_dict().items()
    }


def hybrid_fsdp(directory: Path) -> dict[str, Tensor]:
    """Shards inside a pair of ranks, replicas between pairs."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return train(sharded(Net(), mesh), dist.get_rank(), clip=True)


def tensor_parallel(directory: Path) -> dict[str, Tensor]:
    model = _by_matrices(Net(), init_device_mesh("cpu", (dist.get_world_size(),)))
    return train(model, 0)


def sequence_parallel(directory: Path) -> dict[str, Tensor]:
    """Between the matrices, each rank has a part of the sequence."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net()
    for block in model.blocks:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)
        hand_out = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False)
        if block is model.blocks[0]:
            parallelize_module(block, mesh, hand_out)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"head": head})
    return train(model, 0, parallel_loss=True)


def _by_matrices(model: Net, mesh: DeviceMesh) -> Net:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def mesh_of_data_and_tensor(directory: Path) -> dict[str, Tensor]:
    """FSDP over one axis of the mesh, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = _by_matrices(Net(), mesh["tensor"])
    return train(sharded(model, mesh["data"]), mesh.get_local_rank("data"))


def redistributed(directory: Path) -> dict[str, Tensor]:
    """A DTensor through all layouts, on an axis that the ranks do not divide."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    rows = distribute_tensor(numbers, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product: Any = rows.T @ rows
    maximum: Any = rows.max()
    return {
        "rows": rows.to_local(),
        "columns": columns.to_local(),
        "whole": columns.full_tensor(),
        "product": product.full_tensor(),
        "scattered": product.redistribute(mesh, [Shard(0)]).to_local(),
        "maximum": maximum.full_tensor(),
    }
