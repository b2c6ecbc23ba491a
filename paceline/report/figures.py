"""Draws the figures of a report into PNG and SVG files, with the look of its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paceline.errors import PacelineError
from paceline.record.timeline import Kind, Records
from paceline.report import plots
from paceline.report.events import Floats
from paceline.report.groups import Group, Row, curves_of, loss_curve, share_of, summarise, time_label
from paceline.report.look import COLOURS, DOTS_PER_INCH, HATCHES, KIND_COLOURS, LOOK, TITLE, open_frame
from paceline.report.material import Material
from paceline.report.runs import KINDS, RunData
from paceline.report.series import Axis, Series
from paceline.report.spans import MIXTURE, Spans, merge_to
from paceline.report.view import error_axis

FORMATS = ("png", "svg")
_WIDTH = 7.2  # inches
_MOST_SPANS = 4000  # of a drawn timeline
_MOST_WORKERS = 32
_READABLE = 120  # spans of a worker that can be told apart


def write_figures(material: Material, folder: Path) -> list[Path]:
    """Draw all figures that the runs have numbers for; return the files."""
    groups, rows = material.groups, summarise(material.groups)
    written: list[Path] = []

    def files(name: str) -> list[Path]:
        made = [folder / f"{name}.{kind}" for kind in FORMATS]
        written.extend(made)
        return made

    try:
        folder.mkdir(parents=True, exist_ok=True)
        _draw_curves(groups, files)
        with matplotlib.rc_context(LOOK):
            for name, figure in _other_figures(groups, rows):
                for file in files(name):
                    figure.savefig(file, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise PacelineError(f"the figures could not be written to {folder}: {error.strerror}") from error
    return written


def _draw_curves(groups: Sequence[Group], files: Callable[[str], list[Path]]) -> None:
    runs = [run for each in groups for run in each.runs]
    axis, factor = _error_axis(runs)
    time = f"{time_label(runs)} (s)"
    kinds: list[tuple[str, str, str, Callable[[RunData], tuple[Floats, Floats]]]] = [
        ("time", "Error against time", time, lambda run: (run.points.seconds, factor * run.points.error)),
        (
            "examples",
            "Error against examples",
            "examples of all workers",
            lambda run: (run.points.examples, factor * run.points.error),
        ),
        (
            "bytes",
            "Error against bytes",
            "bytes of all workers (MB)",
            lambda run: (run.points.bytes / 1e6, factor * run.points.error),
        ),
    ]
    for name, title, x_label, read in kinds:
        if series := _series(groups, read):
            plots.draw(title, series, Axis(label=x_label), axis, *files(f"error-against-{name}"))
    if series := _series(groups, loss_curve):
        axes = Axis(label=time), Axis(label="training loss")
        plots.draw("Training loss against time", series, *axes, *files("training-loss"))


def _error_axis(runs: Sequence[RunData]) -> tuple[Axis, float]:
    """The axis of errors, and what errors are multiplied by: those that are shares are shown in percent."""
    told = error_axis(runs)
    factor = 100.0 if told["percent"] else 1.0
    is_drawn = told["target"] > 0 if told["percent"] else math.isfinite(told["target"])  # a log axis has no 0
    mark = (factor * told["target"], told["target_label"]) if is_drawn else None
    if told["percent"]:
        return Axis(label=f"{told['label']} (%)", scale="log", mark=mark), factor
    return Axis(label=told["label"], mark=mark), factor


def _series(groups: Sequence[Group], read: Callable[[RunData], tuple[Floats, Floats]]) -> list[Series]:
    return [
        Series(
            label=each.label,
            panel="",
            x=tuple(curve.x),
            y=tuple(curve.mean),
            band=(tuple(curve.low), tuple(curve.high)) if len(each.runs) > 1 else None,
            style=number,
        )
        for number, each, curve in curves_of(groups, read)
    ]


def _other_figures(groups: Sequence[Group], rows: Sequence[Row]) -> list[tuple[str, Figure]]:
    found = [
        ("throughput", _bars("Throughput", "examples per second", rows, [row.examples_per_second for row in rows])),
        ("efficiency", _bars("Scaling efficiency", "of one worker times workers", rows, [r.efficiency for r in rows])),
        ("time", _breakdown(groups)),
        ("staleness", _staleness(groups)),
    ]
    found += [
        (f"timeline-{number}", _timeline(each.label, run))
        for number, each in enumerate(groups)
        for run in each.runs[:1]
        if run.timeline
    ]
    return [(name, figure) for name, figure in found if figure is not None]


def _rows_figure(title: str, labels: Sequence[str]) -> tuple[Figure, Axes]:
    """A figure with a row for each label, from top to bottom."""
    figure = Figure(figsize=(_WIDTH, 1.3 + 0.34 * len(labels)), layout="constrained")
    axes = figure.subplots()
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    open_frame(axes, grid="x")
    figure.suptitle(title, **TITLE)
    return figure, axes


def _bars(title: str, label: str, rows: Sequence[Row], values: Sequence[float]) -> Figure | None:
    known = [(number, row.label, value) for number, (row, value) in enumerate(zip(rows, values, strict=True))]
    known = [(number, name, value) for number, name, value in known if math.isfinite(value)]
    if not known:
        return None
    figure, axes = _rows_figure(title, [name for _, name, _ in known])
    colours = [COLOURS[number % len(COLOURS)] for number, _, _ in known]
    bars = axes.barh(range(len(known)), [value for _, _, value in known], color=colours, height=0.6)
    percent = title == "Scaling efficiency"
    texts = [f"{value:.0%}" if percent else f"{value:,.0f}" for _, _, value in known]
    axes.bar_label(bars, texts, padding=4, fontsize=9)
    axes.margins(x=0.12)
    if percent:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.axvline(1.0, color=LOOK["axes.edgecolor"], linestyle="--", linewidth=1)
    axes.set_xlabel(label)
    return figure


def _breakdown(groups: Sequence[Group]) -> Figure | None:
    known = [(each.label, [run for run in each.runs if run.seconds_by_kind]) for each in groups]
    known = [(label, runs) for label, runs in known if runs]
    if not known:
        return None
    figure, axes = _rows_figure("Where the workers' time goes", [label for label, _ in known])
    shown = []
    start = np.zeros(len(known))
    for kind in KINDS:
        shares = np.array([np.nanmean([share_of(run, kind) for run in runs]) for _, runs in known])
        if not (shares > 0).any():
            continue
        look: Any = {"color": KIND_COLOURS[kind], "hatch": HATCHES.get(kind), "edgecolor": "white", "linewidth": 0}
        axes.barh(range(len(known)), shares, left=start, height=0.6, **look)
        start += np.nan_to_num(shares)
        shown.append(kind)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("of the living workers' time")
    _kind_legend(figure, shown)
    return figure


def _kind_legend(figure: Figure, kinds: Sequence[str]) -> None:
    patches = [
        Patch(facecolor=KIND_COLOURS[kind], hatch=HATCHES.get(kind), edgecolor="white", linewidth=0, label=kind)
        for kind in kinds
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


def _staleness(groups: Sequence[Group]) -> Figure | None:
    known = [(number, each) for number, each in enumerate(groups) if any(len(run.staleness) for run in each.runs)]
    if not known:
        return None
    columns = min(3, len(known))
    lines = math.ceil(len(known) / columns)
    figure = Figure(figsize=(_WIDTH, 0.7 + 1.9 * lines), layout="constrained")
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (number, each) in zip(grid, known, strict=False):
        counts = np.zeros(max(len(run.staleness) for run in each.runs))
        for run in each.runs:
            counts[: len(run.staleness)] += run.staleness
        axes.bar(np.arange(len(counts)), counts / counts.sum(), width=0.84, color=COLOURS[number % len(COLOURS)])
        axes.set_title(each.label, fontsize=9.5, loc="left")
        axes.set_xlabel("staleness (commits)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        open_frame(axes)
    for axes in grid[len(known) :]:
        axes.set_visible(False)
    figure.suptitle("Pushes by staleness", **TITLE)
    return figure


def _timeline(label: str, run: RunData) -> Figure:
    shown = dict(list(run.timeline.items())[:_MOST_WORKERS])
    window = _readable_window(shown)
    if window is not None:
        shown = {rank: _inside(spans, *window) for rank, spans in shown.items()}
        label += f", {window[0]:.3g} s to {window[1]:.3g} s of {run.seconds:.3g} s"
    figure, axes = _rows_figure(f"Timeline: {label}", [f"worker {rank}" for rank in shown])
    kinds: set[str] = set()
    for row, spans in enumerate(merge_to(shown, _MOST_SPANS).values()):
        kinds |= _draw_spans(axes, row, spans)
    axes.set_xlabel(f"{time_label([run])} (s)")
    axes.set_xlim(*(window or (0.0,)))
    axes.grid(False)
    _kind_legend(figure, [kind for kind in KINDS if kind in kinds])
    return figure


def _readable_window(timeline: Mapping[int, Records]) -> tuple[float, float] | None:
    """From and to: a part in the middle with few enough spans to tell them apart; None if that is all, or one died."""
    most = max(map(len, timeline.values()), default=0)
    if most <= _READABLE or any((spans["kind"] == Kind.DEAD).any() for spans in timeline.values()):
        return None
    length = max(float((spans["start"] + spans["duration"])[-1]) for spans in timeline.values())
    width = length * _READABLE / most
    return (length - width) / 2, (length + width) / 2


def _inside(spans: Records, start: float, end: float) -> Records:
    found: Records = spans[(spans["start"] < end) & (spans["start"] + spans["duration"] > start)]
    return found


def _draw_spans(axes: Axes, row: int, spans: Spans) -> set[str]:
    """Draw a worker's spans; a mixture has the shares of its kinds above each other."""
    found = set()
    mixed = spans.kind == MIXTURE
    below = np.full(len(spans.counts), row + 0.36)  # rows go down
    for part, (name, kind) in enumerate(KINDS.items()):
        look: Any = {"facecolor": KIND_COLOURS[name], "linewidth": 0}
        chosen = spans.kind == kind
        if chosen.any():
            found.add(name)
            places = list(zip(spans.start[chosen], spans.duration[chosen], strict=True))
            hatch: Any = {"hatch": HATCHES[name], "edgecolor": "white"} if name in ("cancelled", "dead") else {}
            axes.broken_barh(places, (row - 0.36, 0.72), **look, **hatch)
        if part < spans.shares.shape[1] and len(below) and (spans.shares[:, part] > 0).any():
            found.add(name)
            height = 0.72 * spans.shares[:, part]
            axes.bar(spans.start[mixed], -height, spans.duration[mixed], bottom=below, align="edge", **look)
            below = below - height
    return found
