"""What is known of a run while it goes on, built from what it writes, as plain numbers."""

from __future__ import annotations

import base64
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.record.following import News, RunTail, finite
from paceline.report.live.history import History, Update
from paceline.report.live.strips import CELL, CELLS
from paceline.report.live.workers import STATES, Worker, Workers
from paceline.report.runs import delay_text

_CHANGES = 60  # births and deaths that are listed
_SLOWEST = 8  # workers that are listed as such
ROWS = 32  # workers whose last seconds a page shows at once
_NOW = 10.0  # seconds over which a rate of now is taken
_UPDATES = 4000  # that are remembered for it
_EVALUATIONS = 400  # at most; of more, every other one is dropped
_STALENESS = 5000  # pushes whose staleness is counted
_VIRTUAL = 1e8  # seconds: times before this are not since the epoch, but of a virtual cluster
_NAMES = {"event", "time", "step", "epoch", "worker", "examples", "bytes", "seconds"}  # beside a metric


class LiveRun:
    """The state of one run; ``look`` reads what is new, ``view`` gives what has changed since an earlier turn."""

    def __init__(self, path: Path, *, turn: int = 0, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._tail = RunTail(path)
        self.config: dict[str, Any] = {}
        self._latest = -math.inf  # the latest time that the run has told of
        self._forget(turn)

    def look(self, turn: int) -> News:
        """Read what is new; turns are numbered upwards."""
        news = self._tail.read()
        if news.restarted:
            self._forget(turn)
        self.history.turn = turn
        self.broken = news.broken
        for event in news.events:
            self._take(event)
        for rank, records in news.records.items():
            self.workers.take(rank, records, turn)
            self._latest = max(self._latest, float((records["start"] + records["duration"]).max()))
        return news

    def expect(self, config: Mapping[str, Any]) -> None:
        """Take the run's configuration."""
        self.config = dict(config)
        workers = config.get("world_size")
        if isinstance(workers, int) and 0 < workers <= 100_000:
            self.workers.expect(workers)

    @property
    def begun(self) -> bool:
        """Whether the run has written anything of its training."""
        return self._latest > -math.inf

    @property
    def all_have_left(self) -> bool:
        """Whether every worker that has joined has left by itself."""
        joined = [worker for worker in self.workers.listed() if worker.has_been]
        return bool(joined) and all(worker.gone == "left" for worker in joined)

    def now(self, *, over: bool) -> float:
        """The present on the run's clock: that of its last record once it is over, or where time is virtual."""
        if over or self._latest < _VIRTUAL:
            return self._latest if self.begun else 0.0
        return max(self._clock(), self._latest)

    # Events -----------------------------------------------------------------------------------------------

    def _forget(self, turn: int) -> None:
        self.history, self.workers = History(turn), Workers()
        self.step = 0
        self.epoch = 0
        self.rate: float | None = None  # the learning rate
        self.bytes = 0.0
        self.broken = 0
        self.evaluations: list[dict[str, Any]] = []
        self._updates: deque[tuple[float, float, float | None]] = deque(maxlen=_UPDATES)  # time, examples, loss
        self._staleness: deque[int] = deque(maxlen=_STALENESS)
        self._latest = -math.inf
        self._began = math.inf
        self._epoch_steps: float | None = None  # updates of an epoch, once one has ended
        self.expect(self.config)

    def _take(self, event: Mapping[str, Any]) -> None:
        at = float(event["time"])
        self._latest, self._began = max(self._latest, at), min(self._began, at)
        kind = event["event"]
        if kind in ("step", "commit"):
            self.workers.served = kind == "commit"
            self._take_update(event, at)
        elif kind == "epoch":  # of a sparse problem
            self._take_epoch(event, at)
        elif kind == "evaluation":
            self._take_evaluation(event, at)
        elif kind in ("joined", "left") and isinstance(worker := event.get("worker"), int) and 0 <= worker < 1 << 31:
            if kind == "joined":
                self.workers.joined(worker, at, int(finite(event.get("incarnation")) or 0))
            else:
                self.workers.ended(worker, at, dead=bool(event.get("dead")))

    def _take_update(self, event: Mapping[str, Any], at: float) -> None:
        step, epoch = int(finite(event.get("step")) or self.step + 1), int(finite(event.get("epoch")) or 0)
        made = max(1, step - self.step)  # several, where not every step has a line
        if epoch > self.epoch:
            self._epoch_steps = self.step / epoch
        self.step, self.epoch = step, epoch
        rate = finite(event.get("lr", event.get("rate")))
        self.rate = self.rate if rate is None else rate
        staleness = event.get("staleness")
        stale = [int(each) for each in staleness if finite(each) is not None] if isinstance(staleness, list) else []
        self._staleness.extend(stale)
        examples, sent = (finite(event.get("examples")) or 0.0) * made, finite(event.get("bytes")) or 0.0
        self.bytes += sent
        loss = finite(event.get("loss"))
        self.history.add(Update(at, loss, examples, tuple(stale), sent))
        self._updates.append((at, examples, loss))

    def _take_epoch(self, event: Mapping[str, Any], at: float) -> None:
        updates, objective = finite(event.get("updates")) or 0.0, finite(event.get("objective"))
        self.epoch = int(finite(event.get("epoch")) or 0)
        self.step += int(updates)
        self.history.add(Update(at, objective, updates))
        self._updates.append((at, updates, objective))

    def _take_evaluation(self, event: Mapping[str, Any], at: float) -> None:
        numbers = {name: finite(value) for name, value in event.items() if name not in _NAMES}
        figures = {name: number for name, number in numbers.items() if number is not None}
        if len(self.evaluations) >= _EVALUATIONS:
            del self.evaluations[1::2]
        self.evaluations.append({"time": at, "step": int(finite(event.get("step")) or 0), **figures})

    # The view ---------------------------------------------------------------------------------------------

    def view(self, since: int = -1, *, over: bool = False, first: int = 0, rows: int = ROWS) -> dict[str, Any]:
        """All that a page shows; of the history and the last seconds what has changed after the turn ``since``."""
        whole = since < self.history.reshaped
        now = self.now(over=over)
        workers = self.workers.listed()
        states = [worker.state(now, over=over, served=self.workers.served) for worker in workers]
        since = -1 if whole else since
        return {
            "whole": whole,
            "now": now,
            "virtual": self.begun and self._latest < _VIRTUAL,
            "config": {name: _short(self.config.get(name)) for name in ("policy", "codec", "seed")}
            | {"problem": _short(self._option("problem")), "delay": _short(delay_text(self.config))},
            "progress": self._progress(now, over=over),
            "figures": self._figures(now),
            "history": {
                "began": self.history.began,
                "width": self.history.width,
                "spans": [list(span) for span in self.history.spans(since)],
            },
            "evaluations": self.evaluations,
            "staleness": sorted(Counter(self._staleness).items()),
            "states": "".join(state[0] if state != "expected" else "?" for state in states),
            "counts": {state: states.count(state) for state in STATES},
            "cell": CELL,
            "cells": CELLS,
            "workers": [
                self._row(worker, now, over) | _strip(worker, since) for worker in workers[first : first + rows]
            ],
            "slowest": [self._row(worker, now, over) for worker in self.workers.slowest(_SLOWEST)],
            "changes": [list(change) for change in sorted(self.workers.changes)[-_CHANGES:]],
            "changed": dict(self.workers.counts),
        }

    def _row(self, worker: Worker, now: float, over: bool) -> dict[str, Any]:
        return {
            "rank": worker.rank,
            "state": worker.state(now, over=over, served=self.workers.served),
            "incarnation": worker.incarnation,
            "step": worker.step,
            "seconds_per_step": worker.seconds_per_step,
            "waiting": worker.waiting_share(),
            "dead": [list(each) for each in worker.dead_times(now, over=over)],
        }

    def _progress(self, now: float, *, over: bool) -> dict[str, Any]:
        began = min(self._began, now)
        seconds = max(0.0, now - began)
        share = self._share()
        known = share is not None and 0 < share < 1 and not over
        return {
            "step": self.step,
            "epoch": self.epoch,
            "epochs": self._option("epochs"),
            "steps": self._option("max_steps"),
            "share": share,
            "began": began,
            "seconds": seconds,
            "seconds_left": seconds * (1 - share) / share if known and share else None,
            "quiet": max(0.0, now - self._updates[-1][0]) if self._updates else None,
        }

    def _share(self) -> float | None:
        """How much of the run is done; None if nothing tells its length."""
        steps, epochs = finite(self._option("max_steps")), finite(self._option("epochs"))
        ends = [steps] if steps else []
        if epochs and self._epoch_steps:
            ends.append(epochs * self._epoch_steps)
        return min(1.0, self.step / min(ends)) if ends else None

    def _figures(self, now: float) -> dict[str, Any]:
        recent = [update for update in self._updates if update[0] >= self._updates[-1][0] - _NOW]
        losses = [loss for _, _, loss in recent if loss is not None]
        seconds = recent[-1][0] - recent[0][0] if len(recent) > 1 else 0.0
        return {
            "loss": sum(losses) / len(losses) if losses else None,
            "examples_per_second": sum(examples for _, examples, _ in recent[1:]) / seconds if seconds > 0 else None,
            "updates_per_second": (len(recent) - 1) / seconds if seconds > 0 else None,
            "staleness": sum(self._staleness) / len(self._staleness) if self._staleness else None,
            "bytes": self.bytes,
            "learning_rate": self.rate,
        }

    def _option(self, name: str) -> Any:
        """An option of the run, or what the run has made of one that was not given."""
        told = [
            options[name]
            for part in ("train", "sparse")
            if isinstance(options := self.config.get(part), dict) and options.get(name) is not None
        ]
        return told[0] if told else self.config.get(name)


def _strip(worker: Worker, since: int) -> dict[str, Any]:
    """Its last seconds: the number of the first cell that changed, and the shares in each since."""
    cell, shares = worker.strip.cells(since)
    return {"first": cell, "shares": base64.b64encode(shares).decode()}


def _short(value: Any) -> str | None:
    """A text that a page shows: a run may hold anything."""
    return None if value is None else str(value)[:200]
