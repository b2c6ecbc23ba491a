"""The pushes that wait for a commit: added up when they come, kept until their commit, or left where they lie."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.aggregators import Aggregator, Needs
from paceline.policies.messages import Commit, mean_weights
from paceline.store.copying import HALVES
from paceline.store.layout import Arena, Layout, ModelLayouts
from paceline.store.pairs import compare_pushes, keep_apart, matrix_of
from paceline.store.remembered import Remembered


class PushKey(NamedTuple):
    """The name of a push: its worker and step. No other step of the run has that number."""

    worker: int
    step: int


class Share(NamedTuple):
    """A push of a commit, with its weight."""

    push: PushKey
    weight: float
    group: int = 0  # pushes of one group are of the same batches, if the policy has groups


def shares_of(commit: Commit) -> list[Share]:
    """The pushes of a commit, with their weights and groups."""
    keys = [PushKey(push.worker, push.step) for push in commit.pushes]
    return [*map(Share, keys, commit.weights, commit.groups or [0] * len(keys))]


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

    def _means(self) -> list[Share]:
        if self._alone is not None and len(self._taken) == 1:  # quicker, and most commits of async
            return [Share(self._taken[0][0], 1.0)]
        keys, examples = zip(*self._taken, strict=True)
        return [*map(Share, keys, mean_weights(examples))]


class _Kept(NamedTuple):
    arena: Arena
    examples: int
    used: int
    own: bool  # the memory is ours, to be used for another push


class KeptPushes:
    """Each push that waits. A commit may name any of them, with any weights; ``memory`` has the present parameters."""

    def __init__(
        self, layouts: ModelLayouts, aggregator: Aggregator, memory: Tensor, remembered: Remembered | None
    ) -> None:
        self._layout, self._aggregator, self._remembered = layouts.up, aggregator, remembered
        num_trained, num_read = len(layouts.trained), len(layouts.reads)
        self._num_trained = num_trained
        stop = len(layouts.up.offsets) - num_read
        self._buffers = range(num_trained, stop)  # the places of these in a push
        self._reads = range(stop, stop + num_read)
        parameters = zip(layouts.parameters, layouts.down.views(memory), strict=False)
        self._now = [(parameter, view) for parameter, view in parameters if parameter.requires_grad]
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

    def compare(self, shares: Sequence[Share] | None) -> Tensor:
        """Compare the pushes that count in pairs: a row of numbers for each trained parameter.

        If the aggregator compares whole pushes, more rows are for the buffers and for which gradients there are.
        """
        counting = [self._kept[share.push] for share in self._named(shares) if share.weight]
        stop = self._reads.start if self._aggregator.whole else self._num_trained
        rows = compare_pushes(self._aggregator, [each.arena.views[:stop] for each in counting])
        if not self._aggregator.whole:
            return rows
        differs = [float(one.used != other.used) for one, other in combinations(counting, 2)]
        return torch.cat([rows, torch.tensor([differs], dtype=torch.float64)])

    def weigh(self, shares: Sequence[Share] | None, rows: Sequence[Tensor]) -> list[Share]:
        """Let the aggregator weigh the pushes that count, by the rows of all servers; too few of them weigh nothing."""
        named = self._named(shares)
        counting = [share for share in named if share.weight]
        weighed: Iterator[float] = iter(())
        if len(counting) >= self._aggregator.least:
            pairs = keep_apart(matrix_of(rows, len(counting)), [share.group for share in counting])
            weighed = iter(self._aggregator.weigh(pairs, [share.weight for share in counting]))
        return [share._replace(weight=next(weighed, 0.0) if share.weight else 0.0) for share in named]

    def _named(self, shares: Sequence[Share] | None) -> Sequence[Share]:
        """The shares, or without them all pushes that wait, weighted by their examples."""
        if shares is not None:
            return shares
        examples = [each.examples for each in self._kept.values()]
        return [*map(Share, self._kept, mean_weights(examples))]

    def combine(self, shares: Sequence[Share] | None) -> Combined:
        shares = self._named(shares)
        assert all(math.isfinite(share.weight) for share in shares), (
            f"wanted weights that are finite, and the policy names {shares}"
        )
        named = [(self._kept.pop(share.push), share.weight) for share in shares]
        self._free += [each.arena for each, _ in named if each.own]
        if self._result is None:
            self._result = Arena(self._layout)
        counting = [(each, weight) for each, weight in named if weight]
        least = 1 if self._aggregator.needs is Needs.PAIRS else self._aggregator.least  # of pairs, see ``weigh``
        if len(counting) < max(1, least):
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
            views = each.arena.views
            for index, (parameter, now) in enumerate(self._now):
                if each.used >> index & 1:
                    gradient, read = views[index], views[self._reads.start + index]
                    remembered = self._remembered.of(parameter) if self._remembered is not None else None
                    gradient.copy_(self._aggregator.correct(gradient, read, now, remembered))

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


class ExchangedPushes:
    """Pushes of parameters, each of which lies where its worker waits for the difference that a commit puts there.

    ``memory`` has the present parameters and buffers. A push x with the weight w becomes w (x - z), of the parameters z
    before the commit, which moves them by the sum of these.
    """

    def __init__(self, layouts: ModelLayouts, memory: Tensor) -> None:
        self._layout = layouts.up
        now = layouts.down.padded(memory)
        places = zip(layouts.parameters, now, strict=False)
        self._parameters = [vector for parameter, vector in places if parameter.requires_grad]
        self._buffers = now[len(layouts.parameters) :]
        self._waiting: dict[PushKey, tuple[Arena, int]] = {}
        self._sum: Arena | None = None  # made when a commit first has more than one push

    def take(self, key: PushKey, push: Arena, examples: int, used: int, *, alone: bool) -> None:
        """Take a push; its memory has to stay as it is until the commit."""
        self._waiting[key] = push, used

    def combine(self, shares: Sequence[Share] | None) -> Combined:
        assert shares is not None, "a commit of parameters names its pushes and their weights"
        assert all(math.isfinite(share.weight) for share in shares), (
            f"wanted weights that are finite, and the policy names {shares}"
        )
        used, counting = 0, []
        for key, weight, _ in shares:
            push, has = self._waiting.pop(key)
            self._subtract(push, weight)
            if weight:
                used |= has
                counting.append((push, weight))
        if not counting:
            return Combined(push, used=0, counts=False)
        result = counting[0][0] if len(counting) == 1 else self._add([push for push, _ in counting])
        self._combine_buffers(result, counting)
        return Combined(result, used, counts=True)

    def _subtract(self, push: Arena, weight: float) -> None:
        for pushed, now in zip(push.padded, self._parameters, strict=False):
            if pushed.dtype in HALVES:
                pushed.copy_((pushed.float() - now.float()).mul_(weight))
            else:
                pushed.sub_(now).mul_(weight)

    def _add(self, pushes: Sequence[Arena]) -> Arena:
        if self._sum is None:
            self._sum = Arena(self._layout)
        for place in range(len(self._parameters)):
            total = self._sum.padded[place].zero_()
            for push in pushes:
                total.add_(push.padded[place])
        return self._sum

    def _combine_buffers(self, result: Arena, counting: Sequence[tuple[Arena, float]]) -> None:
        """Move the buffers toward the mean of those pushed, by the sum of the weights: as a variance, none leaves them.

        A number that all have, such as the infinities of a mask, stays.
        """
        sizes = [abs(weight) for _, weight in counting]
        total = math.fsum(sizes)
        for place, now in enumerate(self._buffers, len(self._parameters)):
            parts = [push.padded[place] for push, _ in counting]
            if not is_continuous(now):
                result.padded[place].copy_(parts[-1])  # a count, such as BatchNorm's, is that of the last push
                continue
            wide = torch.promote_types(now.dtype, torch.float32)
            mean = torch.zeros_like(now, dtype=wide)
            for part, size in zip(parts, sizes, strict=True):
                mean.add_(part.to(wide), alpha=size / total)
            moved = torch.lerp(now.to(wide), mean, min(1.0, total))
            result.padded[place].copy_(torch.where(mean == now, mean, moved))


def is_continuous(tensor: Tensor) -> bool:
    """Whether a tensor's numbers can be averaged."""
    return tensor.is_floating_point() or tensor.is_complex()
