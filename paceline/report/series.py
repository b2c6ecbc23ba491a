"""The curves and axes of a plot, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis of the plot: its label and scale."""

    label: str
    scale: Literal["linear", "log"] = "linear"
    mark: tuple[float, str] | None = None  # a dashed line across the plot there, and what it is


@dataclass(frozen=True, kw_only=True)
class Series:
    """One curve of the plot. A label has the same colour in every panel; on a log scale zeros are left out."""

    label: str
    panel: str  # the title of the panel it is drawn in
    x: tuple[float, ...]
    y: tuple[float, ...]
    band: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # the smallest and the largest at each place
    style: int | None = None  # number of its colour and marker; by default that of its label among all
