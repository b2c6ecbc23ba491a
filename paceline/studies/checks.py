"""Checks of a study's options, for its ``__post_init__``; each raises a ``UsageError`` that names the option."""

from __future__ import annotations

import math

from paceline.errors import UsageError
from paceline.studies.study import Study


def check_counts(study: Study, *names: str) -> None:
    """Raise if one of these options is below 1; None is none of them."""
    for name in names:
        value = getattr(study, name)
        if value is not None and value < 1:
            raise UsageError(f"study {study.name!r}: {name} must be at least 1, got {value}")


def check_positive(study: Study, *names: str) -> None:
    """Raise if one of these options is not a finite number above 0."""
    for name in names:
        value = getattr(study, name)
        if not 0 < value < math.inf:
            raise UsageError(f"study {study.name!r}: {name} must be above 0 and finite, got {value:g}")


def check_different(study: Study, name: str, *, least: int | None = None) -> None:
    """Raise unless an option is different numbers, at least one: from ``least`` up, or if that is None above 0."""
    values = getattr(study, name)
    good = all(0 < value < math.inf if least is None else value >= least for value in values)
    if not values or not good or len(set(values)) < len(values):
        limit = "above 0" if least is None else f"from {least}"
        raise UsageError(f"study {study.name!r}: {name} must be different numbers {limit}, got {values}")
