"""Memory that the server shares with the workers of its host: the parameters, and a slot for the push of each worker.

It is a file without a name, which their supervisor opens and hands down to them. Each worker has a byte of it to lock
while it reads the parameters; the server locks all of these bytes while it changes them. The kernel takes a lock from a
process that dies. A mark that stays behind then says that the parameters are torn.

A worker that is stopped while it reads keeps its lock. The server waits for it no longer than a copy takes, and then
makes the commit all the same: it has *overtaken* that worker. A word tells the worker so after its copy, which is then
void. The word is written before the server tries the lock a last time, and read after the worker has
given its lock up. The kernel puts these two calls in an order, on any processor: either the worker sees the word, or it
had copied everything before the server changed anything.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.errors import CommError

_OVER = 56  # where in the head a byte says that the server has ended
_CHANGING = 57  # ... and one that it is changing the parameters
HEAD = 1 << 16  # bytes: the version, these two, and from byte 64 on the supervisor's marks; the parameters follow
_WORD = struct.Struct("@Q")  # native: written by one instruction
# Words of each rank: twice how often it was overtaken, plus 1 during such a commit; and what it has last seen there.
_WORDS_OF_RANK = 2
_PAUSE = 0.00005  # seconds between two looks at a lock
_MOST_PATIENCE = 60.0  # seconds for one copy


class Copied(enum.Enum):
    """What has come of copying the parameters."""

    WHOLE = enum.auto()
    OVERTAKEN = enum.auto()  # it took too long, and the server has changed them meanwhile: copy again
    TORN = enum.auto()  # their server was killed while it changed them


def mark_over(file: int) -> None:
    """Write into the file that the server has ended, and no other will come."""
    os.pwrite(file, b"\1", _OVER)


def is_over(file: int) -> bool:
    """Whether the server has ended, as ``mark_over`` has written."""
    return os.pread(file, 1, _OVER) == b"\1"


def map_part(file: int, offset: int, length: int) -> Tensor:
    """Allocate a part of a file and map it, as bytes; raise OSError if there is too little memory."""
    os.posix_fallocate(file, offset, max(1, length))
    return torch.frombuffer(mmap.mmap(file, max(1, length), offset=offset), dtype=torch.uint8)[:length]


class SharedMemory:
    """A view of the file: ``down`` and the slots are tensors of bytes, ``version`` is that of the parameters."""

    def __init__(self, file: int, *, down: int, up: int, slots: int, create: bool = False) -> None:
        self._file, self._ranks = file, range(slots)
        self._words = HEAD + down + slots * up
        size = self._words + slots * _WORDS_OF_RANK * _WORD.size
        if create:
            try:
                os.posix_fallocate(file, 0, size)  # raises if there is too little memory
            except OSError as error:
                raise CommError(f"cannot make {size} bytes of memory to share with the workers: {error}") from error
        found = os.fstat(file).st_size
        if found < size:
            raise CommError(f"the server shares {found} bytes of memory, wanted {size}: it has another model")
        self._mapped = mmap.mmap(file, size)
        self._whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.down = self._whole[HEAD : HEAD + down]
        self._slots = [self._whole[HEAD + down + slot * up :][:up] for slot in range(slots)]
        # A server before this one may have been killed in a commit that overtook workers.
        self._overtaken = [rank for rank in self._ranks if self._times(rank) % 2]
        self._patience: dict[int, float] = {}  # seconds for the next copy of those whose last one was overtaken

    def slot(self, rank: int) -> Tensor:
        """The memory for the pushes of this rank's worker."""
        return self._slots[rank]

    @property
    def version(self) -> int:
        version: int = _WORD.unpack_from(self._mapped)[0]
        return version

    @version.setter
    def version(self, version: int) -> None:
        _WORD.pack_into(self._mapped, 0, version)

    # A worker ------------------------------------------------------------------------------------------------

    def read(self, rank: int, copy: Callable[[], None]) -> Copied:
        """Call ``copy`` to copy the parameters; use the copy only if the result is ``WHOLE``."""
        times = self._times(rank)
        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, rank)
        try:
            if times % 2 or times != self._times(rank):
                return Copied.OVERTAKEN
            self._set_known_times(rank, times)
            if self._mapped[_CHANGING]:
                return Copied.TORN
            copy()
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return Copied.WHOLE if times == self._times(rank) else Copied.OVERTAKEN

    # The server ----------------------------------------------------------------------------------------------

    def begin_writing(self, seconds: float) -> list[int]:
        """Wait until nobody reads, and keep others from it until ``wrote``.

        Overtake workers that read for longer than ``seconds``; return those whose copies this makes void.
        """
        if not self._patience and self._try_lock(0, len(self._ranks)):
            self._mapped[_CHANGING] = 1
            return []
        began, held = time.monotonic(), list(self._ranks)
        while held := [rank for rank in held if not self._try_lock(rank)]:
            waited = time.monotonic() - began
            if all(waited > self._patience_for(rank, seconds) for rank in held):
                break
            time.sleep(_PAUSE)
        late = [rank for rank in held if self._knows(rank)]
        self._overtake(held)
        for rank in late:  # its next copy has more time: it may be slow, and not stopped
            self._patience[rank] = min(2 * self._patience.get(rank, seconds), _MOST_PATIENCE)
        for rank in [rank for rank in self._patience if self._knows(rank)]:
            del self._patience[rank]
        self._mapped[_CHANGING] = 1
        return late

    def wrote(self) -> None:
        """The parameters are whole: let others read again."""
        self._mapped[_CHANGING] = 0
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        for rank in self._overtaken:
            self._set_times(rank, self._times(rank) + 1)
        self._overtaken = []

    def _overtake(self, ranks: list[int]) -> None:
        """Go on although these workers hold their locks; one that releases it just now copies again without need."""
        for rank in ranks:
            self._set_times(rank, self._times(rank) + 1)
        self._overtaken = ranks
        for rank in ranks:
            self._try_lock(rank)

    def _try_lock(self, start: int, ranks: int = 1) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, ranks, start)
        except OSError:
            return False
        return True

    def _patience_for(self, rank: int, seconds: float) -> float:
        """How long to wait for a worker: not at all if it still reads what was overtaken before."""
        return self._patience.get(rank, seconds) if self._knows(rank) else -1.0

    # Words ---------------------------------------------------------------------------------------------------

    def _times(self, rank: int) -> int:
        return self._word(self._words + rank * _WORDS_OF_RANK * _WORD.size)

    def _set_times(self, rank: int, times: int) -> None:
        _WORD.pack_into(self._mapped, self._words + rank * _WORDS_OF_RANK * _WORD.size, times)

    def _knows(self, rank: int) -> bool:
        """Whether a worker has begun to read since it was last overtaken."""
        return self._word(self._words + (rank * _WORDS_OF_RANK + 1) * _WORD.size) == self._times(rank)

    def _set_known_times(self, rank: int, times: int) -> None:
        _WORD.pack_into(self._mapped, self._words + (rank * _WORDS_OF_RANK + 1) * _WORD.size, times)

    def _word(self, place: int) -> int:
        return int(_WORD.unpack_from(self._mapped, place)[0])
