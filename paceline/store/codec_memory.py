"""What a worker's codec remembers, where a server of its host can read it at any moment.

There are two places. One has what was remembered after the last push that was taken. The next push is encoded in the
other, which then takes its turn, unless the server does not take that push. So what a server looks for never changes
while it looks: a worker writes into that place again only after it was told that a later push is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import CommError
from paceline.store.layout import Layout, memory_of
from paceline.store.memory import map_part

START = -1  # in the place of a step: before the first push
_NOTHING = -2  # ... what is in the place is of no use
_HEAD = 64  # bytes: the step of the push and the number of the next one, of each place
# Where in a file that is shared; it is sparse, and other things of the server lie before (see ``double_buffer``).
_FIRST, _ROOM = 1 << 44, 1 << 40  # bytes: of rank 0, and of each


class Remembered(NamedTuple):
    """A codec's memory after a push."""

    number: int  # of the next push
    tensors: list[Tensor]


class CodecMemory:
    """Two places for tensors like these: of this process alone, or those of a ``rank`` in a ``file``."""

    def __init__(self, like: Sequence[Tensor], file: int | None = None, rank: int = 0) -> None:
        layout = Layout(like)
        size = _HEAD + 2 * layout.nbytes
        if file is None:
            memory = torch.zeros(size, dtype=torch.uint8)
        else:
            try:
                memory = map_part(file, _FIRST + rank * _ROOM, size)
            except OSError as error:
                raise CommError(
                    f"cannot make {size} bytes of memory for what the codec of worker {rank} keeps back: {error}"
                ) from error
        self._words = memory_of(memory[:_HEAD]).cast("q")
        starts = (_HEAD, _HEAD + layout.nbytes)
        self._tensors = [layout.views(memory[start : start + layout.nbytes]) for start in starts]
        self.place = 0  # that is used

    @property
    def tensors(self) -> list[Tensor]:
        """What is in the place that is used."""
        return self._tensors[self.place]

    @property
    def number(self) -> int:
        """Of the next push."""
        return self._words[2 + self.place]

    # The worker ------------------------------------------------------------------------------------------------------

    def begin_with(self, remembered: Remembered) -> None:
        """Remember this, and no push."""
        self.place = 0
        for tensor, value in zip(self.tensors, remembered.tensors, strict=True):
            tensor.copy_(value)
        self._mark(0, START, remembered.number)
        self._mark(1, _NOTHING, 0)

    def begin_push(self) -> None:
        """Use the other place, with the same in it."""
        before, self.place = self.place, 1 - self.place
        self._mark(self.place, _NOTHING, 0)
        for tensor, value in zip(self.tensors, self._tensors[before], strict=True):
            tensor.copy_(value)
        self._words[2 + self.place] = self._words[2 + before] + 1

    def end_push(self, step: int) -> None:
        """What is remembered is that after the push of this step."""
        self._words[self.place] = step

    def undo_push(self) -> None:
        """Remember what was remembered before the last push."""
        self.place = 1 - self.place

    def _mark(self, place: int, step: int, number: int) -> None:
        self._words[place], self._words[2 + place] = step, number

    # The server ------------------------------------------------------------------------------------------------------

    def after(self, step: int) -> Remembered | None:
        """A copy of what was remembered after the push of a step, ``START`` before the first; None if it is gone."""
        return self._copy(*(place for place in (0, 1) if self._words[place] == step))

    def before(self, step: int) -> Remembered | None:
        """The same before that push; its worker must not make another meanwhile."""
        return self._copy(*(1 - place for place in (0, 1) if self._words[place] == step))

    def _copy(self, *places: int) -> Remembered | None:
        for place in places:
            if self._words[place] != _NOTHING:
                return Remembered(self._words[2 + place], [tensor.clone() for tensor in self._tensors[place]])
        return None
