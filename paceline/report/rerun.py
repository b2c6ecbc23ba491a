"""Tells from a run's configuration which command makes it again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from paceline.errors import PacelineError
from paceline.policies import PeersPolicy, parse_policy

# What ``paceline train`` does without the option; a test compares them with the command.
_DEFAULTS: dict[str, Any] = {
    "workers": 1,
    "servers": 1,
    "policy": "all-reduce",
    "hostile": 0,
    "warmup": "none",
    "warmup_epochs": 5.0,
    "decay": "none",
    "decay_epochs": "30,60,80",
    "decay_factor": 0.1,
    "precision": "fp32",
    "device": "auto",
    "keep": 3,
    "log_every": 1,
    "on_nan": "stop",
}
_NO_OPTIONS = {"problem", "run", "resume", "evaluate", "schedule"}


def command_again(config: Mapping[str, Any]) -> str | None:
    """The command that makes the run again; None if the configuration does not tell, or the workers were virtual."""
    script, values = config.get("script"), config.get("train") or config.get("sparse")
    if config.get("virtual"):
        return None
    if isinstance(values, dict) and isinstance(values.get("problem"), str):
        schedule = values.get("schedule")
        options = {**values, **(schedule if isinstance(schedule, dict) else {})}
        words = ["paceline", "train", values["problem"], *_launch_words(config)]
        return shlex.join([*words, *(word for name, value in options.items() for word in _words(str(name), value))])
    if isinstance(script, list) and script:
        chosen = [word for name in ("policy", "codec") for word in _words(name, config.get(name))]
        return shlex.join(["paceline", "run", *_launch_words(config), *chosen, *map(str, script)])
    return None


def _launch_words(config: Mapping[str, Any]) -> list[str]:
    """The options that say on which processes a run is made, and how slow they are."""
    processes = config.get("world_size")
    workers = processes // _processes_per_worker(config.get("policy")) if isinstance(processes, int) else None
    options = {"workers": workers, **{name: config.get(name) for name in ("servers", "delay", "delay_unit")}}
    return [word for name, value in options.items() for word in _words(name, value)]


def _processes_per_worker(policy: Any) -> int:
    """How many processes a policy has in the place of each worker; 1 if it is not known here."""
    try:
        parsed = parse_policy(str(policy))
    except PacelineError:
        return 1
    return parsed.processes_per_worker if isinstance(parsed, PeersPolicy) else 1


def _words(name: str, value: Any) -> list[str]:
    if isinstance(value, list):
        value = ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in value)
    if name in _NO_OPTIONS or value is None or value is False or _DEFAULTS.get(name) == value:
        return []
    option = f"--{name.replace('_', '-')}"
    return [option] if value is True else [option, str(value)]
