"""What a codec remembers on one worker, for every flat tensor that is summed over all workers as packets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.codecs import Codec, CodecState, Parts
from paceline.codecs.base import Reduction
from paceline.peers.group import Peers, Pending
from paceline.seeding import derive_seed


class CodedSum:
    """Sums one flat tensor over all workers again and again, as packets of a codec.

    A sum is only counted once it is ``settled``: if the step fails in which it was made, all make that step again, so
    what the codec remembered before it comes back.
    """

    def __init__(self, state: CodecState[Any]) -> None:
        self._state = state
        self._made = 0  # sums so far; decides the random numbers of the next, and its place in a warm-up
        self._before: dict[str, Any] | None = None  # the state before a sum that is not settled

    def start(self, flat: Tensor, peers: Peers, *, scale: float = 1.0) -> Pending:
        """Start summing ``flat`` over all workers, in place.

        Values that a scaler has multiplied by ``scale`` are divided by it before a codec that has numbers in their
        unit, since the scale may be another one next time. Other codecs get them as they are: in 16 bits small values
        would be lost.
        """
        self._before = self.state_dict()
        self._made += 1
        step = self._made - 1
        if scale == 1.0 or not self._state.has_unit:
            return self._state.reduce(flat, peers, step=step)
        work = self._state.reduce(flat.div_(scale), peers, step=step)

        def finish() -> None:
            work.wait()
            flat.mul_(scale)

        return Reduction(finish)

    def settle(self) -> None:
        """All workers have the sum, and use it."""
        self._before = None

    def take_unsent(self) -> Tensor | None:
        """What this worker has not sent of its values, if that is remembered; then it no longer is."""
        residual = self._state.memory.get("residual")
        if residual is None:
            return None
        unsent = residual.clone()
        residual.zero_()
        return unsent

    def undo(self) -> None:
        """Nobody uses the sum: remember what was remembered before it."""
        if self._before is not None:
            self.load_state_dict(self._before)
        self._before = None

    def rescale(self, factor: float) -> None:
        """The values to come have another unit: multiply what is remembered of those that came."""
        if factor != 1.0:
            for name in self._state.memory.keys() & {"residual", "momentum"}:
                self._state.memory[name].mul_(factor)

    def kept_state(self) -> dict[str, Any]:
        """The state without a sum that is not settled."""
        return self.state_dict() if self._before is None else self._before

    def state_dict(self) -> dict[str, Any]:
        return {"made": self._made, **self._state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._made = int(state["made"])
        self._state.load_state_dict({name: value for name, value in state.items() if name != "made"})


class Coding:
    """The sums of one worker's exchange under a codec, by name; ``seed`` is the run's, ``scaler`` that of gradients."""

    def __init__(self, codec: Codec, peers: Peers, scaler: torch.amp.GradScaler | None = None) -> None:
        self.codec, self.seed, self.scaler = codec, 0, scaler
        self._peers = peers
        self._sums: dict[str, CodedSum] = {}
        self._loaded: dict[str, Any] = {}  # states of sums that were not asked for yet

    def sum_of(self, name: str, parts: Parts) -> CodedSum:
        """The sum of this name, whose flat tensors have these ``parts``."""
        if name not in self._sums:
            seed = derive_seed(self.seed, self._peers.rank, "codec", name)
            self._sums[name] = made = CodedSum(self.codec.new_state(parts, seed=seed))
            if name in self._loaded:
                made.load_state_dict(self._loaded.pop(name))
        return self._sums[name]

    def start_gradients(self, coded: CodedSum, flat: Tensor) -> Pending:
        """Start a sum of gradients, which the scaler has multiplied, if there is one."""
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        return coded.start(flat, self._peers, scale=scale)

    def forget(self) -> None:
        """Begin anew: the tensors are others."""
        self._sums, self._loaded = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """All that this worker's codec remembers."""
        return {**self._loaded, **{name: each.state_dict() for name, each in self._sums.items()}}

    def kept_state(self) -> dict[str, Any]:
        """The same, without the sums of a step that has failed."""
        return {**self._loaded, **{name: each.kept_state() for name, each in self._sums.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what an earlier process of this worker did, or its exchange with others."""
        self._sums, self._loaded = {}, dict(state)
