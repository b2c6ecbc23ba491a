"""A run on disk: a directory with its configuration, metrics and checkpoints, owned by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from paceline.errors import RunInUseError, UsageError
from paceline.record.checkpoint import CheckpointFolder
from paceline.record.metrics import MetricsWriter

_open_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def _close_locks_in_child() -> None:
    """Close the locks in a forked child, such as a DataLoader's worker: it must not keep a dead parent's run locked."""
    for run in _open_runs:
        run.close_lock()


os.register_at_fork(after_in_child=_close_locks_in_child)


def checkpoints_of(run: Path, keep: int = 3) -> CheckpointFolder:
    """The checkpoints of a run's directory."""
    return CheckpointFolder(run / "checkpoints", keep=keep)


class Run:
    """Open a run directory for writing; with ``resume`` it may already hold a run.

    The lock is an ``flock`` on ``run.lock``: the kernel releases it when the process ends in any way, so a
    killed run never has to be unlocked by hand.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False, keep: int = 3) -> None:
        self.path = Path(path)
        self.checkpoints = checkpoints_of(self.path, keep)
        self._make_directory()
        self._lock = take_lock(self.path)
        _open_runs.add(self)
        try:
            if not resume and (self.metrics_file.exists() or self.checkpoints.files()):
                raise UsageError(
                    f"{self.path} already holds a run; resume it (resume=True, --resume) or choose another directory"
                )
            self.checkpoints.clear_leftovers()
        except BaseException:
            self.close_lock()
            raise
        self.metrics: MetricsWriter | None = None

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    def open_metrics(self, length: int = 0) -> MetricsWriter:
        """Open the metrics for appending after their first ``length`` bytes."""
        self.metrics = MetricsWriter(self.metrics_file, length=length)
        return self.metrics

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write ``config.json``: everything needed to repeat the run."""
        aside = self.path / ".config.json.partial"
        aside.write_text(json.dumps(config, indent=2, default=str) + "\n")
        aside.rename(self.path / "config.json")

    def close(self) -> None:
        metrics, self.metrics = self.metrics, None
        try:
            if metrics is not None:
                metrics.close()
        finally:
            self.close_lock()

    def close_lock(self) -> None:
        self._lock.close()

    def _make_directory(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the run directory {self.path}: {error.strerror}") from error


def take_lock(path: Path) -> IO[str]:
    """Own a directory until the returned file is closed; raise a ``RunInUseError`` if another process owns it."""
    try:
        lock = (path / "run.lock").open("a+")
    except OSError as error:
        raise UsageError(f"cannot write to {path / 'run.lock'}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip() or "another process"
        lock.close()
        raise RunInUseError(
            f"the run directory {path} is in use by {owner}; wait for it, or choose another directory"
        ) from error
    lock.seek(0)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return lock
