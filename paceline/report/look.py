"""The look of drawn figures: that of the report's page in light colours (``page/look.css``)."""

from __future__ import annotations

from typing import Any, Literal

from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind people can distinguish; grey replaces their yellow, too pale for a line.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A8A8A")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")  # the next style when all colours are used

KIND_COLOURS = {
    "computing": "#0072B2",
    "waiting": "#CCD3DA",
    "exchanging": "#E69F00",
    "cancelled": "#D55E00",
    "dead": "#3B4147",
}
HATCHES = {"exchanging": "--", "cancelled": "////", "dead": "xxxx"}  # beside the colours

TEXT, MUTED, LINE = "#1C2024", "#57606A", "#DDE1E6"
DOTS_PER_INCH = 150

LOOK: Any = {
    "font.size": 9.5,
    "text.color": TEXT,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": LINE,
    "grid.linewidth": 0.8,
    "hatch.color": "#FFFFFF",
    "hatch.linewidth": 0.8,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "paceline",
}
"""For ``matplotlib.rc_context``; figures are made and saved inside it."""

TITLE: dict[str, Any] = {"fontsize": 12, "fontweight": "bold", "x": 0.01, "ha": "left"}


def open_frame(axes: Axes, *, grid: Literal["x", "y"] = "y") -> None:
    """Leave the axis at the bottom and pale lines across."""
    axes.grid(True, which="major", axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", which="both", length=0)
