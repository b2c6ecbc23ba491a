"""Means over all workers, of which each tells its part when it gets there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.errors import WireError
from paceline.server.members import Member
from paceline.transport.messages import MOST_VALUES, Mean

_LONGEST_KEY = 1000
_KEPT = 64  # means that are remembered after they were told
_NOTED = 4  # of them, those that a successor is told of


class Ready(NamedTuple):
    """A mean that can be told to those who have told their parts."""

    key: str
    values: tuple[float, ...]
    ranks: list[int]


@dataclass
class Average:
    """The parts of one mean."""

    epoch: int
    parts: dict[int, tuple[float, tuple[float, ...]]] = field(default_factory=dict)  # rank -> weight, values

    def mean(self) -> tuple[float, ...]:
        """The mean of the parts by their weights; NaN if nobody has any."""
        parts = [self.parts[rank] for rank in sorted(self.parts)]  # not as they came: that is another sum each time
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
    """The means that somebody waits for.

    Nobody waits for a worker that came after the epoch in question had begun: it will never tell its part. One that
    tells it when the others have theirs already, having lost its connection meanwhile, is told what they were told.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, Average] = {}
        self._told: dict[str, tuple[float, ...]] = {}

    def told(self) -> dict[str, tuple[float, ...]]:
        """The last few that were told, for a server that takes our place."""
        return {key: self._told[key] for key in list(self._told)[-_NOTED:]}

    def know(self, told: Mapping[str, Sequence[float]]) -> None:
        """Take over what a server before us has told."""
        self._told |= {key: tuple(values) for key, values in told.items()}

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def add(self, rank: int, part: Mean) -> None:
        """Take a worker's part; raise if it does not go together with the others'."""
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
        """The means that nobody has to tell a part of any more, of the members and those expected; each once."""
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
