"""The figures of a comparison's runs, and the table made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.comparing.comparison import Comparison
from paceline.comparing.options import ONE_WORKER
from paceline.record.metrics import read_metrics
from paceline.record.timeline import Kind, read_timeline
from paceline.studies.intervals import interval

_SPENT = (Kind.COMPUTING, Kind.WAITING, Kind.EXCHANGING, Kind.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one run came to; None is what cannot be known."""

    seconds: float | None  # until the target was reached; None: never
    error: float | None  # at the end
    megabytes: float | None  # of tensors, of all workers
    staleness: float | None  # mean over the pushes; None without a server
    waiting: float | None  # share of all workers' time
    thrown_away: float | None  # likewise


def figures_of(run: Path, *, metric: str, higher_is_better: bool, target: float) -> Figures:
    """Read the figures of a run from its files."""
    lines = list(_lines(run / "metrics.jsonl"))
    points = sorted([*_evaluations(lines), *_lines(run / "evaluations.jsonl")], key=lambda point: float(point["time"]))
    points = [point for point in points if point.get(metric) is not None]
    timeline = read_timeline(run)
    starts = [float(records["start"][0]) for records in timeline.values() if len(records)]
    start = min([*starts, *(float(line["time"]) for line in lines[:1])], default=0.0)
    good = [point for point in points if (point[metric] >= target if higher_is_better else point[metric] <= target)]
    staleness = [stale for line in lines if line["event"] == "commit" for stale in line["staleness"]]
    moved = [line["bytes"] for line in lines if line["event"] in ("step", "commit") and "bytes" in line]
    spent = dict.fromkeys(_SPENT, 0.0)
    for records in timeline.values():
        for kind in _SPENT:
            spent[kind] += float(records["duration"][records["kind"] == kind].sum())
    total = sum(spent.values())
    return Figures(
        seconds=max(0.0, float(good[0]["time"]) - start) if good else None,
        error=error_of(points[-1], metric, higher_is_better) if points else None,
        megabytes=sum(moved) / 1e6 if moved else None,
        staleness=sum(staleness) / len(staleness) if staleness else None,
        waiting=spent[Kind.WAITING] / total if total else None,
        thrown_away=spent[Kind.CANCELLED] / total if total else None,
    )


def error_of(point: Mapping[str, Any], metric: str, higher_is_better: bool) -> float | None:
    """The error of an evaluation: 1 - accuracy, a metric of which less is better, or else the loss."""
    if metric == "accuracy":
        return 1.0 - float(point[metric])
    return point.get("test_loss") if higher_is_better else float(point[metric])


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """The rows of the table: the figures of each policy, as means over the seeds that have ended."""
    found = {arm: _figures_of_arm(comparison, arm) for arm in comparison.options.arms}
    failures = {entry.policy: entry.error for entry in comparison.entries if entry.status == "failed"}
    return rows_from(found, failures)


def rows_from(found: Mapping[str, Sequence[Figures]], failures: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """The same from the figures of each policy's runs; ``failures`` are the errors of runs that have failed.

    A policy reaches the target if it does so with every seed. The speed-up over one worker is the ratio of the mean
    times to the target.
    """
    alone = _mean([each.seconds for each in found.get(ONE_WORKER, [])])
    rows = []
    for arm, figures in found.items():
        times = [each.seconds for each in figures]
        seconds = _mean(times)
        known = [time for time in times if time is not None]
        rows.append(
            {
                "policy": arm,
                "seconds": seconds,
                "half": interval(known).half if seconds is not None and len(known) > 1 else None,
                "speedup": alone / seconds if alone is not None and seconds else None,
                "error": _mean([each.error for each in figures]),
                "megabytes": _mean([each.megabytes for each in figures]),
                "staleness": _mean([each.staleness for each in figures]),
                "waiting": _mean([each.waiting for each in figures]),
                "thrown_away": _mean([each.thrown_away for each in figures]),
                "seeds": len(figures),
                "failure": failures.get(arm),
            }
        )
    return rows


def _figures_of_arm(comparison: Comparison, arm: str) -> list[Figures]:
    return [
        figures_of(
            comparison.run_of(entry),
            metric=comparison.metric,
            higher_is_better=comparison.higher_is_better,
            target=comparison.target,
        )
        for entry in comparison.entries
        if entry.policy == arm and entry.status == "done"
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if there are no values, or one is not known."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return read_metrics(file) if file.exists() else iter(())


def _evaluations(lines: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (line for line in lines if line["event"] == "evaluation")


def write_evaluations(run: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Write ``evaluations.jsonl`` aside, then rename it."""
    aside = run / ".evaluations.jsonl.partial"
    aside.write_text("".join(json.dumps({"event": "evaluation", **point}) + "\n" for point in points))
    aside.rename(run / "evaluations.jsonl")
