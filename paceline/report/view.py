"""Makes the data of a page from runs: plain numbers and texts, small enough to be inside it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paceline.report.events import Floats
from paceline.report.groups import Group, curves_of, loss_curve, share_of, summarise, time_label
from paceline.report.material import Material
from paceline.report.runs import KINDS, Change, RunData
from paceline.report.spans import MOST_SPANS, pack
from paceline.version import __version__

MOST_CHANGES = 500  # births and deaths that are listed


def view_of(material: Material, *, most_spans: int = MOST_SPANS) -> dict[str, Any]:
    """The data of a report, as ``report.js`` wants it; numbers that are not known are None."""
    groups = material.groups
    runs = material.runs
    view: dict[str, Any] = finite(
        {
            "paceline": __version__,
            "title": material.title,
            "sentence": material.sentence,
            "failures": list(material.failures),
            "notes": _notes(material),
            "error": error_axis(runs),
            "time": time_label(runs),
            "summary": [dataclasses.asdict(row) for row in summarise(groups)],
            "curves": {
                "time": _curves(groups, lambda run: (run.points.seconds, run.points.error)),
                "examples": _curves(groups, lambda run: (run.points.examples, run.points.error)),
                "bytes": _curves(groups, lambda run: (run.points.bytes, run.points.error)),
                "loss": _curves(groups, loss_curve),
            },
            "staleness": _staleness(groups),
            "breakdown": _breakdown(groups),
            "timelines": timelines(groups, most_spans),
            "changes": _changes(groups),
            "runs": [_describe(run, each.label) for each in groups for run in each.runs],
            "command": material.comparison.command if material.comparison else None,
        }
    )
    return view


def finite(value: Any) -> Any:
    """The value for JSON: None in place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {str(name): finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _notes(material: Material) -> list[str]:
    found = [] if material.status is None else [material.status]
    problems = {(run.problem, run.error_is) for run in material.runs if len(run.points.error)}
    if len(problems) > 1:
        found.append("The runs have different problems or metrics: their errors cannot be compared.")
    told: dict[str, list[str]] = {}
    for run in material.runs:
        for note in run.notes:
            told.setdefault(note, []).append(run.name)
    for note, names in told.items():
        some = len(names) < len(material.runs)
        found.append(f"{_few(names)}: {note}" if some else note)
    return found


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def error_axis(runs: Sequence[RunData]) -> dict[str, Any]:
    """What the axis of errors shows: its label, whether errors are shares, and the target if all have the same."""
    kinds = list(dict.fromkeys(run.error_is for run in runs if len(run.points.error))) or ["error"]
    targets = {run.target_error for run in runs if math.isfinite(run.target_error)}
    target = targets.pop() if len(targets) == 1 else math.nan
    wanted = next((run for run in runs if run.target is not None), None)
    return {
        "label": " or ".join(kinds),
        "percent": kinds == ["test error"],
        "target": target,
        "target_label": f"target: {wanted.metric} {wanted.target:g}" if wanted is not None else "target",
    }


def _curves(groups: Sequence[Group], read: Callable[[RunData], tuple[Floats, Floats]]) -> list[dict[str, Any]]:
    return [
        {
            "label": each.label,
            "style": number,
            "x": _rounded(curve.x),
            "y": _rounded(curve.mean),
            **({"low": _rounded(curve.low), "high": _rounded(curve.high)} if len(each.runs) > 1 else {}),
        }
        for number, each, curve in curves_of(groups, read)
    ]


def _rounded(values: Floats) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _staleness(groups: Sequence[Group]) -> list[dict[str, Any]]:
    found = []
    for number, each in enumerate(groups):
        counts = np.zeros(max(len(run.staleness) for run in each.runs))
        for run in each.runs:
            counts[: len(run.staleness)] += run.staleness
        if counts.sum():
            mean = float(counts @ np.arange(len(counts)) / counts.sum())
            found.append({"label": each.label, "style": number, "counts": counts.tolist(), "mean": mean})
    return found


def _breakdown(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The mean share of the living workers' time by kind; of ``dead``, its ratio to that time."""
    found = []
    for each in groups:
        known = [run for run in each.runs if run.seconds_by_kind]
        shares = {kind: float(np.mean([share_of(run, kind) for run in known])) for kind in KINDS} if known else {}
        if shares and math.isfinite(shares["computing"]):
            seconds = {kind: float(np.mean([run.seconds_by_kind.get(kind, 0.0) for run in known])) for kind in KINDS}
            found.append({"label": each.label, "shares": shares, "seconds": seconds})
    return found


def timelines(groups: Sequence[Group], most: int = MOST_SPANS) -> list[dict[str, Any]]:
    """The timelines of each group's first run, and of the others as long as no span must be merged for them."""
    first = [(each, run) for each in groups for run in [_first_with_timeline(each)] if run is not None]
    room = most - sum(_num_spans(run) for _, run in first)
    chosen = {id(run) for _, run in first}
    for each in groups:
        for run in each.runs:
            if id(run) not in chosen and run.timeline and _num_spans(run) <= room:
                chosen.add(id(run))
                room -= _num_spans(run)
    shown = [(each, run) for each in groups for run in each.runs if id(run) in chosen]
    share = most // max(1, len(first)) if room < 0 else most
    return [
        {"label": each.label, "seed": run.seed, "name": run.name, "data": pack(run.timeline, share)}
        for each, run in shown
    ]


def _first_with_timeline(group: Group) -> RunData | None:
    return next((run for run in group.runs if run.timeline), None)


def _num_spans(run: RunData) -> int:
    return sum(map(len, run.timeline.values()))


def _changes(groups: Sequence[Group]) -> dict[str, Any]:
    """Births and deaths, without those of the start and the end of a run."""
    rows = [
        {"label": each.label, "seed": run.seed, **dataclasses.asdict(change)}
        for each in groups
        for run in each.runs
        for change in run.changes
        if _is_notable(change, run.seconds)
    ]
    return {"rows": rows[:MOST_CHANGES], "more": max(0, len(rows) - MOST_CHANGES)}


def _is_notable(change: Change, length: float) -> bool:
    """Whether a worker did not come with the others, or not leave with them."""
    if change.what == "joined":
        return bool(change.incarnation) or change.seconds > 0.1 * length
    return change.what == "died" or change.seconds < 0.9 * length


def _describe(run: RunData, label: str) -> dict[str, Any]:
    return {
        "label": label,
        "name": run.name,
        "path": str(run.path),
        "seed": run.seed,
        "workers": run.workers,
        "seconds": run.seconds,
        "steps": run.progress.steps[-1] if len(run.progress.steps) else None,
        "being_written": run.ended is None,
        "command": run.command,
        "config": json.dumps(finite(dict(run.config)), indent=2, ensure_ascii=False),
        "notes": list(run.notes),
    }
