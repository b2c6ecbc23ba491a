"""Compute times of workers: a distribution, optionally shifted or changed for single workers, and its text form.

>>> delay = parse_delay("1+exp(0.5) slow(worker=3, factor=5)")
>>> delay.mean(worker=0), delay.mean(worker=3)
(3.0, 15.0)
>>> str(delay)
'1+exp(0.5) slow(worker=3, factor=5)'

The text is a sum of numbers and at most one distribution, then changes, each after a space. ``exp(0.5)`` has the
*rate* 0.5 and so the mean 2, as in the lecture decks. Times have no unit here; the virtual cluster uses seconds.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar, get_type_hints

import numpy as np

from paceline.delays.distributions import (
    DISTRIBUTIONS,
    LARGEST,
    SMALLEST,
    Constant,
    Delay,
    Distribution,
    Exponential,
    Gaussian,
    LogNormal,
    Measured,
    Pareto,
    Times,
    Workers,
    plain,
    with_options,
)
from paceline.delays.text import as_number, name_options, split_terms
from paceline.errors import UsageError, unknown_name
from paceline.spec import check_types, from_spec

__all__ = [
    "CHANGES",
    "DISTRIBUTIONS",
    "Change",
    "Changed",
    "Constant",
    "Delay",
    "Distribution",
    "Exponential",
    "Factors",
    "Fails",
    "Gaussian",
    "LogNormal",
    "Measured",
    "Pareto",
    "Shifted",
    "Slow",
    "parse_delay",
]

EXAMPLES = "2, 1+exp(0.5), lognormal(median=1, sigma=0.5), 1+exp(0.5) slow(worker=3, factor=5) fails(worker=2, at=60)"
_SHORT = reprlib.Repr()
_SHORT.maxstring = 120  # characters that errors quote


@dataclass(frozen=True, kw_only=True)
class Shifted(Delay):
    """A distribution and a constant time before it: ``1+exp(0.5)``."""

    shift: float
    rest: Distribution

    def __post_init__(self) -> None:
        Constant(value=self.shift)  # refuses a shift that is no time
        if isinstance(self.rest, Constant) or not isinstance(self.rest, Distribution):
            raise UsageError(f"wanted a distribution to shift, found {self.rest!r}; for example 1+exp(0.5)")

    def __str__(self) -> str:
        """The text form, which ``parse_delay`` reads back to an equal delay."""
        return f"{plain(self.shift)}+{self.rest}"

    def sample(self, generator: np.random.Generator, workers: Workers, at: float | Times = 0.0) -> Times:
        return self.shift + self.rest.draw(generator, len(workers))

    def mean(self, worker: int) -> float:
        return self.shift + self.rest.mean(worker)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of some workers' delay; a subclass is a frozen dataclass and one line in ``CHANGES``."""

    name: ClassVar[str]  # as users type it

    def __post_init__(self) -> None:
        check_types("change", self.name, self)

    def __str__(self) -> str:
        """The text form, which is part of that of a delay."""
        return with_options(self.name, self)

    def factors_of(self, workers: Workers) -> float | Times:
        """The factors that multiply these workers' times."""
        return 1.0

    def fails_at(self, worker: int) -> float:
        """The time at which a worker fails; infinity if it never does."""
        return math.inf


@dataclass(frozen=True, kw_only=True)
class Factors(Change):
    """Multiply all workers' times: ``factors(1, 1, 2)`` makes the workers 2, 5, 8, ... take twice as long."""

    name: ClassVar[str] = "factors"

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.values:
            raise UsageError("factors needs at least one factor; for example factors(1, 1, 2)")
        for value in self.values:
            _check_factor(self.name, value)

    def __str__(self) -> str:
        return f"factors({', '.join(map(plain, self.values))})"

    def factors_of(self, workers: Workers) -> float | Times:
        return np.asarray(self.values, dtype=np.float64)[workers % len(self.values)]


@dataclass(frozen=True, kw_only=True)
class Slow(Change):
    """Make one worker take ``factor`` times as long: ``slow(worker=3, factor=5)``."""

    name: ClassVar[str] = "slow"

    worker: int
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_worker(self.name, self.worker)
        _check_factor(self.name, self.factor)

    def factors_of(self, workers: Workers) -> float | Times:
        return np.where(workers == self.worker, self.factor, 1.0)


@dataclass(frozen=True, kw_only=True)
class Fails(Change):
    """Let one worker fail for good at the time ``at``: it never finishes its step."""

    name: ClassVar[str] = "fails"

    worker: int
    at: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_worker(self.name, self.worker)
        if not 0 <= self.at <= LARGEST:
            raise UsageError(f"fails: at is a time and must not be negative, got {self.at:g}")

    def fails_at(self, worker: int) -> float:
        return float(self.at) if worker == self.worker else math.inf


CHANGES: dict[str, type[Change]] = {kind.name: kind for kind in (Factors, Slow, Fails)}


@dataclass(frozen=True, kw_only=True)
class Changed(Delay):
    """A delay in which some workers differ: ``1+exp(0.5) slow(worker=3, factor=5)``."""

    base: Distribution | Shifted
    changes: tuple[Change, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.base, Distribution | Shifted) or not self.changes:
            raise UsageError(f"wanted a distribution and changes of it, found {self.base!r} and {self.changes!r}")

    def __str__(self) -> str:
        """The text form, which ``parse_delay`` reads back to an equal delay."""
        return " ".join(map(str, (self.base, *self.changes)))

    def sample(self, generator: np.random.Generator, workers: Workers, at: float | Times = 0.0) -> Times:
        times = self.base.sample(generator, workers)
        for change in self.changes:
            times = times * change.factors_of(workers)
        for change in self.changes:
            if isinstance(change, Fails):
                too_late = (at + times > change.at) | (at >= np.float64(change.at))
                times = np.where((workers == change.worker) & too_late, math.inf, times)
        return times

    def mean(self, worker: int) -> float:
        if self.fails_at(worker) < math.inf:
            return math.inf
        one = np.asarray([worker])
        return float(np.prod([self.base.mean(worker), *(np.max(change.factors_of(one)) for change in self.changes)]))

    def fails_at(self, worker: int) -> float:
        return min(change.fails_at(worker) for change in self.changes)

    def check_workers(self, num_workers: int) -> None:
        for change in self.changes:
            if isinstance(change, Slow | Fails) and change.worker >= num_workers:
                raise UsageError(
                    f"the delay has {change}, but there is no worker {change.worker}: "
                    f"{num_workers} workers have the numbers 0 to {num_workers - 1}"
                )


def parse_delay(text: str | Delay) -> Delay:
    """Read a delay from text, such as ``"1+exp(0.5)"``; a ``Delay`` is returned as it is."""
    if isinstance(text, Delay):
        return text
    if not isinstance(text, str):
        raise UsageError(f"wanted a delay or its text form, got {text!r}. Examples: {EXAMPLES}")
    try:
        sums, changes = split_terms(text)
        base = _sum(sums)
        return Changed(base=base, changes=tuple(map(_change, changes))) if changes else base
    except UsageError as error:
        reason = str(error).rstrip(".")
        raise UsageError(f"cannot read the delay {_SHORT.repr(text)}: {reason}. Examples: {EXAMPLES}") from None


def _sum(terms: list[str]) -> Distribution | Shifted:
    numbers = [number for number in map(as_number, terms) if number is not None]
    others = [term for term in terms if as_number(term) is None]
    if not others:
        return Constant(value=math.fsum(numbers))
    for name in map(_name, others):
        if name in CHANGES:
            raise UsageError(f"{name} changes a delay: write it after one, with a space, as in exp(1) slow(3, 5)")
    if len(others) > 1:
        raise UsageError(f"wanted at most one distribution, found {' and '.join(others)}")
    rest = _build("delay", DISTRIBUTIONS, others[0])
    return Shifted(shift=math.fsum(numbers), rest=rest) if numbers else rest


def _change(term: str) -> Change:
    if as_number(term) is not None or _name(term) in DISTRIBUTIONS:
        raise UsageError(f"write + before {term}, or leave it out")
    return _build("change of a delay", CHANGES, term)


T = TypeVar("T", Distribution, Change)


def _build(kind: str, table: dict[str, type[T]], term: str) -> T:
    name = _name(term)
    if name not in table:
        raise unknown_name(kind, name, table)
    hints = get_type_hints(table[name])
    return from_spec(kind, table, name_options(term, {field.name: hints[field.name] for field in fields(table[name])}))


def _name(term: str) -> str:
    return term.partition("(")[0].strip()


def _check_worker(name: str, worker: int) -> None:
    if worker < 0:
        raise UsageError(f"{name}: worker is a number from 0, got {worker}")


def _check_factor(name: str, factor: float) -> None:
    if not SMALLEST <= factor <= LARGEST:
        raise UsageError(f"{name}: a factor must be above 0, got {factor:g}; 5 takes five times as long")
