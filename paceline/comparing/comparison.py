"""A comparison on disk: a directory with ``comparison.json`` and the directories of its runs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from paceline.comparing.options import CompareOptions
from paceline.errors import UsageError
from paceline.problems import Problem
from paceline.version import __version__

FORMAT = 1
FILE = "comparison.json"

Status = Literal["done", "failed", "running", "waiting"]


@dataclass(kw_only=True)
class Entry:
    """One training of a comparison."""

    policy: str
    seed: int
    run: str  # its directory, inside that of the comparison
    status: Status = "waiting"
    seconds: float | None = None  # of its training
    error: str | None = None


@dataclass(kw_only=True)
class Comparison:
    """What is compared, and how far it has come; ``save`` after every change."""

    path: Path
    options: CompareOptions
    problem: str
    metric: str
    higher_is_better: bool
    target: float
    command: list[str]
    entries: list[Entry]

    @classmethod
    def begin(cls, path: Path, options: CompareOptions, problem: Problem, command: Sequence[str]) -> Self:
        """Begin a comparison in a directory that holds none."""
        folders = _folders(options.arms)
        target = problem.target if options.target is None else options.target
        assert target is not None, "options.check() wants a target"
        comparison = cls(
            path=path,
            options=options,
            problem=problem.name,
            metric=problem.metric.name,
            higher_is_better=problem.metric.higher_is_better,
            target=target,
            command=list(command),
            entries=[
                Entry(policy=arm, seed=seed, run=f"{folders[arm]}/seed-{seed}")
                for seed in range(options.seeds)
                for arm in options.arms
            ],
        )
        comparison.save()
        return comparison

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a comparison to go on with; what was under way begins again, and so does what has failed."""
        try:
            values = json.loads((path / FILE).read_text())
            if values["format"] != FORMAT:
                raise UsageError(f"{path / FILE} is of another version ({values['paceline']}); this is {__version__}")
            entries = [Entry(**each) for each in values["runs"]]
            for entry in entries:
                if entry.status != "done":
                    entry.status, entry.seconds, entry.error = "waiting", None, None
            return cls(
                path=path,
                options=CompareOptions.from_dict(values["options"]),
                entries=entries,
                **{name: values[name] for name in ("problem", "metric", "higher_is_better", "target", "command")},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{path} holds no comparison to go on with: {FILE} cannot be read ({error}); give the directory of one"
            ) from error

    def save(self) -> None:
        """Write ``comparison.json`` aside, then rename it."""
        options = self.options
        values: dict[str, Any] = {
            "format": FORMAT,
            "paceline": __version__,
            "problem": self.problem,
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "target": self.target,
            "workers": options.workers,
            "delay": options.delay,
            "delay_unit": options.delay_unit,
            "virtual": options.virtual,
            "seeds": list(range(options.seeds)),
            "command": self.command,
            "runs": [asdict(entry) for entry in self.entries],
            "options": asdict(options),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        aside = self.path / f".{FILE}.partial"
        aside.write_text(json.dumps(values, indent=2) + "\n")
        aside.rename(self.path / FILE)

    def run_of(self, entry: Entry) -> Path:
        """The directory of a training."""
        return self.path / entry.run


def _folders(arms: Sequence[str]) -> dict[str, str]:
    """A directory for each arm, such as ``k-sync-k-4`` for ``k-sync(k=4)``."""
    folders: dict[str, str] = {}
    for arm in arms:
        name = re.sub(r"[^a-z0-9.]+", "-", arm.lower()).strip("-.") or "policy"
        number = 1
        while (folder := name if number == 1 else f"{name}-{number}") in folders.values():
            number += 1
        folders[arm] = folder
    return folders
