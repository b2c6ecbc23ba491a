"""Gradient coding: any workers but a few give the gradient of all batches (Tandon et al., ICML 2017)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.coded import Code, Coded
from paceline.policies.state import ServerState

MOST_CYCLIC = 32  # workers of a cyclic code: decoding takes time of the cube of their number
MOST_CANCELLED = 1000.0  # terms of a sum may be so many times larger than the sum: three digits are lost
MOST_AMISS = 1e-11  # by which a decoded part may count for more or less than once


@dataclass(frozen=True, kw_only=True)
class GradientCoding(Coded):
    """Let each of n workers compute s + 1 of n batches, and commit the gradient of all when any n - s have pushed.

    ``stragglers`` is s. The pushes are sums with the coefficients of a code, and the commit's weights decode them. If
    s + 1 divides n, groups of s + 1 workers compute the same batches, and the first of each group is enough.

    >>> str(GradientCoding(stragglers=1))
    'gradient-coding(stragglers=1)'
    """

    name: ClassVar[str] = "gradient-coding"

    stragglers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stragglers < 1:
            raise UsageError(
                f"policy {self.name!r}: stragglers must be at least 1, got {self.stragglers}; "
                "for example gradient-coding(stragglers=1)"
            )

    def begin(self, workers: int) -> ServerState:
        if self.stragglers >= workers:
            raise UsageError(
                f"policy {self}: of {workers} workers at most {workers - 1} can be stragglers; "
                f"use at most stragglers={workers - 1}, or more workers"
            )
        best = most_stragglers(workers, self.stragglers)
        if best < self.stragglers:
            raise UsageError(
                f"policy {self}: on {workers} workers a code for so many stragglers would be slow or inaccurate; "
                f"use stragglers={best}, or a number of workers that is a multiple of {self.stragglers + 1}"
            )
        return super().begin(workers)

    def pushes_per_commit(self, workers: int) -> int:
        return workers - min(self.stragglers, workers - 1)

    def code(self, workers: int) -> Code:
        """The code of a round; after deaths it may be one for fewer stragglers."""
        return code_for(workers, most_stragglers(workers, self.stragglers))


@lru_cache(maxsize=256)
def most_stragglers(workers: int, wanted: int) -> int:
    """The largest number of stragglers, up to the wanted one, for which there is a good code of so many workers."""
    return max(s for s in range(min(wanted, workers - 1) + 1) if workers % (s + 1) == 0 or _is_good(workers, s))


@lru_cache(maxsize=256)
def code_for(workers: int, stragglers: int) -> Code:
    """The code of so many workers, of which any but so many stragglers are enough."""
    fits = workers % (stragglers + 1) == 0
    return Repetition(workers, stragglers + 1) if fits else Cyclic(workers, stragglers)


class Repetition(Code):
    """Groups of ``size`` workers compute the same parts, as many as they are.

    >>> Repetition(4, 2).rows
    (((0, 1.0), (1, 1.0)), ((0, 1.0), (1, 1.0)), ((2, 1.0), (3, 1.0)), ((2, 1.0), (3, 1.0)))
    >>> Repetition(4, 2).weights([1, 3, 2])
    [1.0, 1.0, 0.0]
    """

    def __init__(self, workers: int, size: int) -> None:
        self._size, self._num_groups = size, workers // size
        groups = [tuple((part, 1.0) for part in range(first, first + size)) for first in range(0, workers, size)]
        self.rows = tuple(groups[place // size] for place in range(workers))

    def enough(self, places: Iterable[int]) -> bool:
        return len({place // self._size for place in places}) == self._num_groups

    def weights(self, places: Sequence[int]) -> list[float] | None:
        if not self.enough(places):
            return None
        seen: set[int] = set()
        weights = []
        for group in (place // self._size for place in places):
            weights.append(0.0 if group in seen else 1.0)
            seen.add(group)
        return weights


class Cyclic(Code):
    """Worker i computes the s + 1 parts from i on, and any n - s workers are enough (Raviv et al., ICML 2018).

    The rows are the shifts of one codeword of a cyclic or negacyclic MDS code, the polynomial whose roots are s
    neighbours among the n-th roots of 1 or -1. Every column is divided by its entry in a codeword without zeros, so
    that the sum of all parts is a codeword too.

    >>> code = Cyclic(3, 1)
    >>> [[part for part, _ in row] for row in code.rows]
    [[0, 1], [1, 2], [0, 2]]
    >>> weights = code.weights([2, 0])
    >>> round(weights[0] * dict(code.rows[2])[0] + weights[1] * dict(code.rows[0])[0], 9)
    1.0
    """

    def __init__(self, workers: int, stragglers: int) -> None:
        n, s = workers, stragglers
        self._needed = n - s
        word, wrapped = _codeword(n, s), 1.0 if s % 2 and n % 2 == 0 else -1.0
        scale = _without_zeros(n, s)
        rows = []
        for place in range(n):
            parts = [(place + offset) % n for offset in range(s + 1)]
            entries = [
                entry / scale[part] * (wrapped if part < place else 1.0)
                for entry, part in zip(word, parts, strict=True)
            ]
            largest = max(map(abs, entries))
            rows.append(tuple(sorted((part, entry / largest) for part, entry in zip(parts, entries, strict=True))))
        self.rows = tuple(rows)
        self._known: dict[tuple[int, ...], list[float]] = {}  # weights of the last sets of places

    def enough(self, places: Iterable[int]) -> bool:
        return len([*places]) >= self._needed

    def weights(self, places: Sequence[int]) -> list[float] | None:
        if not self.enough(places):
            return None
        used = tuple(sorted(places[: self._needed]))
        if used not in self._known:
            if len(self._known) > MOST_CYCLIC:
                self._known.clear()
            self._known[used] = _solve([self._dense(place) for place in used])
        weights = dict(zip(used, self._known[used], strict=True))
        return [weights.get(place, 0.0) for place in places]

    def cancelled(self, places: Sequence[int]) -> float:
        """By how much the terms of the sum of a part are larger than the part, at most, if these places are decoded."""
        weights = self.weights(places)
        assert weights is not None
        sizes = [0.0] * len(self.rows)
        for weight, place in zip(weights, places, strict=True):
            for part, entry in self.rows[place]:
                sizes[part] += abs(weight * entry)
        return max(sizes)

    def amiss(self, places: Sequence[int]) -> float:
        """By how much the weights of a part differ from 1, at most, if these places are decoded."""
        weights = self.weights(places)
        assert weights is not None
        sums = [-1.0] * len(self.rows)
        for weight, place in zip(weights, places, strict=True):
            for part, entry in self.rows[place]:
                sums[part] += weight * entry
        return max(map(abs, sums))

    def _dense(self, place: int) -> list[float]:
        row = dict(self.rows[place])
        return [row.get(part, 0.0) for part in range(len(self.rows))]


@lru_cache(maxsize=256)
def _is_good(workers: int, stragglers: int) -> bool:
    """Whether a cyclic code is accurate; stragglers in a row are its worst case."""
    if workers > MOST_CYCLIC:
        return False
    code, needed = Cyclic(workers, stragglers), workers - stragglers
    sets = ([(first + each) % workers for each in range(needed)] for first in range(workers))
    return all(code.cancelled(places) <= MOST_CANCELLED and code.amiss(places) <= MOST_AMISS for places in sets)


def _codeword(n: int, s: int) -> list[float]:
    """The coefficients of the polynomial of degree s whose roots are neighbours on the unit circle, around 1 or -1."""
    word = [1.0, 1.0] if s % 2 else [1.0]
    for pair in range(1, s // 2 + 1):
        middle = 2 * math.cos(2 * math.pi * pair / n) if s % 2 else -2 * math.cos(math.pi * (2 * pair - 1) / n)
        padded = [0.0, 0.0, *word, 0.0, 0.0]
        word = [padded[at] + middle * padded[at + 1] + padded[at + 2] for at in range(len(word) + 2)]
    return word


def _without_zeros(n: int, s: int) -> list[float]:
    """A codeword of which no entry is 0."""
    if s % 2 and n % 2 == 0:
        return [1.0] * n
    signs = [1.0 if s % 2 or part % 2 == 0 else -1.0 for part in range(n)]
    if s % 2 == 0 and n % 2:
        return signs
    return [sign * math.sin(math.pi * (part + 0.5) / n) for part, sign in enumerate(signs)]


def _solve(rows: list[list[float]]) -> list[float]:
    """The weights by which the rows add up to ones, by Gaussian elimination with pivots."""
    count = len(rows)
    equations = [[*column, 1.0] for column in zip(*rows, strict=True)]  # one for each part
    for at in range(count):
        pivot = max(range(at, len(equations)), key=lambda each: abs(equations[each][at]))
        equations[at], equations[pivot] = equations[pivot], equations[at]
        top = equations[at]
        for below in equations[at + 1 :]:
            factor = below[at] / top[at]
            if factor:
                for column in range(at, count + 1):
                    below[column] -= factor * top[column]
    weights = [0.0] * count
    for at in reversed(range(count)):
        known = sum(equations[at][column] * weights[column] for column in range(at + 1, count))
        weights[at] = (equations[at][count] - known) / equations[at][at]
    return weights
