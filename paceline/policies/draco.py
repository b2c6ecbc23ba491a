"""DRACO: a few wrong workers change nothing, since each gradient is computed by a group (Chen et al., ICML 2018)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.coded import Code, Coded
from paceline.policies.state import ServerState


@dataclass(frozen=True, kw_only=True)
class Draco(Coded):
    """Let groups of 2 f + 1 workers compute the same batches, and commit what f + 1 of each group agree on to the bit.

    ``faulty`` is f, the number of workers that may push anything. The commit is that of a run without them.

    >>> str(Draco(faulty=1))
    'draco(faulty=1)'
    """

    name: ClassVar[str] = "draco"

    faulty: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.faulty < 1:
            raise UsageError(
                f"policy {self.name!r}: faulty must be at least 1, got {self.faulty}; for example draco(faulty=1)"
            )

    @property
    def combined_by(self) -> str:
        return f"vote(faulty={self.faulty})"

    def begin(self, workers: int) -> ServerState:
        least = 2 * self.faulty + 1
        if workers < least:
            raise UsageError(
                f"policy {self}: of {workers} workers a majority may be wrong; use at least {least} workers, "
                f"or at most faulty={max(0, (workers - 1) // 2)}"
            )
        return super().begin(workers)

    def pushes_per_commit(self, workers: int) -> int:
        return workers

    def code(self, workers: int) -> Code:
        return groups_of(workers, self.faulty)


@lru_cache(maxsize=256)
def groups_of(workers: int, faulty: int) -> Groups:
    """The groups of so many workers."""
    return Groups(workers, faulty)


class Groups(Code):
    """As many groups of 2 f + 1 workers as there can be, or one; each computes as many parts as it has workers.

    >>> [[part for part, _ in row] for row in Groups(4, 1).rows]
    [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    """

    def __init__(self, workers: int, faulty: int) -> None:
        count = max(1, workers // (2 * faulty + 1))
        starts = [group * workers // count for group in range(count + 1)]
        self._majority = faulty + 1
        self._groups = [group for group in range(count) for _ in range(starts[group], starts[group + 1])]
        self.rows = tuple(
            tuple((part, 1.0) for part in range(starts[group], starts[group + 1])) for group in self._groups
        )

    def enough(self, places: Iterable[int]) -> bool:
        """Only if there are all: it is not known here whether they agree."""
        return len({*places}) == len(self.rows)

    def weights(self, places: Sequence[int]) -> list[float] | None:
        """Shares of 1 in each group, if it can have a majority."""
        sizes = Counter(self._groups[place] for place in places)
        if any(sizes[group] < self._majority for group in self._groups):
            return None
        return [1 / sizes[self._groups[place]] for place in places]

    def group(self, place: int) -> int:
        return self._groups[place]

    def may_take(self, place: int, pushed: Sequence[int]) -> bool:
        """Nobody votes twice in a group."""
        return all(self._groups[place] != self._groups[each] for each in pushed)
