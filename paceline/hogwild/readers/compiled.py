"""The compiled parsers, or an error that says why there are none."""

from __future__ import annotations

import os
from types import ModuleType

from paceline.errors import UsageError


def parsers() -> ModuleType:
    """The compiled module; it is missing where no compiler was to be had at installation."""
    try:
        from paceline.native import _readers
    except ImportError as error:
        raise UsageError(
            f"large text files are read by a compiled module, which is missing ({error}); "
            "install Paceline with a C++20 compiler at hand, on Linux"
        ) from error
    return _readers


def cores() -> int:
    """How many threads may run at once here."""
    return len(os.sched_getaffinity(0))
