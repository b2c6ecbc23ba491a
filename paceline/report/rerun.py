"""Tells from a run's configuration which command makes it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

# What ``paceline train`` does without the option; a test compares them with the command.
_DEFAULTS: dict[str, Any] = {
    "policy": "all-reduce",
    "hostile": 0,
    "warmup": "none",
    "warmup_epochs": 5.0,
    "decay": "none",
    "decay_epochs": "30,60,80",
    "decay_factor": 0.1,
    "precision": "fp32",
    "device": "auto",
    "log_every": 1,
    "on_nan": "stop",
}
_NO_OPTIONS = {"problem", "run", "resume", "evaluate", "schedule"}


def command_again(config: Mapping[str, Any]) -> str | None:
    """The command that makes the run again; None if the configuration does not tell."""
    told = config.get("command")
    if isinstance(told, list) and told:
        return shlex.join(map(str, told))
    values = config.get("train") or config.get("sparse")
    if not isinstance(values, dict) or not isinstance(values.get("problem"), str):
        return None
    schedule = values.get("schedule")
    options = {**values, **(schedule if isinstance(schedule, dict) else {})}
    words = ["paceline", "train", values["problem"]]
    workers = config.get("world_size")
    words += ["--workers", str(workers)] if isinstance(workers, int) and workers > 1 else []
    for name, value in options.items():
        words += [] if name in _NO_OPTIONS else _words(str(name), value)
    return shlex.join(words)


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        value = ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    if value is None or value is False or _DEFAULTS.get(name) == value:
        return []
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]
