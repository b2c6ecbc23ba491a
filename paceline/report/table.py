"""Prints the plain tables of benchmarks, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> None:
    """Print one line per row; ``columns`` maps keys to formats, such as ``".2f"``; None is printed as a dash."""
    lines = [list(columns)]
    lines += [["-" if row[key] is None else format(row[key], spec) for key, spec in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, columns.values(), widths, strict=True)
        print("  ".join(f"{cell:{'>' if spec else '<'}{width}}" for cell, spec, width in cells))
