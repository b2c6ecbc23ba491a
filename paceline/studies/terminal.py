"""Prints the table of ``paceline study``."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from paceline.studies.files import numeric_columns, shown_rows
from paceline.studies.study import StudyResult


def print_table(result: StudyResult) -> None:
    """Print the table and the notes of a result to stdout."""
    rows = shown_rows(result)
    table = Table(title=result.study.title, title_justify="left")
    needed = 1
    for index, right in enumerate(numeric_columns(result)):
        name = result.columns[index].name
        table.add_column(name, justify="right" if right else "left")
        needed += max(map(len, (name, *(row[index] for row in rows)))) + 3
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    # A table wider than the terminal is printed in full width: numbers must not be cut.
    Console(width=max(console.width, needed), highlight=False, markup=False).print(table)
    for note in result.notes:
        console.print(f"- {note}")
