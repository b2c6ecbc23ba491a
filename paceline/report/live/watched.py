"""A run or a comparison under watch: whether it waits, goes on or has ended, and what pages show of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from paceline.errors import PacelineError, UsageError
from paceline.record.following import News
from paceline.report.live.run import LiveRun
from paceline.report.runs import COMPARISON, check_format, is_abandoned, is_being_written, read_config, read_json

Stage = Literal["waiting", "running", "ended"]

_OF_A_RUN = ("config.json", "metrics.jsonl", "timeline", "run.lock", COMPARISON)
_LONG_PAUSE = 60.0  # seconds without a sign after which a comparison has ended: its reports take a while
_PAUSE = 5.0  # seconds without an owner after which a run has ended: one that is replaced needs some


class Watched:
    """Look at a run again and again; other threads may ask for views meanwhile.

    A directory that does not exist yet is waited for. In a comparison the run that goes on is shown.
    """

    def __init__(
        self,
        path: Path,
        *,
        make_report: Callable[[Path], bytes] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.stage: Stage = "waiting"
        self.message: str | None = None  # what is wrong, or what is waited for
        self.report: bytes | None = None
        self._make_report = make_report
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = 0
        self._comparison: dict[str, Any] | None = None
        self._run = LiveRun(path, clock=clock)
        self._active_at: float | None = None  # when a process was last seen at work on the run
        self._caught_up = False  # whether all was read that was there at first

    def check(self) -> None:
        """Raise if there is something that is no run, or one that cannot be read."""
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; name the directory of a run, such as runs/digits-1")
        if self.path.exists() and not any((self.path / name).exists() for name in _OF_A_RUN):
            found = "is empty" if not any(self.path.iterdir()) else "holds no run"
            raise UsageError(f"{self.path} {found}: wanted config.json, metrics.jsonl or {COMPARISON} in it")
        try:
            problem = self._read_files().problem
        except PacelineError as error:
            raise UsageError(str(error)) from error
        if problem is not None:
            raise UsageError(problem)

    def look(self) -> News:
        """Read what is new; its ``behind`` tells that there is more already."""
        with self._lock:
            self._turn += 1
            try:
                news = self._read_files()
                self._find_stage(news)
            except PacelineError as error:
                self.message = str(error)
                return News()
        if self.stage == "ended" and self.report is None and not news.behind and self._make_report is not None:
            self._keep_report(self._make_report)
        return news

    def view(self, since: int = -1, *, first: int = 0) -> dict[str, Any]:
        """What a page shows; of what is long only that which has changed after the turn ``since``."""
        with self._lock:
            return {
                "turn": self._turn,
                "name": str(self.path)[-200:],
                "stage": self.stage,
                "message": self.message,
                "report": self.report is not None,
                "comparison": self._comparison_view(),
                "run": self._run.view(since, over=self.stage == "ended", first=first),
            }

    @property
    def run(self) -> LiveRun:
        """The run that is shown."""
        return self._run

    # Looking ----------------------------------------------------------------------------------------------

    def _read_files(self) -> News:
        self.message = None
        if (self.path / COMPARISON).is_file():
            self._comparison = read_json(self.path / COMPARISON)
            check_format(self.path / COMPARISON, self._comparison)
            self._follow(self._run_now())
        else:
            self._comparison = None
            self._follow(self.path)
        notes: list[str] = []
        if (self._run.path / "config.json").exists():
            config = read_config(self._run.path, notes)
            if config != self._run.config:
                self._run.expect(config)
        news = self._run.look(self._turn)
        if news.broken:
            notes.append(f"Lines of its metrics that are broken and left out: {news.broken}.")
        if news.problem is not None:
            notes.append(f"{news.problem}.")
        self.message = " ".join(notes) or None
        return news

    def _follow(self, path: Path) -> None:
        if path != self._run.path:
            self._run = LiveRun(path, turn=self._turn, clock=self._clock)
            self._active_at, self._caught_up = None, False

    def _find_stage(self, news: News) -> None:
        """A run goes on while a process owns it, or while it grows (another host's owner is not seen from here)."""
        now, owned = self._clock(), is_being_written(self._run.path)
        if owned or (self._caught_up and (news.events or news.records)):
            self._active_at = now
        self._caught_up = not news.behind
        lately = self._active_at is not None and now - self._active_at < _PAUSE
        if self._comparison is not None:
            goes_on = self._comparison_goes_on(owned, now)
        else:
            goes_on = owned or (lately and not self._run.all_have_left)
        begun = self._comparison is not None or self._run.begun or bool(self._run.config)
        self.stage = "running" if goes_on else "ended" if begun else "waiting"
        if self.stage == "running":
            self.report = None

    def _keep_report(self, make_report: Callable[[Path], bytes]) -> None:
        try:
            self.report = make_report(self.path)
        except PacelineError as error:
            self.message = str(error)

    # Comparisons ------------------------------------------------------------------------------------------

    def _entries(self) -> list[dict[str, str]]:
        """The runs of the comparison, as far as they are what they should be."""
        runs = (self._comparison or {}).get("runs")
        entries = [entry for entry in runs if isinstance(entry, dict)] if isinstance(runs, list) else []
        names = ("policy", "seed", "run", "status", "error")
        return [{name: _text(entry.get(name)) for name in names} for entry in entries]

    def _comparison_goes_on(self, owned: bool, now: float) -> bool:
        statuses = [entry["status"] for entry in self._entries()]
        if "running" not in statuses and "waiting" not in statuses:
            return False
        if is_being_written(self.path) or (not is_abandoned(self.path) and self._shows_signs(statuses, owned, now)):
            return True
        left = len(statuses) - statuses.count("done") - statuses.count("failed")
        self.message = (
            f"The comparison was interrupted: {left} of {len(statuses)} trainings are left. "
            f"Go on with: paceline compare --resume {self.path}"
        )
        return False

    def _shows_signs(self, statuses: list[str], owned: bool, now: float) -> bool:
        """Whether a comparison whose owner is not seen from here has been at work lately."""
        is_virtual = (self._comparison or {}).get("virtual") is True  # then nobody owns a run
        if "running" in statuses and (owned or is_virtual):
            return True
        return now - max(self._active_at or 0.0, (self.path / COMPARISON).stat().st_mtime) < _LONG_PAUSE

    def _run_now(self) -> Path:
        """The run of the comparison that goes on, or the last one that did; no directory outside of it."""
        begun = [entry for entry in self._entries() if entry["status"] != "waiting" and entry["run"]]
        going_on = [entry for entry in begun if entry["status"] == "running"]
        for entry in (going_on or begun)[-1:]:
            if (self.path / entry["run"]).resolve().is_relative_to(self.path.resolve()):
                return self.path / entry["run"]
        return self.path

    def _comparison_view(self) -> dict[str, Any] | None:
        if self._comparison is None:
            return None
        entries = self._entries()
        done = sum(entry["status"] in ("done", "failed") for entry in entries)
        return {"problem": _text(self._comparison.get("problem")), "runs": entries, "done": done}


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:200]
