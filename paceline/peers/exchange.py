"""How a session's worker meets the others: not at all in a world of one, or by all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.peers.group import Peers, default_peers
from paceline.peers.reducer import Outcome, Reducer
from paceline.policies import AllReduce, Policy
from paceline.record.state_tree import pack, unpack


class Exchange(Protocol):
    """What a session asks of the way its workers agree."""

    rank: int
    world_size: int

    def begin(self, *, examples: int, total: int | None, loss: Callable[[], float | None]) -> None:
        """Before forward: exchange the gradients of the backward pass to come."""
        ...

    def finish(self) -> Outcome | None:
        """Before the update: the gradients are averaged when this returns."""
        ...

    def abandon(self) -> None:
        """The step failed: leave its gradients alone."""
        ...

    def mean(self, value: Tensor, weight: float) -> Tensor:
        """Average ``value`` over the workers."""
        ...

    def share(self, state: Any) -> Any:
        """Give every worker the state that worker 0 has."""
        ...

    def largest(self, number: int) -> int:
        """Find the largest of the workers' numbers."""
        ...

    def close(self) -> None:
        """Let go of the model; the group stays."""
        ...


def connect(model: nn.Module, policy: Policy, *, group: Any, place: tuple[int, int] | None) -> Exchange:
    """Meet the other workers: those of ``group``, or of torch's default one, or nobody.

    ``place`` is the rank and the number of workers that a launcher has given to this process.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if group is not None:
        peers = Peers(group, group.rank(), group.size(), device)
    elif place is not None or torch.distributed.is_initialized():
        peers = default_peers(device, place)
    else:
        return Alone()
    if peers.size == 1:
        return Alone()
    if not isinstance(policy, AllReduce):
        raise UsageError(f"policy {policy} cannot run on {peers.size} workers")
    return AllReduceExchange(model, peers, policy)


class Alone:
    """A world of one."""

    rank = 0
    world_size = 1

    def begin(self, *, examples: int, total: int | None, loss: Callable[[], float | None]) -> None:
        pass

    def finish(self) -> None:
        return None

    def abandon(self) -> None:
        pass

    def mean(self, value: Tensor, weight: float) -> Tensor:
        return value.clone()

    def share(self, state: Any) -> Any:
        return state

    def largest(self, number: int) -> int:
        return number

    def close(self) -> None:
        pass


class AllReduceExchange:
    """Average the gradients of ``model`` over ``peers`` in every step; its buffers follow worker 0's."""

    def __init__(self, model: nn.Module, peers: Peers, policy: AllReduce) -> None:
        self.rank, self.world_size = peers.rank, peers.size
        self._peers = peers
        self._model = model
        check_same_model(model, peers)
        with torch.no_grad():
            for tensor in model.state_dict(keep_vars=True).values():
                if isinstance(tensor, Tensor):
                    peers.broadcast(tensor.detach())
        self._reducer = Reducer(
            [(name, parameter) for name, parameter in model.named_parameters()],
            peers,
            policy,
            sparse=sparse_parameters(model),
        )

    def begin(self, *, examples: int, total: int | None, loss: Callable[[], float | None]) -> None:
        self._reducer.arm(examples=examples, total=total, loss=loss)

    def finish(self) -> Outcome:
        outcome = self._reducer.finish()
        self.follow_buffers()  # here and not before forward, so that between steps all workers are alike
        return outcome

    def follow_buffers(self) -> None:
        """Copy worker 0's buffers to all."""
        with self._peers.explain("sending buffers"):
            send_buffers(self._model, self._peers)

    def abandon(self) -> None:
        self._reducer.disarm()

    def mean(self, value: Tensor, weight: float) -> Tensor:
        packed = torch.cat([value.detach().reshape(-1).double() * weight, value.new_tensor([weight]).double()])
        packed = packed.to(self._peers.device)
        with self._peers.explain("averaging a value"):
            self._peers.all_reduce(packed).wait()
        return (packed[:-1] / packed[-1]).reshape(value.shape).to(value)

    def share(self, state: Any) -> Any:
        with self._peers.explain("receiving the checkpoint of worker 0"):
            return share_state(state, self._peers)

    def largest(self, number: int) -> int:
        with self._peers.explain("comparing how much data is left"):
            tensor = torch.tensor([number], device=self._peers.device)
            self._peers.all_reduce(tensor, torch.distributed.ReduceOp.MAX).wait()
        return int(tensor)

    def close(self) -> None:
        self._reducer.close()


def check_same_model(model: nn.Module, peers: Peers) -> None:
    """Make sure that all workers have the same parameters, and tell all of them who differs and how."""
    mine = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    with peers.explain("comparing models"):
        everybody = peers.gather(mine)
    for rank, theirs in enumerate(everybody):
        difference = _first_difference(everybody[0], theirs)
        if difference is not None:
            raise UsageError(
                f"worker {rank} has another model than worker 0: {difference}; all workers must build the same model"
            )


def _first_difference(first: list[Any], other: list[Any]) -> str | None:
    for place, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return f"tensor {place} is {_describe(b)}, and {_describe(a)} on worker 0"
    if len(first) != len(other):
        return f"it has {len(other)} tensors, and worker 0 has {len(first)}"
    return None


def _describe(entry: list[Any]) -> str:
    name, shape, dtype, trained = entry
    return f"{name} {tuple(shape)} {dtype}{'' if trained else ' (frozen)'}"


def sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Name the parameters whose gradients are sparse."""
    return frozenset(
        f"{prefix}.weight".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )


def send_buffers(model: nn.Module, peers: Peers) -> None:
    """Copy worker 0's buffers (BatchNorm's statistics) to all, one message per dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in model.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        peers.broadcast(flat)
        if peers.rank != 0:
            with torch.no_grad():
                for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view_as(buffer))


def share_state(state: Mapping[str, Any] | None, peers: Peers) -> Any:
    """Send worker 0's state to all: its JSON part first, then the bytes of every tensor."""
    tree, tensors = pack(state)
    layout = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    tree, layout = peers.share([tree, layout])
    received = {}
    for name, (dtype, shape) in layout.items():
        if peers.rank == 0:
            tensor = tensors[name].contiguous()
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        payload = tensor.reshape(-1).view(torch.uint8).to(peers.device)
        peers.broadcast(payload)
        received[name] = payload.cpu().view(tensor.dtype).reshape(shape)
    return unpack(tree, received)
