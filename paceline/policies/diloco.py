"""Let every worker train by itself, and move a shared anchor by the average of what they did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.periodic import Periodic
from paceline.policies.progress import Progress


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Periodic):
    """Update an anchor by Nesterov's method with what the workers have changed (Douillard et al., 2023).

    All workers begin at the anchor. After ``every`` steps the mean of their changes is the gradient of an outer update
    of the anchor, and they begin anew there. The inner optimizer is the user's; its state stays each worker's own.

    The parameters can be exchanged in ``fragments``, each at steps of its own, and in the background during the next
    ``overlap`` steps. Workers then keep a part ``merge`` of their own values (Streaming DiLoCo, 2025, by the same).

    >>> str(DiLoCo(every=500, fragments=4, overlap=5))
    'diloco(every=500, fragments=4, overlap=5)'
    """

    name: ClassVar[str] = "diloco"

    outer_lr: float = 0.7
    outer_momentum: float = 0.9  # Nesterov's
    fragments: int = 1
    overlap: int = 0  # steps between the start of an exchange and its use
    merge: float = 0.5  # the weight of a worker's own values where exchanges overlap with steps

    def __post_init__(self) -> None:
        super().__post_init__()
        for wanted, fits, found in (
            ("outer_lr must be above 0 and finite", 0 < self.outer_lr < math.inf, self.outer_lr),
            ("outer_momentum must be at least 0 and below 1", 0 <= self.outer_momentum < 1, self.outer_momentum),
            ("fragments must be at least 1", self.fragments >= 1, self.fragments),
            (
                f"every must be at least the number of fragments, {self.fragments}, since a step exchanges one",
                self.every >= self.fragments,
                self.every,
            ),
            ("overlap must be at least 0", self.overlap >= 0, self.overlap),
            (
                f"overlap must be below every, {self.every}, since a fragment's exchange ends before its next one",
                self.overlap < self.every,
                self.overlap,
            ),
            ("merge must be at least 0 and below 1", 0 <= self.merge < 1, self.merge),
        ):
            if not fits:
                raise UsageError(f"policy {self.name!r}: {wanted}, got {found}")

    @property
    def kept(self) -> float:
        """The weight of a worker's own values when an exchange ends."""
        return self.merge if self.overlap else 0.0

    def fragment(self, steps: int) -> int | None:
        """The fragment whose exchange starts after this many steps.

        >>> [DiLoCo(every=5, fragments=2).fragment(steps) for steps in range(1, 11)]
        [None, 0, None, None, 1, None, 0, None, None, 1]
        """
        place = (steps - 1) % self.every + 1
        ends = [(number + 1) * self.every // self.fragments for number in range(self.fragments)]
        return ends.index(place) if place in ends else None

    def period(self, progress: Progress) -> int:
        steps = 1
        while self.fragment(progress.steps + steps) is None:
            steps += 1
        return steps

    def cut(self, sizes: Sequence[int]) -> list[list[int]]:
        """Cut tensors of these sizes into fragments: each tensor in turn goes to the smallest so far.

        So the layers of a fragment lie apart, and fragments are about equal.

        >>> DiLoCo(every=5, fragments=2).cut([100, 10, 100, 10, 100, 10])
        [[0, 3, 4], [1, 2, 5]]
        """
        if len(sizes) < self.fragments:
            raise UsageError(
                f"policy {self.name!r}: fragments are whole tensors, and {self.fragments} of them are more than the "
                f"{len(sizes)} tensors that the model trains; give fewer"
            )
        parts: list[list[int]] = [[] for _ in range(self.fragments)]
        filled = [0] * self.fragments
        for index, size in enumerate(sizes):
            smallest = min(range(self.fragments), key=lambda part: (filled[part], len(parts[part])))
            parts[smallest].append(index)
            filled[smallest] += size
        return parts
