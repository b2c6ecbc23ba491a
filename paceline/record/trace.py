"""A run's ``trace.bin``: which worker read which version and batch, and the order of commits and cancels.

The file is a magic number and blocks. A block is its length, a CRC-32 of the length, a CRC-32 of the records, and the
records; both CRCs continue those of the block before. The first block is JSON: everything else that the numbers of the
run depend on. A record is a byte for its kind and a few numbers, tens of bytes in all. A changed or moved byte raises
an error that names its block; missing bytes at the end mean that the writer was killed.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from paceline.errors import PacelineError

MAGIC = b"PLTRACE1"
_LENGTH = struct.Struct("<I")
_BLOCK = struct.Struct("<III")  # length, CRC of the length, CRC of the records
_LARGEST = 1 << 24  # bytes of a block that a reader accepts
_FULL = 1 << 16  # bytes at which a block is written without a flush


class TraceError(PacelineError):
    """A trace is damaged, or the file is not a trace; the message says where."""


class Began(NamedTuple):
    """The server started, or started again, with the parameters of this version and no workers."""

    version: int
    replaced: bool = False  # it replaces a killed server, and the worker processes are the same


class Described(NamedTuple):
    """A worker described its data, with a checksum of some of it; 0 without a checksum."""

    num_samples: int
    batch_size: int
    checksum: int


class Joined(NamedTuple):
    """A worker joined as this incarnation."""

    rank: int
    life: int
    at: float  # seconds since the server began
    epoch: int = 0  # the first unfinished one
    kept: bool = False  # with what its codec remembered in an earlier run


class Left(NamedTuple):
    """A worker left or died."""

    rank: int
    dead: bool
    at: float
    version: int = 0  # of its parameters, if it left by itself


class Asked(NamedTuple):
    """A worker asked for steps with batches of epochs below ``epochs``; it has the parameters of ``version``."""

    rank: int
    epochs: int
    version: int


class Given(NamedTuple):
    """A worker was given a step; ``fresh``: it reads the parameters, of this version or a later one."""

    rank: int
    step: int
    version: int
    fresh: bool
    epoch: int
    batch: int
    more: int = 0  # batches that follow in any case
    weight: float = 1.0  # of the batch, in a sum
    packet: bool = False  # a packet was sent in place of the parameters


class GivenMore(NamedTuple):
    """A worker was given one more batch for its step, or none (-1)."""

    rank: int
    step: int
    epoch: int
    batch: int
    weight: float = 1.0  # of the batch, in a sum


class Pushed(NamedTuple):
    """A push was accepted for the next commit; it was computed from the parameters of ``version``."""

    rank: int
    step: int
    version: int
    examples: int
    loss: float  # NaN if unknown
    checksum: int  # of the gradients' bits
    at: float


class Late(NamedTuple):
    """A push came too late and was dropped."""

    rank: int
    step: int
    version: int


class NotFinite(NamedTuple):
    """A push held a NaN or an infinity and was dropped."""

    rank: int
    step: int
    version: int


class Skipped(NamedTuple):
    """A worker skipped its step; the batch counts as used."""

    rank: int
    step: int
    version: int


class Cancelled(NamedTuple):
    """A worker's step was cancelled."""

    rank: int
    step: int


class Chose(NamedTuple):
    """The next commit takes this push with this weight; a commit without such records averages all by examples."""

    rank: int
    step: int
    weight: float
    group: int = 0  # pushes of one group are of the same batches, if there are groups


class Committed(NamedTuple):
    """This many of the accepted pushes were applied; ``version`` is the new version of the parameters."""

    version: int
    pushes: int
    at: float


class Finished(NamedTuple):
    """A worker was told that no batches are left; it reads the parameters of this version or a later one."""

    rank: int
    version: int


class Averaged(NamedTuple):
    """A worker was sent a mean; successive records of the same key are the workers whose values it averages."""

    rank: int
    key: int  # CRC-32 of its name


class Hashed(NamedTuple):
    """The parameters and buffers of this version had this hash."""

    version: int
    digest: bytes


class Met(NamedTuple):
    """Under ``hogwild`` a worker that read or updated a block found it changed by others, to this version.

    No record means that it was as the worker itself had read or written it last.
    """

    block: int
    version: int
    writing: bool


class Stepped(NamedTuple):
    """Under ``hogwild`` a worker has made an update; what it met is in the records before."""


class Ended(NamedTuple):
    """The run ended; ``whole``: after its last batch, not because it was asked to stop."""

    whole: bool


Record: TypeAlias = (
    Began | Described | Joined | Left | Asked | Given | GivenMore | Pushed | Late | NotFinite | Skipped | Cancelled
    | Chose | Committed | Finished | Averaged | Hashed | Met | Stepped | Ended
)  # fmt: skip

_FORMATS: dict[int, tuple[type[Record], struct.Struct]] = {
    1: (Began, struct.Struct("<Q?")),
    2: (Joined, struct.Struct("<IIdQ?")),
    3: (Left, struct.Struct("<I?dQ")),
    4: (Asked, struct.Struct("<IqQ")),
    5: (Given, struct.Struct("<IQQ?qqId?")),
    6: (GivenMore, struct.Struct("<IQqqd")),
    7: (Pushed, struct.Struct("<IQQQdQd")),
    8: (Late, struct.Struct("<IQQ")),
    9: (NotFinite, struct.Struct("<IQQ")),
    10: (Skipped, struct.Struct("<IQQ")),
    11: (Cancelled, struct.Struct("<IQ")),
    12: (Committed, struct.Struct("<QId")),
    13: (Finished, struct.Struct("<IQ")),
    14: (Averaged, struct.Struct("<II")),
    15: (Hashed, struct.Struct("<Q16s")),
    16: (Ended, struct.Struct("<?")),
    17: (Described, struct.Struct("<QQQ")),
    18: (Chose, struct.Struct("<IQdI")),
    19: (Met, struct.Struct("<HI?")),
    20: (Stepped, struct.Struct("<")),
}
_PACKERS = {kind: (bytes([number]), form.pack) for number, (kind, form) in _FORMATS.items()}


class TracePosition(NamedTuple):
    """The end of the written trace, from which a writer can continue."""

    length: int  # bytes
    check: int  # the CRC so far


class TraceWriter:
    """Append records to a trace; flushed records survive this process, synced ones also its host."""

    def __init__(self, path: Path, about: Mapping[str, Any], *, after: TracePosition | None = None) -> None:
        """Begin a trace described by ``about``, or continue one ``after`` a position and cut off the rest."""
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._pending = bytearray()
        if after is not None and os.fstat(self._file).st_size >= after.length:
            self.position = after
            os.ftruncate(self._file, after.length)
            os.lseek(self._file, after.length, os.SEEK_SET)
            return
        os.ftruncate(self._file, 0)
        self.position = TracePosition(len(MAGIC), 0)
        self._write(MAGIC)
        self._pending += json.dumps(about).encode()
        self.flush()

    def append(self, record: Record) -> None:
        """Add a record; the next flush writes it."""
        kind, pack = _PACKERS[type(record)]
        self._pending += kind
        self._pending += pack(*record)
        if len(self._pending) > _FULL:
            self.flush()

    def flush(self) -> TracePosition:
        """Write the pending records as a block, and return the new end of the file."""
        if self._pending:
            check = zlib.crc32(self._pending, self.position.check)
            length = len(self._pending)
            self._write(_BLOCK.pack(length, _check_of(length, self.position.check), check) + self._pending)
            self.position = TracePosition(self.position.length + _BLOCK.size + len(self._pending), check)
            self._pending.clear()
        return self.position

    def sync(self) -> TracePosition:
        """Flush and fsync."""
        position = self.flush()
        os.fsync(self._file)
        return position

    def close(self) -> None:
        self.flush()
        os.close(self._file)

    def _write(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise PacelineError(f"could not write {self._path}: {error.strerror}") from error


class Trace:
    """Read a trace: ``about`` is its first block, iteration gives its records.

    An unfinished block of a killed writer at the end is left out; any other damage raises a ``TraceError``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._bytes = path.read_bytes()
        except OSError as error:
            raise TraceError(
                f"cannot read the trace {path}: {error.strerror}; was the run made with a server?"
            ) from None
        if self._bytes[: len(MAGIC)] != MAGIC:
            raise TraceError(f"{path} is not a trace: it begins with {self._bytes[: len(MAGIC)]!r}, wanted {MAGIC!r}")
        self._blocks = list(self._split())
        if not self._blocks:
            raise TraceError(f"{path} is damaged: it ends inside its first block")
        self.about: dict[str, Any] = json.loads(bytes(self._blocks.pop(0)))

    def __iter__(self) -> Iterator[Record]:
        for block in self._blocks:
            yield from _records(block)

    def _split(self) -> Iterator[memoryview]:
        """The blocks, each checked first."""
        start, check, number = len(MAGIC), 0, 0
        version: int | None = None
        whole = memoryview(self._bytes)
        while start + _BLOCK.size <= len(whole):
            length, check_of_length, wanted = _BLOCK.unpack_from(whole, start)
            good = length <= _LARGEST and _check_of(length, check) == check_of_length
            block = whole[start + _BLOCK.size :][:length]
            if good and len(block) < length:
                return  # the writer was killed while it wrote
            check = zlib.crc32(block, check)
            try:
                if not good or check != wanted:
                    raise TraceError("does not match its checksum")
                if number:
                    version = max((r.version for r in _records(block) if isinstance(r, Committed)), default=version)
            except TraceError as error:
                known = "the beginning" if version is None else f"the commit of version {version}"
                raise TraceError(
                    f"{self._path} is damaged: block {number}, which begins at byte {start}, {error}; what comes "
                    f"before it, up to {known}, is good"
                ) from None
            yield block
            start, number = start + _BLOCK.size + length, number + 1


def _check_of(length: int, check: int) -> int:
    return zlib.crc32(_LENGTH.pack(length), check)


def _records(block: memoryview) -> Iterator[Record]:
    start = 0
    while start < len(block):
        try:
            kind, form = _FORMATS[block[start]]
            yield kind(*form.unpack_from(block, start + 1))
        except (KeyError, struct.error):
            raise TraceError(f"holds a record of the unknown kind {block[start]}") from None
        start += 1 + form.size
