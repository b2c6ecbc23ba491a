"""Draws curves into a PNG or SVG file."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis as DrawnAxis
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from paceline.report.look import COLOURS, DOTS_PER_INCH, LINES, LOOK, MARKERS, MUTED, TITLE, open_frame
from paceline.report.series import Axis, Series

_PANEL_INCHES = (4.0, 3.6)
_FEW = 8  # labels that fit under a panel


def draw(title: str, curves: Sequence[Series], x_axis: Axis, y_axis: Axis, *files: Path) -> None:
    """Draw the curves into files, of the formats that their names end in, with panels side by side."""
    with matplotlib.rc_context(LOOK):
        figure = _draw(title, curves, x_axis, y_axis)
        for file in files:
            figure.savefig(file, dpi=DOTS_PER_INCH)


def _draw(title: str, curves: Sequence[Series], x_axis: Axis, y_axis: Axis) -> Figure:
    panels = list(dict.fromkeys(series.panel for series in curves))
    labels = list(dict.fromkeys(series.label for series in curves))
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(max(1.6, len(panels)) * width, height + 0.9), layout="constrained")
    row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for panel, axes in zip(panels, row, strict=True):
        drawn = [series for series in curves if series.panel == panel]
        for series in drawn:
            _draw_series(axes, series, labels.index(series.label) if series.style is None else series.style)
        if y_axis.mark is not None:
            _draw_mark(axes, *y_axis.mark)
        _finish_panel(axes, panel, x_axis, y_axis)
        _label_few(axes, x_axis, {x for series in drawn for x in series.x})
    row[0].set_ylabel(y_axis.label)
    figure.suptitle(title, **TITLE)
    handles = {line.get_label(): line for axes in row for line in axes.get_lines()}  # some are no series
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=_legend_columns(labels, figure.get_figwidth()),
        frameon=False,
    )
    return figure


def _legend_columns(labels: list[str], inches: float) -> int:
    """The number of columns that fit, at about 12.5 letters an inch and 6 for the line before each label."""
    return max(1, min(len(labels), 8, int(12.5 * inches / (6 + max(map(len, labels))))))


def _draw_series(axes: Axes, series: Series, number: int) -> None:
    if series.band is not None:
        axes.fill_between(series.x, *series.band, color=COLOURS[number % len(COLOURS)], alpha=0.16, linewidth=0)
    axes.plot(
        series.x,
        series.y,
        label=series.label,
        color=COLOURS[number % len(COLOURS)],
        linestyle=LINES[number // len(COLOURS) % len(LINES)],
        linewidth=1.6,
        marker=MARKERS[number % len(MARKERS)],
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        # Few markers, at different places on every curve, so that overlapping curves can be distinguished.
        markevery=(number % 8, 8) if len(series.x) > 16 else 1,
    )


def _draw_mark(axes: Axes, value: float, label: str) -> None:
    axes.axhline(value, color=MUTED, linestyle="--", linewidth=1, zorder=1)
    axes.annotate(
        label,
        (1, value),
        (0, 3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
        color=MUTED,
        path_effects=[withStroke(linewidth=3, foreground="white")],
    )


def _finish_panel(axes: Axes, title: str, x_axis: Axis, y_axis: Axis) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x_axis.label)
    if x_axis.scale == "log":
        axes.set_xscale("log", nonpositive="mask")
    if y_axis.scale == "log":
        axes.set_yscale("log", nonpositive="mask")
    for axis, wanted in ((axes.xaxis, x_axis), (axes.yaxis, y_axis)):
        if wanted.scale == "log":
            _label_decades(axis)
        else:
            axis.set_major_formatter(FuncFormatter(_plain))
    open_frame(axes)


def _label_decades(axis: DrawnAxis) -> None:
    """Label 1, 2 and 5 of every decade in plain numbers: an axis from 2 to 8 would otherwise have no label."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _label_few(axes: Axes, x_axis: Axis, values: Collection[float]) -> None:
    """Label the places of a log axis that have points, if they are few: 1, 4 and 16 workers, not 1, 2, 5 and 10."""
    if x_axis.scale == "log" and len(values) <= _FEW:
        axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
        axes.xaxis.set_minor_locator(NullLocator())


def _plain(value: float, _place: int | None = None) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
