"""Writes runs and comparisons as training would have, in a moment."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.record.timeline import MAGIC, RECORD, Kind, timeline_file
from paceline.version import __version__

EPOCH = 1.7e9  # when the runs begin


def make_run(
    path: Path,
    *,
    policy: str = "k-sync(k=3)",
    workers: int = 4,
    seed: int = 0,
    steps: int = 60,
    pace: float = 0.05,
    cancels: bool = True,
    dies: bool = False,
    text: str = "",
    started: float = EPOCH,
) -> Path:
    """Write a run of ``steps`` commits; ``text`` is put into every field that a user can fill."""
    random = np.random.default_rng([seed, workers, steps])
    path.mkdir(parents=True)
    config: dict[str, Any] = {
        "paceline": __version__,
        "policy": policy + text,
        "seed": seed,
        "world_size": workers,
        "train": {"problem": f"digits{text}", "policy": policy + text, "seed": seed, "optimizer": f"sgd(lr=0.1){text}"},
    }
    (path / "config.json").write_text(json.dumps(config))
    server = policy not in ("all-reduce", "one worker", "local-sgd(every=8)")
    lines = []
    for step in range(1, steps + 1):
        at = started + step * pace
        line: dict[str, Any] = {"time": at, "step": step, "examples": 32 * workers, "bytes": 40_000 * workers}
        line["loss"] = 2.3 * math.exp(-step / steps * 3) + 0.02 * random.random()
        if server:
            line |= {"event": "commit", "staleness": random.poisson(1.0, 3).tolist(), "seconds": 0.001}
        else:
            line |= {"event": "step", "seconds": {"forward": 0.01, "backward": 0.02, "waited": 0.01}}
            line |= {"workers_waited": [0.01] * workers}
        lines.append(line)
        if step % 6 == 0:
            error = 0.9 * math.exp(-step / steps * 3.2) * (1 + 0.1 * random.random())
            lines.append({"event": "evaluation", "time": at, "step": step, "test_loss": error, "accuracy": 1 - error})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank in range(workers):
        spans = _spans(random, steps, pace, cancels=cancels, dies=dies and rank == workers - 1)
        write_timeline(path, rank, spans, started=started)
    return path


def _spans(
    random: np.random.Generator, steps: int, pace: float, *, cancels: bool, dies: bool
) -> list[tuple[Kind, int, float, float]]:
    spans, now = [(Kind.BEGAN, 0, 0.0, 0.0)], 0.001
    for step in range(steps):
        if dies and step == steps // 3:  # it is back after ten steps
            now += 10 * pace
            spans.append((Kind.BEGAN, 1, now, 0.0))
            continue
        computed = pace * random.uniform(0.3, 0.85)
        cancelled = cancels and random.random() < 0.2
        spans.append((Kind.CANCELLED if cancelled else Kind.COMPUTING, step, now, computed))
        spans.append((Kind.EXCHANGING, step, now + computed, 0.1 * pace))
        spans.append((Kind.WAITING, step, now + computed + 0.1 * pace, 0.9 * pace - computed))
        now += pace
    return [*spans, (Kind.LEFT, 0, now, 0.0)]


def write_timeline(
    run: Path, rank: int, spans: Sequence[tuple[int, int, float, float]] | Any, *, started: float = EPOCH
) -> None:
    """Write the timeline of one worker; times are since the start."""
    records = np.zeros(len(spans), RECORD)
    columns = spans.T if isinstance(spans, np.ndarray) else zip(*spans, strict=True)
    records["kind"], records["step"], records["start"], records["duration"] = map(np.array, columns)
    records["start"] += started
    file = timeline_file(run, rank)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(MAGIC + records.tobytes())


def make_comparison(path: Path, *, seeds: Sequence[int] = (0, 1), text: str = "", **header: Any) -> Path:
    """Write a comparison of four policies and one worker."""
    kinds: dict[str, dict[str, Any]] = {
        "one worker": {"workers": 1, "pace": 0.08, "cancels": False},
        "all-reduce": {"pace": 0.06, "cancels": False},
        "k-sync(k=3)": {"pace": 0.045, "dies": True},
        "async": {"pace": 0.03, "cancels": False},
        "local-sgd(every=8)": {"pace": 0.035, "cancels": False},
    }
    listed = []
    for number, (policy, options) in enumerate(kinds.items()):
        for seed in seeds:
            name = f"policy-{number}/seed-{seed}"
            make_run(path / name, policy=policy, seed=seed, text=text, **options)
            listed.append({"policy": policy + text, "seed": seed, "run": name, "status": "done", "error": None})
    written = {
        "format": 1,
        "paceline": __version__,
        "problem": f"digits{text}",
        "metric": "accuracy",
        "higher_is_better": True,
        "target": 0.9,
        "workers": 4,
        "delay": f"1+exp(0.5){text}",
        "delay_unit": "20ms",
        "virtual": False,
        "seeds": list(seeds),
        "command": ["paceline", "compare", f"digits{text}", "--workers", "4"],
        "runs": listed,
        **header,
    }
    (path / "comparison.json").write_text(json.dumps(written))
    return path


def make_million(path: Path, *, workers: int = 8, spans: int = 1_000_000, lines: int = 50_000) -> Path:
    """Write a run of a million spans: a long one at times, and many short ones."""
    make_run(path, workers=workers, steps=lines, pace=0.02)
    random = np.random.default_rng(0)
    each = spans // workers
    for rank in range(workers):
        duration = random.exponential(0.008, each) * np.where(random.random(each) < 1e-4, 500, 1)
        start = np.cumsum(duration) - duration
        kind = np.arange(each) % 3
        write_timeline(path, rank, np.stack([kind, np.arange(each) // 3, start, duration], axis=1))
    return path
