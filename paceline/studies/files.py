"""Write a study's result: ``result.json`` for machines, ``table.md`` and ``plot.png`` for people."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from paceline.errors import PacelineError, UsageError
from paceline.report.pictures import draw_pictures
from paceline.report.plots import draw
from paceline.studies.study import StudyResult


def check_folder(folder: Path) -> None:
    """Raise if ``write_result`` could not make the folder or write to it; call it before measuring."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise UsageError(
            f"the results cannot be written to {folder}: {existing} is not a directory that may be written to; "
            "name another one with --out DIR"
        )


def write_result(result: StudyResult, folder: Path) -> None:
    """Write the three files into ``folder``, each atomically; older ones are replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as aside:
            _write_files(result, Path(aside))
            for file in sorted(Path(aside).iterdir()):
                file.replace(folder / file.name)
    except OSError as error:
        raise PacelineError(f"the results could not be written to {folder}: {error}") from error


def _write_files(result: StudyResult, folder: Path) -> None:
    (folder / "result.json").write_text(as_json(result), encoding="utf-8")
    (folder / "table.md").write_text(as_markdown(result), encoding="utf-8")
    draw(result.study.title, result.series, result.x_axis, result.y_axis, folder / "plot.png")
    for name, panels in result.pictures.items():
        draw_pictures(panels, folder / f"{name}.png")


def as_json(result: StudyResult) -> str:
    """Write a result as the text of ``result.json``."""
    return json.dumps(result.as_dict(), indent=1, allow_nan=False) + "\n"


def as_markdown(result: StudyResult) -> str:
    """Write a result's table and notes as a page of Markdown."""
    numeric = numeric_columns(result)
    lines = [
        f"# {result.study.title}",
        "",
        _markdown_row([column.name for column in result.columns]),
        _markdown_row(["---:" if right else "---" for right in numeric]),
        *(_markdown_row(cells) for cells in shown_rows(result)),
    ]
    if result.notes:
        lines += ["", *(f"- {note}" for note in result.notes)]
    return "\n".join(lines) + "\n"


def shown_rows(result: StudyResult) -> list[list[str]]:
    """All cells of the table as text."""
    return [[column.show(cell) for column, cell in zip(result.columns, row, strict=True)] for row in result.rows]


def numeric_columns(result: StudyResult) -> list[bool]:
    """Whether each column holds numbers, which are aligned to the right."""
    return [not any(isinstance(row[existing], str) for row in result.rows) for existing in range(len(result.columns))]


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
