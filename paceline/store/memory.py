"""Memory that the server shares with the workers of its host: the parameters once, and a slot for each one's gradients.

It is a file without a name, which their supervisor opens and hands down to them. Whoever reads the parameters holds a
lock on it that others may hold too, the server while it changes them one for itself alone; the kernel takes a lock
from a process that dies. A mark that stays behind then says that the parameters are torn.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.errors import CommError

_OVER = 56  # where in the head a byte says that the server has ended
_CHANGING = 57  # ... and one that it is changing the parameters
HEAD = 1 << 16  # the version, that, and from byte 64 on what the supervisor notes; the parameters come behind it
_VERSION = struct.Struct("@Q")  # native: written by one instruction
_PATIENCE = 0.00005  # seconds between two looks at a lock


def mark_over(file: int) -> None:
    """Write into the file that the server has ended, and no other will come."""
    os.pwrite(file, b"\1", _OVER)


def is_over(file: int) -> bool:
    """Whether that is written there."""
    return os.pread(file, 1, _OVER) == b"\1"


class SharedMemory:
    """A view of the file: ``down`` and the slots are tensors of bytes, ``version`` is that of the parameters."""

    def __init__(self, file: int, *, down: int, up: int, slots: int, create: bool = False) -> None:
        self._file = file
        size = HEAD + down + slots * up
        if create:
            try:
                os.posix_fallocate(file, 0, size)  # too little memory is told now, not by a signal later
            except OSError as error:
                raise CommError(f"cannot make {size} bytes of memory to share with the workers: {error}") from error
        found = os.fstat(file).st_size
        if found < size:
            raise CommError(f"the server shares {found} bytes of memory, wanted {size}: it has another model")
        self._mapped = mmap.mmap(file, size)
        self._whole = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self.down = self._whole[HEAD : HEAD + down]
        self._slots = [self._whole[HEAD + down + slot * up :][:up] for slot in range(slots)]

    def slot(self, rank: int) -> Tensor:
        """Where the worker of this rank puts its gradients."""
        return self._slots[rank]

    @property
    def version(self) -> int:
        return int(_VERSION.unpack_from(self._mapped)[0])

    @version.setter
    def version(self, version: int) -> None:
        _VERSION.pack_into(self._mapped, 0, version)

    @contextlib.contextmanager
    def reading(self) -> Iterator[bool]:
        """The parameters stay as they are inside the block; False if they are torn, since their server was killed."""
        fcntl.lockf(self._file, fcntl.LOCK_SH)
        try:
            yield not self._mapped[_CHANGING]
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def try_writing(self, seconds: float) -> bool:
        """Wait until nobody reads and keep others from it until ``wrote``; False if somebody reads for too long."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(_PATIENCE)
                continue
            self._mapped[_CHANGING] = 1
            return True

    def wrote(self) -> None:
        """The parameters are whole: let others read again."""
        self._mapped[_CHANGING] = 0
        fcntl.lockf(self._file, fcntl.LOCK_UN)
