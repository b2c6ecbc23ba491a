"""Control numbers: a few numbers after the gradients of the last bucket, summed with them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import OutOfStepError
from paceline.peers.group import Peers

_TAG, _TOTAL, _EXAMPLES, _LOSS, _LOSSES, _STOP, _USED = range(7)
_TAG_PERIOD = 1 << 10  # sums over up to 16,000 workers stay exact in float32


@dataclass(frozen=True)
class Told:
    """The control numbers of all workers, read from the sums."""

    examples: int  # of all workers
    loss: float | None  # mean over the workers that gave theirs
    used: Callable[[int], bool]  # whether any worker had a gradient for the parameter
    waited_seconds: tuple[float, ...]  # by rank: seconds that the slowest worker computed longer
    stop: bool  # whether any worker was asked to stop


class Control:
    """Float32 numbers: a tag of the exchange, examples, losses, stop requests, used parameters, compute times.

    A worker writes its own and leaves those of others zero, so the sum over all workers holds all of them.
    """

    def __init__(self, numbers: Tensor, peers: Peers, num_parameters: int) -> None:
        self._numbers = numbers
        self._peers = peers
        self._num_parameters = num_parameters
        # Through numpy: for a few numbers it is faster than tensor operations.
        self._row = (numbers if numbers.is_cpu else numbers.cpu()).numpy()

    @staticmethod
    def length(num_parameters: int, workers: int) -> int:
        return _USED + num_parameters + workers

    def fill(
        self,
        *,
        tag: int,
        examples: int,
        total: int,
        loss: float | None,
        stop: bool,
        used: Collection[int],
        compute_seconds: float,
    ) -> None:
        """Write this worker's numbers."""
        row = self._row
        row.fill(0.0)
        row[_TAG], row[_TOTAL], row[_EXAMPLES] = tag % _TAG_PERIOD, total % _TAG_PERIOD, examples
        if loss is not None and examples > 0:
            row[_LOSS], row[_LOSSES] = loss * examples, examples
        row[_STOP] = stop
        flags = row[_USED : _USED + self._num_parameters]
        flags[slice(None) if len(used) == self._num_parameters else list(used)] = 1.0
        row[_USED + self._num_parameters + self._peers.rank] = compute_seconds
        if not self._numbers.is_cpu:
            self._numbers.copy_(torch.from_numpy(row))

    def read(self, tag: int, total: int) -> Told:
        """Read the sums; raise if other workers are in another step or on other data."""
        row = self._row.tolist() if self._numbers.is_cpu else self._numbers.tolist()
        self._compare("step", row[_TAG], tag, "do all make the same number of steps, and accumulate in the same ones?")
        self._compare("number of examples", row[_TOTAL], total, "do all of them use the same data?")
        seconds = row[_USED + self._num_parameters :]
        return Told(
            examples=round(row[_EXAMPLES]),
            loss=row[_LOSS] / row[_LOSSES] if row[_LOSSES] else None,
            used=lambda index: row[_USED + index] > 0,
            waited_seconds=tuple(max(seconds) - own for own in seconds),
            stop=row[_STOP] > 0,
        )

    def _compare(self, what: str, found: float, own: int, question: str) -> None:
        wanted = own % _TAG_PERIOD * self._peers.size
        if found != wanted:
            raise OutOfStepError(
                f"worker {self._peers.rank}: the workers have fallen out of step at its {what} {own} (their sum "
                f"should be {wanted}, and is {found:g}); {question}"
            )
