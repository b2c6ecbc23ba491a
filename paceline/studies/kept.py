"""Finished trainings in a file, so that a study that was stopped does not make them again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.studies.arms import Arm, Trial
from paceline.virtual.plan import Point, TrainingOutcome
from paceline.virtual.simulate import Simulated


class KeptTrials:
    """The trials in a file, one a line, that were made in the same ``setting`` of problem and data.

    A last line without an end is that of a process that was killed; it is left out, and later overwritten.
    """

    def __init__(self, file: Path, setting: Mapping[str, Any]) -> None:
        self._file, self._setting = file, setting
        self._records: dict[str, dict[str, Any]] = {}
        try:
            data = file.read_bytes() if file.exists() else b""
        except OSError as error:
            raise UsageError(f"the file of finished trainings {file} cannot be read: {error}") from error
        end = data.rfind(b"\n") + 1
        self._cut: int | None = end if end < len(data) else None  # where to cut the file before adding to it
        for number, line in enumerate(data[:end].splitlines(), start=1):
            try:
                record = json.loads(line)
                self._records[record["key"]] = record
            except (ValueError, KeyError, TypeError):
                raise UsageError(
                    f"line {number} of {file} is not a finished training; name another file with --keep"
                ) from None

    def find(self, arm: Arm, seed: int) -> Trial | None:
        """The trial of an arm with a seed, if it is there."""
        record = self._records.get(self._key(arm, seed))
        if record is None:
            return None
        histogram = {int(stale): count for stale, count in record["run"]["staleness_histogram"].items()}
        run = Simulated(**{**record["run"], "staleness_histogram": histogram})
        outcome = TrainingOutcome(run=run, curve=tuple(Point(**point) for point in record["curve"]))
        return Trial(
            arm=arm,
            seed=seed,
            outcome=outcome,
            train_loss=record["train_loss"],
            train_value=record["train_value"],
        )

    def keep(self, trial: Trial) -> None:
        """Add a trial to the file."""
        record = {
            "key": self._key(trial.arm, trial.seed),
            "run": dataclasses.asdict(trial.outcome.run),
            "curve": [dataclasses.asdict(point) for point in trial.outcome.curve],
            "train_loss": trial.train_loss,
            "train_value": trial.train_value,
        }
        try:
            if self._cut is not None:
                os.truncate(self._file, self._cut)
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            raise PacelineError(f"a finished training could not be written to {self._file}: {error}") from error
        self._cut = None

    def _key(self, arm: Arm, seed: int) -> str:
        ways = dataclasses.asdict(arm)
        del ways["name"], ways["group"]  # which change nothing of the training
        return json.dumps({**self._setting, "seed": seed, **ways}, sort_keys=True)
