"""The way down through a codec: a worker is sent the difference to the parameters that it has.

Server and worker keep the same copy of what the worker has, to the bit. What a packet leaves out stays in the
difference, so that nothing is lost. A codec's own residual would count it twice, and is emptied before every packet.
What is not trained is sent as it is, in front of the packet: buffers always, parameters only with all the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paceline.codecs import Codec, Parts
from paceline.errors import NonFiniteInputError, WireError
from paceline.seeding import derive_seed
from paceline.store.layout import Layout, ModelLayouts, memory_of
from paceline.store.packets import empty_residual, most_bytes
from paceline.transport.pieces import Pieces


class Behind:
    """What one worker has of the server's parameters, which packets bring near to them; one at each end.

    ``views`` of its methods are the parameters and buffers, as ``layouts.down`` has them.
    """

    def __init__(self, codec: Codec, layouts: ModelLayouts, *, seed: int = 0, rank: int = 0) -> None:
        parameters = layouts.parameters
        self._trained = [place for place, parameter in enumerate(parameters) if parameter.requires_grad]
        self._buffers = range(len(parameters), len(parameters) + len(layouts.buffers))
        parts = replace(Parts.of(layouts.trained), dtype=torch.float32)
        self._state = codec.new_state(parts, seed=derive_seed(seed, rank, "codec", "down"))
        self._has, self._difference = torch.zeros(parts.count), torch.zeros(parts.count)
        self._knows = False  # whether the worker has anything
        self._version = torch.tensor([-1])  # that was sent last, with a step
        self.lacks_all = False  # the worker has yet to be sent what it has, since it goes on from an earlier run
        self._rest = Layout(layouts.buffers)
        self.most_bytes = max(layouts.down.nbytes, self._rest.nbytes + most_bytes(self._state))  # of what is sent

    def take_all(self, views: Sequence[Tensor], *, version: int = -1) -> None:
        """The worker is sent all parameters as they are; with a step those of a ``version``."""
        self._copy_trained(views, self._has)
        self._knows, self.lacks_all = True, False
        self._version[0] = version

    def encode(self, views: Sequence[Tensor], *, version: int) -> Tensor | None:
        """Make the packet that brings a worker to this version; None: all have to be sent as they are.

        A worker that goes on from an earlier run, and has had this version, is not brought any nearer by being given
        its step again.
        """
        if not self._knows:
            return None
        lacked_all, self.lacks_all = self.lacks_all, False
        if lacked_all and int(self._version) == version:
            return torch.empty(0, dtype=torch.uint8)
        self._version[0] = version
        self._copy_trained(views, self._difference)
        self._difference.sub_(self._has)
        empty_residual(self._state)
        try:
            packet = self._state.encode(self._difference, step=version)
        except NonFiniteInputError:
            return None
        self._state.decode(packet, self._has, add=True)
        return packet

    def remembered(self) -> list[Tensor]:
        """All that has to be known to go on, if the worker has anything; for ``go_on_from``."""
        return [self._has, self._version, *self._state.memory.values()] if self._knows else []

    def go_on_from(self, remembered: Sequence[Tensor]) -> None:
        """Go on from what was remembered in an earlier run; the worker has to be sent what it has."""
        if remembered:
            self._knows = self.lacks_all = True
            for tensor, value in zip(self.remembered(), remembered, strict=True):
                tensor.copy_(value)

    def write(self, views: Sequence[Tensor]) -> None:
        """Have the parameters that the worker has in the place of those that are trained."""
        for place, part in zip(self._trained, self._state.parts.tensors, strict=True):
            views[place].copy_(self._has[part.place].view(part.shape))

    def all_pieces(self, memory: Tensor, layout: Layout) -> Pieces:
        """The memory to send, with all that the worker has; ``memory`` is that of the parameters and buffers."""
        everything = memory.clone()
        self.write(layout.views(everything))
        return Pieces(memory_of(everything))

    def pieces(self, packet: Tensor, views: Sequence[Tensor]) -> Pieces:
        """The memory to send."""
        memory = torch.zeros(self._rest.nbytes, dtype=torch.uint8)
        for place, view in zip(self._buffers, self._rest.views(memory), strict=True):
            view.copy_(views[place])
        return Pieces(memory_of(memory), memory_of(packet))

    def unpack(self, came: Tensor, views: Sequence[Tensor]) -> None:
        """Have the parameters after a packet; raise WireError if it cannot be decoded."""
        if came.numel() < self._rest.nbytes:
            raise WireError(f"wanted parameters of at least {self._rest.nbytes} bytes, found {came.numel()}")
        self._state.decode(came[self._rest.nbytes :], self._has, add=True)
        self.write(views)
        for place, view in zip(self._buffers, self._rest.views(came[: self._rest.nbytes]), strict=True):
            views[place].copy_(view)

    def _copy_trained(self, views: Sequence[Tensor], flat: Tensor) -> None:
        for place, part in zip(self._trained, self._state.parts.tensors, strict=True):
            flat[part.place].view(part.shape).copy_(views[place])
