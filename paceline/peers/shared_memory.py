"""Memory of one host that all workers of a run have mapped: tensors, and words that count what each worker does.

It is a file without a name. A worker opens that of another through ``/proc``, so no compiled module is needed, and
nothing is left behind, however the workers end. Each opens it for itself: then each has a lock of its own, which the
kernel releases when its process dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import struct
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import LostContactError, UsageError

_WORD = 8  # bytes
_FLOCK = struct.Struct("@hhqqi4x")  # the kernel's struct flock
_ALIGNED = 64  # bytes: a line of the cache, so that no two tensors have one in common

Descriptor = tuple[int, int, int]  # the file, and a process that has it open under a number


class SharedMemory:
    """A file of ``num_words`` words, all 0 at first, and then ``num_bytes`` bytes for tensors."""

    def __init__(self, file: int, num_words: int) -> None:
        weakref.finalize(self, os.close, file)
        self._file = file
        self._mapped = mmap.mmap(file, 0)
        self._start = _aligned(num_words * _WORD)
        self.words = memoryview(self._mapped)[: num_words * _WORD].cast("q")
        self.key = os.fstat(file).st_ino

    @classmethod
    def make(cls, num_words: int, num_bytes: int) -> SharedMemory:
        """Make a file; raise if the host has not enough memory."""
        size = _aligned(num_words * _WORD) + num_bytes
        try:
            file = os.memfd_create("paceline shared parameters", os.MFD_CLOEXEC)
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            raise UsageError(f"cannot have {size:,} bytes of memory to share: {error.strerror}") from error
        return cls(file, num_words)

    @classmethod
    def open(cls, descriptor: Descriptor, num_words: int) -> SharedMemory:
        """Open the file that another worker has."""
        _, process, number = descriptor
        try:
            return cls(os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC), num_words)
        except OSError as error:
            raise LostContactError(f"the memory that process {process} shares is gone: {error}") from error

    @property
    def descriptor(self) -> Descriptor:
        """By which others open the file while this object lives."""
        return self.key, os.getpid(), self._file

    def tensors(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Views of the memory with the shapes and layouts of these tensors, one behind the other."""
        views, place = [], self._start
        for tensor in like:
            strides = torch.empty_like(tensor, device="meta").stride()  # dense, in the order of the tensor's dimensions
            if tensor.numel():
                flat = torch.frombuffer(self._mapped, dtype=tensor.dtype, count=tensor.numel(), offset=place)
            else:
                flat = tensor.new_empty(0)
            views.append(flat.as_strided(tensor.shape, strides))
            place += _aligned(tensor.nbytes)
        return views

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other workers out of such blocks."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def locked_part(self, number: int) -> Iterator[None]:
        """The same for blocks of the same number."""
        # Of the open file, not of the process: workers may be threads.
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLKW, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        try:
            yield
        finally:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0))


def bytes_for(tensors: Sequence[Tensor]) -> int:
    """The bytes that the views of such tensors take."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def host_of_memory() -> str:
    """The identity of this host: equal in two processes if one can open the memory of the other.

    Empty where processes cannot share memory in this way.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/pid:{Path('/proc/self/ns/pid').stat().st_ino}/user:{os.getuid()}"


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED
