"""Average differences over all workers as packets of a codec."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.codecs import Parts
from paceline.peers.averaging import Averager, Means, exchanged_dtype
from paceline.peers.coding import CodedSum, Coding
from paceline.peers.flat import count, flatten, parts_of
from paceline.peers.group import Peers, Pending


class CodedAverager(Averager):
    """Find the weighted means of tensors, of which the first ``num_coded`` are differences, and sent as packets.

    The others, such as BatchNorm's statistics, are averaged exactly, with the control numbers. These come first, since
    a worker must know its share of all weights: what a codec remembers then stays in the unit of the parameters. If
    ``equal``, all weights are 1, and nobody waits for them.
    """

    def __init__(self, peers: Peers, coding: Coding, name: str, *, num_coded: int, equal: bool = False) -> None:
        super().__init__(peers)
        self._coding, self._name, self._num_coded, self._equal = coding, name, num_coded, equal
        self._told: Means | None = None  # of the exact part, where it comes first
        self.share = 0.0  # this worker's part of the weights of the last average
        self._coded: list[tuple[CodedSum, Pending, dict[int, Tensor]]] = []  # under way; the parts are by place

    def start(
        self,
        tensors: Sequence[Tensor],
        *,
        weight: float,
        tag: int,
        stop: bool = False,
        numbers: Sequence[float] = (),
        now: bool = False,
    ) -> None:
        exact = [torch.empty(0, device=self._peers.device), *tensors[self._num_coded :]]
        numbers, first = (*numbers, weight), not self._equal
        super().start(exact, weight=weight, tag=tag, stop=stop, numbers=numbers, now=now or first)
        self._told = super().finish() if first else None
        total = float(self._peers.size) if self._told is None else self._told.numbers[-1]
        self._coded, self.share = [], weight / total if total else 0.0
        if total:
            with self._peers.explain("averaging the parameters"), torch.no_grad():
                self._start_coded(tensors[: self._num_coded])

    def _start_coded(self, tensors: Sequence[Tensor]) -> None:
        for coded, places in self._sums_of(tensors):
            group = [tensors[place] for place in places]
            flat = torch.zeros(count(group), dtype=exchanged_dtype(group[0]), device=self._peers.device)
            if self.share:  # else zeros, not times 0: those of borrowed data may be NaN
                flatten(group, flat)
                flat.mul_(self.share)
            parts = dict(zip(places, parts_of(flat, group), strict=True))
            self._coded.append((coded, coded.start(flat, self._peers), parts))

    def _sums_of(self, tensors: Sequence[Tensor]) -> Iterator[tuple[CodedSum, list[int]]]:
        """Those of the differences, one for each dtype, with the places of its tensors."""
        places: dict[torch.dtype, list[int]] = {}
        for place, tensor in enumerate(tensors):
            places.setdefault(exchanged_dtype(tensor), []).append(place)
        for dtype, those in places.items():
            parts = Parts.of([tensors[place] for place in those])
            yield self._coding.sum_of(f"{self._name} {dtype}", parts), those

    @torch.no_grad()
    def add_unsent(self, tensors: Sequence[Tensor], differences: Sequence[Tensor], factor: float) -> None:
        """Add to tensors what was not sent of their differences, times a factor; it no longer waits to be sent.

        ``differences`` have the shapes and types of those that were averaged.
        """
        for coded, places in self._sums_of(differences):
            unsent = coded.take_unsent()
            if unsent is not None:
                for place, part in zip(places, parts_of(unsent, [differences[each] for each in places]), strict=True):
                    tensors[place].add_(part.to(tensors[place]), alpha=factor)

    def finish(self) -> Means:
        told = super().finish() if self._told is None else self._told
        self._told = None
        means: dict[int, Tensor] = {}
        for _, work, parts in self._coded:
            with self._peers.explain("averaging the parameters"):
                work.wait()
            means.update(parts)
        values = None if told.values is None else [*(means[place] for place in sorted(means)), *told.values[1:]]
        return Means(values, told.stop, told.numbers[:-1])

    def settle(self) -> None:
        """All workers use the means."""
        for coded, _, _ in self._coded:
            coded.settle()
        self._coded = []
