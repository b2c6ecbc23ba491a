"""The exchange between a session's workers: none in a world of one, else collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.peers.coding import Coding
from paceline.peers.group import Peers
from paceline.peers.reducer import Outcome
from paceline.peers.tensors import averaged_dtype, send_tensors, share_state
from paceline.policies import Progress


class BackwardPass(NamedTuple):
    """A backward pass after which the parameters are updated, as this worker knows of it."""

    examples: int
    total: int | None = None  # of all workers, where that is known
    loss: Callable[[], float | None] = lambda: None  # asked when backward has ended
    stop: Callable[[], bool] = lambda: False  # whether the worker was asked to stop, asked then too
    tag: int | None = None  # of the step; the same on all workers


class Exchange(Protocol):
    """The interface between a session and the exchange of its workers."""

    rank: int
    world_size: int
    replicas_differ: bool  # whether the workers' parameters may differ between steps
    catches_up: bool  # whether a worker that has missed exchanges goes on without them; else it copies another's state
    exchanges: bool  # whether the last update was one after which workers exchange: the same on all of them
    common_state: tuple[str, ...]  # entries of the state that are the same on all workers
    shares_parameters: bool  # whether all workers update the same parameters, while the rest of their states may differ
    records: bool  # whether the run is to be recorded
    step: Callable[[Optimizer], None] | None  # makes the step of an optimizer, if that is not its own ``step()``
    coding: Coding | None  # what a codec remembers on this worker

    @property
    def num_bytes(self) -> int:
        """Bytes that this worker has sent through collectives so far."""
        ...

    @property
    def waited_seconds(self) -> float:
        """Seconds that this worker has waited for slower ones so far, beside those that an ``Outcome`` tells."""
        ...

    def accumulate(self, *, examples: int, total: int | None) -> None:
        """Before forward: keep the gradients of the next backward pass for a later exchange."""
        ...

    def begin(self, backward: BackwardPass) -> None:
        """Before forward: the parameters are updated after the next backward pass."""
        ...

    def finish(self) -> Outcome | None:
        """Before the update: wait until the gradients are final."""
        ...

    def started(self, progress: Progress) -> None:
        """Before the session's first step, after a checkpoint was loaded."""
        ...

    def updated(self, progress: Progress) -> bool:
        """After an update; return whether a worker was asked to stop, if all learn it now."""
        ...

    def release(self, *, failed: bool = False) -> None:
        """End the step, which may have ``failed``: later gradients are not exchanged."""
        ...

    def averaged(self) -> contextlib.AbstractContextManager[object]:
        """Load the answer of all workers, such as their average, into the model, inside the block."""
        ...

    def conclude(self) -> None:
        """End a successful run: give all workers the answer."""
        ...

    def mean(self, value: Tensor, weight: float) -> Tensor:
        """Average ``value`` over the workers."""
        ...

    def share(self, state: Any, root: int = 0) -> Any:
        """Give every worker the state that worker ``root`` has."""
        ...

    def gather(self, state: Any) -> list[Any]:
        """Give every worker the list of all workers' states."""
        ...

    def largest(self, number: int) -> int:
        """Find the largest of the workers' numbers."""
        ...

    def follow_buffers(self) -> None:
        """Copy worker 0's buffers to all."""
        ...

    def lead(self) -> int:
        """How many exchanges another worker may be ahead of this one."""
        ...

    def meet_soon(self) -> None:
        """One has died, or others wait to join: have an exchange soon, if there is not one after every few updates."""
        ...

    def lag(self) -> int | None:
        """How many of this worker's last updates some other has not made yet, if what each learns is in memory at once.

        None if that is known only after an exchange.
        """
        ...

    def counts(self) -> dict[str, Any]:
        """What the exchange has counted so far, for the metrics."""
        ...

    def record(self, run: Path, about: Mapping[str, Any], replay: Path | None) -> None:
        """The run has begun: record it in this directory, with what it is ``about``; or ``replay`` that of another."""
        ...

    def confirm(self) -> None:
        """Return when all workers have come here."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state that determines the rounding of later exchanges."""
        ...

    def kept_state(self) -> dict[str, Any]:
        """The state to go on from if the present update fails; it exchanges nothing, and leaves out what is under way.

        Its tensors may be those in use.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore that state, after the model's; it may be of another number of workers, or empty."""
        ...

    def agreed(self) -> None:
        """All workers have the same parameters now."""
        ...

    def give_up(self, steps: int) -> None:
        """Workers have died or joined: no worker begins now what others may have begun up to this step.

        Those that had begun it have left it behind with the exchange of before.
        """
        ...

    def close(self) -> None:
        """Release the model; the group stays."""
        ...


class Alone:
    """The exchange of a world of one."""

    rank = 0
    world_size = 1
    replicas_differ = False
    catches_up = False
    exchanges = True
    common_state: tuple[str, ...] = ()
    shares_parameters = False
    records = False
    step: Callable[[Optimizer], None] | None = None
    coding: Coding | None = None

    @property
    def num_bytes(self) -> int:
        return 0

    @property
    def waited_seconds(self) -> float:
        return 0.0

    def accumulate(self, *, examples: int, total: int | None) -> None:
        pass

    def begin(self, backward: BackwardPass) -> None:
        pass

    def finish(self) -> Outcome | None:
        return None

    def started(self, progress: Progress) -> None:
        pass

    def updated(self, progress: Progress) -> bool:
        return False

    def release(self, *, failed: bool = False) -> None:
        pass

    def averaged(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def conclude(self) -> None:
        pass

    def mean(self, value: Tensor, weight: float) -> Tensor:
        return value.to(averaged_dtype(value), copy=True)

    def share(self, state: Any, root: int = 0) -> Any:
        return state

    def gather(self, state: Any) -> list[Any]:
        return [state]

    def largest(self, number: int) -> int:
        return number

    def follow_buffers(self) -> None:
        pass

    def lead(self) -> int:
        return 0

    def meet_soon(self) -> None:
        pass

    def lag(self) -> int | None:
        return None

    def counts(self) -> dict[str, Any]:
        return {}

    def record(self, run: Path, about: Mapping[str, Any], replay: Path | None) -> None:
        pass

    def confirm(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def kept_state(self) -> dict[str, Any]:
        return self.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def agreed(self) -> None:
        pass

    def give_up(self, steps: int) -> None:
        pass

    def close(self) -> None:
        pass


class PeersExchange(Alone):
    """The base of collective exchanges; a subclass defines what is exchanged and when.

    All workers have the same model. When a worker dies, the others make their exchange anew, on new ``peers``, load the
    ``kept_state`` of the one before, with the furthest worker's entries of ``common_state``, and repeat what failed. So
    a method must exchange everything before it changes the model or its own tensors.
    """

    def __init__(self, model: nn.Module, peers: Peers) -> None:
        self.rank, self.world_size = peers.rank, peers.size
        self._peers = peers
        self._modules = list(model.modules())  # kept, since collecting them takes longer than reading their buffers

    @property
    def num_bytes(self) -> int:
        return self._peers.traffic.num_bytes

    @property
    def waited_seconds(self) -> float:
        return self._peers.traffic.waited_seconds

    def buffers(self) -> list[Tensor]:
        """The model's buffers as they are now."""
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]

    def follow_buffers(self) -> None:
        """Copy worker 0's buffers to all."""
        with self._peers.explain("sending buffers"):
            send_tensors(self.buffers(), self._peers)

    def confirm(self) -> None:
        with self._peers.explain("waiting for the others"):
            self._peers.barrier()

    def mean(self, value: Tensor, weight: float) -> Tensor:
        flat = value.detach().reshape(-1).to(torch.float64)
        packed = torch.cat([flat * weight if weight else torch.zeros_like(flat), flat.new_tensor([weight])])
        packed = packed.to(self._peers.device)
        with self._peers.explain("averaging a value"):
            self._peers.all_reduce(packed).wait()
        return (packed[:-1] / packed[-1]).reshape(value.shape).to(value.device, averaged_dtype(value))

    def share(self, state: Any, root: int = 0) -> Any:
        with self._peers.explain(f"receiving the state of worker {root}"):
            return share_state(state, self._peers, root)

    def gather(self, state: Any) -> list[Any]:
        with self._peers.explain("collecting the workers' states"):
            return [share_state(state, self._peers, root) for root in range(self.world_size)]

    def largest(self, number: int) -> int:
        with self._peers.explain("comparing how much data is left"):
            tensor = torch.tensor([number], device=self._peers.device)
            self._peers.all_reduce(tensor, torch.distributed.ReduceOp.MAX).wait()
        return int(tensor)


def check_same_model(model: nn.Module, peers: Peers) -> None:
    """Raise on all workers if one has other parameters than worker 0, and say how they differ."""
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
