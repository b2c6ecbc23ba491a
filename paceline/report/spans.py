"""Packs the spans of a timeline small enough for a page.

Times become whole numbers of a quantum. If there are too many spans, short neighbours of one worker become a mixture
(kind 7), which has the shares of its kinds: a page cannot show more than that at once. Spans that are long, and all
births and deaths, stay as they are.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.record.timeline import Kind, Records

MIXTURE = 7
MOST_SPANS = 120_000  # on a page; up to 21 bytes each, before base64
MOST_WORKERS = 512  # rows of a timeline
_NUM_SHARES = 4  # computing, waiting, exchanging, cancelled
_QUANTA = 2**32 - 1
_FINEST = 1e-6  # seconds


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """One worker's spans, some of them mixtures."""

    start: npt.NDArray[np.float64]
    duration: npt.NDArray[np.float64]
    kind: npt.NDArray[np.uint8]
    step: npt.NDArray[np.uint32]
    shares: npt.NDArray[np.float64]  # a row of four for each mixture, in their order
    counts: npt.NDArray[np.uint32]  # spans in each mixture

    def __len__(self) -> int:
        return len(self.kind)


def merge(records: Records, width: float) -> Spans:
    """Merge neighbours that begin in the same ``width`` seconds and are all shorter than that; 0 merges nothing."""
    start, duration = records["start"].astype(np.float64), records["duration"].astype(np.float64)
    kind = records["kind"].astype(np.uint8)
    if width <= 0 or not len(records):
        none = np.zeros((0, _NUM_SHARES)), np.zeros(0, np.uint32)
        return Spans(start=start, duration=duration, kind=kind, step=records["step"], shares=none[0], counts=none[1])
    short = (duration < width) & (kind < _NUM_SHARES)
    place = np.floor(start / width)
    together = short[1:] & short[:-1] & (place[1:] == place[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~together]))
    counts = np.diff(np.append(first, len(records)))
    ends = np.maximum.reduceat(start + duration, first)
    mixed = counts > 1
    seconds = np.zeros((len(first), _NUM_SHARES))
    for part in range(_NUM_SHARES):
        seconds[:, part] = np.add.reduceat(np.where(kind == part, duration, 0.0), first)
    seconds, total = seconds[mixed], seconds[mixed].sum(axis=1, keepdims=True)
    return Spans(
        start=start[first],
        duration=ends - start[first],
        kind=np.where(mixed, MIXTURE, kind[first]).astype(np.uint8),
        step=records["step"][first],
        shares=np.divide(seconds, total, out=np.zeros_like(seconds), where=total > 0),
        counts=counts[mixed].astype(np.uint32),
    )


def merge_to(timeline: Mapping[int, Records], most: int) -> dict[int, Spans]:
    """Merge the spans of all workers until there are at most ``most``, or as few as this can make."""
    spans = {rank: merge(records, 0.0) for rank, records in timeline.items()}
    length = _length(timeline)
    width = length / max(1, most)
    while sum(map(len, spans.values())) > most and width < length:
        spans = {rank: merge(records, width) for rank, records in timeline.items()}
        width *= 2
    return spans


def pack(timeline: Mapping[int, Records], most: int = MOST_SPANS) -> dict[str, Any]:
    """Pack a timeline for ``timeline.js``, at most ``most`` spans; ``merged`` tells whether some are mixtures."""
    shown = dict(sorted(timeline.items())[:MOST_WORKERS])
    length = _length(shown)
    quantum = max(_FINEST, length / _QUANTA)
    merged = merge_to(shown, most)
    return {
        "seconds": length,
        "quantum": quantum,
        "merged": any(len(spans.counts) for spans in merged.values()),
        "hidden": len(timeline) - len(shown),
        "workers": [_pack_worker(rank, spans, quantum) for rank, spans in merged.items()],
    }


def _pack_worker(rank: int, spans: Spans, quantum: float) -> dict[str, Any]:
    start = np.clip(np.rint(spans.start / quantum), 0, _QUANTA)
    end = np.clip(np.rint((spans.start + spans.duration) / quantum), start, _QUANTA)
    columns = {"start": start, "duration": end - start, "step": spans.step, "counts": spans.counts}
    packed: dict[str, Any] = {name: _base64(values.astype("<u4")) for name, values in columns.items()}
    shares = np.rint(spans.shares * 255).astype(np.uint8)
    return {"rank": rank, "kind": _base64(spans.kind), "shares": _base64(shares), **packed}


def _base64(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _length(timeline: Mapping[int, Records]) -> float:
    ends = [float((spans["start"] + spans["duration"]).max()) for spans in timeline.values() if len(spans)]
    return max(ends, default=0.0)


def kind_name(kind: int) -> str:
    """The name of a kind as it is shown."""
    return {Kind.BEGAN: "joined", Kind.LEFT: "left"}.get(Kind(kind), Kind(kind).name.lower())
