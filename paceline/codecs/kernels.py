"""The compiled loops of the codecs, or None: then torch operations make the same bytes."""

from __future__ import annotations

import importlib
from typing import Any


def _load() -> Any:
    try:
        return importlib.import_module("paceline.native._codecs")
    except ImportError:
        return None


native: Any = _load()
