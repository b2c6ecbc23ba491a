"""The few numbers that ride behind the gradients of the last bucket and are summed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from paceline.errors import CommError
from paceline.peers.group import Peers

_TAG, _EXAMPLES, _LOSS, _LOSSES, _USED = range(5)
_TAG_PERIOD = 1 << 10  # sums over up to 16,000 workers stay exact in float32


@dataclass(frozen=True)
class Told:
    """What the sums say."""

    examples: int  # of all workers
    loss: float | None  # mean over the workers that told theirs
    used: Callable[[int], bool]  # whether any worker had a gradient for the parameter
    waited_seconds: tuple[float, ...]  # how much longer the slowest worker computed than each


class Control:
    """Numbers in float32: a tag of the exchange, examples, losses, who used what, everybody's compute time.

    A worker fills in its own and leaves the others' places zero, so the sum over all workers is the whole table.
    """

    def __init__(self, numbers: Tensor, peers: Peers, num_parameters: int) -> None:
        self._numbers = numbers
        self._peers = peers
        self._num_parameters = num_parameters

    @staticmethod
    def length(num_parameters: int, workers: int) -> int:
        return _USED + num_parameters + workers

    def fill(
        self,
        *,
        tag: int,
        examples: int,
        loss: float | None,
        arrived: Iterable[int],
        compute_seconds: float,
    ) -> None:
        """Write this worker's numbers."""
        row = [0.0] * len(self._numbers)
        row[_TAG], row[_EXAMPLES] = tag % _TAG_PERIOD, examples
        if loss is not None and examples > 0:
            row[_LOSS], row[_LOSSES] = loss * examples, examples
        for place in arrived:
            row[_USED + place] = 1.0
        row[_USED + self._num_parameters + self._peers.rank] = compute_seconds
        self._numbers.copy_(self._numbers.new_tensor(row))

    def read(self, tag: int) -> Told:
        """Read the sums; workers that are not in the same exchange as this one are an error."""
        row = self._numbers.tolist()
        if row[_TAG] != tag % _TAG_PERIOD * self._peers.size:
            raise CommError(
                f"worker {self._peers.rank}, exchange {tag}: the workers have fallen out of step (their exchange "
                f"numbers add up to {row[_TAG]:g}, not {self._peers.size} times {tag % _TAG_PERIOD}); "
                "do all of them run the same number of steps, and accumulate in the same ones?"
            )
        seconds = row[_USED + self._num_parameters :]
        return Told(
            examples=round(row[_EXAMPLES]),
            loss=row[_LOSS] / row[_LOSSES] if row[_LOSSES] else None,
            used=lambda place: row[_USED + place] > 0,
            waited_seconds=tuple(max(seconds) - own for own in seconds),
        )
