"""What a simulated training is to do, and what came of it: its curve of losses, beside the cluster's results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.codecs import Codec
from paceline.data.sampler import ShardedSampler
from paceline.errors import UsageError
from paceline.problems import Problem
from paceline.schedules import ScheduleConfig
from paceline.training.train import evaluate
from paceline.virtual.simulate import Simulated


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What to train, how, and how often to evaluate it."""

    problem: Problem
    optimizer: str | None = None  # None: the problem's own
    batch_size: int | None = None  # of each worker; None: the problem's own
    codec: str | Codec | None = None  # of what is exchanged; its packets' bytes are what messages cost
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    epochs: float = 0.0  # over which a cosine falls; other schedules do not ask
    points: int = 40  # of the curve
    dense_start: bool = False  # evaluate more often at first, at the squares of equal steps

    def __post_init__(self) -> None:
        for name in ("batch_size", "points"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, got {value}")

    @property
    def batch(self) -> int:
        """Examples in the mini-batch of a worker."""
        return self.batch_size or self.problem.recipe.batch_size

    def times(self, end: float) -> list[float]:
        """The times of evaluation, from 0 to the end; they may also be counted in commits."""
        shares = [index / self.points for index in range(self.points + 1)]
        return [end * (share**2 if self.dense_start else share) for share in shares]

    def make_scheduler(self, optimizer: Optimizer, batches: int) -> LRScheduler | None:
        """Make the schedule of the learning rate for updates that each use this many batches."""
        num_samples: int = len(self.problem.train)  # type: ignore[arg-type]  # a Dataset with a length
        steps = ShardedSampler(num_samples, self.batch, world_size=batches).steps_per_epoch
        return self.schedule.build(optimizer, steps_per_epoch=steps, epochs=self.epochs, batch=self.batch * batches)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Loss and metric of the parameters at one virtual time."""

    seconds: float
    commits: int
    loss: float  # mean on the test data
    value: float  # of the problem's metric on the test data


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """The results of a simulated training: those of the cluster, and the curve of losses."""

    run: Simulated
    curve: tuple[Point, ...]

    def time_to(self, problem: Problem, target: float) -> float | None:
        """The time at which the problem's metric first reached the target; None if never."""
        good = (point.seconds for point in self.curve if problem.metric.reaches(point.value, target))
        return next(good, None)


class Curve:
    """The losses of a run at given times, on the test data."""

    def __init__(self, problem: Problem, times: Sequence[float]) -> None:
        self._problem, self._times = problem, times
        self.points: list[Point] = []

    def due(self, before: float) -> bool:
        """Whether there is a time before this one at which no loss is known yet."""
        return len(self.points) < len(self._times) and self._times[len(self.points)] < before

    def look(self, model: nn.Module, commits: int, before: float, now: float | None = None) -> None:
        """Evaluate the model for all times before this one that are not done yet.

        ``now`` is the time on the clock if times are counted in commits.
        """
        for time in itertools.takewhile(lambda time: time < before, self._times[len(self.points) :]):
            if self.points and self.points[-1].commits == commits:
                loss, value = self.points[-1].loss, self.points[-1].value
            else:
                loss, value, _ = evaluate(model, self._problem)
            self.points.append(Point(seconds=time if now is None else now, commits=commits, loss=loss, value=value))
