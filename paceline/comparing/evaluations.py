"""Writes the evaluations of a run that has ended, beside its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_evaluations(run: Path, points: Sequence[Mapping[str, Any]]) -> None:
    """Write ``evaluations.jsonl`` aside, then rename it."""
    aside = run / ".evaluations.jsonl.partial"
    aside.write_text("".join(json.dumps({"event": "evaluation", **point}) + "\n" for point in points))
    aside.rename(run / "evaluations.jsonl")
