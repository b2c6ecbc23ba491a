"""Trains a problem on worker processes of this host, each of which runs the hidden command ``train-worker``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import PacelineError
from paceline.launch import supervisor
from paceline.launch.service import ServerOptions
from paceline.policies import PeersPolicy, parse_policy
from paceline.training.train import Progress, TrainConfig, Watch


class WorkersFailed(PacelineError):
    """The workers ended without a result; the supervisor has shown why, and ``code`` is its exit code."""

    def __init__(self, code: int, reason: str | None) -> None:
        super().__init__(reason or f"the workers ended with code {code}")
        self.code = code


def worker_command(config: TrainConfig) -> list[str]:
    """What each worker process runs."""
    return ["-m", "paceline", "train-worker", json.dumps(dataclasses.asdict(config))]


def train_on_workers(
    config: TrainConfig,
    workers: int,
    server: ServerOptions,
    *,
    environment: Mapping[str, str] | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Train on so many processes and return the result; a ``KeyboardInterrupt`` says that a signal has ended it."""
    policy = parse_policy(config.policy)
    results: dict[int, dict[str, Any]] = {}
    stopped: list[bool] = []
    reasons: list[tuple[float, str]] = []  # when a process failed, and why
    shown = 0

    def hear(rank: int, report: dict[str, Any]) -> None:
        """Take results and progress from any worker: all report the same, and under a server any may be killed."""
        nonlocal shown
        if report["event"] == "result":
            results[rank] = report["result"]
        elif report["event"] == "failed":
            reasons.append((report["at"], report["first_message"].strip()))
        elif report["event"] == "progress" and "progress" in report and report["step"] > shown:
            shown = report["step"]
            if watch is not None:
                watch(Progress(**report["progress"]))

    code = supervisor.supervise(
        worker_command(config),
        workers=workers,
        per_device=policy.processes_per_worker if isinstance(policy, PeersPolicy) else 1,
        environment=environment,
        on_report=hear,
        on_stop=lambda: stopped.append(True),
        server=server,
    )
    if stopped:
        raise KeyboardInterrupt
    if code != 0 or not results:
        raise WorkersFailed(code or 1, min(reasons)[1] if reasons else None)
    # Of those that were there from the start, if one has joined late.
    return results[min(results, key=lambda rank: (results[rank]["resumed_at"], rank))]
