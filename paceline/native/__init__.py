"""The one compiled module: reductions and same-host collectives on raw memory.

It is optional. Where no compiler was to be had when the package was installed, ``available()`` is false and
``reason()`` says why; everything that needs it then has another way.
"""

from __future__ import annotations

import importlib

__all__ = ["available", "reason"]


def _look() -> str:
    try:
        importlib.import_module("paceline.native._core")
    except ImportError as error:
        return f"the compiled module is missing ({error}); install Paceline with a C++20 compiler at hand, on Linux"
    return ""


_reason = _look()


def available() -> bool:
    """Whether the compiled module can be used."""
    return not _reason


def reason() -> str:
    """Why it cannot; empty if it can."""
    return _reason
