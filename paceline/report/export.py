"""Writes the numbers of a report as CSV, and timelines in the trace format of Chrome, which Perfetto opens."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from paceline.errors import PacelineError
from paceline.record.timeline import Kind, Records
from paceline.report.groups import summarise
from paceline.report.material import Material
from paceline.report.runs import KINDS, RunData
from paceline.report.spans import kind_name

_MICROSECONDS = 1e6


def write_csv(material: Material, folder: Path) -> list[Path]:
    """Write the tables of the report into ``folder``, one file each; return the files."""
    tables = {
        "summary": _summary(material),
        "evaluations": _columns(material, "points"),
        "progress": _columns(material, "progress"),
        "staleness": _staleness(material),
        "time": _times(material),
        "changes": _changes(material),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"{name}.csv" for name in tables]
        for file, rows in zip(files, tables.values(), strict=True):
            with file.open("w", newline="", encoding="utf-8", errors="replace") as out:
                csv.writer(out).writerows([_safe(cell) for cell in row] for row in rows)
    except OSError as error:
        raise PacelineError(f"the tables could not be written to {folder}: {error.strerror}") from error
    return files


def _safe(cell: Any) -> Any:
    """A cell; NaN is left empty, and a text that a spreadsheet would run as a formula gets a quote before it."""
    if isinstance(cell, str) and cell[:1] in "=+-@\t\r" and cell:
        return f"'{cell}"
    return "" if cell is None or (isinstance(cell, float) and not np.isfinite(cell)) else cell


def _summary(material: Material) -> Iterator[Sequence[Any]]:
    rows = [dataclasses.asdict(row) for row in summarise(material.groups)]
    yield ["policy", *(name for name in (rows[0] if rows else {}) if name != "label")]
    for row in rows:
        yield list(row.values())


def _columns(material: Material, part: str) -> Iterator[Sequence[Any]]:
    """The arrays of all runs, below each other."""
    names: list[str] | None = None
    for run in material.runs:
        arrays = vars(getattr(run, part))
        if names is None:
            names = list(arrays)
            yield ["run", "policy", "seed", *names]
        for values in zip(*arrays.values(), strict=True):
            yield [run.name, run.policy, run.seed, *map(float, values)]


def _staleness(material: Material) -> Iterator[Sequence[Any]]:
    yield ["run", "policy", "seed", "staleness", "pushes"]
    for run in material.runs:
        for value, count in enumerate(run.staleness):
            yield [run.name, run.policy, run.seed, value, int(count)]


def _times(material: Material) -> Iterator[Sequence[Any]]:
    yield ["run", "policy", "seed", "worker", *KINDS]
    for run in material.runs:
        for rank, spans in run.timeline.items():
            sums = [spans["duration"][spans["kind"] == kind].sum(dtype=np.float64) for kind in KINDS.values()]
            yield [run.name, run.policy, run.seed, rank, *map(float, sums)]


def _changes(material: Material) -> Iterator[Sequence[Any]]:
    yield ["run", "policy", "seed", "seconds", "worker", "what", "incarnation"]
    for run in material.runs:
        for change in run.changes:
            yield [run.name, run.policy, run.seed, change.seconds, change.worker, change.what, change.incarnation]


def write_trace(material: Material, file: Path) -> Path:
    """Write the timelines of all runs in Chrome's trace format; a name that ends in ``.gz`` makes it compressed."""
    runs = [run for run in material.runs if run.timeline]
    if not runs:
        raise PacelineError("no run has a timeline of its workers, so there is no trace to write")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _open(file) as out:
            out.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            events = (event for number, run in enumerate(runs, start=1) for event in _trace_events(run, number))
            out.writelines(_separated(json.dumps(event, separators=(",", ":")) for event in events))
            out.write("\n]}\n")
    except OSError as error:
        raise PacelineError(f"the trace could not be written to {file}: {error.strerror}") from error
    return file


def _open(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return io.TextIOWrapper(cast(IO[bytes], gzip.open(file, "wb", compresslevel=6)), encoding="utf-8")
    return file.open("w", encoding="utf-8")


def _separated(texts: Iterable[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield text if number == 0 else f",\n{text}"


def _trace_events(run: RunData, process: int) -> Iterator[dict[str, Any]]:
    """A run is a process of the trace, and a worker one of its threads; both count from 1, since 0 is the idle task."""
    seed = "" if run.seed is None else f", seed {run.seed}"
    yield _named("process_name", process, 0, f"{run.policy}{seed} ({run.name})")
    for rank, spans in run.timeline.items():
        thread = rank + 1
        yield _named("thread_name", process, thread, f"worker {rank}")
        yield {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": rank}}
        starts, ends = _whole_microseconds(spans)
        columns = spans["kind"].tolist(), spans["step"].tolist(), starts.tolist(), (ends - starts).tolist()
        for kind, step, at, length in zip(*columns, strict=True):
            event = {"name": kind_name(kind), "pid": process, "tid": thread, "ts": at}
            if kind in (Kind.BEGAN, Kind.LEFT):
                yield {**event, "ph": "i", "s": "t"}
            else:
                yield {**event, "ph": "X", "dur": length, "args": {"step": step}}


def _whole_microseconds(spans: Records) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """When spans start and end. One ends before the next begins: of two that overlap, a reader drops one."""
    times = spans["start"], spans["start"] + spans["duration"].astype(np.float64)
    starts, ends = (np.maximum(np.rint(each * _MICROSECONDS), 0).astype(np.int64) for each in times)
    ends[:-1] = np.minimum(ends[:-1], starts[1:])
    return starts, np.maximum(starts, ends)


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
