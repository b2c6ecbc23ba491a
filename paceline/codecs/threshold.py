"""Values that have grown beyond a threshold, each sent as plus or minus the threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from paceline.codecs import kernels, rice
from paceline.codecs.base import Codec, CodecState, Part, Parts, store_at
from paceline.codecs.bits import pack, packed_bytes, unpack
from paceline.codecs.packet import Reader, put, refuse, words

WORDS, RICE, BITMAP = range(3)
QUICK, SLOW = 1.25, 1.02  # factors of an adaptive threshold: while its share is far from the wanted one, and near it


@dataclass(frozen=True, kw_only=True)
class Threshold(Codec):
    """Add each step's values to the residual; where that is beyond ``tau``, send plus or minus tau (Strom, 2015).

    A word is an index of 31 bits and a sign; or gaps between indices are sent in Golomb-Rice code. If two bits for
    every value are fewer bytes, they are sent. With ``adaptive``, a share of the values such as 0.001, tau rises while
    more of them are sent, and falls while fewer are.

    >>> state = Threshold(tau=2.0).new_state(Parts.one(4), seed=0)
    >>> out = torch.zeros(4)
    >>> state.decode(state.encode(torch.tensor([1.0, -5.0, 2.5, 0.0]), step=0), out)
    >>> out, state.memory["residual"]
    (tensor([ 0., -2.,  2.,  0.]), tensor([ 1.0000, -3.0000,  0.5000,  0.0000]))
    """

    name: ClassVar[str] = "threshold"
    whole: ClassVar[bool] = True

    tau: float
    form: Literal["words", "rice"] = "rice"
    adaptive: float = 0.0  # the share of values to send; 0 leaves tau as it is

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1e-30 <= self.tau <= 1e30:
            raise self.mistake(f"tau must be from 1e-30 to 1e30, got {self.tau:g}")
        if not 0 <= self.adaptive < 1:
            raise self.mistake(f"adaptive must be a share of the values, at least 0 and below 1, got {self.adaptive:g}")

    def new_state(self, parts: Parts, *, seed: int) -> ThresholdState:
        return ThresholdState(self, parts, seed)


class ThresholdState(CodecState[Threshold]):
    """Remembers what was not sent, and tau."""

    def __init__(self, codec: Threshold, parts: Parts, seed: int) -> None:
        super().__init__(codec, parts, seed)
        if parts.count >= 1 << 31:
            raise codec.mistake(f"an index has 31 bits, but there are {parts.count} values; use smaller buckets")
        self.memory["residual"] = torch.zeros(parts.count)
        self.memory["tau"] = torch.tensor([codec.tau], dtype=torch.float32)

    def most_bytes(self, piece: Part) -> int:
        return 12 + words(packed_bytes(piece.count, 2))

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        tau, residual = self.memory["tau"], self.memory["residual"]
        indices, negative = take_beyond(values, residual, tau)
        at = self.write(into, at, indices, negative)
        self.adapt(indices.numel())
        return at

    def form_of(self, count: int) -> int:
        """The form in which so many indices are sent."""
        form, most = RICE, rice.most_bytes(count, self.parts.count)
        if self.codec.form == "words":
            form, most = WORDS, 4 * count
        return form if most <= words(packed_bytes(self.parts.count, 2)) else BITMAP

    def write(self, into: Tensor, at: int, indices: Tensor, negative: Tensor) -> int:
        form = self.form_of(indices.numel())
        at = put(into, at, self.memory["tau"])
        at = put(into, at, torch.tensor([form, indices.numel()], dtype=torch.int32))
        if form == WORDS:
            return put(into, at, (indices << 1 | negative).to(torch.uint32))
        if form == RICE:
            return rice.write(into, at, indices, self.parts.count, negative)
        marks = torch.zeros(self.parts.count, dtype=torch.uint8)
        marks[indices] = (1 + negative).to(torch.uint8)
        return put(into, at, pack(marks, 2))

    def adapt(self, sent: int) -> None:
        """Move tau towards the share of values that is wanted."""
        wanted = self.codec.adaptive * self.parts.count
        if not wanted:
            return
        factor = SLOW if wanted / 2 <= sent <= wanted * 2 else QUICK
        self.memory["tau"].mul_(factor if sent > wanted else 1 / factor).clamp_(1e-30, 1e30)

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        tau = packet.take(1, torch.float32)
        form, count = packet.number(), packet.number()
        if not (tau > 0 and torch.isfinite(tau)):
            raise refuse(f"its threshold is {float(tau)}")
        indices, negative = self.read(packet, form, count)
        store_at(out, indices, torch.where(negative > 0, -tau, tau), add=add)

    def read(self, packet: Reader, form: int, count: int) -> tuple[Tensor, Tensor]:
        total = self.parts.count
        if form == RICE:
            return rice.read(packet, count, total, bits=True)
        if form == WORDS:
            found = packet.take(count, torch.int32).to(torch.int64) & 0xFFFFFFFF
            if count and not (bool((found >> 1).diff().gt(0).all()) and int(found[-1] >> 1) < total):
                raise refuse(f"its indices do not rise, or are not below {total}")
            return found >> 1, found & 1
        if form != BITMAP:
            raise refuse(f"it has the form {form}")
        marks = unpack(packet.take(packed_bytes(total, 2), torch.uint8), total, 2)
        indices = torch.nonzero(marks).flatten()
        if indices.numel() != count or (marks == 3).any():
            raise refuse(f"its bitmap has {indices.numel()} marks for {count} values")
        return indices, marks[indices] - 1


def take_beyond(values: Tensor, residual: Tensor, tau: Tensor) -> tuple[Tensor, Tensor]:
    """Add values to the residual, and take tau or -tau from what is beyond it: the indices, and which are negative."""
    if kernels.native is not None:
        found = torch.empty(values.numel(), dtype=torch.int32)
        addresses = (values.data_ptr(), residual.data_ptr(), values.numel())
        count = kernels.native.take_beyond(*addresses, float(tau), found.data_ptr())
        marked = found[:count].to(torch.int64) & 0xFFFFFFFF
        return marked >> 1, marked & 1
    residual += values
    indices = torch.nonzero(residual.abs() > tau).flatten()
    negative = torch.signbit(residual[indices]).to(torch.int64)
    residual[indices] -= torch.where(negative > 0, -tau, tau)
    return indices, negative
