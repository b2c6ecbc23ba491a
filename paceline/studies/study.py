"""The base of every study: a frozen value whose fields are its options, and whose result is a table and a plot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from paceline.interrupts import Interrupts
from paceline.report.pictures import Panel
from paceline.report.series import Axis, Series
from paceline.spec import check_types, to_spec

Tell: TypeAlias = Callable[[str, int, int], None]
"""Called with a text, the amount done and the total."""

Cell: TypeAlias = str | int | float | None
"""A value of the table; None if there is none."""


def option(default: Any, help: str) -> Any:
    """Declare a field of a study as an option of its command; ``help`` is shown there."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class StudyContext:
    """Arguments of a study that are not its options."""

    data: Path | None = None  # where the data sets lie
    seed: int = 0
    tell: Tell = lambda text, done, total: None
    interrupts: Interrupts = field(default_factory=Interrupts)


@dataclass(frozen=True, kw_only=True)
class Study(ABC):
    """A reproducible measurement; a subclass is a frozen dataclass and one line in ``STUDIES``.

    Its fields are declared with ``option(default, help)`` and may be int, float, str, bool, a tuple of one of
    these, or None where that means "decide yourself".
    """

    name: ClassVar[str]  # as users type it, with hyphens
    title: ClassVar[str]  # one line, for the list of studies and over the plot

    def __post_init__(self) -> None:
        check_types("study", self.name, self)

    def __str__(self) -> str:
        """The text form, as in ``optimizers(steps=500)``."""
        return to_spec(self.name, self)

    @abstractmethod
    def run(self, context: StudyContext) -> StudyResult:
        """Measure; wrong options raise a ``UsageError`` before the first measurement."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of the table; ``decimals`` is for its floats."""

    name: str
    decimals: int = 2

    def show(self, cell: Cell) -> str:
        """A cell of this column as text."""
        if cell is None:
            return "-"
        return f"{cell:,.{self.decimals}f}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """What a study measured: a table, the curves of a plot, and notes on sources and limits."""

    study: Study
    seed: int
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    x_axis: Axis
    y_axis: Axis
    series: tuple[Series, ...]
    notes: tuple[str, ...] = ()
    records: tuple[dict[str, Any], ...] = ()  # all measurements, for result.json
    missing: str | None = None  # what is missing, such as a target that was not reached
    interrupted: bool = False  # by the user, so the result may be incomplete
    pictures: Mapping[str, tuple[Panel, ...]] = field(default_factory=dict)  # by the name of their file

    def as_dict(self) -> dict[str, Any]:
        """Everything as lists, dicts and plain values that fit JSON."""
        values = asdict(self)
        del values["study"], values["pictures"]
        return {
            "study": self.study.name,
            "title": self.study.title,
            "options": asdict(self.study),
            **values,
        }
