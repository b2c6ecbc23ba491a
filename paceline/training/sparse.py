"""Trains a sparse problem from a configuration, for ``paceline train`` and the study of lock-free training."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from paceline.errors import CheckpointError, NonFiniteLossError, UsageError, check_whole
from paceline.hogwild.engine import Engine, Report, sparse_policy
from paceline.hogwild.fingerprint import fingerprint
from paceline.hogwild.sparsity import sparsity
from paceline.hogwild.tasks import Task, TaskOptions, describe, load_task
from paceline.policies import Average
from paceline.record.run import Run
from paceline.training.train import Progress
from paceline.version import __version__

_SLICE_SECONDS = 0.25  # between looks at the clock, at requests to stop and at the progress line
_SAVE_SECONDS = 5.0  # between checkpoints, if the user does not say how many updates
_SEARCH = 200_000_000  # steps in search of rho, which takes a fraction of a second
_FIRST_SLICE = 20_000  # updates, before the speed is known
_NUMBERED = {"svm": ("columns",), "matrix-completion": ("rows", "columns"), "graph-cut": ("nodes",)}  # by the file


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Everything that determines a run on a sparse problem; ``None`` means the problem's own value."""

    options: TaskOptions
    policy: str = "hogwild"
    rate: float | None = None
    decay: float | None = None  # of the rate, after every epoch
    epochs: int | None = None
    seed: int = 0
    run: str | None = None
    resume: bool = False
    save_every: int | None = None  # updates; None: after the first epoch, then after one if some seconds have passed

    def __post_init__(self) -> None:
        sparse_policy(self.policy)
        for name in ("epochs", "save_every"):
            if getattr(self, name) is not None:
                check_whole(name.replace("_", " "), getattr(self, name))
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed}")
        if self.decay is not None and not 0 < self.decay <= 1:
            raise UsageError(
                f"--decay multiplies the rate after each epoch: it must be above 0 and at most 1, got {self.decay:g}"
            )
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"--rate must be above 0 and finite, got {self.rate:g}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from the result of ``asdict`` after a round trip through JSON."""
        try:
            return cls(**{**values, "options": TaskOptions(**values["options"])})
        except (AttributeError, KeyError, TypeError) as error:
            raise UsageError(f"the stored options are damaged, or of another version: {error}") from error


@dataclass(frozen=True, kw_only=True)
class SparseResult:
    """The result of a run; rates and times are those of this process."""

    problem: str
    policy: str
    threads: int
    metric: str  # with the data that it is of, such as test_error
    value: float
    first_objective: float  # of the parameters that training begins with
    measured: dict[str, float]  # the objective and all errors
    epochs: int
    updates: int
    resumed_at: int  # updates made by earlier processes
    seconds: float
    updates_per_second: float
    lost_update_rate: float | None
    sparsity: dict[str, Any]
    run: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Tally:
    """The sums over the parts of an epoch."""

    updates: int = 0
    seconds: float = 0.0
    waited: int = 0
    sampled: int = 0
    lost: int = 0

    def add(self, report: Report) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(report, name))

    @property
    def per_second(self) -> float:
        return self.updates / self.seconds if self.seconds else 0.0

    @property
    def lost_rate(self) -> float | None:
        return self.lost / self.sampled if self.sampled else None


def train_sparse(
    config: SparseConfig,
    task: Task | None = None,
    watch: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> SparseResult:
    """Train a sparse problem to the end of its epochs.

    When ``stop`` returns true, the run ends within a second or so with a ``KeyboardInterrupt``. Before that it is
    saved, but for ``average`` inside an epoch: its bits would be others, and the last checkpoint stays as it is.
    """
    task = task or load_task(config.options)
    if config.run is None:
        return _SparseTraining(config, task, watch, stop, None).run()
    with contextlib.closing(Run(config.run, resume=config.resume)) as run:
        return _SparseTraining(config, task, watch, stop, run).run()


def _too_large(task: Task) -> str:
    sizes = describe(task.problem)
    largest = max(sizes[name] for name in _NUMBERED[task.name]) - 1
    shown = ", ".join(f"{size} {name}" for name, size in sizes.items())
    return (
        f"{task.name}: no memory for the parameters of {shown}; the numbers in the file are taken as they are, "
        f"and the largest index is {largest}"
    )


class _SparseTraining:
    """The objects of one call of ``train_sparse``."""

    def __init__(
        self,
        config: SparseConfig,
        task: Task,
        watch: Callable[[Progress], None] | None,
        stop: Callable[[], bool],
        run: Run | None,
    ) -> None:
        self.config, self.task, self.watch, self.stop, self.directory = config, task, watch, stop, run
        rate, decay = config.rate or task.rate, config.decay or task.decay
        self.epochs = config.epochs or task.epochs
        try:
            self.engine = Engine(task.problem, config.policy, seed=config.seed, rate=rate, decay=decay)
        except MemoryError as error:
            raise UsageError(_too_large(task)) from error
        self.epoch, self.whole = Tally(), Tally()  # of this epoch, and of this process
        self.measured: dict[str, float] = {}
        self.ended = False  # whether the metrics have a line of the end
        self.saved_at: int | None = None  # updates
        self.saved_time = -math.inf  # so the first checkpoint is written after the first epoch
        self.first = self.engine.objective()

    def run(self) -> SparseResult:
        started = time.perf_counter()
        metrics_bytes = self._load()
        resumed_at = self._updates()
        sparse = self._sparsity()
        if self.directory is not None:
            if not resumed_at or self.engine.position[0] < self.epochs:  # a run that was finished keeps its options
                config = {"paceline": __version__, "policy": self.config.policy, "sparse": asdict(self.config)}
                self.directory.write_config(config)
            self.directory.open_metrics(metrics_bytes)
        if not resumed_at:
            self._write("data", **describe(self.task.problem), **sparse)
        self.measured = self.task.measure(self.engine)
        if not resumed_at:
            self._write("epoch", epoch=0, **self.measured)
        while self.engine.position[0] < self.epochs:
            self._run_epoch()
        self.measured |= self.task.finish(self.engine)
        if not self.ended:
            self._write("end", **self.measured)
            self.ended = True
            self._save()
        return self._result(resumed_at, time.perf_counter() - started, sparse)

    def _run_epoch(self) -> None:
        epoch = self.engine.position[0]
        while self.engine.position[0] == epoch:
            self.ended = False
            report = self.engine.run(self._slice(), stop=self.stop)
            self.epoch.add(report)
            self.whole.add(report)
            if self.engine.position[0] != epoch:
                self._end_epoch()
            self._watch()
            if self.stop():
                if self.engine.position[1] == 0 or not self._averages():
                    self._save()
                raise KeyboardInterrupt
            if self.config.save_every is not None and self._updates() - (self.saved_at or 0) >= self.config.save_every:
                self._save()

    def _end_epoch(self) -> None:
        self.measured = self.task.measure(self.engine)
        if not all(map(math.isfinite, self.measured.values())):
            raise NonFiniteLossError(
                f"after epoch {self.engine.position[0]} the objective is not finite; lower the rate, which is "
                f"{self.config.rate or self.task.rate:g} (--rate)"
            )
        self._write(
            "epoch",
            epoch=self.engine.position[0],
            **self.measured,
            updates=self.epoch.updates,
            seconds=self.epoch.seconds,
            waited=self.epoch.waited,
            updates_per_second=self.epoch.per_second,
            lost_update_rate=self.epoch.lost_rate,
        )
        self.epoch = Tally()
        if self.config.save_every is None and time.monotonic() - self.saved_time > _SAVE_SECONDS:
            self._save()

    def _slice(self) -> int | None:
        """How many updates to make before the next look around; None: the rest of the epoch."""
        if self._averages():
            return None
        fast = int(self.whole.per_second * _SLICE_SECONDS) or _FIRST_SLICE
        if self.config.save_every is None:
            return fast
        return min(fast, (self.saved_at or 0) + self.config.save_every - self._updates())

    def _averages(self) -> bool:
        """Whether threads have copies, which are averaged whenever a run of the engine ends: that is an epoch's end."""
        return isinstance(self.engine.policy, Average)

    def _updates(self) -> int:
        epoch, made = self.engine.position
        return epoch * self.task.problem.items + made

    def _sparsity(self) -> dict[str, Any]:
        found = sparsity(self.task.problem, budget=_SEARCH)
        threads = self.engine.threads
        races = self.engine.policy.races and threads > 1
        slowdown = found.predicted_slowdown(threads) if races else None
        return {**asdict(found), "threads": threads, "predicted_slowdown": slowdown}

    def _watch(self) -> None:
        if self.watch is not None:
            progress = Progress(
                step=self._updates(),
                total_steps=self.epochs * self.task.problem.items,
                epoch=self.engine.position[0],
                loss=self.measured["objective"],
                examples_per_second=self.whole.per_second,
                timing={},
            )
            self.watch(progress)

    def _write(self, event: str, **values: Any) -> None:
        if self.directory is not None and self.directory.metrics is not None:
            self.directory.metrics.write(event, **values)

    @cached_property
    def _data(self) -> str:
        return fingerprint(self.task.problem)

    # Checkpoints ------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint, numbered by thousandths of an epoch, unless this state has one."""
        if self.directory is None or (self.saved_at == self._updates() and not self.ended):
            return
        assert self.directory.metrics is not None, "the metrics are open while training"
        epoch, made = self.engine.position
        state = {
            "sparse": {
                "problem": self.task.name,
                "data": self._data,
                "position": [epoch, made],
                "tally": asdict(self.epoch),
                "ended": self.ended,
                "metrics_bytes": self.directory.metrics.sync(),
            },
            "parameters": dict(self.engine.parameters),
        }
        self.directory.checkpoints.write(epoch * 1000 + made * 1000 // max(1, self.task.problem.items), state)
        self.saved_at, self.saved_time = self._updates(), time.monotonic()

    def _load(self) -> int:
        """Load the newest checkpoint that can be used; return the length of the metrics that belong to it."""
        if self.directory is None or not self.config.resume:
            return 0
        failure: CheckpointError | None = None
        for file, state in self.directory.checkpoints.newest():
            if isinstance(state, CheckpointError):
                failure = failure or state
                continue
            self._use(file, state)
            self.saved_at = self._updates()
            self.directory.checkpoints.drop_after(file)
            return int(state["sparse"]["metrics_bytes"])
        if failure is not None:
            raise failure
        return 0

    def _use(self, file: Path, state: dict[str, Any]) -> None:
        try:
            saved = state["sparse"]
            if saved["problem"] != self.task.name:
                raise UsageError(f"it is of the problem {saved['problem']}")
            if saved["data"] != self._data:
                raise UsageError("it was trained on other data")
            self.engine.parameters = state["parameters"]
            self.engine.position = tuple(saved["position"])
            self.epoch = Tally(**saved["tally"])
            self.ended = bool(saved["ended"])
        except (KeyError, TypeError, UsageError) as error:
            raise CheckpointError(
                f"{file} belongs to something else: {error}; resume with the data and options of its run"
            ) from error

    def _result(self, resumed_at: int, seconds: float, sparse: dict[str, Any]) -> SparseResult:
        return SparseResult(
            problem=self.task.name,
            policy=str(self.engine.policy),
            threads=self.engine.threads,
            metric=self.task.shown(self.measured),
            value=self.measured[self.task.shown(self.measured)],
            first_objective=self.first,
            measured=self.measured,
            epochs=self.engine.position[0],
            updates=self._updates(),
            resumed_at=resumed_at,
            seconds=seconds,
            updates_per_second=self.whole.per_second,
            lost_update_rate=self.whole.lost_rate,
            sparsity=sparse,
            run=self.config.run,
        )
