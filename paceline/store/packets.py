"""Pushes as packets of a codec: a worker encodes its gradients, and each server decodes those of its part.

What is sent to a server is first all that is not coded, as it is: buffers, and the parameters that were read if the
aggregator needs them; then the packet. A packet of no bytes says that a gradient is not finite.

Parameters that are pushed are coded as the difference to those of the worker's last push that was taken, as the server
has decoded them; the first ones after a worker has joined are sent as they are. As on the way down (see ``behind``),
what a packet leaves out stays in the difference, and the codec's own residual is emptied.
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
from paceline.policies.messages import PushKind
from paceline.seeding import derive_seed
from paceline.store.codec_memory import CodecMemory, Remembered
from paceline.store.layout import Arena, Layout, ModelLayouts, memory_of
from paceline.transport.pieces import Pieces


def most_bytes(state: CodecState[Any]) -> int:
    """The most bytes of a packet."""
    return HEADER.size + sum(map(state.most_bytes, state.pieces)) + 4 * sum(part.count for part in state.raw)


def empty_residual(state: CodecState[Any]) -> None:
    """Have nothing kept back: what is coded is a difference that has it already."""
    if "residual" in state.memory:
        state.memory["residual"].zero_()


def memory_of_states(states: Sequence[CodecState[Any]]) -> list[Tensor]:
    """All that the codecs of the parts remember, in one order."""
    return [tensor for state in states for tensor in state.memory.values()]


class PartPackets:
    """Codes the gradients of one server's part, as one vector of float32, or parameters if pushes are such.

    ``last`` of its methods are the parameters of the worker's last push, or None before the first.
    """

    def __init__(
        self, codec: Codec, layouts: ModelLayouts, kind: PushKind = PushKind.GRADIENT, *, seed: int = 0
    ) -> None:
        self._layouts, self.trained, self.of_parameters = layouts, layouts.trained, kind is PushKind.PARAMETERS
        if any(each.is_complex() for each in self.trained):
            raise UsageError(f"codec {codec} is for real numbers, and the model has complex parameters; leave it out")
        self.state = codec.new_state(replace(Parts.of(self.trained), dtype=torch.float32), seed=seed)
        self._flat = torch.zeros(self.state.parts.count)
        self._views = [self._flat[part.place].view(part.shape) for part in self.state.parts.tensors]
        self._rest = Layout([*layouts.buffers, *layouts.reads])
        self._rest_memory = torch.zeros(self._rest.nbytes, dtype=torch.uint8)
        self.most_bytes = self._rest.nbytes + max(most_bytes(self.state), self._flat.nbytes)  # of what is sent

    def encode(self, last: Tensor | None = None, *, step: int) -> Tensor:
        """Make the packet of the model's gradients; a parameter without one has zeros."""
        for parameter, view in zip(self.trained, self._views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if self.of_parameters and last is None:
            return self._flat.clone().view(torch.uint8)
        if last is not None:
            self._flat.sub_(last)
            empty_residual(self.state)
        return self.state.encode(self._flat, step=step)

    def decode(self, packet: Tensor, last: Tensor | None = None) -> list[Tensor]:
        """What a packet says of each parameter, until the next call; NaN if it has no bytes."""
        if not packet.numel():
            self._flat.fill_(math.nan)
        elif last is not None:
            self.state.decode(packet, self._flat.copy_(last), add=True)
        elif not self.of_parameters:
            self.state.decode(packet, self._flat)
        elif packet.numel() == self._flat.nbytes:
            self._flat.copy_(packet.view(torch.float32))
        else:
            raise WireError(f"wanted a first packet of {self._flat.nbytes} bytes, found {packet.numel()}")
        return self._views

    def decoded(self) -> Tensor | None:
        """What was decoded last, to be the ``last`` of the next push, if pushes are parameters."""
        return self._flat.clone() if self.of_parameters else None

    def pieces(self, packet: Tensor) -> Pieces:
        """The memory to send, before any of it changes."""
        rest = [*self._layouts.buffers, *self._layouts.reads]
        for tensor, view in zip(rest, self._rest.views(self._rest_memory), strict=True):
            view.copy_(tensor.detach())
        return Pieces(memory_of(self._rest_memory), memory_of(packet))

    def unpack(self, came: Tensor, push: Arena, last: Tensor | None = None) -> None:
        """Have what was sent as a push; raise WireError if it is none."""
        if came.numel() < self._rest.nbytes:
            raise WireError(f"wanted a push of at least {self._rest.nbytes} bytes, found {came.numel()}")
        decoded = self.decode(came[self._rest.nbytes :], last)
        for view, value in zip(push.views, [*decoded, *self._rest.views(came[: self._rest.nbytes])], strict=True):
            view.copy_(value)


class PushPackets:
    """A worker's end of a codec: one packet for each server's part, and what is remembered from push to push.

    A push that the server does not take leaves no trace. ``since`` is the version at which the worker has joined: its
    pushes are numbered from there. What is remembered is in ``file``, if there is one; with ``kept`` it is that which
    the server has put there, and goes on from an earlier run.
    """

    def __init__(
        self,
        codec: Codec,
        layouts: Sequence[ModelLayouts],
        kind: PushKind,
        *,
        seed: int,
        rank: int,
        since: int = 0,
        file: int | None = None,
        kept: bool = False,
    ) -> None:
        self.codec = codec
        self.parts = [
            PartPackets(codec, part, kind, seed=derive_seed(seed, rank, "codec", number))
            for number, part in enumerate(layouts)
        ]
        self._last: list[Tensor | None] = [None for _ in layouts]
        self._packets: list[Tensor] = []  # of the last push
        self._unanswered = False  # the last push
        first = memory_of_states([part.state for part in self.parts])
        self._memory = CodecMemory(first, file, rank)
        if not kept:
            self._memory.begin_with(Remembered(since, first))
        self._use_memory()

    def encode(self, step: int = 0) -> list[Tensor]:
        """Make the packets of the model's gradients, for a step; all are empty if one of them is not finite."""
        self.answered(taken=False)
        number = self._memory.number
        self._memory.begin_push()
        self._use_memory()
        self._unanswered = True
        try:
            self._packets = [part.encode(last, step=number) for part, last in zip(self.parts, self._last, strict=True)]
        except NonFiniteInputError:
            self._packets = [torch.empty(0, dtype=torch.uint8) for _ in self.parts]
        self._memory.end_push(step)
        return self._packets

    def answered(self, *, taken: bool) -> None:
        """Learn whether the server has taken the last push; a second answer to it changes nothing."""
        unanswered, self._unanswered = self._unanswered, False
        if not unanswered:
            return
        if not taken:
            self._memory.undo_push()
            self._use_memory()
        elif self.parts[0].of_parameters:
            for place, (part, packet) in enumerate(zip(self.parts, self._packets, strict=True)):
                part.decode(packet, self._last[place])
                self._last[place] = part.decoded()

    def begin_again(self, *, undone: bool) -> None:
        """Join again with what is remembered; ``undone``: without the last push, which was taken and then lost."""
        if undone:
            self._memory.undo_push()
        self._memory.begin_with(Remembered(self._memory.number, [tensor.clone() for tensor in self._memory.tensors]))
        self._use_memory()
        self._last = [None for _ in self.parts]

    def _use_memory(self) -> None:
        tensors = iter(self._memory.tensors)
        for part in self.parts:
            part.state.memory = {name: next(tensors) for name in part.state.memory}

    def put_in_place(self) -> None:
        """Have what the last packets say in the place of the gradients.

        A parameter without a gradient gets one if something of its earlier ones is sent.
        """
        for part, packet, last in zip(self.parts, self._packets, self._last, strict=True):
            for parameter, values in zip(part.trained, part.decode(packet, last), strict=True):
                if parameter.grad is not None or bool(values.any()):
                    parameter.grad = torch.empty_like(parameter).copy_(values)

    def code(self, step: int = 0) -> int:
        """Have in the place of the gradients what the servers would decode; return how many bytes the packets have."""
        packets = self.encode(step)
        self.put_in_place()
        return sum(packet.numel() for packet in packets)

    def used(self) -> bytes:
        """One bit per parameter: the last packets have something for it, which then takes the place of its gradient."""
        trained = [parameter for part in self.parts for parameter in part.trained]
        if any(parameter.grad is None for parameter in trained):
            self.put_in_place()
        bits = sum((parameter.grad is not None) << place for place, parameter in enumerate(trained))
        return bits.to_bytes(-(-len(trained) // 8), "little")
