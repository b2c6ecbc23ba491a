"""Writes a run for TensorBoard, when it has ended or while it goes on."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from paceline.errors import PacelineError, UsageError
from paceline.record.following import RunTail, finite
from paceline.record.timeline import Kind, Records
from paceline.report.runs import COMPARISON, read_json

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_SPAN = 1.0  # seconds of a point of throughput or of a part of the workers' time
_LATE = 2.0  # seconds that a worker's records may come after the metrics
_KINDS = (Kind.COMPUTING, Kind.WAITING, Kind.EXCHANGING, Kind.CANCELLED)
_NO_METRIC = {"event", "time", "step", "epoch", "worker", "examples", "bytes", "seconds", "test_loss"}


class TensorBoardExport:
    """Write a run, or all runs of a comparison, to ``folder/NAME``; each ``look`` adds what is new.

    Points have the run's own times, and its updates as steps. What an earlier export of the same name has written is
    no longer shown.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder = path, folder
        self._writer_class = _writer_class()
        self._runs: dict[Path, _RunExport] = {}

    def look(self) -> bool:
        """Write what is new; return whether there is more already."""
        behind = False
        for name, path in _runs_of(self._path).items():
            if path not in self._runs and not (path / "metrics.jsonl").exists():
                continue  # no folder before there is anything to show
            if path not in self._runs:
                self._runs[path] = _RunExport(path, self._folder / name, self._writer_class)
            behind = self._runs[path].look() or behind
        return behind

    def close(self) -> None:
        """Write the rest."""
        while self.look():
            pass
        for run in self._runs.values():
            run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def export_runs(paths: Sequence[Path], folder: Path) -> None:
    """Write runs and comparisons as far as they go."""
    for path in paths:
        with TensorBoardExport(path, folder):
            pass


def _writer_class() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("--tensorboard needs TensorBoard; install it: pip install 'paceline[tensorboard]'") from error
    return SummaryWriter


def _runs_of(path: Path) -> dict[str, Path]:
    """The runs in a directory by the names of their folders."""
    if not (path / COMPARISON).is_file():
        return {path.resolve().name: path}
    listed = read_json(path / COMPARISON).get("runs")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    found = {str(entry.get("run")): path / str(entry.get("run")) for entry in entries if entry.get("run")}
    inside = path.resolve()
    return {name: run for name, run in found.items() if run.resolve().is_relative_to(inside)}


class _RunExport:
    """One run's points."""

    def __init__(self, path: Path, folder: Path, writer_class: type[SummaryWriter]) -> None:
        self._folder, self._writer_class = folder, writer_class
        self._tail = RunTail(path, skip=False)
        self._begin()

    def _begin(self) -> None:
        try:
            # purge_step: what was written before is not shown, from step 0 on.
            self._writer = self._writer_class(str(self._folder), purge_step=0)
        except OSError as error:
            raise PacelineError(f"cannot write for TensorBoard to {self._folder}: {error.strerror}") from error
        self._step = 0
        self._bytes = 0.0
        self._examples = 0.0  # since the last point of throughput
        self._since: float | None = None  # the time of that
        self._times: list[float] = []  # of updates, at most one in a span, with their steps
        self._steps: list[int] = []
        self._latest = -math.inf
        self._seconds: dict[int, np.ndarray] = {}  # number of a span -> seconds of each kind, of all workers

    def look(self) -> bool:
        news = self._tail.read()
        if news.restarted:
            self._writer.close()
            self._begin()
        for event in news.events:
            self._take(event)
        for records in news.records.values():
            self._count(records)
        if not news.behind:
            self._write_times(self._latest - _LATE)
            self._writer.flush()
        return news.behind

    def close(self) -> None:
        self._write_times(math.inf)
        self._writer.close()

    def _take(self, event: Mapping[str, Any]) -> None:
        at, kind = float(event["time"]), event["event"]
        self._latest = max(self._latest, at)
        if kind in ("step", "commit"):
            self._take_update(event, at)
        elif kind == "epoch":  # of a sparse problem
            updates = finite(event.get("updates")) or 0.0
            update = {"step": self._step + int(updates), "examples": 1, "loss": event.get("objective")}
            self._take_update(update, at)
        elif kind == "evaluation":
            step = int(finite(event.get("step")) or self._step)
            self._add("loss/test", event.get("test_loss"), step, at)
            for name in sorted(event.keys() - _NO_METRIC):
                self._add(f"metric/{name}", event[name], step, at)

    def _take_update(self, event: Mapping[str, Any], at: float) -> None:
        step = int(finite(event.get("step")) or self._step + 1)
        self._examples += (finite(event.get("examples")) or 0.0) * max(1, step - self._step)
        self._step = step
        self._add("loss/train", event.get("loss"), step, at)
        self._add("lr", event.get("lr", event.get("rate")), step, at)
        staleness = event.get("staleness")
        if isinstance(staleness, list) and (known := [each for each in map(finite, staleness) if each is not None]):
            self._add("staleness/mean", sum(known) / len(known), step, at)
        if (sent := finite(event.get("bytes"))) is not None:
            self._bytes += sent
            self._add("bytes", self._bytes, step, at)
        if self._since is None:
            self._since, self._examples = at, 0.0
        elif at - self._since >= _SPAN:
            self._add("throughput", self._examples / (at - self._since), step, at)
            self._since, self._examples = at, 0.0
        if not self._times or at - self._times[-1] >= _SPAN / 4:
            self._times.append(at)
            self._steps.append(step)

    def _count(self, records: Records) -> None:
        """Add the seconds of the records to the spans in which they ended."""
        spans = np.floor((records["start"] + records["duration"]) / _SPAN).astype(np.int64)
        for number in np.unique(spans):
            within = records[spans == number]
            seconds = self._seconds.setdefault(int(number), np.zeros(len(_KINDS)))
            for place, kind in enumerate(_KINDS):
                seconds[place] += within["duration"][within["kind"] == kind].sum(dtype=np.float64)

    def _write_times(self, until: float) -> None:
        """Write the workers' time in the spans that ended before then, as shares."""
        for number in sorted(number for number in self._seconds if (number + 1) * _SPAN <= until):
            seconds = self._seconds.pop(number)
            at = (number + 1) * _SPAN
            place = bisect.bisect_right(self._times, at) - 1
            step = self._steps[place] if place >= 0 else 0
            for kind, share in zip(_KINDS, seconds / (seconds.sum() or 1.0), strict=True):
                self._add(f"time/{kind.name.lower()}", float(share), step, at)

    def _add(self, tag: str, value: Any, step: int, at: float) -> None:
        number = finite(value)
        if number is not None:
            self._writer.add_scalar(tag, number, step, walltime=at)
