"""Progress bars of the command, which vanish at the end, and plain lines, which stay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from paceline.training.train import Progress

WIDE = 110  # columns of a terminal that shows the breakdown of the time
SHORT = {"forward": "fwd", "backward": "bwd", "communication": "comm", "waited": "wait", "optimizer": "opt"}


def _title_column() -> TextColumn:
    return TextColumn("{task.description}", markup=False)  # it may be the name of a user's file


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr, if that is a terminal; yields the function that moves it."""
    console = Console(stderr=True)
    columns = (_title_column(), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def tell(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        yield tell


class ProgressLine:
    """Show the progress of a training run: steps, loss, examples per second, and the breakdown of the time."""

    def __init__(self, title: str, *, unit: str = "examples", console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns: list[ProgressColumn] = [
            _title_column(),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn(f"{{task.fields[rate]:,.0f}} {unit}/s"),
        ]
        if console.width >= WIDE:
            columns += [TextColumn("{task.fields[shares]}"), TimeRemainingColumn()]
        self._bar = Bar(*columns, console=console)
        self._title = title
        self._task: TaskID | None = None
        self._seconds: dict[str, float] = {}

    def __call__(self, progress: Progress) -> None:
        values: dict[str, Any] = {
            "loss": f"{progress.loss:.4f}" if abs(progress.loss) < 1e6 else f"{progress.loss:.3g}",
            "rate": progress.examples_per_second,
            "shares": self._shares(progress.timing),
        }
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=progress.total_steps, **values)
        self._bar.update(self._task, completed=progress.step, **values)

    def _shares(self, timing: dict[str, float]) -> str:
        """The breakdown of the time, smoothed over about twenty updates: fwd 31% bwd 40% ..."""
        for part, seconds in timing.items():
            self._seconds[part] = 0.95 * self._seconds.get(part, seconds) + 0.05 * seconds
        total = sum(self._seconds.values())
        shares = {part: seconds / total for part, seconds in self._seconds.items()} if total else {}
        return " ".join(f"{SHORT[part]} {share:.0%}" for part, share in shares.items() if share >= 0.005)

    def __enter__(self) -> Self:
        return self  # the bar appears with the first update, so that an earlier error has its own line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._bar.stop()
