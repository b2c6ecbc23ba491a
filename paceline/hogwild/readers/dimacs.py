"""Reads max-flow problems in the form of DIMACS: ``p max``, ``n NODE s|t``, ``a FROM TO CAPACITY``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.errors import UsageError
from paceline.hogwild.readers.blocks import BLOCK, TextFile
from paceline.hogwild.readers.cache import Array
from paceline.hogwild.readers.compiled import parsers

_STATE = ("nodes", "arcs", "source", "sink")


@dataclass(frozen=True)
class FlowNetwork:
    """A directed graph with capacities, a source and a sink; nodes are numbered from 0."""

    nodes: int
    tails: Array  # int32
    heads: Array  # int32
    capacities: Array  # float64
    source: int
    sink: int


def read_dimacs(path: str | Path, *, block: int = BLOCK) -> FlowNetwork:
    """Read a file, plain or gzipped."""
    text = TextFile(Path(path), block=block)
    state = dict.fromkeys(_STATE, 0)
    parts: list[tuple[Array, Array, Array]] = []
    for part in text:
        read = text.take(parsers().dimacs(part, *(state[name] for name in _STATE)))
        state = {name: read[name] for name in _STATE}
        tails, heads = (np.frombuffer(read[name], np.int32) - 1 for name in ("tails", "heads"))
        parts.append((tails, heads, np.frombuffer(read["capacities"], np.float64)))
    _check(Path(path), state, sum(len(tails) for tails, _, _ in parts))
    tails, heads, capacities = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return FlowNetwork(state["nodes"], tails, heads, capacities, state["source"] - 1, state["sink"] - 1)


def _check(path: Path, state: dict[str, int], arcs: int) -> None:
    if not state["nodes"]:
        raise UsageError(f"{path}: wanted a line p max NODES ARCS, found none; is it a max-flow problem of DIMACS?")
    for name, letter in (("source", "s"), ("sink", "t")):
        if not state[name]:
            raise UsageError(f"{path}: wanted a line n NODE {letter} that names the {name}, found none")
    if state["source"] == state["sink"]:
        raise UsageError(f"{path}: node {state['sink']} is both source and sink")
    if arcs != state["arcs"]:
        raise UsageError(f"{path}: its line p promises {state['arcs']} arcs, found {arcs}; is it complete?")
