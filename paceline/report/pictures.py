"""Draws pictures side by side into a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from paceline.report.look import DOTS_PER_INCH, LOOK


@dataclass(frozen=True)
class Panel:
    """A picture with a title: rows of grey values or of colours."""

    title: str
    pixels: Any


def draw_pictures(panels: Sequence[Panel], file: Path) -> None:
    """Draw the pictures in one row."""
    height, width = panels[0].pixels.shape[:2]
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(4 * len(panels), 4 * height / width + 0.4), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            axes.imshow(panel.pixels, cmap="gray", interpolation="nearest")
            axes.set_title(panel.title, fontsize=10, loc="left")
            axes.set_axis_off()
        figure.savefig(file, dpi=DOTS_PER_INCH, format="png")
