"""Checks what a replay needs beside the trace: the run's options, and a machine that gives the same bits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UsageError
from paceline.record.trace import Trace
from paceline.schedules import ScheduleConfig
from paceline.training.train import TrainConfig
from paceline.version import __version__

_WITHOUT_EFFECT = frozenset({"run", "resume", "data", "max_steps", "save_every", "log_every", "evaluate", "on_nan"})


def open_trace(run: Path) -> tuple[Trace, dict[str, Any]]:
    """Open the trace of a run, and read its ``config.json``."""
    try:
        config = json.loads((run / "config.json").read_text())
    except (OSError, ValueError):
        config = None
    if not isinstance(config, dict):
        raise UsageError(
            f"{run} is not a run: replay wants the directory of one, with its config.json, such as runs/digits-1"
        )
    if not (run / "trace.bin").exists():
        raise UsageError(
            f"{run} has no trace.bin: only runs with a parameter server, or of several workers under "
            f"hogwild(record=true), record one, but this one's policy was {config.get('policy')}; record one with: "
            "paceline train --workers 2 --policy async"
        )
    return Trace(run / "trace.bin"), config


def train_config(run: Path, config: Mapping[str, Any]) -> TrainConfig:
    """The options of a run of ``paceline train``."""
    known = {field.name for field in fields(TrainConfig)}
    try:
        options = config["train"]
        if set(options) != known:
            raise ValueError("options of another version")
        return TrainConfig.from_dict(options)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{run / 'config.json'} does not hold the options of a run as this version of Paceline writes them: {error}"
        ) from error


def doubts(about: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The differences from the recorded run because of which bits may differ."""
    found = [
        f"{what} is {here} here, but was {about.get(key)} in the run"
        for key, what, here in (
            ("paceline", "Paceline", __version__),
            ("torch", "torch", torch.__version__),
            ("processor", "the processor's instruction set", torch.backends.cpu.get_cpu_capability()),
        )
        if about.get(key) != here
    ]
    if about.get("policy") != config.get("policy"):
        found.append(
            f"the trace is of a run under {about.get('policy')}, but config.json of one under {config.get('policy')}"
        )
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if about["threads"] > usable:
        found.append(f"the run had {about['threads']} threads a worker, but there are {usable} cores here")
    changed = _changed_options(about, config)
    if changed:
        found.append(f"the run was resumed with other options ({', '.join(changed)}); the replay uses the last ones")
    return found


def _changed_options(about: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The options that were changed when the run was resumed, if they can change its numbers."""
    *_, text = about.get("command") or [""]
    try:
        first = asdict(TrainConfig.from_dict(json.loads(text)))
        last = asdict(TrainConfig.from_dict(config["train"]))
    except (ValueError, KeyError, TypeError):
        return []
    without_effect = _WITHOUT_EFFECT
    if last["schedule"] == first["schedule"] == asdict(ScheduleConfig()):
        without_effect |= {"epochs"}
    elif config["world_size"] != about["world_size"]:
        return ["workers", *_differing(first, last, without_effect)]
    return _differing(first, last, without_effect)


def _differing(first: Mapping[str, Any], last: Mapping[str, Any], without_effect: frozenset[str]) -> list[str]:
    return [name.replace("_", "-") for name in first if name not in without_effect and first[name] != last[name]]


@contextlib.contextmanager
def as_recorded(about: Mapping[str, Any]) -> Iterator[None]:
    """Set the run's number of threads and, if it still exists, its working directory, inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(about["threads"])
    directory = Path(about.get("directory", "."))
    try:
        with contextlib.chdir(directory) if directory.is_dir() else contextlib.nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)
