"""Means over several seeds with their intervals, and what they say about a claim."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

# Student's t for 95 % on both sides, by degrees of freedom from 1; beyond the last it is a little too cautious.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Interval(NamedTuple):
    """A mean, and half the width of its 95 % interval, which one value alone does not have."""

    mean: float
    half: float | None

    def show(self, decimals: int = 2) -> str:
        """The interval as text.

        >>> Interval(1.5, 0.25).show(), Interval(1.5, None).show()
        ('1.50 +- 0.25', '1.50')
        """
        rest = "" if self.half is None else f" +- {self.half:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{rest}"


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values, with Student's 95 % interval.

    >>> interval([1.0, 2.0, 3.0]).show()
    '2.00 +- 2.48'
    """
    count = len(values)
    mean = statistics.fmean(values)
    if count < 2 or not math.isfinite(mean):
        return Interval(mean, None)
    error = statistics.stdev(values) / math.sqrt(count)
    return Interval(mean, _STUDENT[min(count - 1, len(_STUDENT)) - 1] * error)


def verdict(claim: str, advantages: Sequence[float], unit: str, *, at_least: float = 0.0, decimals: int = 2) -> str:
    """Say whether a claim holds, given by how much it does with each seed.

    It holds if the whole interval is above ``at_least``, its opposite if it is below; else nothing is shown.

    >>> verdict("A is below B", [1.0, 1.2, 1.1], "points")
    'A is below B: holds (by 1.10 +- 0.25 points, 3 seeds).'
    >>> verdict("A is below B", [1.0, -1.2, 1.1], "points")
    'A is below B: not shown (by 0.30 +- 3.23 points, 3 seeds).'
    """
    found = interval(advantages)
    return _judged(claim, found, f"by {found.show(decimals)} {unit}", len(advantages), above=at_least)


def agreement(claim: str, differences: Sequence[float], unit: str, *, within: float, decimals: int = 2) -> str:
    """Say whether two things are the same, given by how much they differ with each seed.

    They are if the whole interval is within ``within`` of 0, and are not if it lies beyond; else nothing is shown.

    >>> agreement("A is as B", [1.0, -1.2, 0.1], "%", within=5)
    'A is as B, within 5 %: holds (they differ by -0.03 +- 2.75 %, 3 seeds).'
    >>> agreement("A is as B", [9.0, 9.2, 9.1], "%", within=5)
    'A is as B, within 5 %: does not hold (they differ by 9.10 +- 0.25 %, 3 seeds).'
    """
    found = interval(differences)
    claim, shown = f"{claim}, within {within:g} {unit}", f"they differ by {found.show(decimals)} {unit}"
    return _judged(claim, found, shown, len(differences), above=-within, below=within)


def limit(claim: str, values: Sequence[float], unit: str, *, below: float, decimals: int = 2) -> str:
    """Say whether something is below a limit, given how large it is with each seed.

    It is if the whole interval is below, and is not if the whole interval is above; else nothing is shown.

    >>> limit("A loses", [1.0, 1.2, 1.1], "points", below=2)
    'A loses less than 2 points: holds (1.10 +- 0.25 points, 3 seeds).'
    >>> limit("A loses", [1.0, 1.2, 1.1], "points", below=1)
    'A loses less than 1 points: not shown (1.10 +- 0.25 points, 3 seeds).'
    """
    found = interval(values)
    claim, shown = f"{claim} less than {below:g} {unit}", f"{found.show(decimals)} {unit}"
    return _judged(claim, found, shown, len(values), below=below)


def _judged(
    claim: str, found: Interval, shown: str, seeds: int, *, above: float = -math.inf, below: float = math.inf
) -> str:
    """The sentence on a claim, which holds if the whole interval lies between two numbers."""
    if found.half is None:
        return f"{claim}: one seed shows nothing ({shown})."
    low, high = found.mean - found.half, found.mean + found.half
    word = "not shown"
    if above < low and high < below:
        word = "holds"
    elif high < above or below < low:
        word = "does not hold"
    return f"{claim}: {word} ({shown}, {seeds} seeds)."
