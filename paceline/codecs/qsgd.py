"""Stochastic rounding to a few levels of each bucket's norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs import elias, kernels
from paceline.codecs.base import Codec, CodecState, Part, Parts, check_bucket, store
from paceline.codecs.bits import pack, packed_bytes, unpack
from paceline.codecs.buckets import exact_sqrt, halving_sum, in_buckets, num_buckets
from paceline.codecs.packet import Reader, fill, put, refuse, words
from paceline.codecs.rounding import Key, key_of, uniform


@dataclass(frozen=True, kw_only=True)
class QSGD(Codec):
    """Round each value at random to one of ``levels`` multiples of its bucket's norm, so that its mean is the value.

    With 7 levels and a sign a value takes 4 bits. The norm is the largest value (``max``), as its authors use, or the
    2-norm of their theorems (Alistarh et al., 2017). ``form=elias`` is shorter where most levels are 0: with few levels
    of the 2-norm. It remembers nothing.

    >>> state = QSGD(levels=7).new_state(Parts.one(51_200), seed=0)
    >>> state.encode(torch.randn(51_200), step=0).numel()
    26032
    """

    name: ClassVar[str] = "qsgd"

    levels: int = 7
    bucket: int = 512  # values that share a norm
    norm: Literal["max", 2] = "max"
    form: Literal["packed", "elias"] = "packed"
    raw_below: int = 10_000  # values: smaller tensors are sent as they are

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.levels <= 127:
            raise self.mistake(f"levels must be from 1 to 127, got {self.levels}")
        check_bucket(self, self.bucket)
        if self.raw_below < 0:
            raise self.mistake(f"raw_below must be at least 0, got {self.raw_below}")

    @property
    def width(self) -> int:
        """The bits of a level and its sign."""
        return 1 + self.levels.bit_length()

    def codes(self, shape: tuple[int, ...]) -> bool:
        return Part(0, shape).count >= self.raw_below

    def new_state(self, parts: Parts, *, seed: int) -> QSGDState:
        return QSGDState(self, parts, seed)


class QSGDState(CodecState[QSGD]):
    """Writes all norms, then a sign and level of each value."""

    def most_bytes(self, piece: Part) -> int:
        norms = 4 * num_buckets(piece.count, self.codec.bucket)
        if self.codec.form == "elias":
            return norms + elias.most_bytes(piece.count)
        return norms + words(packed_bytes(piece.count, self.codec.width))

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        key = key_of(self.seed, number, step)
        if kernels.native is not None:
            return self.encode_natively(values, into, at, key)
        buckets = in_buckets(values, self.codec.bucket)
        norms = norms_of(buckets, self.codec.norm)
        divisors = torch.where(norms > 0, norms, 1.0).unsqueeze(1)
        exact = (buckets.abs() / divisors * self.codec.levels).flatten()[: values.numel()]
        level = exact.floor()
        level += uniform(key, values.numel()) < exact - level
        level.clamp_(max=self.codec.levels)
        at = put(into, at, norms)
        if self.codec.form == "elias":
            return elias.write(into, at, level, torch.signbit(values), self.codec.levels)
        codes = level.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << (self.codec.width - 1))
        return put(into, at, pack(codes, self.codec.width))

    def encode_natively(self, values: Tensor, into: Tensor, at: int, key: Key) -> int:
        codec, count = self.codec, values.numel()
        packed, start = codec.form == "packed", into.data_ptr()
        end = at + 4 * num_buckets(count, codec.bucket)
        codes = torch.empty(0 if packed else count, dtype=torch.uint8)
        target = start + end if packed else codes.data_ptr()
        how = (codec.bucket, codec.levels, codec.norm == 2, *key)
        kernels.native.to_levels(values.data_ptr(), count, *how, start + at, target, packed)
        if packed:
            return fill(into, end + packed_bytes(count, codec.width))
        sizes = kernels.native.to_elias(codes.data_ptr(), count, codec.levels, start + end + 8)
        return fill(into, put(into, end, torch.tensor(sizes, dtype=torch.int32)) + sizes[1])

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        norms = packet.take(num_buckets(out.numel(), self.codec.bucket), torch.float32)
        if kernels.native is not None:
            self.decode_natively(norms, packet, out, add=add)
            return
        levels, negative = self.read_levels(packet, out.numel())
        shares = torch.where(negative, -1.0, 1.0) * levels / self.codec.levels
        values = in_buckets(shares, self.codec.bucket) * norms.unsqueeze(1)
        store(out, values.flatten()[: out.numel()], add=add)

    def decode_natively(self, norms: Tensor, packet: Reader, out: Tensor, *, add: bool) -> None:
        codec, count = self.codec, out.numel()
        packed = codec.form == "packed"
        if packed:
            codes = packet.take(packed_bytes(count, codec.width), torch.uint8)
        else:
            coded, length = packet.number(), packet.number()
            data, codes = packet.take(length, torch.uint8), torch.empty(count, dtype=torch.uint8)
            if not kernels.native.from_elias(data.data_ptr(), length, coded, count, codec.levels, codes.data_ptr()):
                raise refuse(elias.NOT_LEVELS)
        kernels.native.from_levels(
            norms.data_ptr(), codes.data_ptr(), count, codec.bucket, codec.levels, packed, out.data_ptr(), add
        )

    def read_levels(self, packet: Reader, count: int) -> tuple[Tensor, Tensor]:
        """Levels, and which of them are negative."""
        if self.codec.form == "elias":
            return elias.read(packet, count, self.codec.levels)
        codes = unpack(packet.take(packed_bytes(count, self.codec.width), torch.uint8), count, self.codec.width)
        sign = 1 << (self.codec.width - 1)
        return codes & (sign - 1), codes & sign > 0


def norms_of(buckets: Tensor, norm: Literal["max", 2]) -> Tensor:
    """The norm of each row; the 2-norm is taken of the row over its largest value, so that no square overflows."""
    largest = buckets.abs().amax(1)
    if norm == "max":
        return largest
    divisors = torch.where(largest > 0, largest, 1.0).unsqueeze(1)
    return exact_sqrt(halving_sum((buckets / divisors).square())) * largest
