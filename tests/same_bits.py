"""Equality to the last bit of nested states, with the place of the first difference."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.record.metrics import read_metrics


def difference(left: Any, right: Any, path: str = "state") -> str | None:
    """Say where two states differ in type, shape or any bit, or give ``None``; NaN equals NaN of the same bits."""
    if kind(left) != kind(right):
        return f"{path}: {kind(left)} against {kind(right)}"
    if isinstance(left, Mapping):
        if [*map(repr, left)] != [*map(repr, right)]:
            return f"{path}: keys {list(left)} against {list(right)}"
        pairs = [(left[a], right[b], f"{path}.{a}") for a, b in zip(left, right, strict=True)]
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            return f"{path}: {len(left)} items against {len(right)}"
        pairs = [(a, b, f"{path}.{place}") for place, (a, b) in enumerate(zip(left, right, strict=True))]
    else:
        return None if content(left) == content(right) else f"{path}: {brief(left)} against {brief(right)}"
    return next((found for a, b, at in pairs if (found := difference(a, b, at)) is not None), None)


def kind(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return type(value).__name__.replace("Parameter", "Tensor"), value.dtype, tuple(value.shape)
    if isinstance(value, Counter):
        return Counter
    return dict if isinstance(value, Mapping) else type(value)


def content(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        return bytes(plain.reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, np.ndarray | np.generic):
        return value.tobytes()
    return repr(value) if isinstance(value, float) else value  # tells 0.0 from -0.0


def brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) < 80 else f"{text[:80]}..."


def assert_same(left: Any, right: Any) -> None:
    found = difference(left, right)
    assert found is None, found


def metrics_of(run: Path) -> list[str]:
    """The lines of a run's metrics without what clocks say; as text, for NaN is unequal to itself."""
    return [
        json.dumps({key: value for key, value in line.items() if key not in ("time", "seconds", "workers_waited")})
        for line in read_metrics(run / "metrics.jsonl")
    ]
