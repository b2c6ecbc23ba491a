"""What the workers' codecs remember in a checkpoint, and how workers of a resumed run get it back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.codecs import Codec, Parts
from paceline.policies.messages import PushKind
from paceline.store.behind import Behind
from paceline.store.codec_memory import CodecMemory, Remembered
from paceline.store.layout import ModelLayouts
from paceline.store.packets import memory_of_states

logger = logging.getLogger("paceline")


class Kept(NamedTuple):
    """What one worker's codec remembers, and the server's for the way down."""

    up: Remembered
    down: list[Tensor]


class KeptCodecs:
    """The memories of the codecs of workers of this host, in a file that they share; ``layouts`` are the parts.

    ``state`` is what ``state_dict`` gave in an earlier run. A worker gets what its rank had.
    """

    def __init__(
        self, codec: Codec, layouts: Sequence[ModelLayouts], kind: PushKind, file: int | None, state: Mapping[str, Any]
    ) -> None:
        self._codec, self._kind, self._file = codec, kind, file
        parts = [replace(Parts.of(part.trained), dtype=torch.float32) for part in layouts]
        self._like = memory_of_states([codec.new_state(each, seed=0) for each in parts])
        self._kept: dict[int, Kept] = {}  # of workers that have not joined yet
        for each in state.get("workers", ()):
            up = Remembered(each["number"], each["up"])
            if state["kind"] == kind.value and [tensor.shape for tensor in up.tensors] == [
                tensor.shape for tensor in self._like
            ]:
                self._kept[each["rank"]] = Kept(up, each["down"])

    def lost(self, workers: int) -> list[int]:
        """The ranks of which nothing was kept."""
        return [rank for rank in range(workers) if rank not in self._kept]

    def memory_of(self, rank: int) -> CodecMemory:
        """The memory of a worker's codec, if the worker is of this host."""
        return CodecMemory(self._like, self._file, rank)

    def hand_over(self, rank: int, memory: CodecMemory | None, behind: Behind | None) -> bool:
        """Let a worker that joins go on with what was kept of it; False if there is nothing."""
        kept = self._kept.pop(rank, None)
        if kept is None:
            return False
        if memory is None:
            if self._like:
                logger.warning("worker %d is on another host now: what its codec %s kept is lost", rank, self._codec)
            return False
        memory.begin_with(kept.up)
        if behind is not None:
            behind.go_on_from(kept.down)
        return True

    def state_dict(self, joined: Mapping[int, Kept]) -> dict[str, Any]:
        """For a checkpoint: what is kept of those who have ``joined``, and of those who have not."""
        workers = [
            {"rank": rank, "number": kept.up.number, "up": kept.up.tensors, "down": kept.down}
            for rank, kept in sorted({**self._kept, **joined}.items())
        ]
        return {"kind": self._kind.value, "workers": workers}
