"""One bit for each value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs import kernels
from paceline.codecs.base import Codec, CodecState, Part, Parts, check_bucket, store
from paceline.codecs.bits import pack_bits, packed_bytes, unpack_bits
from paceline.codecs.buckets import halving_sum, in_buckets, num_buckets
from paceline.codecs.packet import Reader, fill, put, words


@dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """Send the sign of each value, and for each bucket the mean of the absolute values, which all of them become.

    With ``feedback`` the error is added to the values of the next step (Karimireddy et al., 2019; buckets as Zheng et
    al., 2019). With ``vote=majority`` a reduction gives each value the sign that most ranks sent, times the sum of the
    ranks' means (Bernstein et al., 2018); a tie gives 0.

    >>> state = Sign(bucket=8).new_state(Parts.one(4), seed=0)
    >>> out = torch.zeros(4)
    >>> state.decode(state.encode(torch.tensor([1.0, -2.0, 3.0, -2.0]), step=0), out)
    >>> out, state.memory["residual"]
    (tensor([ 2., -2.,  2., -2.]), tensor([-1.,  0.,  1.,  0.]))
    """

    name: ClassVar[str] = "sign"

    feedback: bool = True
    vote: Literal["none", "majority"] = "none"
    bucket: int = 4096  # values that share a mean

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bucket(self, self.bucket)

    def new_state(self, parts: Parts, *, seed: int) -> SignState:
        return SignState(self, parts, seed)


class SignState(CodecState[Sign]):
    """Writes all means, then all signs; remembers the error."""

    def __init__(self, codec: Sign, parts: Parts, seed: int) -> None:
        super().__init__(codec, parts, seed)
        if codec.feedback:
            self.memory["residual"] = torch.zeros(parts.count)

    def most_bytes(self, piece: Part) -> int:
        return 4 * num_buckets(piece.count, self.codec.bucket) + words(packed_bytes(piece.count, 1))

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        residual = self.memory["residual"][self.pieces[number].place] if self.codec.feedback else None
        if kernels.native is not None:
            return self.encode_natively(values, residual, into, at)
        if residual is not None:
            values = values + residual
        means = self.means(values)
        negative = torch.signbit(values)
        if residual is not None:
            torch.sub(values, self.spread(means, negative), out=residual)
        return put(into, put(into, at, means), pack_bits(negative))

    def encode_natively(self, values: Tensor, residual: Tensor | None, into: Tensor, at: int) -> int:
        count, bucket, start = values.numel(), self.codec.bucket, into.data_ptr()
        end = at + 4 * num_buckets(count, bucket)
        remembered = residual.data_ptr() if residual is not None else 0
        kernels.native.to_signs(values.data_ptr(), remembered, count, bucket, start + at, start + end)
        return fill(into, end + packed_bytes(count, 1))

    def means(self, values: Tensor) -> Tensor:
        """The mean of each bucket's absolute values; in the last one, of as many as there are."""
        sums = halving_sum(in_buckets(values.abs(), self.codec.bucket))
        counts = torch.full_like(sums, self.codec.bucket)
        if values.numel() % self.codec.bucket:
            counts[-1] = values.numel() % self.codec.bucket
        return sums / counts

    def spread(self, means: Tensor, negative: Tensor) -> Tensor:
        """Each bucket's mean for all of its values, with their signs."""
        each = means.repeat_interleave(self.codec.bucket)[: negative.numel()]
        return torch.where(negative, -each, each)

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        count, bucket = out.numel(), self.codec.bucket
        means = packet.take(num_buckets(count, bucket), torch.float32)
        signs = packet.take(packed_bytes(count, 1), torch.uint8)
        if kernels.native is not None:
            kernels.native.from_signs(means.data_ptr(), signs.data_ptr(), count, bucket, out.data_ptr(), add)
            return
        store(out, self.spread(means, unpack_bits(signs)[:count].bool()), add=add)

    def combine(self, packets: Sequence[Tensor], flat: Tensor) -> None:
        if self.codec.vote == "none":
            super().combine(packets, flat)
            return
        sent, votes, size = (torch.zeros(self.parts.count) for _ in range(3))
        for packet in packets:
            self.decode(packet, sent)
            votes += sent.sign()
            size += sent.abs()
        flat.copy_(votes.sign() * size)
