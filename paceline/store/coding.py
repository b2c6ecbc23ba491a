"""Pushes as packets of a codec: a worker encodes its gradients, and each server decodes those of its part.

What is sent to a server is first all that is not coded, as it is: buffers, and the parameters that were read if the
aggregator needs them; then the packet. A packet of no bytes says that a gradient is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.codecs import Codec, CodecState, Parts
from paceline.codecs.packet import HEADER
from paceline.errors import NonFiniteInputError, UsageError, WireError
from paceline.seeding import derive_seed
from paceline.store.layout import Arena, Layout, ModelLayouts, memory_of
from paceline.transport.pieces import Pieces


def most_bytes(state: CodecState[Any]) -> int:
    """The most bytes of a packet."""
    return HEADER.size + sum(map(state.most_bytes, state.pieces)) + 4 * sum(part.count for part in state.raw)


class CodedPart:
    """Codes the gradients of one server's part, as one vector of float32."""

    def __init__(self, codec: Codec, layouts: ModelLayouts, *, seed: int = 0) -> None:
        self._layouts, self.trained = layouts, layouts.trained
        if any(each.is_complex() for each in self.trained):
            raise UsageError(f"codec {codec} is for real numbers, and the model has complex parameters; leave it out")
        self.state = codec.new_state(replace(Parts.of(self.trained), dtype=torch.float32), seed=seed)
        self._flat = torch.zeros(self.state.parts.count)
        self._views = [self._flat[part.place].view(part.shape) for part in self.state.parts.tensors]
        self._rest = Layout([*layouts.buffers, *layouts.reads])
        self._rest_memory = torch.zeros(self._rest.nbytes, dtype=torch.uint8)
        self.most_bytes = self._rest.nbytes + most_bytes(self.state)  # of what is sent

    def encode(self, *, step: int) -> Tensor:
        """Make the packet of the model's gradients; a parameter without one has zeros."""
        for parameter, view in zip(self.trained, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        return self.state.encode(self._flat, step=step)

    def decode(self, packet: Tensor) -> list[Tensor]:
        """What a packet says of each parameter, until the next call; NaN if it has no bytes."""
        if packet.numel():
            self.state.decode(packet, self._flat)
        else:
            self._flat.fill_(math.nan)
        return self._views

    def pieces(self, packet: Tensor) -> Pieces:
        """The memory to send, before any of it changes."""
        rest = [*self._layouts.buffers, *self._layouts.reads]
        for tensor, view in zip(rest, self._rest.views(self._rest_memory), strict=True):
            view.copy_(tensor.detach())
        return Pieces(memory_of(self._rest_memory), memory_of(packet))

    def unpack(self, came: Tensor, push: Arena) -> None:
        """Have what was sent as a push; raise WireError if it is none."""
        if came.numel() < self._rest.nbytes:
            raise WireError(f"wanted a push of at least {self._rest.nbytes} bytes, found {came.numel()}")
        values = self.decode(came[self._rest.nbytes :]), self._rest.views(came[: self._rest.nbytes])
        for view, value in zip(push.views, [*values[0], *values[1]], strict=True):
            view.copy_(value)


class PushCoding:
    """A worker's end of a codec: one packet for each server's part, and what is remembered from push to push.

    A push that the server does not take leaves no trace. ``since`` is the version at which the worker has joined: its
    pushes are numbered from there, so that a resumed run does not round by the same random numbers again.
    """

    def __init__(self, codec: Codec, layouts: Sequence[ModelLayouts], *, seed: int, rank: int, since: int = 0) -> None:
        self.codec = codec
        self.parts = [
            CodedPart(codec, part, seed=derive_seed(seed, rank, "codec", number)) for number, part in enumerate(layouts)
        ]
        self._number = since  # of the next push
        self._before: list[dict[str, Tensor]] | None = None  # what was remembered before a push without an answer

    def encode(self) -> list[Tensor]:
        """Make the packets of the model's gradients; all are empty if one of them is not finite."""
        self.answered(taken=False)
        self._before = [part.state.state_dict() for part in self.parts]
        self._number += 1
        try:
            return [part.encode(step=self._number - 1) for part in self.parts]
        except NonFiniteInputError:
            return [torch.empty(0, dtype=torch.uint8)] * len(self.parts)

    def answered(self, *, taken: bool) -> None:
        """Learn whether the server has taken the last push; a second answer to it changes nothing."""
        before, self._before = self._before, None
        if before is not None and not taken:
            for part, memory in zip(self.parts, before, strict=True):
                part.state.load_state_dict(memory)
            self._number -= 1

    def put_in_place(self, packets: Sequence[Tensor]) -> None:
        """Have what packets say in the place of the gradients.

        A parameter without a gradient gets one if something of its earlier ones is sent.
        """
        for part, packet in zip(self.parts, packets, strict=True):
            for parameter, values in zip(part.trained, part.decode(packet), strict=True):
                if parameter.grad is not None or bool(values.any()):
                    parameter.grad = torch.empty_like(parameter).copy_(values)

    def code(self) -> int:
        """Have in the place of the gradients what the servers would decode; return how many bytes the packets have."""
        packets = self.encode()
        self.put_in_place(packets)
        return sum(packet.numel() for packet in packets)

    def used(self, packets: Sequence[Tensor]) -> bytes:
        """One bit per parameter: something is sent for it. Gradients may be replaced by what packets say."""
        trained = [parameter for part in self.parts for parameter in part.trained]
        if any(parameter.grad is None for parameter in trained):
            self.put_in_place(packets)
        bits = sum((parameter.grad is not None) << place for place, parameter in enumerate(trained))
        return bits.to_bytes(-(-len(trained) // 8), "little")
