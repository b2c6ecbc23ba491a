"""The largest values of each tensor; the others wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paceline.codecs import rice
from paceline.codecs.base import Codec, CodecState, Part, Parts, store_at
from paceline.codecs.packet import Reader, put
from paceline.codecs.selection import about_largest, largest


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Send the share ``density`` of each tensor's values, the largest; add the others to those of the next step.

    With ``momentum`` it is Deep Gradient Compression (Lin et al., 2018): momentum is applied here, before values are
    chosen, so the optimizer must have none; and where a value is sent, its momentum starts again. ``clip`` is the
    largest 2-norm that the values of one step may have. In the first ``warm_up`` steps the density falls from 1/4 in
    four stages. Without ``feedback`` the others are lost, and there is no momentum here.

    >>> state = TopK(density=0.25).new_state(Parts.one(4), seed=0)
    >>> out = torch.zeros(4)
    >>> state.decode(state.encode(torch.tensor([1.0, -5.0, 2.0, 3.0]), step=0), out)
    >>> out, state.memory["residual"]
    (tensor([ 0., -5.,  0.,  0.]), tensor([1., 0., 2., 3.]))
    """

    name: ClassVar[str] = "top-k"

    density: float = 0.001
    feedback: bool = True
    momentum: float = 0.0
    clip: float = 0.0  # 0 does not clip
    warm_up: int = 0  # steps
    sampled: float = 0.0  # the share of values from which a threshold is guessed; 0 finds the largest exactly

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.density <= 1:
            raise self.mistake(f"density must be above 0 and at most 1, got {self.density:g}")
        if not 0 <= self.momentum < 1:
            raise self.mistake(f"momentum must be at least 0 and below 1, got {self.momentum:g}")
        if self.momentum and not self.feedback:
            raise self.mistake("momentum is that of values that wait; without feedback give it to the optimizer")
        if not 0 <= self.clip < float("inf"):
            raise self.mistake(f"clip must be at least 0 and finite, got {self.clip:g}")
        if not 0 <= self.sampled <= 1:
            raise self.mistake(f"sampled must be a share of the values, from 0 to 1, got {self.sampled:g}")
        if self.warm_up < 0:
            raise self.mistake(f"warm_up must be at least 0 steps, got {self.warm_up}")

    def density_at(self, step: int) -> float:
        """The density of a step: a quarter, a 16th, a 64th, a 256th, and from the end of the warm-up ``density``."""
        if step >= self.warm_up:
            return self.density
        return max(self.density, 0.25 ** (1 + 4 * step // self.warm_up))

    def new_state(self, parts: Parts, *, seed: int) -> TopKState:
        return TopKState(self, parts, seed)


class TopKState(CodecState[TopK]):
    """Remembers what was not sent, and the momentum of it."""

    def __init__(self, codec: TopK, parts: Parts, seed: int) -> None:
        super().__init__(codec, parts, seed)
        if codec.feedback:
            self.memory["residual"] = torch.zeros(parts.count)
        if codec.momentum:
            self.memory["momentum"] = torch.zeros(parts.count)

    @property
    def has_unit(self) -> bool:
        return super().has_unit or self.codec.clip > 0

    def most_bytes(self, piece: Part) -> int:
        count = piece.count  # all, since the density may be that of the warm-up
        return 4 + rice.most_bytes(count, piece.count) + 4 * count

    def prepare(self, values: Tensor, *, step: int) -> Tensor:
        if self.codec.clip:
            norm = float(values.double().norm())
            values = values * min(1.0, self.codec.clip / norm) if norm else values
        if self.codec.momentum:
            values = self.memory["momentum"].mul_(self.codec.momentum).add_(values)
        return self.memory["residual"].add_(values) if self.codec.feedback else values

    def encode_piece(self, number: int, values: Tensor, into: Tensor, at: int, *, step: int) -> int:
        place = self.pieces[number].place
        count = min(values.numel(), max(1, round(self.codec.density_at(step) * values.numel())))
        sample = round(self.codec.sampled * values.numel())
        chosen = about_largest(values, count, sample) if sample else largest(values, count)
        at = put(into, at, torch.tensor([chosen.numel()], dtype=torch.int32))
        at = rice.write(into, at, chosen, values.numel())
        at = put(into, at, values[chosen])
        for remembered in self.memory.values():
            remembered[place][chosen] = 0
        return at

    def decode_piece(self, number: int, packet: Reader, out: Tensor, *, add: bool) -> None:
        count = packet.number()
        chosen, _ = rice.read(packet, count, out.numel())
        values = packet.take(count, torch.float32)
        store_at(out, chosen, values, add=add)
