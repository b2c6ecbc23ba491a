"""A thin, typed wrapper of a ``torch.distributed`` process group."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.descriptions import RANKS_DIFFER
from paceline.collectives.register import NAME
from paceline.errors import LostContactError, OutOfStepError


class _Packets:
    """The packets of all workers, which are exchanged in ``wait``.

    Gloo sends a message when its receiver has said that it is ready. On a slow link that word must not wait behind
    packets, so a worker gets ready for all packets before it sends its own.
    """

    def __init__(self, peers: Peers, own: Tensor) -> None:
        self._peers, self._own = peers, own

    def wait(self) -> list[Tensor]:
        """Send the own one, and receive the others; they are in the order of the ranks."""
        peers, own = self._peers, self._own.to(self._peers.device)
        others = [(peers.rank + ahead) % peers.size for ahead in range(1, peers.size)]
        lengths = self._exchange(torch.tensor([len(own)], device=peers.device), dict.fromkeys(others, 1))
        packets = self._exchange(own, {other: int(length) for other, length in lengths.items()})
        return [self._own if rank == peers.rank else packets[rank].cpu() for rank in range(peers.size)]

    def _exchange(self, own: Tensor, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Send a vector to all others, and receive one from each, of these sizes."""
        found = {other: own.new_empty(size) for other, size in sizes.items()}
        works = [self._peers.receive(vector, other) for other, vector in found.items() if len(vector)]
        works += [self._peers.send(own, other) for other in found if len(own)]
        for work in works:
            work.wait()
        return found


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...


@dataclass
class Traffic:
    """Counts what a worker sends through collectives and messages, and how long it waits for slower workers."""

    num_bytes: int = 0
    waited_seconds: float = 0.0  # in exchanges that tell; the reducer of gradients tells in its outcome


@dataclass(frozen=True)
class Peers:
    """One worker's view of its group: its rank, and the few collectives and messages that training needs.

    ``group`` is any ``torch.distributed`` process group. Calls go to the group itself, not through the module's
    global state, so that several workers can be threads of one process, as in the tests.
    """

    group: Any
    rank: int
    size: int
    device: torch.device  # of the group's tensors
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    may_lose: bool = False  # if a worker dies, the others go on in another group

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeros for repeated reductions; all workers must make the same call together.

        Groups of one host give shared memory, which is reduced without a copy.
        """
        allocate = getattr(self.group, "allocate", None)
        if allocate is None or device.type != "cpu":
            return torch.zeros(count, dtype=dtype, device=device)
        with self.explain("allocating memory"):
            zeros: Tensor = allocate(count, dtype)
        return zeros

    def overlaps(self) -> bool:
        """Whether collectives can run while this worker computes.

        Those of one host need its cores; if all cores compute, a second thread only takes turns with the first.
        """
        spare_cores = getattr(self.group, "has_spare_cores", None)
        return spare_cores is None or bool(spare_cores())

    def has_threads(self) -> bool:
        """Whether another thread than this worker's may use the group."""
        return not getattr(self.group, "takes_turns", False)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, now: bool = False) -> Pending:
        """Start summing ``tensor`` over all workers, in place; ``now`` runs it here, which is faster than waiting."""
        self.traffic.num_bytes += _num_bytes(tensor)
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = op, not now
        work: Pending = self.group.allreduce([tensor], options)
        return work

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy the root's ``tensor`` into that of every worker."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self.group.broadcast([tensor], options).wait()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Collect every worker's ``tensor``, which must have the same shape everywhere."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.group.allgather([parts], [tensor]).wait()
        return parts

    def gather_packets(self, packet: Tensor) -> _Packets:
        """Give every worker the packets of all, whose sizes may differ; each goes to each receiver once."""
        return _Packets(self, packet)

    def send(self, tensor: Tensor, to: int) -> Pending:
        """Start sending ``tensor`` to one worker; it must not change until that has ended."""
        self.traffic.num_bytes += _num_bytes(tensor)
        work: Pending = self.group.send([tensor], to, 0)
        return work

    def receive(self, tensor: Tensor, sender: int) -> Pending:
        """Start receiving into ``tensor`` what a worker sends; messages of one sender come in order."""
        work: Pending = self.group.recv([tensor], sender, 0)
        return work

    def barrier(self) -> None:
        self.group.barrier().wait()

    def close(self) -> None:
        """Leave the group: calls of others that still wait for this worker fail."""
        self.group.abort()

    def share(self, value: Any, root: int = 0) -> Any:
        """Give every worker the root's ``value``, which must fit JSON (nothing is pickled)."""
        data = self._bytes(json.dumps(value).encode() if self.rank == root else b"")
        length = torch.tensor([len(data)], device=self.device)
        self.broadcast(length, root)
        if self.rank != root:
            data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self.broadcast(data, root)
        return json.loads(bytes(data.cpu().numpy()))

    def gather(self, value: Any) -> list[Any]:
        """Give every worker the list of all workers' values, which must fit JSON."""
        data = self._bytes(json.dumps(value).encode())
        lengths = [int(n) for n in self.all_gather(torch.tensor([len(data)], device=self.device))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=self.device)
        padded[: len(data)] = data
        parts = self.all_gather(padded)
        return [json.loads(bytes(part[:n].cpu().numpy())) for part, n in zip(parts, lengths, strict=True)]

    def _bytes(self, data: bytes) -> Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device) if data else torch.empty(0)

    @contextlib.contextmanager
    def explain(self, what: str) -> Iterator[None]:
        """Turn a failed collective into an error that names the worker and its operation."""
        try:
            yield
        except (LostContactError, OutOfStepError):
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            if reason.startswith(RANKS_DIFFER):
                raise OutOfStepError(
                    f"worker {self.rank} of {self.size} has fallen out of step while {what}: {reason}; do all make the "
                    "same number of steps, and call mean(), averaged() and save() equally often?"
                ) from error
            raise LostContactError(
                f"worker {self.rank} of {self.size} lost contact while {what}: {reason}; "
                "another worker has probably died, look for its own error"
            ) from error


def _num_bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:  # how much of it travels is known when all have told their sizes
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


def default_peers(device: torch.device, rank_and_size: tuple[int, int] | None = None) -> Peers:
    """Join torch's default process group, making it if need be.

    It is made at ``MASTER_ADDR`` and ``MASTER_PORT``, with the rank and size of ``rank_and_size`` or else of torchrun's
    variables: shared memory for CPU tensors of one host, Gloo between hosts, NCCL for CUDA. It stays for further
    sessions until the process ends, for a group of the same name cannot be made a second time.
    """
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        rank, size = rank_and_size if rank_and_size is not None else (-1, -1)
        make_default_group("nccl" if device.type == "cuda" else NAME, rank=rank, world_size=size)
        atexit.register(leave_default_group)
    return Peers(dist.group.WORLD, dist.get_rank(), dist.get_world_size(), device)


def make_default_group(backend: str, **options: Any) -> None:
    """Make torch's default group, so that ``leave_default_group`` can end it and its threads.

    Functions of the module imported here have the default group of that moment as a default argument. If an optimizer
    imports it later, they keep the group alive.
    """
    import torch.distributed.nn.functional  # noqa: F401

    dist.init_process_group(backend, **options)


def leave_default_group() -> None:
    """Leave torch's default group, if there is one, before the interpreter ends.

    A thread of Gloo that lets go of a tensor later than that aborts the process (pytorch's issue 190489). It ends when
    nothing refers to the group any more, and a session that is garbage still does.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
