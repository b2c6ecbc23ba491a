"""What the command shows to a person: a progress bar that goes away, and plain lines that stay."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from paceline.training import Progress


class ProgressLine:
    """Show how a training run gets on: steps, epoch, loss and examples per second."""

    def __init__(self, title: str, *, console: Console | None = None) -> None:
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("epoch {task.fields[epoch]}  loss {task.fields[loss]:.4f}"),
            TextColumn("{task.fields[rate]:,.0f} examples/s"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
        )
        self._title = title
        self._task: TaskID | None = None

    def __call__(self, progress: Progress) -> None:
        values: dict[str, Any] = {
            "epoch": progress.epoch,
            "loss": progress.loss,
            "rate": progress.examples_per_second,
        }
        if self._task is None:
            self._task = self._bar.add_task(self._title, total=progress.total_steps, **values)
        self._bar.update(self._task, completed=progress.step, **values)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
