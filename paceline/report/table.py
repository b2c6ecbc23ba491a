"""Prints the plain tables of benchmarks and comparisons, without importing torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.report.groups import Row

_SUMMARY = {
    "label": "policy",
    "seconds_to_target": "s to target",
    "speed_up": "speed-up",
    "final_error": "final error",
    "megabytes": "MB",
    "mean_staleness": "staleness",
    "waiting": "waiting",
    "thrown_away": "thrown away",
    "examples_per_second": "examples/s",
}
_FORMATS = ("", ".3g", ".2f", ".4f", ".1f", ".2f", ".0%", ".0%", ",.0f")


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print one line per row; ``columns`` maps keys to formats, such as ``".2f"``; None is printed as a dash."""
    lines = [list(columns)]
    lines += [["-" if row[key] is None else format(row[key], spec) for key, spec in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, columns.values(), widths, strict=True)
        print("  ".join(f"{cell:{'>' if spec else '<'}{width}}" for cell, spec, width in cells))


def print_summary(rows: Sequence[Row]) -> None:
    """Print the summary of runs, as the report's page shows it; what is not known is a dash."""
    shown = []
    for row in rows:
        values = dataclasses.asdict(row)
        known = {name: None if isinstance(each, float) and math.isnan(each) else each for name, each in values.items()}
        if row.seeds > 1 and known["seconds_to_target"] is not None:
            known["seconds_to_target"] = _with_spread(row.seconds_to_target, row.seconds_spread)
        shown.append({title: known[name] for name, title in _SUMMARY.items()})
    several = any(row.seeds > 1 for row in rows)
    formats = ["", ">" if several else ".3g", *_FORMATS[2:]]
    print_table(shown, dict(zip(_SUMMARY.values(), formats, strict=True)))


def _with_spread(mean: float, spread: float) -> str:
    """Both with as many decimals as give the mean three digits."""
    decimals = 2 - math.floor(math.log10(abs(mean))) if mean else 2
    decimals = min(9, max(0, decimals))
    return f"{mean:,.{decimals}f} +- {spread:,.{decimals}f}"
