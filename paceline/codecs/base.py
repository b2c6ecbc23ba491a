"""The base of every codec: a frozen value with a text form, and the state that encodes and decodes with it."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.packet import HEADER, Reader, put, seal, unseal
from paceline.errors import NonFiniteInputError, UsageError
from paceline.spec import check_types, to_spec

LIMIT = 2.0**96  # of values

C = TypeVar("C", bound="Codec")


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> Any: ...


class PendingPackets(Protocol):
    """A gathering, which may only begin in ``wait``; its packets are in the order of the ranks."""

    def wait(self) -> Sequence[Tensor]: ...


class Collective(Protocol):
    """What a reduction needs of the other workers."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start summing a tensor over all ranks, in place."""

    def gather_packets(self, packet: Tensor) -> PendingPackets:
        """Give every rank the packets of all, whose sizes may differ."""


class Reduction:
    """A reduction under way: the rest of it happens in the first ``wait``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


@dataclass(frozen=True)
class Part:
    """One tensor inside a flat one."""

    offset: int
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> slice:
        return slice(self.offset, self.offset + self.count)


@dataclass(frozen=True)
class Parts:
    """What a flat tensor consists of. Values that are in no part must be 0, and stay 0.

    >>> Parts.of([torch.zeros(2, 3), torch.zeros(4)])
    Parts(count=10, tensors=(Part(offset=0, shape=(2, 3)), Part(offset=6, shape=(4,))), dtype=torch.float32)
    """

    count: int
    tensors: tuple[Part, ...]
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Parts:
        """The parts of these tensors, one after the other."""
        parts, offset = [], 0
        for tensor in tensors:
            parts.append(Part(offset, tuple(tensor.shape)))
            offset += tensor.numel()
        return Parts(offset, tuple(parts), tensors[0].dtype if tensors else torch.float32)

    @staticmethod
    def one(count: int) -> Parts:
        """The parts of a flat tensor that is one vector of float32."""
        return Parts(count, (Part(0, (count,)),))


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """How values become fewer bytes; a subclass is a frozen dataclass and one line in ``CODECS``."""

    name: ClassVar[str]  # as users type it, with hyphens
    whole: ClassVar[bool] = False  # whether the flat tensor is coded as one piece, else each tensor in it

    both: bool = False  # whether a server's parameters are coded on the way down too

    def __post_init__(self) -> None:
        check_types("codec", self.name, self)

    def __str__(self) -> str:
        """The text form, which ``parse_codec`` reads back to an equal codec."""
        return to_spec(self.name, self)

    def codes(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is coded; others are sent as they are."""
        return True

    @abstractmethod
    def new_state(self, parts: Parts, *, seed: int) -> CodecState[Any]:
        """Start at one end of a road. Every worker, and every flat tensor of it, needs a seed of its own."""

    def mistake(self, what: str) -> UsageError:
        """Build the error for an option that cannot be."""
        return UsageError(f"codec {self.name!r}: {what}")


class CodecState(ABC, Generic[C]):
    """Encodes and decodes one flat tensor again and again, and remembers what its codec needs from step to step.

    A subclass codes one piece: a tensor, or the whole flat tensor. Its tensors in ``memory`` are saved and restored.
    """

    def __init__(self, codec: C, parts: Parts, seed: int) -> None:
        self.codec, self.parts, self.seed = codec, parts, seed
        self.memory: dict[str, Tensor] = {}
        self._tag = zlib.crc32(str(codec).encode())
        everything = (Part(0, (parts.count,)),)
        tensors = everything if codec.whole else parts.tensors
        self.pieces = [part for part in tensors if codec.codes(part.shape)]
        self.raw = [part for part in tensors if not codec.codes(part.shape)]

    # For subclasses ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def most_bytes(self, piece: Part) -> int:
        """The most bytes that ``encode_piece`` writes."""

    @abstractmethod
    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        """Write the code of a piece at a place of a packet; return where it ends, a multiple of 4."""

    @abstractmethod
    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        """Read the code of a piece; ``out`` is float32."""

    def prepare(self, values: Tensor, *, step: int) -> Tensor:
        """Change all values together before their pieces are encoded; ``values`` itself must stay as it is."""
        return values

    def combine(self, packets: Sequence[Tensor], flat: Tensor) -> None:
        """Make the result of a reduction from the packets of all ranks."""
        for number, packet in enumerate(packets):
            self.decode(packet, flat, add=number > 0)

    @property
    def has_unit(self) -> bool:
        """Whether the codec has numbers in the unit of the values: what it remembers, or an option."""
        return bool(self.memory)

    # For users --------------------------------------------------------------------------------------------------------

    def encode(self, flat: Tensor, *, step: int) -> Tensor:
        """Make the packet of a flat tensor: bytes on the CPU. ``flat`` is not changed."""
        values = self._checked(flat)
        prepared = self.prepare(values, step=step)
        most = sum(self.most_bytes(piece) for piece in self.pieces) + 4 * sum(part.count for part in self.raw)
        packet = torch.empty(HEADER.size + most, dtype=torch.uint8)
        at = HEADER.size
        for number, piece in enumerate(self.pieces):
            at = self.encode_piece(number, prepared[piece.place], packet, at, step=step)
        for part in self.raw:
            at = put(packet, at, values[part.place])
        return seal(packet, at, self._tag, self.parts.count)

    def decode(self, packet: Tensor, out: Tensor, *, add: bool = False) -> None:
        """Write what a packet says to ``out``, or add it; the same bits on every machine."""
        self._check_shape(out)
        reader = Reader(unseal(packet, self._tag, self.parts.count, self.codec))
        plain = is_plain(out)
        target = out if plain else torch.zeros(out.shape)
        for number, piece in enumerate(self.pieces):
            self.decode_piece(number, reader, target[piece.place], add=add and plain)
        for part in self.raw:
            store(target[part.place], reader.take(part.count, torch.float32), add=add and plain)
        reader.end()
        if not plain:
            store(out, target.to(out.device), add=add)

    def reduce(self, flat: Tensor, group: Collective, *, step: int) -> Pending:
        """Start summing a flat tensor over all ranks, in place: gather all packets, and add them in the order of ranks.

        If a rank's values are not finite, the sums are NaN on every rank.
        """
        try:
            packet = self.encode(flat, step=step)
        except NonFiniteInputError:
            packet = torch.empty(0, dtype=torch.uint8)
        packets = group.gather_packets(packet)

        def finish() -> None:
            arrived = packets.wait()
            if all(packet.numel() for packet in arrived):
                self.combine(arrived, flat)
            else:
                self.spoil(flat)

        return Reduction(finish)

    def spoil(self, flat: Tensor) -> None:
        """Make all values NaN, but for those in no part."""
        for part in self.parts.tensors:
            flat[part.place] = math.nan

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all that is remembered."""
        return {name: tensor.clone() for name, tensor in self.memory.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to what ``state_dict`` gave."""
        wanted = {name: tuple(tensor.shape) for name, tensor in self.memory.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if found != wanted:
            raise UsageError(f"the state of codec {self.codec} wants {wanted}, got {found}; is it of another model?")
        for name, tensor in state.items():
            self.memory[name].copy_(tensor)

    def _check_shape(self, flat: Tensor) -> None:
        if flat.shape != (self.parts.count,):
            raise UsageError(f"codec {self.codec} wants a vector of {self.parts.count} values, got {tuple(flat.shape)}")

    def _checked(self, flat: Tensor) -> Tensor:
        self._check_shape(flat)
        values = flat.detach().to("cpu", torch.float32).contiguous()
        if not can_be_coded(values):
            raise NonFiniteInputError(
                f"codec {self.codec} wants finite values below 2^96, got NaN, infinite or larger ones; skip this step"
            )
        return values


def is_plain(values: Tensor) -> bool:
    """Whether kernels can work on the values where they are."""
    return values.dtype == torch.float32 and values.device.type == "cpu" and values.is_contiguous()


def can_be_coded(values: Tensor, limit: float = LIMIT) -> bool:
    """Whether all values are finite and below a limit, which is so small that no sum of many is infinite."""
    if kernels.native is not None and values.is_contiguous():
        bits = kernels.native.largest_bits(values.data_ptr(), values.numel())
        return bool(bits < int(torch.tensor(limit).view(torch.int32)))
    return values.numel() == 0 or bool(values.abs().amax() < limit)


def check_bucket(codec: Codec, bucket: int) -> None:
    """Raise unless so many values can share a number: a bucket's codes must fill whole bytes."""
    if not (8 <= bucket <= 1 << 20 and bucket % 8 == 0):
        raise codec.mistake(f"bucket must be a multiple of 8 from 8 to {1 << 20}, got {bucket}")


def store(out: Tensor, values: Tensor, *, add: bool) -> None:
    """Write values to ``out``, or add them."""
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def store_at(out: Tensor, indices: Tensor, values: Tensor, *, add: bool) -> None:
    """Write values to these indices of ``out`` and 0 to the others, or add them; an index comes once."""
    if not add:
        out.zero_()
    if kernels.native is not None:
        kernels.native.add_at(indices.data_ptr(), values.data_ptr(), indices.numel(), out.data_ptr())
    else:
        out[indices] += values
