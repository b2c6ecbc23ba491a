"""How a session's worker meets the others: not at all in a world of one, or by all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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

    def accumulate(self, *, examples: int, total: int | None) -> None:
        """Before forward: keep the gradients of the backward pass to come for a later exchange."""
        ...

    def begin(
        self,
        *,
        examples: int,
        total: int | None,
        loss: Callable[[], float | None],
        stop: Callable[[], bool] = lambda: False,
        tag: int | None = None,
    ) -> None:
        """Before forward: exchange the gradients of the backward pass to come, and of those accumulated before."""
        ...

    def finish(self) -> Outcome | None:
        """Before the update: the gradients are averaged when this returns."""
        ...

    def release(self, *, failed: bool = False) -> None:
        """The step is over, or has ``failed``: further gradients are the worker's own."""
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

    def follow_buffers(self) -> None:
        """Copy worker 0's buffers to all."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What the bits of the exchanges to come depend on, beside what is exchanged."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the state may be that of another number of workers, or of one alone."""
        ...

    def close(self) -> None:
        """Let go of the model; the group stays."""
        ...


def connect(model: nn.Module, policy: Policy, *, group: Any, rank_and_size: tuple[int, int] | None) -> Exchange:
    """Meet the other workers: those of ``group``, or of torch's default one, or nobody.

    ``rank_and_size`` is the rank and the number of workers that a launcher has given to this process.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if group is not None:
        peers = Peers(group, group.rank(), group.size(), device)
    elif rank_and_size is not None or torch.distributed.is_initialized():
        peers = default_peers(device, rank_and_size)
    else:
        return Alone()
    if peers.size == 1:
        return Alone()
    check_peers(policy)
    assert isinstance(policy, AllReduce)
    return AllReduceExchange(model, peers, policy)


def check_peers(policy: Policy) -> None:
    """Raise if workers that meet as peers cannot run under the policy."""
    if not isinstance(policy, AllReduce):
        raise UsageError(
            f"policy {policy} needs a server, which only Paceline's own launcher starts; "
            f"run the script by: paceline run --workers N --policy '{policy}' script.py"
        )


class Alone:
    """A world of one."""

    rank = 0
    world_size = 1

    def accumulate(self, *, examples: int, total: int | None) -> None:
        pass

    def begin(
        self,
        *,
        examples: int,
        total: int | None,
        loss: Callable[[], float | None],
        stop: Callable[[], bool] = lambda: False,
        tag: int | None = None,
    ) -> None:
        pass

    def finish(self) -> None:
        return None

    def release(self, *, failed: bool = False) -> None:
        pass

    def mean(self, value: Tensor, weight: float) -> Tensor:
        return value.to(averaged_dtype(value), copy=True)

    def share(self, state: Any) -> Any:
        return state

    def largest(self, number: int) -> int:
        return number

    def follow_buffers(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class AllReduceExchange:
    """Average the gradients of ``model`` over ``peers`` in every step; its buffers follow worker 0's."""

    def __init__(self, model: nn.Module, peers: Peers, policy: AllReduce) -> None:
        self.rank, self.world_size = peers.rank, peers.size
        self._peers = peers
        check_same_model(model, peers)
        with peers.explain("receiving the parameters of worker 0"):
            for tensor in [*model.parameters(), *model.buffers()]:
                send_tensors([tensor], peers)
        self._reducer = Reducer(
            [(name, parameter) for name, parameter in model.named_parameters()],
            peers,
            policy,
            sparse=sparse_parameters(model),
        )
        self._accumulated: list[tuple[int, int | None]] = []  # examples and total of the passes kept so far
        self._modules = list(model.modules())  # walking through them takes longer than looking for buffers

    def accumulate(self, *, examples: int, total: int | None) -> None:
        self._reducer.disarm()
        self._accumulated.append((examples, total))
        self._reducer.weigh(_weight(examples, total))

    def begin(
        self,
        *,
        examples: int,
        total: int | None,
        loss: Callable[[], float | None],
        stop: Callable[[], bool] = lambda: False,
        tag: int | None = None,
    ) -> None:
        passes = [*self._accumulated, (examples, total)]
        self._accumulated = []
        if len(passes) > 1 and all(known is not None for _, known in passes):
            self._reducer.arm(examples=examples, total=total, loss=loss, stop=stop, tag=tag, weighted=True)
            self._reducer.weigh(_weight(examples, total))
            return
        # Without totals all passes of a worker get one weight, by their examples together.
        self._reducer.arm(examples=sum(count for count, _ in passes), total=total, loss=loss, stop=stop, tag=tag)
        if len(passes) > 1:
            self._reducer.weigh(_weight(examples, None))

    def finish(self) -> Outcome:
        outcome = self._reducer.finish()
        self.follow_buffers()  # here and not before forward, so that between steps all workers are alike
        return outcome

    def follow_buffers(self) -> None:
        """Copy worker 0's buffers to all."""
        with self._peers.explain("sending buffers"):
            send_tensors([tensor for module in self._modules for tensor in _buffers_of(module)], self._peers)

    def release(self, *, failed: bool = False) -> None:
        if failed:
            self._accumulated = []
        self._reducer.disarm(failed=failed)

    def mean(self, value: Tensor, weight: float) -> Tensor:
        flat = value.detach().reshape(-1).to(torch.float64)
        packed = torch.cat([flat * weight if weight else torch.zeros_like(flat), flat.new_tensor([weight])])
        packed = packed.to(self._peers.device)
        with self._peers.explain("averaging a value"):
            self._peers.all_reduce(packed).wait()
        return (packed[:-1] / packed[-1]).reshape(value.shape).to(value.device, averaged_dtype(value))

    def share(self, state: Any) -> Any:
        with self._peers.explain("receiving the checkpoint of worker 0"):
            return share_state(state, self._peers)

    def largest(self, number: int) -> int:
        with self._peers.explain("comparing how much data is left"):
            tensor = torch.tensor([number], device=self._peers.device)
            self._peers.all_reduce(tensor, torch.distributed.ReduceOp.MAX).wait()
        return int(tensor)

    def state_dict(self) -> dict[str, Any]:
        return self._reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._reducer.load_state_dict(state)

    def close(self) -> None:
        self._reducer.close()


def _buffers_of(module: nn.Module) -> Iterable[Tensor]:
    return (buffer for buffer in module._buffers.values() if buffer is not None)


def _weight(examples: int, total: int | None) -> float:
    """The weight of a pass's gradients among all workers'; unknown, but for borrowed data, without a total."""
    return examples / total if total is not None else float(examples > 0)


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
    for index, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return f"tensor {index} is {_describe(b)}, and {_describe(a)} on worker 0"
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


def averaged_dtype(value: Tensor) -> torch.dtype:
    """Averages of whole numbers are not whole."""
    return value.dtype if value.is_floating_point() or value.is_complex() else torch.get_default_dtype()


def send_tensors(tensors: Sequence[Tensor], peers: Peers) -> None:
    """Copy worker 0's tensors into everybody's, as bytes: process groups want them dense, and know few dtypes."""
    if not tensors:
        return
    tensors = [_without_repeats(tensor) for tensor in tensors]
    with torch.no_grad():
        parts = [_as_bytes(tensor) for tensor in tensors]
        payload = torch.cat([part.to(peers.device) for part in parts])
        peers.broadcast(payload)
        if peers.rank != 0:
            received = torch.split(payload, [len(part) for part in parts])
            for tensor, part in zip(tensors, received, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _without_repeats(tensor: Tensor) -> Tensor:
    """An expanded tensor as it lies in memory, for it cannot be written otherwise."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def share_state(state: Mapping[str, Any] | None, peers: Peers) -> Any:
    """Send worker 0's state to all: its JSON part first, then the bytes of every tensor."""
    tree, tensors = pack(state)
    layout = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    tree, layout = peers.share([tree, layout])
    received = {}
    for name, (dtype, shape) in layout.items():
        if peers.rank == 0:
            tensor = tensors[name]
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        payload = _as_bytes(tensor).to(peers.device)
        peers.broadcast(payload)
        received[name] = payload.cpu().view(tensor.dtype).reshape(shape)
    return unpack(tree, received)
