"""Reads runs and comparisons from disk as plain numbers, for the report and the live page.

Neither torch nor the run's own code is needed. What a run does not have is left empty and told in its ``notes``; a
directory that is no run, or one of a format that is not known here, raises a ``UsageError``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paceline.errors import UsageError
from paceline.record.timeline import Kind, Records, TimelineError, read_timeline
from paceline.report.events import Floats, Points, Progress, RunEvents, read_events
from paceline.report.rerun import command_again
from paceline.version import __version__

COMPARISON = "comparison.json"
FORMAT = 1  # of comparisons and configurations
KINDS = {  # the parts of a worker's time, in the order in which they are shown
    "computing": Kind.COMPUTING,
    "waiting": Kind.WAITING,
    "exchanging": Kind.EXCHANGING,
    "cancelled": Kind.CANCELLED,
    "dead": Kind.DEAD,
}
ONE_WORKER = "one worker"  # the policy that a comparison's speed-ups are measured against


@dataclass(frozen=True, kw_only=True)
class Change:
    """A worker that joined, left by itself, or died."""

    seconds: float  # since the start of the run
    worker: int
    what: Literal["joined", "left", "died"]
    incarnation: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunData:
    """One run as numbers; times are seconds since its start."""

    path: Path
    name: str  # the directory, as the user or the comparison calls it
    policy: str
    seed: int | None
    workers: int | None
    problem: str | None
    codec: str | None
    delay: str | None
    metric: str | None
    higher_is_better: bool
    error_is: str  # what the errors of ``points`` are: "test error" (1 - accuracy), the metric's name, "test loss"
    target: float | None  # of the metric
    started: float  # seconds since the epoch; of a virtual run 0
    ended: float | None  # None while it is being written
    points: Points  # evaluations
    progress: Progress  # steps or commits
    staleness: Floats  # pushes that had the staleness 0, 1, 2, ...; empty without a server
    seconds_by_kind: Mapping[str, float]  # of all workers together, in the order of KINDS; empty if unknown
    timeline: Mapping[int, Records]  # rank -> spans, with ``start`` in seconds since the start of the run
    changes: tuple[Change, ...]
    config: Mapping[str, Any]
    command: str | None  # to run it again
    virtual: bool = False
    notes: tuple[str, ...] = ()  # what is missing or broken, in sentences

    @property
    def seconds(self) -> float:
        """How long it took, or has been going on for."""
        times = [self.points.seconds, self.progress.seconds]
        last = max((float(each[-1]) for each in times if len(each)), default=0.0)
        return max(0.0, last if self.ended is None else self.ended - self.started)

    @property
    def examples(self) -> float:
        """The examples of all workers' steps; NaN if unknown."""
        return _last(self.progress.examples)

    @property
    def bytes(self) -> float:
        """The bytes of tensors that all workers have sent and received; NaN if unknown."""
        return _last(self.progress.bytes)

    @property
    def throughput(self) -> float:
        """Examples per second of all workers, over the whole run."""
        return self.examples / self.seconds if self.seconds > 0 else np.nan

    @property
    def mean_staleness(self) -> float:
        """The mean over all pushes; NaN without a server."""
        total = self.staleness.sum()
        return float(self.staleness @ np.arange(len(self.staleness)) / total) if total else np.nan

    @property
    def thrown_away_seconds(self) -> float:
        """The seconds of all workers that went into cancelled work; NaN if unknown."""
        return self.seconds_by_kind.get("cancelled", np.nan)

    @property
    def target_error(self) -> float:
        """The error that reaches the target; NaN without one, or if errors are of another kind."""
        if self.target is None or (self.higher_is_better and self.metric != "accuracy"):
            return np.nan
        return 1.0 - self.target if self.metric == "accuracy" else self.target

    @property
    def seconds_to_target(self) -> float:
        """When an evaluation first reached the target; NaN if none did."""
        if self.target is None:
            return np.nan
        value = self.points.value
        reached = value >= self.target if self.higher_is_better else value <= self.target
        return float(self.points.seconds[reached.argmax()]) if reached.any() else np.nan

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not (len(self.points.error) or len(self.progress.seconds) or self.timeline)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A run of a comparison: read, or waiting to be made, or failed."""

    policy: str
    seed: int | None
    name: str
    status: str  # done, failed, running, interrupted or waiting
    error: str | None  # why it failed, or cannot be read
    run: RunData | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The header of a comparison, and its runs."""

    path: Path
    problem: str | None
    metric: str | None
    higher_is_better: bool
    target: float | None
    workers: int | None
    delay: str | None
    virtual: bool
    seeds: tuple[int, ...]
    command: str | None
    entries: tuple[Entry, ...] = field(repr=False)

    @property
    def runs(self) -> tuple[RunData, ...]:
        """The runs that could be read."""
        return tuple(entry.run for entry in self.entries if entry.run is not None)


def is_comparison(path: str | os.PathLike[str]) -> bool:
    """Whether a directory holds a comparison, not a run."""
    return (Path(path) / COMPARISON).is_file()


def read_run(
    path: str | os.PathLike[str], *, metric: str | None = None, higher_is_better: bool | None = None
) -> RunData:
    """Read a run, finished or being written; raise a ``UsageError`` if the directory holds none that can be read.

    A comparison knows which metric is compared, and whether higher is better.
    """
    path = Path(path)
    _check_directory(path)
    notes: list[str] = []
    try:
        config = read_config(path, notes)
    except BrokenFileError as error:
        notes.append(f"{error}; so its policy and options are not known.")
        config = {}
    written = is_being_written(path)
    timeline = _read_timeline(path, written, notes)
    workers = _whole(config.get("world_size")) or len(timeline) or None
    events = read_events(path, notes, metric=metric, higher_is_better=higher_is_better)
    started = min([*events.started, *(float(spans["start"][0]) for spans in timeline.values())], default=0.0)
    ends = [*events.ended, *(float((spans["start"] + spans["duration"]).max()) for spans in timeline.values())]
    for spans in timeline.values():
        spans["start"] -= started
    points, progress = events.since(started)
    train = _mapping(config.get("train")) or _mapping(config.get("sparse"))
    if not (len(points.error) or len(progress.seconds)):
        notes.append("Nothing has been measured yet." if written else "It ended before anything was measured.")
    elif written:
        notes.append("The run is still being written: these are its numbers so far.")
    return RunData(
        path=path,
        name=path.name or str(path),
        policy=_text(config.get("policy")) or _text(train.get("policy")) or "unknown policy",
        seed=_whole(config.get("seed", train.get("seed"))),
        workers=workers,
        problem=_text(train.get("problem")) or _text(config.get("problem")),
        codec=_text(config.get("codec")),
        delay=delay_text(config),
        metric=events.metric,
        higher_is_better=bool(events.higher_is_better),
        error_is=events.error_is,
        target=_finite(config.get("target")),
        started=started,
        ended=None if written else max(ends, default=started),
        points=points,
        progress=progress,
        staleness=events.staleness,
        seconds_by_kind=_seconds_by_kind(timeline, events, notes),
        timeline=timeline,
        changes=_changes_of(timeline) if timeline else _changes_told(events, started),
        config=config,
        command=command_again(config),
        virtual=config.get("virtual") is True,
        notes=tuple(notes),
    )


def read_comparison(path: str | os.PathLike[str]) -> Comparison:
    """Read a comparison, whole or partial; a run that cannot be read has its reason in the entry."""
    path = Path(path)
    _check_directory(path, COMPARISON)
    header = read_json(path / COMPARISON)
    check_format(path / COMPARISON, header)
    command = header.get("command")
    comparison = Comparison(
        path=path,
        problem=_text(header.get("problem")),
        metric=_text(header.get("metric")),
        higher_is_better=bool(header.get("higher_is_better")),
        target=_finite(header.get("target")),
        workers=_whole(header.get("workers")),
        delay=delay_text(header),
        virtual=bool(header.get("virtual")),
        seeds=tuple(seed for seed in _list(header.get("seeds")) if _whole(seed) is not None),
        command=_joined(command),
        entries=(),
    )
    return replace(comparison, entries=tuple(_read_entry(comparison, each) for each in _list(header.get("runs"))))


def _read_entry(comparison: Comparison, listed: Any) -> Entry:
    values = _mapping(listed)
    policy, seed, name = _text(values.get("policy")) or "?", _whole(values.get("seed")), _text(values.get("run")) or ""
    status = _text(values.get("status")) or "unknown"
    entry = Entry(
        policy=policy,
        seed=seed,
        name=name,
        status="interrupted" if status == "running" and is_abandoned(comparison.path) else status,
        error=_text(values.get("error")),
        run=None,
    )
    if entry.status == "waiting" or not name:
        return entry
    try:
        known = None if comparison.metric is None else comparison.higher_is_better
        run = read_run(comparison.path / name, metric=comparison.metric, higher_is_better=known)
    except UsageError as error:
        return replace(entry, error=entry.error or str(error))
    ended = None if entry.status == "running" else run.ended if run.ended is not None else run.started + run.seconds
    run = replace(
        run,
        name=name,
        policy=policy,
        seed=seed if seed is not None else run.seed,
        problem=comparison.problem or run.problem,
        target=comparison.target,
        delay=comparison.delay or run.delay,
        virtual=comparison.virtual,
        ended=ended,
    )
    return replace(entry, run=run)


# The files of a run -----------------------------------------------------------------------------------------------


def _check_directory(path: Path, *wanted: str) -> None:
    """Raise unless there is a run, or the file that is wanted."""
    if not path.exists():
        raise UsageError(f"there is no directory {path}; name that of a run, such as runs/digits-1")
    if not path.is_dir():
        raise UsageError(f"{path} is a file; name the directory of a run, such as runs/digits-1")
    names = wanted or ("config.json", "metrics.jsonl", "timeline")
    if not any((path / name).exists() for name in names):
        found = "is empty" if not any(path.iterdir()) else "holds no run"
        raise UsageError(f"{path} {found}: wanted {' or '.join(names)} in it; name the directory of a run")


class BrokenFileError(UsageError):
    """A file that should hold a JSON object holds none."""


def read_json(file: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; raise a ``BrokenFileError`` if it does not."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenFileError(f"{file} is broken: it is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise BrokenFileError(f"{file} is broken: wanted a JSON object, found {type(found).__name__}")
    return found


def check_format(file: Path, values: Mapping[str, Any]) -> None:
    """Raise if the values are of a format that is not known here."""
    if values.get("format", FORMAT) != FORMAT:
        raise UsageError(
            f"{file} has the format {str(values['format'])[:40]} of Paceline {str(values.get('paceline', '?'))[:40]}; "
            f"this is Paceline {__version__}, which reads format {FORMAT}: install the newer version to see it"
        )


def read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read a run's configuration; what is odd about it goes into ``notes``."""
    file = path / "config.json"
    if not file.exists():
        notes.append("It has no config.json, so its policy and options are not known.")
        return {}
    config = read_json(file)
    check_format(file, config)
    version = str(config.get("paceline", __version__))
    if _release(version) > _release(__version__):
        notes.append(
            f"It was written by Paceline {version[:40]}; this is {__version__}, which may leave out what is new."
        )
    return config


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def is_being_written(path: str | os.PathLike[str]) -> bool:
    """Whether a live process of this host owns the run.

    It has ``run.lock`` open. The lock is not asked for: a run that starts at this instant would be refused.
    """
    return _is_owned(Path(path)) is True


def is_abandoned(path: str | os.PathLike[str]) -> bool:
    """Whether a process of this host has owned the run or comparison, and none does now."""
    return _is_owned(Path(path)) is False


def _is_owned(path: Path) -> bool | None:
    """Whether the last owner still has ``run.lock`` open; None if it is not known, or on another host."""
    lock = path / "run.lock"
    try:
        owner = re.fullmatch(r"process (\d{1,9}) on (.+)", lock.read_text().strip())
    except (OSError, ValueError):
        return None
    if owner is None or owner[2] != socket.gethostname():
        return None
    files = Path("/proc", owner[1], "fd")
    if not Path("/proc/self/fd").exists():
        return _lives(int(owner[1]))
    try:
        return any(file.readlink() == lock.resolve() for file in files.iterdir())
    except PermissionError:
        return _lives(int(owner[1]))  # another user's: all that can be known
    except OSError:
        return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read_timeline(path: Path, written: bool, notes: list[str]) -> dict[int, Records]:
    try:
        found = read_timeline(path, until=0.0 if written else None)
    except (TimelineError, OSError) as error:
        notes.append(f"Its timeline cannot be read: {error}.")
        return {}
    sound = {rank: _sound(spans) for rank, spans in found.items()}
    if broken := sum(len(found[rank]) - len(spans) for rank, spans in sound.items()):
        notes.append(f"Records of its timeline that are broken and left out: {broken}.")
    sound = {rank: spans for rank, spans in sound.items() if len(spans)}
    if not sound:
        notes.append("It has no timeline of its workers.")
    return sound


def _sound(spans: Records) -> Records:
    """The records that can be; times of other centuries would make all others too small to see."""
    start, duration = spans["start"], spans["duration"]
    with np.errstate(invalid="ignore"):
        whole = np.isfinite(start) & (np.abs(start) < 1e11) & (duration >= 0) & (duration < 1e9)
    sound: Records = spans[whole & (spans["kind"] <= Kind.DEAD)].copy()
    return sound


# What follows from them -------------------------------------------------------------------------------------------


def _seconds_by_kind(timeline: Mapping[int, Records], events: RunEvents, notes: list[str]) -> dict[str, float]:
    if not timeline:
        if events.seconds_by_kind and events.seconds_of_worker_0:
            notes.append("The parts of its time are those of worker 0 alone.")
        return events.seconds_by_kind
    return {
        name: float(sum(spans["duration"][spans["kind"] == kind].sum(dtype=np.float64) for spans in timeline.values()))
        for name, kind in KINDS.items()
    }


def _changes_of(timeline: Mapping[int, Records]) -> tuple[Change, ...]:
    told: dict[int, Literal["joined", "left", "died"]]
    told = {Kind.BEGAN: "joined", Kind.LEFT: "left", Kind.DEAD: "died"}
    found = [
        Change(
            seconds=float(record["start"]),
            worker=rank,
            what=told[int(record["kind"])],
            incarnation=int(record["step"]) if record["kind"] == Kind.BEGAN else None,
        )
        for rank, spans in timeline.items()
        for record in spans[spans["kind"] >= Kind.BEGAN]
    ]
    return tuple(sorted(found, key=lambda change: change.seconds))


def _changes_told(events: RunEvents, started: float) -> tuple[Change, ...]:
    return tuple(
        Change(seconds=max(0.0, at - started), worker=worker, what=what, incarnation=incarnation)
        for at, worker, what, incarnation in sorted(events.changes)
    )


def _last(values: Floats) -> float:
    return float(values[-1]) if len(values) else np.nan


def delay_text(values: Mapping[str, Any]) -> str | None:
    """The delay that a configuration tells of, with its unit."""
    delay, unit = values.get("delay"), values.get("delay_unit")
    if not delay:
        return None
    return f"{delay} in units of {unit}" if unit else str(delay)


def _joined(command: Any) -> str | None:
    return shlex.join(map(str, command)) if isinstance(command, list) and command else _text(command)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
