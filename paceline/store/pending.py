"""The pushes that wait for a commit: added up when they come, or kept until their commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from paceline.aggregators import Aggregator
from paceline.policies.messages import mean_weights
from paceline.store.copying import HALVES
from paceline.store.layout import Arena, Layout, ModelLayouts


class PushKey(NamedTuple):
    """The name of a push: its worker and step. No other step of the run has that number."""

    worker: int
    step: int


class Share(NamedTuple):
    """A push of a commit, with its weight."""

    push: PushKey
    weight: float


class Combined(NamedTuple):
    """The result of the pushes of a commit."""

    arena: Arena
    used: int  # one bit per trained parameter: a push that counts has a gradient for it
    counts: bool  # False: no push counts, so the buffers stay as they are


class Pending(Protocol):
    """The pushes that wait for a commit."""

    def take(self, key: PushKey, push: Arena, examples: int, used: int, *, alone: bool) -> None:
        """Take a push. Its memory may be used again at once, unless the next commit is of this push ``alone``."""
        ...

    def combine(self, shares: Sequence[Share] | None) -> Combined:
        """Combine the pushes that are named, or all, weighted by their examples; the others keep waiting."""
        ...


class RunningMean:
    """The mean, weighted by examples, of all pushes since the last commit. No push is kept."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sum: Arena | None = None  # made when a commit first has more than one push
        self._totals: list[Tensor] = []  # the vectors of the sum; in single precision where its own are in half
        self._unit = 1  # the examples of the first push
        self._weight = 0.0  # of all pushes, in this unit
        self._used = 0
        self._taken: list[tuple[PushKey, int]] = []  # with their examples
        self._alone: tuple[Arena, int] | None = None

    def take(self, key: PushKey, push: Arena, examples: int, used: int, *, alone: bool) -> None:
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
                total.copy_(part)  # a count, such as BatchNorm's of batches, is that of the last push
            elif weight:
                total.add_(part, alpha=weight)
        self._weight += weight
        self._used |= used if weight else 0

    def combine(self, shares: Sequence[Share] | None) -> Combined:
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
    """Each push that waits. A commit may name any of them, with any weights; ``memory`` has the present parameters."""

    def __init__(self, layouts: ModelLayouts, aggregator: Aggregator, memory: Tensor) -> None:
        self._layout, self._aggregator = layouts.up, aggregator
        num_trained, num_read = len(layouts.trained), len(layouts.reads)
        stop = len(layouts.up.offsets) - num_read
        self._buffers = range(num_trained, stop)  # the places of these in a push
        self._reads = range(stop, stop + num_read)
        parameters = zip(layouts.parameters, layouts.down.padded(memory), strict=False)
        self._now = [vector for parameter, vector in parameters if parameter.requires_grad]
        self._kept: dict[PushKey, _Kept] = {}
        self._free: list[Arena] = []
        self._result: Arena | None = None

    def take(self, key: PushKey, push: Arena, examples: int, used: int, *, alone: bool) -> None:
        if alone:
            self._kept[key] = _Kept(push, examples, used, own=False)
            return
        arena = self._free.pop() if self._free else Arena(self._layout)
        arena.memory.copy_(push.memory)
        self._kept[key] = _Kept(arena, examples, used, own=True)

    def combine(self, shares: Sequence[Share] | None) -> Combined:
        if shares is None:
            examples = [each.examples for each in self._kept.values()]
            shares = [*map(Share, self._kept, mean_weights(examples))]
        assert all(math.isfinite(share.weight) for share in shares), (
            f"wanted weights that are finite, and the policy names {shares}"
        )
        named = [(self._kept.pop(share.push), share.weight) for share in shares]
        self._free += [each.arena for each, _ in named if each.own]
        if self._result is None:
            self._result = Arena(self._layout)
        counting = [(each, weight) for each, weight in named if weight]
        if not counting or len(counting) < self._aggregator.least:
            return Combined(self._result, used=0, counts=False)
        kept, weights = zip(*counting, strict=True)
        if self._reads:
            self._correct(kept)
        self._combine_gradients(self._result, kept, weights)
        self._combine_buffers(self._result, kept, weights)
        used = 0
        for each in kept:
            used |= each.used
        return Combined(self._result, used, counts=True)

    def _correct(self, kept: Sequence[_Kept]) -> None:
        """Let the aggregator correct the gradients of each push, where they lie."""
        for each in kept:
            vectors = each.arena.padded
            for gradient, read, now in zip(vectors, vectors[self._reads.start :], self._now, strict=False):
                gradient.copy_(self._aggregator.correct(gradient, read, now))

    def _combine_gradients(self, result: Arena, kept: Sequence[_Kept], weights: Sequence[float]) -> None:
        """Combine whole vectors with all that is in them, since one operation is faster than one for each tensor."""
        for vector, *parts in zip(result.flat, *(each.arena.flat for each in kept), strict=True):
            if is_continuous(vector):
                vector.copy_(self._aggregator.combine(parts, weights))

    def _combine_buffers(self, result: Arena, kept: Sequence[_Kept], weights: Sequence[float]) -> None:
        """Combine buffers by the sizes of the weights: the result lies between them, as a variance has to."""
        sizes = [abs(weight) for weight in weights]
        total = math.fsum(sizes)
        done = min(weights) > 0 and math.isclose(total, 1.0, rel_tol=1e-9)  # with the gradients
        for index in self._buffers:
            buffer, parts = result.padded[index], [each.arena.padded[index] for each in kept]
            if not is_continuous(buffer):
                buffer.copy_(parts[-1])  # a count, such as BatchNorm's of batches, is that of the last push
            elif not done:
                buffer.copy_(self._aggregator.combine(parts, [size / total for size in sizes]))


def is_continuous(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be averaged."""
    return tensor.is_floating_point() or tensor.is_complex()
