"""Gathers what a report is made of: the runs that are named, or those of a comparison, and what is wrong with them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from paceline.errors import UsageError
from paceline.report.groups import Group, group
from paceline.report.runs import (
    ONE_WORKER,
    Comparison,
    RunData,
    is_abandoned,
    is_comparison,
    read_comparison,
    read_run,
)

Source: TypeAlias = str | os.PathLike[str] | RunData
"""A run, or the directory of a run or of a comparison."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """Runs, in the order in which they are shown."""

    runs: tuple[RunData, ...]
    comparison: Comparison | None  # if the report is of one comparison
    failures: tuple[str, ...]  # sentences about runs that failed or cannot be read

    @property
    def groups(self) -> list[Group]:
        """The runs, those that differ in their seed alone together."""
        return group(self.runs)

    @property
    def title(self) -> str:
        """The title of the report."""
        problems = _listed({run.problem for run in self.runs if run.problem} or {_problem(self.comparison)})
        if self.comparison is not None:
            return f"{problems}: policies compared"
        if len(self.runs) == 1:
            return f"{problems}: {self.runs[0].policy}"
        return f"{problems}: {len(self.runs)} runs"

    @property
    def sentence(self) -> str:
        """What was compared: policies, problem, workers, delay, seeds, target."""
        if not self.runs:
            return "There is no run to show yet."
        virtual = any(run.virtual for run in self.runs)
        policies = list(dict.fromkeys(run.policy for run in self.runs if run.policy != ONE_WORKER))
        alone = any(run.policy == ONE_WORKER for run in self.runs)
        told = [f"{len(policies)} policies"] if len(policies) > 1 else policies
        parts = [" and ".join([*told, ONE_WORKER] if alone else told)]
        parts.append(f"on {_listed({run.problem for run in self.runs if run.problem} or {'an unknown problem'})}")
        if workers := sorted({run.workers for run in self.runs if run.workers and run.workers > 1}):
            parts.append(f"with {_listed(map(str, workers))} {'virtual ' * virtual}workers")
        delays = {run.delay for run in self.runs if run.delay}
        parts += [f"{'whose steps take' if virtual else 'slowed by'} {_listed(delays)}"] if delays else []
        seeds = sorted({run.seed for run in self.runs if run.seed is not None})
        parts += [f"with the seed{'s' * (len(seeds) > 1)} {_listed(map(str, seeds))}"] if seeds else []
        text = ", ".join([" ".join(parts[:2]), *parts[2:]])
        targets = {(run.metric, run.target) for run in self.runs if run.target is not None}
        goals = [f"{str(metric).replace('_', ' ')} {target:g}" for metric, target in sorted(targets, key=str)]
        return text + (f"; the target is {_listed(goals)}." if goals else ".")

    @property
    def status(self) -> str | None:
        """How far an unfinished comparison is."""
        entries = self.comparison.entries if self.comparison else ()
        unfinished = ("running", "interrupted", "waiting")
        counts = {status: sum(entry.status == status for entry in entries) for status in unfinished}
        if self.comparison is None or not any(counts.values()):
            return None
        done = sum(entry.status in ("done", "failed") for entry in entries)
        rest = [f"{count} {status}" for status, count in counts.items() if count]
        told = f"The comparison is not finished: {done} of {len(entries)} runs are made, {' and '.join(rest)}."
        path = shlex.quote(str(self.comparison.path))
        return f"{told} Go on with: paceline compare --resume {path}" if is_abandoned(self.comparison.path) else told


def as_sources(source: Source | Sequence[Source]) -> list[Source]:
    """One source or several, as a list."""
    return [source] if isinstance(source, str | os.PathLike | RunData) else list(source)


def gather(sources: Source | Sequence[Source], *, target: float | None = None) -> Material:
    """Read runs and comparisons; raise a ``UsageError`` if none of them can be read.

    ``target`` is one of the metric, in place of the comparison's.
    """
    listed = as_sources(sources)
    if not listed:
        raise UsageError("wanted at least one run; name its directory, such as runs/digits-1")
    runs: list[RunData] = []
    failures: list[str] = []
    comparisons: list[Comparison] = []
    errors: list[UsageError] = []
    for source in listed:
        if isinstance(source, RunData):
            runs.append(source)
            continue
        try:
            if is_comparison(source):
                comparison = read_comparison(source)
                comparisons.append(comparison)
                runs += comparison.runs
                failures += _failures(comparison)
            else:
                runs.append(read_run(source))
        except UsageError as error:
            errors.append(error)
            failures.append(f"{Path(source)} is left out: {error}.")
    if errors and not runs and not comparisons:
        raise errors[0]
    return Material(
        runs=tuple(run if target is None else replace(run, target=target) for run in runs),
        comparison=comparisons[0] if len(comparisons) == len(listed) == 1 else None,
        failures=tuple(failures),
    )


def _failures(comparison: Comparison) -> list[str]:
    found = []
    for entry in comparison.entries:
        which = f"{entry.policy}, seed {entry.seed}" if entry.seed is not None else entry.policy
        if entry.status == "failed":
            found.append(f"{which}, failed: {entry.error or 'the reason is not known'}")
        elif entry.error is not None:
            found.append(f"{which}, cannot be read: {entry.error}")
    return found


def _problem(comparison: Comparison | None) -> str:
    return (comparison.problem if comparison is not None else None) or "Paceline"


def _listed(parts: object) -> str:
    """Parts as they are listed in a sentence."""
    names = sorted(parts) if isinstance(parts, set) else [str(part) for part in parts]  # type: ignore[attr-defined]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""
