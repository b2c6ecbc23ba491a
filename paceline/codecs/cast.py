"""Values in a smaller floating-point format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.base import Codec, CodecState, Collective, Part, Parts, Pending, Reduction, can_be_coded, store
from paceline.codecs.buckets import in_buckets, num_buckets
from paceline.codecs.packet import Reader, fill, put, words
from paceline.errors import NonFiniteInputError

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BUCKET = 512  # values of fp8 that share a scale
LARGEST_FP8 = 448.0
TOO_LARGE_FOR_FP16 = 65_520.0  # from here on values become infinite


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """Send values in 16 bits, or in 8 with a scale for every 512 of them (E4M3; Micikevicius et al., 2022).

    >>> state = Cast(to="bf16").new_state(Parts.one(1000), seed=0)
    >>> state.encode(torch.ones(1000), step=0).numel()
    2032
    """

    name: ClassVar[str] = "cast"
    whole: ClassVar[bool] = True

    to: Literal["bf16", "fp16", "fp8"] = "bf16"

    def new_state(self, parts: Parts, *, seed: int) -> CastState:
        kind = CastToFp8 if self.to == "fp8" else CastToHalf
        return kind(self, parts, seed)


class CastState(CodecState[Cast]):
    """Remembers nothing."""


class CastToHalf(CastState):
    """Sixteen bits: sums of them are made by the collectives as they are."""

    def most_bytes(self, piece: Part) -> int:
        return words(2 * piece.count)

    def narrow(self, values: Tensor) -> Tensor:
        return values.to(HALVES[self.codec.to])

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        if self.codec.to == "fp16" and not can_be_coded(values, TOO_LARGE_FOR_FP16):
            raise NonFiniteInputError(f"codec {self.codec}: a value is too large for fp16; use cast(to=bf16)")
        size = 2 * values.numel()
        into[at : at + size].view(HALVES[self.codec.to]).copy_(values)
        return fill(into, at + size)

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        store(out, packet.take(out.numel(), HALVES[self.codec.to]), add=add)

    def reduce(self, flat: Tensor, group: Collective, *, step: int) -> Pending:
        """Sum in 16 bits, as the collectives do; what is not finite stays so."""
        self._check_shape(flat)
        narrow = self.narrow(flat.detach())
        pending = group.all_reduce(narrow)

        def finish() -> None:
            pending.wait()
            flat.copy_(narrow)

        return Reduction(finish)


class CastToFp8(CastState):
    """Eight bits, each bucket divided by a scale that makes its largest value 448, the largest one there is."""

    def most_bytes(self, piece: Part) -> int:
        return 4 * num_buckets(piece.count, BUCKET) + words(piece.count)

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        count, start = values.numel(), into.data_ptr()
        if kernels.native is not None:
            end = at + 4 * num_buckets(count, BUCKET)
            kernels.native.to_fp8(values.data_ptr(), count, BUCKET, start + at, start + end)
            return fill(into, end + count)
        buckets = in_buckets(values, BUCKET)
        scales = buckets.abs().amax(1) / LARGEST_FP8
        divisors = torch.where(scales > 0, scales, 1.0).unsqueeze(1)
        # The division may round up to more than the largest value, which has no infinity above it, but NaN.
        codes = (buckets / divisors).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return put(into, put(into, at, scales), codes.flatten()[:count].view(torch.uint8))

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        count = out.numel()
        scales = packet.take(num_buckets(count, BUCKET), torch.float32)
        codes = packet.take(count, torch.uint8)
        if kernels.native is not None:
            kernels.native.from_fp8(scales.data_ptr(), codes.data_ptr(), count, BUCKET, out.data_ptr(), add)
            return
        wide = in_buckets(codes.view(torch.float8_e4m3fn).to(torch.float32), BUCKET)
        store(out, (wide * scales.unsqueeze(1)).flatten()[:count], add=add)
