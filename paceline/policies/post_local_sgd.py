"""Average after every step at first, and seldom once the learning rate has fallen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.policies.periodic import Periodic
from paceline.policies.progress import Progress

FIRST_DECAY = "first-decay"


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(Periodic):
    """Average the parameters after every step until ``start``, then after every ``every`` (Lin et al., ICLR 2020).

    ``start`` is a number of steps, or ``epoch-3``: the first step of epoch 3, counted from 0, or ``first-decay``: the
    first learning rate below an earlier one. The optimizer's state, such as momentum, is not averaged.

    >>> str(PostLocalSGD(every=16, start="epoch-3"))
    'post-local-sgd(every=16, start=epoch-3)'
    """

    name: ClassVar[str] = "post-local-sgd"

    start: int | str = FIRST_DECAY

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.start, str):
            fits = self.start == FIRST_DECAY or self._start_epoch is not None
        else:
            fits = self.start >= 0
        if not fits:
            raise UsageError(
                f"policy {self.name!r}: start must be a number of steps of at least 0, an epoch such as epoch-3, or "
                f"{FIRST_DECAY}, got {self.start}"
            )

    @property
    def _start_epoch(self) -> int | None:
        number = re.fullmatch(r"epoch-([0-9]{1,9})", str(self.start))
        return None if number is None else int(number[1])

    def period(self, progress: Progress) -> int:
        """Steps until the next average.

        >>> PostLocalSGD(every=16, start=500).period(Progress(steps=499))
        1
        >>> PostLocalSGD(every=16, start=500).period(Progress(steps=500))
        16
        """
        return self.every if self._started(progress) else 1

    def _started(self, progress: Progress) -> bool:
        if isinstance(self.start, int):
            return progress.steps >= self.start
        epoch = self._start_epoch
        return progress.decayed if epoch is None else progress.epoch >= epoch
