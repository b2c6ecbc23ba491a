"""Runs a comparison: one training after the other, each on its own directory."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from paceline.comparing.comparison import Comparison, Entry
from paceline.comparing.real import train_real
from paceline.comparing.virtual import train_virtually
from paceline.errors import PacelineError
from paceline.interrupts import answered
from paceline.problems import Problem
from paceline.record.run import take_lock

Tell = Callable[[str, int, int], None]  # what is trained, and how much is done, of how much
_PARTS = 1000  # of a training, in the progress


def compare(comparison: Comparison, problem: Problem, tell: Tell, changed: Callable[[Path], object]) -> None:
    """Train all that is not done yet. One that fails is noted, and the others go on.

    ``changed`` is called with the directory after each training. After a ``KeyboardInterrupt`` the comparison can be
    loaded, and goes on with the training that was interrupted. The directory is locked meanwhile.
    """
    with take_lock(comparison.path):
        _train_all(comparison, problem, tell, changed)


def _train_all(comparison: Comparison, problem: Problem, tell: Tell, changed: Callable[[Path], object]) -> None:
    total = _PARTS * len(comparison.entries)
    for number, entry in enumerate(comparison.entries):
        if entry.status == "done":
            continue

        def told(share: float, number: int = number, entry: Entry = entry) -> None:
            tell(f"{entry.policy}, seed {entry.seed}", _PARTS * number + round(_PARTS * min(1.0, share)), total)

        told(0.0)
        entry.status, entry.error = "running", None
        comparison.save()
        try:
            entry.seconds = _train(comparison, problem, entry, told)
            entry.status = "done"
        except PacelineError as error:
            entry.status, entry.error = "failed", str(error)
        except BaseException:
            entry.status = "waiting"
            raise
        finally:
            comparison.save()
            changed(comparison.path)
    tell("done", total, total)


def _train(comparison: Comparison, problem: Problem, entry: Entry, tell: Callable[[float], None]) -> float:
    run = comparison.run_of(entry)
    if run.exists():  # of a comparison that was interrupted: its clock has stood still
        shutil.rmtree(run)
    if not comparison.options.virtual:
        return train_real(comparison.options, problem, entry.policy, entry.seed, run, tell)
    stop: list[object] = []
    with answered(lambda number, _: stop.append(number), signal.SIGINT, signal.SIGTERM):
        return train_virtually(comparison.options, problem, entry.policy, entry.seed, run, tell, stop)
