"""Let every worker mix its parameters with those of a few others, which change from step to step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from paceline.policies.base import PeersPolicy


class Neighbours(NamedTuple):
    """The workers with which one worker mixes after a step."""

    receivers: tuple[int, ...]  # each is sent ``share`` of the worker's parameters and of its weight
    senders: tuple[int, ...]
    share: float  # which the worker also keeps


@dataclass(frozen=True, kw_only=True)
class Gossip(PeersPolicy):
    """Mix parameters with a neighbour after every step: stochastic gradient push (Assran et al., ICML 2019).

    A ``ring`` has the same neighbours in all steps. ``exponential`` ones are 1, 2, 4, ... ranks away in turn. Under
    ``random-pairs`` two workers exchange with each other, drawn anew in each step from ``seed``.

    >>> str(Gossip(topology="ring"))
    'gossip(topology=ring)'
    """

    name: ClassVar[str] = "gossip"

    topology: Literal["ring", "exponential", "random-pairs"] = "exponential"
    seed: int = 0  # of random pairs

    def sends(self, step: int, workers: int) -> tuple[tuple[int, int], ...]:
        """The sender and receiver of every message after this step, the first being 0.

        >>> Gossip(topology="exponential").sends(1, workers=4)
        ((0, 2), (1, 3), (2, 0), (3, 1))
        """
        if workers == 1:
            return ()
        if self.topology == "random-pairs":
            return self._random_pairs(step, workers)
        turns = (workers - 1).bit_length()  # as many as there are powers of 2 below the number of workers
        distance = 1 if self.topology == "ring" else 1 << step % turns
        return tuple((rank, (rank + distance) % workers) for rank in range(workers))

    def _random_pairs(self, step: int, workers: int) -> tuple[tuple[int, int], ...]:
        """Pair the ranks in a random order; of an odd number the last stays alone."""
        order = sorted(range(workers), key=lambda rank: (_hash(self.seed, step, rank), rank))
        pairs = [*zip(order[::2], order[1::2], strict=False)]
        return (*pairs, *((other, one) for one, other in pairs))

    def neighbours(self, rank: int, step: int, workers: int) -> Neighbours:
        """A worker's part in the messages after this step."""
        sends = self.sends(step, workers)
        receivers = tuple(receiver for sender, receiver in sends if sender == rank)
        senders = tuple(sender for sender, receiver in sends if receiver == rank)
        return Neighbours(receivers, senders, 1 / (1 + len(receivers)))

    def spread(self, step: int, workers: int, sender: int) -> int:
        """Steps until all workers know what ``sender`` adds to its message after ``step``, if each passes it on.

        >>> Gossip(topology="ring").spread(0, workers=4, sender=2)
        3
        """
        informed, steps = {sender}, 0
        while len(informed) < workers:
            informed |= {to for sender, to in self.sends(step + steps, workers) if sender in informed}
            steps += 1
        return steps


def _hash(*numbers: int) -> bytes:
    """Random bits, the same for the same numbers in every process."""
    return hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
