"""Reads measured compute times from a file of numbers, or from the metrics of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UsageError

_WANTED = "wanted a file of numbers, one or more a line, or a run's directory or metrics.jsonl"


def read_times(path: Path) -> tuple[float, ...]:
    """Read compute times in seconds; a run gives the forward and backward time of every step of any worker."""
    file = path / "metrics.jsonl" if path.is_dir() else path
    try:
        times = tuple(_times_of_run(file) if file.suffix == ".jsonl" else _numbers(file))
    except OSError as error:
        raise UsageError(f"the times in {file} cannot be read: {error.strerror}; {_WANTED}") from None
    except ValueError as error:  # no number, no JSON, no UTF-8
        raise UsageError(f"{file} does not hold times: {error}; {_WANTED}") from None
    if not times:
        raise UsageError(f"{file} holds no times; {_WANTED}")
    for index, time in enumerate(times, start=1):
        if not 0 <= time < math.inf:
            raise UsageError(f"{file}: time {index} is {time:g}, but times are finite and not negative")
    return times


def _numbers(file: Path) -> Iterator[float]:
    for line in file.read_text(encoding="utf-8").splitlines():
        yield from map(float, line.replace(",", " ").split())


def _times_of_run(file: Path) -> Iterator[float]:
    from paceline.record.metrics import read_metrics  # imports torch, which takes seconds

    for event in read_metrics(file):
        if isinstance(event, dict) and event.get("event") == "step" and "seconds" in event:
            try:
                yield event["seconds"]["forward"] + event["seconds"]["backward"]
            except (TypeError, KeyError):
                raise ValueError(f"step {event.get('step')} has no forward and backward time") from None
