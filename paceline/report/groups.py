"""Puts runs that differ in their seed alone together, and sums them up: the rows of the table and the curves.

The page, the table of ``paceline compare``, the figures and the CSV files all show these numbers.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.report.events import Floats
from paceline.report.runs import KINDS, ONE_WORKER, RunData

MOST_POINTS = 500  # of a curve
_LOSS_POINTS = 100  # of the training loss: the loss of a single step is mostly noise


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Runs of one policy, one for each seed."""

    label: str
    runs: tuple[RunData, ...]

    @property
    def is_serial(self) -> bool:
        """Whether this is what speed-ups are measured against."""
        return self.runs[0].policy == ONE_WORKER or self.runs[0].workers == 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """The mean over the seeds, and the smallest and largest of them."""

    x: Floats
    mean: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the summary: means over the seeds, NaN where unknown."""

    label: str
    seeds: int
    reached: int  # seeds that reached the target
    seconds_to_target: float  # mean over the seeds, if all reached it
    seconds_spread: float  # half of the largest less the smallest
    speed_up: float  # time of one worker to the target over this one's
    final_error: float
    final_error_spread: float  # likewise
    megabytes: float
    mean_staleness: float
    waiting: float  # share of all workers' time
    thrown_away: float  # share of all workers' time
    examples_per_second: float
    efficiency: float  # examples per second over those of one worker, for each worker
    seconds: float


def group(runs: Iterable[RunData]) -> list[Group]:
    """Put together the runs that differ in their seed alone; a label tells what the groups differ in."""
    found: dict[tuple[str | None, ...], list[RunData]] = {}
    for run in runs:
        found.setdefault((run.policy, _workers(run), run.problem, run.codec, run.delay), []).append(run)
    varying = [len({key[part] for key in found}) > 1 for part in range(5)]
    groups: list[Group] = []
    for key, members in found.items():
        same_policy = sum(other[0] == key[0] for other in found) > 1
        extra = [part for part, varies in zip(key[1:], varying[1:], strict=True) if varies and part and same_policy]
        label = ", ".join([str(key[0]), *map(str, extra)])
        if max(Counter(run.seed for run in members).values()) > 1:  # they differ in something else
            groups += [Group(label=f"{label} ({run.name})", runs=(run,)) for run in members]
        else:
            members.sort(key=lambda run: -1 if run.seed is None else run.seed)
            groups.append(Group(label=label, runs=tuple(members)))
    return groups


def _workers(run: RunData) -> str | None:
    return None if run.workers is None else f"{run.workers} worker{'s' * (run.workers != 1)}"


def summarise(groups: Sequence[Group]) -> list[Row]:
    """Sum up each group; speed-ups are over the group of one worker, if there is one."""
    serial = [each for each in groups if each.is_serial]
    base = serial[0] if len(serial) == 1 else None
    return [_summarise(each, base) for each in groups]


def _summarise(group: Group, base: Group | None) -> Row:
    times = _times(group)
    errors = [float(run.points.error[-1]) for run in group.runs if len(run.points.error)]
    rate, workers = _mean(run.throughput for run in group.runs), group.runs[0].workers
    serial_time = _mean(_times(base)) if base else math.nan
    serial_rate = _mean(run.throughput for run in base.runs) if base else math.nan
    return Row(
        label=group.label,
        seeds=len(group.runs),
        reached=sum(math.isfinite(run.seconds_to_target) for run in group.runs),
        seconds_to_target=_mean(times),
        seconds_spread=_spread(times),
        speed_up=serial_time / _mean(times),
        final_error=_mean(errors),
        final_error_spread=_spread(errors),
        megabytes=_mean(run.bytes for run in group.runs) / 1e6,
        mean_staleness=_mean(run.mean_staleness for run in group.runs),
        waiting=_mean(share_of(run, "waiting") for run in group.runs),
        thrown_away=_mean(share_of(run, "cancelled") for run in group.runs),
        examples_per_second=rate,
        efficiency=rate / (serial_rate * workers) if workers else math.nan,
        seconds=_mean(run.seconds for run in group.runs),
    )


def _times(group: Group) -> list[float]:
    """The seconds to the target; none if a seed missed it: a mean over the others would flatter the policy."""
    times = [run.seconds_to_target for run in group.runs]
    return times if all(map(math.isfinite, times)) else []


def share_of(run: RunData, kind: str) -> float:
    """The share of the living workers' time that went into this; NaN if unknown."""
    total = sum(run.seconds_by_kind.get(each, 0.0) for each in KINDS if each != "dead")
    return run.seconds_by_kind.get(kind, 0.0) / total if total > 0 else math.nan


def _mean(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return math.fsum(known) / len(known) if known else math.nan


def _spread(values: Iterable[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return (max(known) - min(known)) / 2 if known else math.nan


def mean_curve(curves: Sequence[tuple[Floats, Floats]]) -> Curve | None:
    """The mean of curves over common places; one that has ended keeps its last value."""
    sound = [_rising(x, y) for x, y in curves]
    sound = [(x, y) for x, y in sound if len(x)]
    if not sound:
        return None
    begin = max(x[0] for x, _ in sound)
    places = np.unique(np.concatenate([x for x, _ in sound]))
    places = thin_places(places[places >= begin])
    values = np.array([np.interp(places, x, y) for x, y in sound])
    return Curve(x=places, mean=values.mean(axis=0), low=values.min(axis=0), high=values.max(axis=0))


def _rising(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    x, places = np.unique(x, return_index=True)
    return x, y[places]


def thin_places(places: Floats, most: int = MOST_POINTS) -> Floats:
    """At most so many of them, with the first and the last."""
    if len(places) <= most:
        return places
    chosen: Floats = places[np.unique(np.linspace(0, len(places) - 1, most).round().astype(int))]
    return chosen


def smooth(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """At most so many points: means over as many neighbours each."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= most:
        return x, y
    parts = np.array_split(np.arange(len(x)), most)
    with warnings.catch_warnings(action="ignore"):
        return np.array([x[part].mean() for part in parts]), np.array([y[part].mean() for part in parts])


def loss_curve(run: RunData) -> tuple[Floats, Floats]:
    """The training loss against seconds, smoothed."""
    return smooth(run.progress.seconds, run.progress.loss, _LOSS_POINTS)


def time_label(runs: Iterable[RunData]) -> str:
    """What the axis of time is called."""
    kinds = {"virtual" if run.virtual else "wall-clock" for run in runs}
    return f"{kinds.pop()} time" if len(kinds) == 1 else "time"


def curves_of(
    groups: Sequence[Group], read: Callable[[RunData], tuple[Floats, Floats]]
) -> list[tuple[int, Group, Curve]]:
    """The mean curve of every group that has one, with the group's number, which is its style."""
    found = [(number, each, mean_curve([read(run) for run in each.runs])) for number, each in enumerate(groups)]
    return [(number, each, curve) for number, each, curve in found if curve is not None]
