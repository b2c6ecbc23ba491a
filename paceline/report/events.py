"""Reads ``metrics.jsonl`` and ``evaluations.jsonl`` of a run into arrays.

Lines may be missing, half-written, broken or of a newer version: what cannot be used is left out and told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
What: TypeAlias = Literal["joined", "left", "died"]

_LARGEST_STALENESS = 100_000
_NO_METRIC = {"event", "time", "step", "epoch", "worker", "test_loss", "examples", "bytes", "seconds", "generation"}
_COMPUTING = ("forward", "backward", "optimizer")
_LOWER_IS_BETTER = ("loss", "error", "excess", "perplexity", "objective")


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """The evaluations of a run; ``examples`` and ``bytes`` are those until then, NaN where unknown."""

    seconds: Floats
    steps: Floats
    examples: Floats
    bytes: Floats
    value: Floats  # of the metric
    error: Floats  # lower is better: 1 - accuracy, the metric itself, or the test loss


@dataclass(frozen=True, kw_only=True, eq=False)
class Progress:
    """The steps or commits of a run, one for each line of metrics; ``examples`` and ``bytes`` are sums until then."""

    seconds: Floats
    steps: Floats
    examples: Floats
    bytes: Floats
    loss: Floats  # of the training data; NaN where unknown


@dataclass(kw_only=True)
class RunEvents:
    """The events of a run, while they are read."""

    steps: list[tuple[float, float, float, float, float]] = field(default_factory=list)  # as Progress, with counts
    evaluations: list[dict[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # the first and the last
    began: float = math.inf  # the earliest time that the lines tell of
    staleness_counts: dict[int, int] = field(default_factory=dict)
    changes: list[tuple[float, int, What, int | None]] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=dict)  # seconds by kind
    seconds_of_worker_0: bool = True  # whether ``spent`` is of worker 0 alone
    worker_bytes: float = 0.0  # as the workers' figures at the end tell
    metric: str | None = None
    higher_is_better: bool | None = None

    @property
    def started(self) -> list[float]:
        return [self.began] if math.isfinite(self.began) else []

    @property
    def ended(self) -> list[float]:
        return self.times[-1:]

    @property
    def staleness(self) -> Floats:
        counts = np.zeros(max(self.staleness_counts, default=-1) + 1)
        for value, count in self.staleness_counts.items():
            counts[value] = count
        return counts

    @property
    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds by kind, where there is no timeline."""
        return self.spent if sum(self.spent.values()) > 0 else {}

    @property
    def error_is(self) -> str:
        """What the error of an evaluation is."""
        if self.metric == "accuracy":
            return "test error"
        return "test loss" if self.metric is None or self.higher_is_better else self.metric.replace("_", " ")

    def since(self, started: float) -> tuple[Points, Progress]:
        """The evaluations and the steps, with times since the start of the run."""
        progress = self._progress(started)
        return self._points(started, progress), progress

    def _progress(self, started: float) -> Progress:
        table = np.array(sorted(self.steps, key=lambda row: row[0]), dtype=np.float64).reshape(-1, 5)
        seconds, steps, examples, num_bytes, loss = table.T
        made = np.diff(steps, prepend=0.0)  # several, where not every step has a line
        made = np.where(made > 0, made, 1.0)
        examples = _sum_up(examples * made)
        num_bytes = _sum_up(num_bytes)
        if len(num_bytes) and not np.isfinite(num_bytes[-1]) and self.worker_bytes:
            num_bytes = self.worker_bytes * steps / max(1.0, steps[-1])
        return Progress(seconds=seconds - started, steps=steps, examples=examples, bytes=num_bytes, loss=loss)

    def _points(self, started: float, progress: Progress) -> Points:
        rows = sorted(self.evaluations, key=lambda row: row["time"])

        def column(name: str) -> Floats:
            return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)

        steps, value = column("step"), column(self.metric or "test_loss")
        error = {"test error": 1.0 - value, "test loss": column("test_loss")}.get(self.error_is, value)
        examples, num_bytes = (
            np.where(np.isfinite(told), told, _at(steps, progress.steps, sums))
            for told, sums in ((column("examples"), progress.examples), (column("bytes"), progress.bytes))
        )
        points = {"seconds": column("time") - started, "steps": steps, "examples": examples, "bytes": num_bytes}
        points |= {"value": value, "error": error}
        known = np.isfinite(error)
        return Points(**{name: values[known] for name, values in points.items()})


def read_events(
    path: Path, notes: list[str], *, metric: str | None = None, higher_is_better: bool | None = None
) -> RunEvents:
    """Read the events of the run in ``path``; what is wrong with them goes into ``notes``."""
    events = RunEvents(metric=metric, higher_is_better=higher_is_better)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        if not (path / name).exists():
            continue
        broken = 0
        try:
            for line in _lines(path / name):
                broken += not _take(events, line)
        except OSError as error:
            notes.append(f"{name} cannot be read: {error.strerror}.")
        if broken:
            notes.append(f"Lines of {name} that are broken and left out: {broken}.")
    if events.higher_is_better is None and events.metric is not None:
        lower = any(word in events.metric for word in _LOWER_IS_BETTER)
        events.higher_is_better = not lower
    return events


def _lines(file: Path) -> Iterator[Any]:
    """All values; None for a line that is no JSON. An unfinished last line is left out."""
    with file.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield None


def _take(events: RunEvents, line: Any) -> bool:
    """Add one line; return whether it is an event."""
    if not isinstance(line, dict):
        return False
    event, at = line.get("event", "evaluation"), _number(line.get("time"))
    if not isinstance(event, str) or not math.isfinite(at):
        return False
    events.times = [min([at, *events.times]), max([at, *events.times])]
    spent = line.get("seconds")
    took = _number(spent)
    if isinstance(spent, dict) and event == "step":
        took = sum(each for each in map(_number, spent.values()) if each > 0)
    events.began = min(events.began, at - (took if event in ("step", "commit", "epoch") and took > 0 else 0.0))
    taker = _TAKERS.get(event)
    if taker is not None:
        taker(events, line, at)
    return True


def _take_step(events: RunEvents, line: Mapping[str, Any], at: float) -> None:
    names = ("step", "examples", "bytes", "loss")
    step, examples, num_bytes, loss = (_number(line.get(name)) for name in names)
    events.steps.append((at, step if math.isfinite(step) else len(events.steps) + 1, examples, num_bytes, loss))
    seconds = line.get("seconds")
    if isinstance(seconds, dict):
        parts = {"computing": _COMPUTING, "waiting": ("waited",), "exchanging": ("communication",)}
        _spend(events, {kind: sum(_at_least_0(seconds.get(name)) for name in names) for kind, names in parts.items()})


def _take_commit(events: RunEvents, line: Mapping[str, Any], at: float) -> None:
    _take_step(events, {**line, "seconds": None}, at)
    staleness = line.get("staleness")
    for value in staleness if isinstance(staleness, list) else ():
        if isinstance(value, int) and 0 <= value <= _LARGEST_STALENESS:
            events.staleness_counts[value] = events.staleness_counts.get(value, 0) + 1


def _take_evaluation(events: RunEvents, line: Mapping[str, Any], at: float) -> None:
    row = {str(name): number for name, value in line.items() if math.isfinite(number := _number(value))}
    names = [name for name in row if name not in _NO_METRIC]
    if events.metric is None and names:
        events.metric = "accuracy" if "accuracy" in names else names[0]
    events.evaluations.append({**row, "time": at})


def _take_epoch(events: RunEvents, line: Mapping[str, Any], at: float) -> None:
    """An epoch of a sparse problem: an evaluation, and as many steps as it made updates."""
    events.metric, events.higher_is_better = "objective", False
    made, before = _at_least_0(line.get("updates")), events.steps[-1][1] if events.steps else 0.0
    if made:
        events.steps.append((at, before + made, 1.0, math.nan, _number(line.get("objective"))))
    events.evaluations.append({"time": at, "step": before + made, "objective": _number(line.get("objective"))})


def _take_worker(events: RunEvents, line: Mapping[str, Any], at: float) -> None:
    """The figures of a worker under a server, at the end."""
    names = {"computing": "computing_seconds", "waiting": "waiting_seconds", "cancelled": "thrown_away_seconds"}
    if events.seconds_of_worker_0:
        events.seconds_of_worker_0 = False
        events.spent.clear()
    _spend(events, {kind: _at_least_0(line.get(name)) for kind, name in names.items()})
    events.worker_bytes += _at_least_0(line.get("bytes_in")) + _at_least_0(line.get("bytes_out"))


def _take_change(events: RunEvents, line: Mapping[str, Any], at: float) -> None:
    worker, incarnation = line.get("worker"), line.get("incarnation")
    if isinstance(worker, int):
        what: What = "joined" if line["event"] == "joined" else "died" if line.get("dead") else "left"
        events.changes.append((at, worker, what, incarnation if isinstance(incarnation, int) else None))


_TAKERS = {
    "step": _take_step,
    "commit": _take_commit,
    "evaluation": _take_evaluation,
    "epoch": _take_epoch,
    "worker": _take_worker,
    "joined": _take_change,
    "left": _take_change,
}


def _spend(events: RunEvents, seconds: Mapping[str, float]) -> None:
    for kind, each in seconds.items():
        events.spent[kind] = events.spent.get(kind, 0.0) + each


def _sum_up(values: Floats) -> Floats:
    """Sums until each value; NaN if no value is known."""
    known = np.isfinite(values)
    return np.cumsum(np.where(known, values, 0.0)) if known.any() else np.full(len(values), np.nan)


def _at(steps: Floats, known_steps: Floats, sums: Floats) -> Floats:
    """The sums at these steps."""
    if not len(known_steps):
        return np.full(len(steps), np.nan)
    return np.interp(steps, known_steps, sums, left=0.0)


def _number(value: Any) -> float:
    """A finite number, or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return math.nan
    return float(value)


def _at_least_0(value: Any) -> float:
    number = _number(value)
    return number if number > 0 else 0.0
