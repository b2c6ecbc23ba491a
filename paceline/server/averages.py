"""Means over all workers: each sends its part, and is answered when all parts have come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import WireError
from paceline.server.members import Member
from paceline.transport.messages import MOST_VALUES, Mean

_LONGEST_KEY = 1000
_KEPT = 64  # means that are remembered after they were sent
_NOTED = 4  # of these, the number that a replacement of this server gets


class Ready(NamedTuple):
    """A mean that is complete, and the workers that sent its parts."""

    key: str
    values: tuple[float, ...]
    ranks: list[int]


@dataclass
class Average:
    """The parts of one mean that have come."""

    epoch: int
    parts: dict[int, tuple[float, tuple[float, ...]]] = field(default_factory=dict)  # rank -> weight, values

    def mean(self) -> tuple[float, ...]:
        """The weighted mean of the parts; NaN if all weights are 0."""
        parts = [self.parts[rank] for rank in sorted(self.parts)]  # the order of arrival would change the rounding
        weights = [weight for weight, _ in parts]
        total = sum(weights)
        columns = zip(*(values for _, values in parts), strict=True)
        return tuple(
            sum(weight * value for weight, value in zip(weights, column, strict=True) if weight) / total
            if total
            else float("nan")
            for column in columns
        )


class Averages:
    """The means that workers wait for.

    A mean does not wait for a worker that joined after its epoch had begun, since that worker will not send a part. If
    a worker lost its connection and sends its part after the others were answered, it gets the same answer.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, Average] = {}
        self._told: dict[str, tuple[float, ...]] = {}

    def told(self) -> dict[str, tuple[float, ...]]:
        """The last few means that were sent, for a replacement of this server."""
        return {key: self._told[key] for key in list(self._told)[-_NOTED:]}

    def know(self, told: Mapping[str, Sequence[float]]) -> None:
        """Remember the means that a killed server has sent."""
        self._told |= {key: tuple(values) for key, values in told.items()}

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def add(self, rank: int, part: Mean) -> None:
        """Add a worker's part; raise if it has another number of values than the others."""
        found = len(part.values)
        if found > MOST_VALUES or len(part.key) > _LONGEST_KEY:
            raise WireError(f"wanted at most {MOST_VALUES} values for a mean, found {found}: the mean has to fit too")
        average = self._under_way.setdefault(part.key, Average(part.epoch))
        wanted = next((len(values) for _, values in average.parts.values()), found)
        if found != wanted:
            raise WireError(
                f"wanted {wanted} values for the mean {part.key!r}, found {found}; all workers must give as many"
            )
        average.parts[rank] = part.weight, part.values

    def ready(self, members: Iterable[Member], expected: Iterable[int]) -> list[Ready]:
        """The means to which all members and expected workers have sent their parts; each is returned once."""
        members, to_come = list(members), set(expected)
        found = []
        for key, average in list(self._under_way.items()):
            wanted = to_come.union(member.rank for member in members if member.first_epoch < average.epoch)
            if key not in self._told and not average.parts.keys() >= wanted:
                continue
            del self._under_way[key]
            values = self._told.setdefault(key, average.mean())
            found.append(Ready(key, values, list(average.parts)))
        while len(self._told) > _KEPT:
            del self._told[next(iter(self._told))]
        return found

    def waited_for(self) -> str:
        """Which workers wait for which means."""
        return "; ".join(
            f"workers {sorted(average.parts)} for mean {key.rpartition('/')[2]} of epoch {average.epoch}"
            for key, average in self._under_way.items()
        )
