"""The pushes that wait for a commit: added up as they come, or kept until one is made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from paceline.aggregators import Aggregator
from paceline.policies.messages import mean_weights
from paceline.store.copying import HALVES
from paceline.store.layout import Arena, Layout


class PushKey(NamedTuple):
    """Which push: a worker's result of a step, whose number no other step of the run has."""

    worker: int
    step: int


class Share(NamedTuple):
    """A push of a commit, and how much it counts."""

    push: PushKey
    weight: float


class Combined(NamedTuple):
    """What the pushes of a commit come to."""

    arena: Arena
    used: int  # bits of the parameters that any of them has a gradient for
    counts: bool  # False: none of them has a weight, so that there are no buffers to take


class RunningMean:
    """The mean of all pushes taken since the last commit, weighted by their examples.

    A push's memory may be used again as soon as it is taken, unless it is ``alone`` in the commit that follows at once.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sum: Arena | None = None  # made when a commit first has more than one push
        self._totals: list[Tensor] = []  # where sums are made: there, or for halves, which are too small, in singles
        self._unit = 1  # the examples of the first push
        self._weight = 0.0  # of all pushes, in this unit
        self._used = 0
        self._taken: list[tuple[PushKey, int]] = []  # with their examples
        self._alone: tuple[Arena, int] | None = None

    def take(self, key: PushKey, push: Arena, examples: int, used: int, *, alone: bool) -> None:
        """Take a push."""
        if alone:
            self._alone = push, used
        else:
            self._add(push, examples, used)
        self._taken.append((key, examples))

    def _add(self, push: Arena, examples: int, used: int) -> None:
        if self._sum is None:
            self._sum = Arena(self._layout)
            self._totals = [flat.float() if flat.dtype in HALVES else flat for flat in self._sum.flat]
        first = not self._taken
        if first:
            self._unit = max(1, examples)
        weight = examples / self._unit
        for total, part in zip(self._totals, push.flat, strict=True):
            if first and not weight:
                total.zero_()
            elif weight and (first or not is_continuous(total)):
                total.copy_(part)  # a count of batches seen is the last one's
            elif weight:
                total.add_(part, alpha=weight)
        self._weight += weight
        self._used |= used if weight else 0

    def combine(self, shares: Sequence[Share] | None) -> Combined:
        """Give the mean; shares, if they are named, must be those of it."""
        assert shares is None or [*shares] == self._means(), (
            f"the policy says that a commit is the mean of all pushes taken, {self._means()}, and names {shares}"
        )
        try:
            if self._alone is not None:
                return Combined(*self._alone, counts=True)
            assert self._sum is not None
            for total, mean in zip(self._totals, self._sum.flat, strict=True):
                if self._weight and is_continuous(total):
                    total.div_(self._weight)
                if total is not mean:
                    mean.copy_(total)
            return Combined(self._sum, self._used, counts=self._weight > 0)
        finally:
            self._weight, self._used, self._taken, self._alone = 0.0, 0, [], None

    def _means(self) -> list[tuple[PushKey, float]]:
        keys, examples = zip(*self._taken, strict=True)
        return [*zip(keys, mean_weights(examples), strict=True)]


class _Kept(NamedTuple):
    arena: Arena
    examples: int
    used: int
    own: bool  # the memory is ours, to be used for another push


class KeptPushes:
    """All pushes that wait, each for itself: a commit may name any of them, with any weights.

    The first ``num_trained`` tensors of the layout are gradients, the others buffers.
    """

    def __init__(self, layout: Layout, num_trained: int, aggregator: Aggregator) -> None:
        self._layout, self._num_trained, self._aggregator = layout, num_trained, aggregator
        self._kept: dict[PushKey, _Kept] = {}
        self._free: list[Arena] = []
        self._result: Arena | None = None

    def take(self, key: PushKey, push: Arena, examples: int, used: int, *, alone: bool) -> None:
        """Take a push."""
        if alone:
            self._kept[key] = _Kept(push, examples, used, own=False)
            return
        arena = self._free.pop() if self._free else Arena(self._layout)
        arena.memory.copy_(push.memory)
        self._kept[key] = _Kept(arena, examples, used, own=True)

    def combine(self, shares: Sequence[Share] | None) -> Combined:
        """Combine the pushes that are named, the others go on waiting; or all, by their examples."""
        if shares is None:
            examples = [each.examples for each in self._kept.values()]
            shares = [*map(Share, self._kept, mean_weights(examples))]
        weights = [share.weight for share in shares]
        assert all(map(math.isfinite, weights)), f"wanted weights that are finite, and the policy names {shares}"
        kept = [self._kept.pop(share.push) for share in shares]
        if self._result is None:
            self._result = Arena(self._layout)
        for result, *parts in zip(self._result.flat, *(each.arena.flat for each in kept), strict=True):
            if is_continuous(result):
                result.copy_(self._aggregator.combine(parts, weights))
        counting = [(each, weight) for each, weight in zip(kept, weights, strict=True) if weight]
        if counting:
            self._combine_buffers(self._result, counting)
        self._free += [each.arena for each in kept if each.own]
        used = 0
        for each, _ in counting:
            used |= each.used
        return Combined(self._result, used, counts=bool(counting))

    def _combine_buffers(self, result: Arena, counting: Sequence[tuple[_Kept, float]]) -> None:
        """Have the mean of the buffers by the sizes of the weights: it lies between them, as a variance has to."""
        sizes = [abs(weight) for _, weight in counting]
        total = math.fsum(sizes)
        is_there = all(weight > 0 for _, weight in counting) and math.isclose(total, 1.0, rel_tol=1e-9)
        for index in range(self._num_trained, len(result.padded)):
            buffer, parts = result.padded[index], [each.arena.padded[index] for each, _ in counting]
            if not is_continuous(buffer):
                buffer.copy_(parts[-1])  # a count of batches seen is the last one's
            elif not is_there:
                buffer.copy_(self._aggregator.combine(parts, [size / total for size in sizes]))


def is_continuous(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be averaged."""
    return tensor.is_floating_point() or tensor.is_complex()
