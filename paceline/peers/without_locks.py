"""The base of exchanges through memory that all workers share: they meet only when one asks for it."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OutOfStepError, UsageError
from paceline.peers.group import Peers
from paceline.peers.race_counts import NUM_PROBES, RaceCounts
from paceline.peers.replicas import ReplicasExchange
from paceline.peers.shared_memory import SharedMemory, bytes_for, host_of_memory
from paceline.policies import PeersPolicy, Progress

MOST_WORKERS = 256
_SLOT = 16  # words of each worker: two lines of the cache
_MEETING = 0  # the word with the update after which all workers meet
_ALLOWED, _STEPS, _COUNTS = 0, 1, 2  # in a worker's slot: updates it may make without a look, has made; its counts
NUM_WORDS = _SLOT * (1 + MOST_WORKERS)
_LOOK = 0.02  # seconds from one look at the meeting to the next, about
_MOST_STEPS = 1 << 10  # from one look to the next

# The memory of each model stays open while workers form a new group: others open it from here.
_memories: weakref.WeakKeyDictionary[nn.Module, SharedMemory] = weakref.WeakKeyDictionary()


class WithoutLocks(ReplicasExchange):
    """Let the workers of one host read and write tensors in memory that all of them have, without waiting.

    They meet only where one was asked to stop, has heard of a death, or of others that want to join. It then names the
    update after which all meet, which none of them has made yet. So that this is known, every worker says up to
    which update it may go before it looks again: about every 20 ms. Only this look takes a lock.
    """

    common_state: tuple[str, ...] = ("memory",)
    exchanges = False
    num_more_words = 0  # behind those of the workers, for subclasses

    def __init__(self, model: nn.Module, peers: Peers, policy: PeersPolicy) -> None:
        super().__init__(model, peers)
        self._model, self._policy = model, policy
        self._check(peers)
        self._known: Any = None  # the memory with which the run goes on
        self._memory: SharedMemory | None = None
        self.shared: list[Tensor] = []
        self._allowed = self._stride = 0
        self._looked = 0.0
        self._meeting = 0

    def _check(self, peers: Peers) -> None:
        with peers.explain("comparing hosts"):
            hosts = peers.gather(host_of_memory())
        if not hosts[0] or len(set(hosts)) > 1:
            raise UsageError(f"policy {self._policy} is for the workers of one host, which can share memory")
        if peers.size > MOST_WORKERS:
            raise UsageError(f"policy {self._policy} is for at most {MOST_WORKERS} workers, found {peers.size}")
        if any(parameter.device.type != "cpu" for parameter in self._trained):
            raise UsageError(f"policy {self._policy} wants the model in the host's memory, found {self._device()}")
        places = [parameter.untyped_storage().data_ptr() for parameter in self._trained if parameter.numel()]
        if len(set(places)) < len(places):
            raise UsageError(
                f"policy {self._policy}: two parameters are views of the same memory, and would become two; tie them "
                "as one nn.Parameter"
            )

    def _device(self) -> str:
        return ", ".join(sorted({str(parameter.device) for parameter in self._trained}))

    # For subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def first_values(self) -> Sequence[Tensor]:
        """What the shared tensors hold when a run begins or goes on from a checkpoint."""

    @abstractmethod
    def enter(self) -> None:
        """The shared tensors are there."""

    # Memory -----------------------------------------------------------------------------------------------

    def started(self, progress: Progress) -> None:
        self._memory = self._find()
        probe = torch.empty(NUM_PROBES, dtype=torch.float64)
        probes, *self.shared = self._memory.tensors([probe, *self.first_values()])
        if self._known is None and self.rank == 0:
            with torch.no_grad():
                for shared, first in zip(self.shared, self.first_values(), strict=True):
                    shared.copy_(first)
        words = self._memory.words
        slots = [words[_SLOT * (1 + rank) + _COUNTS : _SLOT * (2 + rank)] for rank in range(MOST_WORKERS)]
        self.races = RaceCounts(slots, self.rank, probes)
        self.confirm()  # the values are there, and nobody uses a slot any more that was another's before
        self.races.begin(nobody_from=self.world_size)
        self._slot(self.rank)[_STEPS] = progress.steps
        self._slot(self.rank)[_ALLOWED] = self._allowed = progress.steps
        self._meeting = words[_MEETING]
        self._known = None
        self.enter()
        self.confirm()

    def memory(self) -> SharedMemory:
        assert self._memory is not None
        return self._memory

    def _find(self) -> SharedMemory:
        """The memory of the run before, or new memory of worker 0."""
        num_words = NUM_WORDS + self.num_more_words
        if self._known is None:
            first = [torch.empty(NUM_PROBES, dtype=torch.float64), *self.first_values()]
            memory = SharedMemory.make(num_words, bytes_for(first)) if self.rank == 0 else None
            with self._peers.explain("sharing memory"):
                descriptor = self._peers.share(None if memory is None else memory.descriptor)
        else:
            descriptor, memory = self._known, _memories.get(self._model)
            if memory is not None and memory.key != descriptor[0]:
                memory = None
        memory = memory or SharedMemory.open(descriptor, num_words)
        _memories[self._model] = memory
        return memory

    def forget_memory(self) -> None:
        """The run has ended well: nobody goes on with the memory."""
        _memories.pop(self._model, None)
        self._memory = None

    def _slot(self, rank: int) -> memoryview:
        assert self._memory is not None
        return self._memory.words[_SLOT * (1 + rank) : _SLOT * (2 + rank)]

    # Meeting ----------------------------------------------------------------------------------------------

    def after_update(self, progress: Progress) -> bool:
        self._slot(self.rank)[_STEPS] = progress.steps
        asked = self._backward.stop()
        if asked:
            self.meet_soon()
        if progress.steps >= self._allowed:
            self._look(progress.steps)
        self.exchanges = progress.steps == self._meeting
        if not self.exchanges:
            return False
        with self._peers.explain("meeting all workers"):
            stop = torch.tensor([float(asked)])
            self._peers.all_reduce(stop, now=True).wait()
        return bool(stop)

    def meet_soon(self) -> None:
        assert self._memory is not None
        with self._memory.locked():
            words = self._memory.words
            if words[_MEETING] < self.steps_of(self.rank):  # else this worker has yet to come there, or is there
                words[_MEETING] = 1 + max(self._slot(rank)[_ALLOWED] for rank in range(self.world_size))

    def _look(self, steps: int) -> None:
        """Go on to a later update, at most to the one after which all meet."""
        assert self._memory is not None
        now = time.perf_counter()
        self._stride = min(2 * self._stride, _MOST_STEPS) if now - self._looked < _LOOK else self._stride // 2
        self._stride = max(1, self._stride)
        self._looked = now
        with self._memory.locked():
            self._meeting = self._memory.words[_MEETING]
            allowed = steps + self._stride
            if steps < self._meeting:
                allowed = min(allowed, self._meeting)
            self._slot(self.rank)[_ALLOWED] = self._allowed = allowed

    def steps_of(self, rank: int) -> int:
        """The updates that a worker has made."""
        return self._slot(rank)[_STEPS]

    def rest(self) -> None:
        """Return when all workers have come here; raise if one has made more updates than another."""
        self.confirm()
        steps = [self.steps_of(rank) for rank in range(self.world_size)]
        if len(set(steps)) > 1:
            raise OutOfStepError(
                f"worker {self.rank}: the workers have fallen out of step: by rank, they have made {steps} updates; do "
                "all make the same number of steps?"
            )

    def lag(self) -> int | None:
        return self.steps_of(self.rank) - min(map(self.steps_of, range(self.world_size)))

    # Counts and state -------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        return {"races": self.races.told()}

    def averages(self, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        return buffers

    def kept_state(self) -> dict[str, Any]:
        memory = self._memory.descriptor if self._memory is not None else None
        return {**ReplicasExchange.state_dict(self), "memory": memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._known = state.get("memory")
