"""Random compute times of one mini-batch: the interface of every delay, and the distributions.

>>> Exponential(rate=0.5).mean(worker=0)
2.0
>>> Gaussian(mu=1.0, sigma=0.2).sample(np.random.default_rng(0), np.arange(4)).shape
(4,)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.delays.measured_times import read_times
from paceline.errors import UsageError
from paceline.spec import check_types, print_call

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Times: TypeAlias = npt.NDArray[np.float64]
Workers: TypeAlias = npt.NDArray[np.integer[Any]]
Range: TypeAlias = tuple[float, float]  # from, to

SMALLEST, LARGEST = 1e-50, 1e50  # limits of every parameter except 0, so that no time overflows or underflows


class Delay(ABC):
    """A frozen value that draws compute times; all randomness comes from the generator argument."""

    @abstractmethod
    def sample(self, generator: np.random.Generator, workers: Workers, at: float | Times = 0.0) -> Times:
        """Draw one compute time for each of ``workers``, which start ``at`` (one time for all, or one for each).

        A worker that fails before it would have finished takes infinitely long.
        """

    @abstractmethod
    def mean(self, worker: int) -> float:
        """The expected compute time of a worker; infinite if it fails at some time, or if the mean does not exist."""

    def fails_at(self, worker: int) -> float:
        """The time at which a worker fails; infinity if it never does."""
        return math.inf

    def check_workers(self, num_workers: int) -> None:  # noqa: B027  # most delays name no worker
        """Raise a UsageError if the delay names a worker that is not among the first ``num_workers``."""


@dataclass(frozen=True, kw_only=True)
class Distribution(Delay):
    """A delay with independent draws, the same for all workers; a subclass is one line in ``DISTRIBUTIONS``."""

    name: ClassVar[str]  # as users type it
    ranges: ClassVar[dict[str, Range]] = {}  # of the numbers that are not simply above 0

    def __post_init__(self) -> None:
        check_types("delay", self.name, self)
        for field in fields(self):
            value = getattr(self, field.name)
            low, high = self.ranges.get(field.name, (SMALLEST, LARGEST))
            if not isinstance(value, str) and not low <= value <= high:
                wanted = "above 0" if low == SMALLEST and not value > 0 else f"from {low:g} to {high:g}"
                raise UsageError(f"{self.name}: {field.name} must be {wanted}, got {value:g}")

    def __str__(self) -> str:
        """The text form, which ``parse_delay`` reads back to an equal delay."""
        return with_options(self.name, self)

    @abstractmethod
    def draw(self, generator: np.random.Generator, count: int) -> Times:
        """Draw ``count`` independent times."""

    def sample(self, generator: np.random.Generator, workers: Workers, at: float | Times = 0.0) -> Times:
        return self.draw(generator, len(workers))


@dataclass(frozen=True, kw_only=True)
class Constant(Distribution):
    """Always the same time. As text it is the number alone: ``2``."""

    name: ClassVar[str] = "constant"
    ranges: ClassVar[dict[str, Range]] = {"value": (0.0, LARGEST)}

    value: float

    def __str__(self) -> str:
        return plain(self.value)

    def draw(self, generator: np.random.Generator, count: int) -> Times:
        return np.full(count, self.value, dtype=np.float64)

    def mean(self, worker: int) -> float:
        return float(self.value)


@dataclass(frozen=True, kw_only=True)
class Exponential(Distribution):
    """Memoryless: ``exp(0.5)`` has the rate 0.5, the mean 1/0.5 = 2."""

    name: ClassVar[str] = "exp"

    rate: float

    def __str__(self) -> str:
        return f"exp({plain(self.rate)})"

    def draw(self, generator: np.random.Generator, count: int) -> Times:
        return generator.standard_exponential(count) / self.rate

    def mean(self, worker: int) -> float:
        return 1.0 / self.rate


@dataclass(frozen=True, kw_only=True)
class LogNormal(Distribution):
    """Half of the times below ``median``; ``sigma`` is the standard deviation of their logarithm."""

    name: ClassVar[str] = "lognormal"
    ranges: ClassVar[dict[str, Range]] = {"sigma": (SMALLEST, 20.0)}

    median: float
    sigma: float

    def draw(self, generator: np.random.Generator, count: int) -> Times:
        return self.median * np.exp(self.sigma * generator.standard_normal(count))

    def mean(self, worker: int) -> float:
        return self.median * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, kw_only=True)
class Pareto(Distribution):
    """Never below ``minimum``, and above t with chance (minimum/t)^shape; a mean exists for a shape above 1."""

    name: ClassVar[str] = "pareto"
    ranges: ClassVar[dict[str, Range]] = {"shape": (0.1, LARGEST)}

    minimum: float
    shape: float

    def draw(self, generator: np.random.Generator, count: int) -> Times:
        return self.minimum * np.exp(generator.standard_exponential(count) / self.shape)

    def mean(self, worker: int) -> float:
        return self.minimum * self.shape / (self.shape - 1) if self.shape > 1 else math.inf


@dataclass(frozen=True, kw_only=True)
class Gaussian(Distribution):
    """Normal with mean ``mu`` and deviation ``sigma``; negative times are drawn again."""

    name: ClassVar[str] = "gaussian"
    ranges: ClassVar[dict[str, Range]] = {"mu": (0.0, LARGEST)}  # at least half of the draws are kept

    mu: float
    sigma: float

    def draw(self, generator: np.random.Generator, count: int) -> Times:
        times = generator.normal(self.mu, self.sigma, count)
        while (negative := np.flatnonzero(times < 0)).size:
            times[negative] = generator.normal(self.mu, self.sigma, negative.size)
        return times

    def mean(self, worker: int) -> float:
        cut = self.mu / self.sigma
        density = math.exp(-cut * cut / 2) / math.sqrt(2 * math.pi)
        return self.mu + self.sigma * density / (0.5 * math.erfc(-cut / math.sqrt(2)))


@dataclass(frozen=True, kw_only=True)
class Measured(Distribution):
    """Times drawn with replacement from a file of numbers, or from the steps of a run (its directory or metrics).

    The time of a run's step is that of its forward and backward pass, on any worker. As text:
    ``measured(times.txt)``, ``measured(runs/digits-1)``.
    """

    name: ClassVar[str] = "measured"

    file: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.times.mean()  # reads the file, so that a wrong file raises now

    def __str__(self) -> str:
        return print_call(self.name, {"file": self.file})

    @cached_property
    def times(self) -> Times:
        """The times of the file, in order."""
        return np.asarray(read_times(Path(self.file)), dtype=np.float64)

    def draw(self, generator: np.random.Generator, count: int) -> Times:
        return self.times[generator.integers(len(self.times), size=count)]

    def mean(self, worker: int) -> float:
        return float(self.times.mean())


DISTRIBUTIONS: dict[str, type[Distribution]] = {
    kind.name: kind for kind in (Constant, Exponential, LogNormal, Pareto, Gaussian, Measured)
}


def plain(number: float) -> str:
    """Write a number exactly, and a whole one without ``.0``."""
    return str(number) if isinstance(number, int) else repr(float(number)).removesuffix(".0")


def with_options(name: str, settings: DataclassInstance) -> str:
    """Write a name with all fields of a dataclass, which are numbers, as in ``slow(worker=3, factor=5)``."""
    options = (f"{field.name}={plain(getattr(settings, field.name))}" for field in fields(settings))
    return f"{name}({', '.join(options)})"
