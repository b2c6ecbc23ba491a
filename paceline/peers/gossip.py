"""Mix the parameters of neighbours after every step, without a barrier of all workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OutOfStepError
from paceline.peers.flat import by_dtype, count, flatten, unflatten
from paceline.peers.group import Peers, Pending
from paceline.peers.replicas import ReplicasExchange
from paceline.policies import Gossip, Progress

_MEETING = -1  # in a header, in the place of the steps until the stop: all workers meet


class GossipExchange(ReplicasExchange):
    """Mix the models of ``peers`` with those of the neighbours that the policy names, by push-sum.

    A worker has a weight w, at first 1, and its model holds x / w. After an update it divides x and w into equal
    shares, keeps one, sends one to each of its receivers and adds those of its senders. So the sums of x and of w over
    all workers are conserved, and their quotient is the run's answer. In all topologies of the policy a worker receives
    as much weight as it sends, and w stays 1. Floating-point buffers are mixed with the parameters.

    A worker waits for its senders of this step, and until its receivers of the last step have its message.

    So some may be several steps ahead of others when a worker dies. Those behind then make these steps without mixing,
    and all mix again after the step that follows.
    """

    catches_up = True
    common_state = ("stop_at",)

    def __init__(self, model: nn.Module, peers: Peers, policy: Gossip) -> None:
        super().__init__(model, peers)
        self._policy = policy
        self._weight = 1.0
        self._updates = 0  # made in this run
        self._stop_at: int | None = None  # the update after which all workers stop
        self._given_up = 0  # the last update after which nobody mixes, since a worker has died
        self._flats: dict[torch.dtype, _Flat] = {}
        self._sent: list[Pending] = []  # perhaps still on their way

    def started(self, progress: Progress) -> None:
        self._updates = progress.steps

    def after_update(self, progress: Progress) -> bool:
        step, self._updates = progress.steps - 1, progress.steps
        if self._updates > self._given_up:
            if self._backward.stop():
                self._stop_by(step + self._policy.spread(step, self.world_size, self.rank))
            with self._peers.explain("mixing with its neighbours"), torch.no_grad():
                self._mix(step)
        return self._updates == self._stop_at

    def give_up(self, steps: int) -> None:
        self._given_up = steps

    def _mix(self, step: int) -> None:
        receivers, senders, share = self._policy.neighbours(self.rank, step, self.world_size)
        self._wait_until_sent()
        flats = self._load(share)
        self._weight *= share
        header = self._header(step, 0 if self._stop_at is None else max(0, self._stop_at - step))
        for receiver in receivers:
            self._send([header, *(flat.outgoing for flat in flats)], receiver)
        for sender in senders:
            stop_in, weight = self._receive_header(sender, step, meeting=False)
            if stop_in:
                self._stop_by(step + stop_in)
            self._weight += weight
            for flat in flats:
                self._peers.receive(flat.incoming, sender).wait()
                flat.mixed.add_(flat.incoming)
        for flat in flats:
            flat.mixed.div_(self._weight)
            unflatten(flat.mixed, flat.tensors)

    def _load(self, share: float) -> list[_Flat]:
        """Have this worker's share in the flat tensors."""
        parameters, buffers = by_dtype(self._trained), by_dtype(self.buffers())
        for dtype in {**parameters, **buffers}:
            flat = self._flats.setdefault(dtype, _Flat(dtype, self._peers.device))
            flat.load(parameters.get(dtype, []), buffers.get(dtype, []), self._weight, share)
        return list(self._flats.values())

    def _stop_by(self, update: int) -> None:
        self._stop_at = update if self._stop_at is None else min(self._stop_at, update)

    # Messages ---------------------------------------------------------------------------------------------

    def _header(self, step: int, stop_in: int) -> Tensor:
        return torch.tensor([step, stop_in, self._weight], dtype=torch.float64, device=self._peers.device)

    def _send(self, tensors: Iterable[Tensor], receiver: int) -> None:
        self._sent += [self._peers.send(tensor, receiver) for tensor in tensors]

    def _wait_until_sent(self) -> None:
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def _receive_header(self, sender: int, step: int, *, meeting: bool) -> tuple[int, float]:
        """The steps until all workers stop, or 0, and the weight sent; raise if the sender is in another step."""
        header = torch.empty(3, dtype=torch.float64, device=self._peers.device)
        began = time.perf_counter()
        self._peers.receive(header, sender).wait()
        self._peers.traffic.waited_seconds += time.perf_counter() - began
        its_step, stop_in, weight = header.tolist()
        if its_step != step or (stop_in == _MEETING) != meeting:
            raise OutOfStepError(
                f"worker {self.rank}: the workers have fallen out of step: it {_doing(step, meeting)}, and worker "
                f"{sender} {_doing(int(its_step), stop_in == _MEETING)}; do all make the same number of steps?"
            )
        return int(stop_in), weight

    def _meet(self) -> None:
        """Find out whether all workers are here: else one would wait for a message, and we for that one."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        with self._peers.explain("meeting all workers"):
            for other in others:
                self._send([self._header(self._updates, _MEETING)], other)
            for other in others:
                self._receive_header(other, self._updates, meeting=True)
            self._wait_until_sent()

    # The answer and the state -----------------------------------------------------------------------------

    def lead(self) -> int:
        mixed_from = max(self._updates, self._given_up)  # the steps before do not spread what a worker knows
        return mixed_from - self._updates + self._policy.spread(mixed_from, self.world_size, self.rank)

    def weight(self) -> float:
        return self._weight

    def agreed(self) -> None:
        super().agreed()
        self._weight = 1.0

    def load_answer(self) -> None:
        self._meet()
        super().load_answer()

    def gather(self, state: Any) -> list[Any]:
        self._meet()
        return super().gather(state)

    def mean(self, value: Tensor, weight: float) -> Tensor:
        self._meet()
        return super().mean(value, weight)

    def largest(self, number: int) -> int:
        self._meet()
        return super().largest(number)

    def state_dict(self) -> dict[str, Any]:
        mixed = [] if self._weight == 1 else [flat.mixed for flat in self._flats.values()]
        return {**super().state_dict(), "weight": self._weight, "mixed": mixed}

    def kept_state(self) -> dict[str, Any]:
        return {**self.state_dict(), "stop_at": self._stop_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._weight = float(state.get("weight", 1.0))
        self._stop_at = state.get("stop_at")
        if state.get("mixed"):
            for flat, mixed in zip(self._load(1.0), state["mixed"], strict=True):
                flat.mixed.copy_(mixed)


class _Flat:
    """The tensors of one dtype, parameters first, as they are sent, received and mixed."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        self.outgoing, self.incoming, self.mixed = (torch.zeros(0, dtype=dtype, device=device) for _ in range(3))

    def load(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], weight: float, share: float) -> None:
        """Take ``share`` of a worker's tensors that has this ``weight``."""
        self.tensors = [*parameters, *buffers]
        if count(self.tensors) != len(self.mixed):
            self.outgoing, self.incoming, self.mixed = (
                flat.new_zeros(count(self.tensors)) for flat in (self.outgoing, self.incoming, self.mixed)
            )
        flatten(self.tensors, self.outgoing)
        if weight != 1:
            # The update was made on x / w, and x moves as far: x + (new - x / w).
            split = count(parameters)
            self.outgoing[:split].add_(self.mixed[:split], alpha=weight - 1)
            self.outgoing[split:].mul_(weight)
        self.outgoing.mul_(share)
        self.mixed.copy_(self.outgoing)


def _doing(step: int, meeting: bool) -> str:
    return f"averages, saves or ends after step {step}" if meeting else f"mixes after step {step + 1}"
