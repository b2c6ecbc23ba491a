"""What ``paceline study`` shows to a person: a progress bar on stderr, then the table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from paceline.studies.files import numeric_columns, shown_rows
from paceline.studies.study import StudyResult, Tell


@contextlib.contextmanager
def progress_bar() -> Iterator[Tell]:
    """Show a bar on stderr, if that is a terminal; gives the function that moves it."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield tell


def print_table(result: StudyResult) -> None:
    """Print the table and the notes of a result to stdout."""
    rows = shown_rows(result)
    table = Table(title=result.study.title, title_justify="left")
    needed = 1
    for place, right in enumerate(numeric_columns(result)):
        name = result.columns[place].name
        table.add_column(name, justify="right" if right else "left")
        needed += max(map(len, (name, *(row[place] for row in rows)))) + 3
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    # Numbers cut short would be wrong numbers: a table that does not fit is printed as wide as it has to be.
    Console(width=max(console.width, needed), highlight=False, markup=False).print(table)
    for note in result.notes:
        console.print(f"- {note}")
