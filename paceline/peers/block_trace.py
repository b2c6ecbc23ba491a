"""The traces of a recorded ``hogwild`` run: one file for each worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError
from paceline.record.trace import Ended, Hashed, Met, Stepped, Trace

MOST_BLOCKS = 1 << 16

Block = tuple[int, bool]  # its number, and whether it is written


@dataclass
class BlockTrace:
    """What one worker did."""

    steps: list[dict[Block, int]] = field(default_factory=list)  # the versions to which others had changed blocks
    copies: Counter[tuple[int, int]] = field(default_factory=Counter)  # before a step, by block and version
    hashes: list[tuple[int, bytes]] = field(default_factory=list)
    whole: bool = False  # it ended by itself, not by a signal


def trace_file(run: Path, rank: int) -> Path:
    """The file of a worker."""
    return run / (f"trace-{rank}.bin" if rank else "trace.bin")


def read_block_traces(run: Path, workers: int) -> list[BlockTrace]:
    """The traces of all workers; raise if one of them has no end."""
    return [_read(run, rank) for rank in range(workers)]


def _read(run: Path, rank: int) -> BlockTrace:
    found, step, ended = BlockTrace(), dict[Block, int](), False
    for record in Trace(trace_file(run, rank)):
        match record:
            case Met(block, version, writing):
                step[block, writing] = version
                if not writing:
                    found.copies[block, version] += 1
            case Stepped():
                found.steps.append(step)
                step = {}
            case Hashed(steps, digest):
                found.hashes.append((steps, digest))
            case Ended(whole):
                found.whole, ended = whole, True
            case _:
                pass
    if not ended:
        raise UsageError(
            f"{run} cannot be replayed: one of its workers has failed or was killed; under hogwild only runs that have "
            "ended, or were asked to stop, can be"
        )
    return found
