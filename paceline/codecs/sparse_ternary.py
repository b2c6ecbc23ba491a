"""The largest values of each tensor, each sent as plus or minus their mean size; the rest waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs import rice
from paceline.codecs.base import Codec, CodecState, Part, Parts, store_at
from paceline.codecs.packet import Reader, put, refuse
from paceline.codecs.selection import largest


@dataclass(frozen=True, kw_only=True)
class SparseTernary(Codec):
    """Send where each tensor's largest values are, their signs and one mean size (Sattler et al., 2019).

    They are the share ``density`` of its values. What they lack to their true size, and all other values, are added to
    those of the next step. A value that is sent costs the bits of its place and one more.

    >>> state = SparseTernary(density=0.5).new_state(Parts.one(4), seed=0)
    >>> out = torch.zeros(4)
    >>> state.decode(state.encode(torch.tensor([1.0, -5.0, 2.0, 3.0]), step=0), out)
    >>> out, state.memory["residual"]
    (tensor([ 0., -4.,  0.,  4.]), tensor([ 1., -1.,  2., -1.]))
    """

    name: ClassVar[str] = "sparse-ternary"

    density: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.density <= 1:
            raise self.mistake(f"density must be above 0 and at most 1, got {self.density:g}")

    def new_state(self, parts: Parts, *, seed: int) -> SparseTernaryState:
        return SparseTernaryState(self, parts, seed)


class SparseTernaryState(CodecState[SparseTernary]):
    """Remembers what was not sent."""

    def __init__(self, codec: SparseTernary, parts: Parts, seed: int) -> None:
        super().__init__(codec, parts, seed)
        self.memory["residual"] = torch.zeros(parts.count)

    def count_of(self, piece: Part) -> int:
        """How many values of a piece are sent."""
        return min(piece.count, max(1, round(self.codec.density * piece.count)))

    def most_bytes(self, piece: Part) -> int:
        return 4 + rice.most_bytes(self.count_of(piece), piece.count)

    def prepare(self, values: Tensor, *, step: int) -> Tensor:
        return self.memory["residual"].add_(values)

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        chosen = largest(values, self.count_of(self.pieces[number]))
        sent = values[chosen]
        size = sent.double().abs().mean().float() if chosen.numel() else torch.zeros(())
        negative = torch.signbit(sent)
        at = put(into, at, size.reshape(1))
        at = rice.write(into, at, chosen, values.numel(), negative.to(torch.int64))
        values[chosen] -= torch.where(negative, -size, size)
        return at

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        size = packet.take(1, torch.float32)
        if not (size >= 0 and torch.isfinite(size)):
            raise refuse(f"its mean size is {float(size)}")
        chosen, negative = rice.read(packet, self.count_of(self.pieces[number]), out.numel(), bits=True)
        store_at(out, chosen, torch.where(negative > 0, -size, size), add=add)
