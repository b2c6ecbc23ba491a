"""Trains a problem in several ways, each with several seeds, on virtual workers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, TensorDataset

from paceline.attacks import attacked
from paceline.data.sampler import ShardedSampler
from paceline.errors import UsageError
from paceline.policies import ServerPolicy, parse_policy
from paceline.problems import Problem
from paceline.report.series import Series
from paceline.schedules import ScheduleConfig
from paceline.studies.intervals import Interval, interval
from paceline.studies.outcomes import record_of
from paceline.studies.study import StudyContext
from paceline.threads import one_thread
from paceline.training.train import evaluate
from paceline.virtual.plan import Point, TrainingOutcome, TrainingPlan
from paceline.virtual.scenario import Scenario, Topology
from paceline.virtual.training import SimulatedTraining, begin_training

if TYPE_CHECKING:
    from paceline.studies.kept import KeptTrials


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train: a policy on so many workers, with a batch, a rate and a schedule."""

    name: str  # of the row and the curve
    group: str = ""  # of the panel, where there are several
    optimizer: str
    epochs: float
    batch_size: int  # of each worker
    workers: int = 1
    policy: str = "all-reduce"
    codec: str | None = None
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    delay: str = "1"
    link: str = "instant"
    topology: Topology = "ring"  # of collectives
    attack: str | None = None
    hostile: int = 0  # workers that attack
    points: int = 1  # evaluations, evenly over the run
    judges: int | None = None  # examples to evaluate on, the first ones of each set; None: all

    def steps(self, problem: Problem) -> int:
        """Updates in its epochs."""
        num_samples: int = len(problem.train)  # type: ignore[arg-type]  # a Dataset with a length
        policy, batches = parse_policy(self.policy), self.workers
        if isinstance(policy, ServerPolicy):
            batches = policy.batches_per_commit(self.workers) * policy.local_steps
        sampler = ShardedSampler(num_samples, self.batch_size, world_size=batches)
        return max(1, round(self.epochs * sampler.steps_per_epoch))

    def begin(self, problem: Problem, seed: int) -> SimulatedTraining:
        """Make its training; the clock stands at 0."""
        if self.judges is not None:
            problem = dataclasses.replace(problem, test=first(problem.test, self.judges))
        plan = TrainingPlan(
            problem=attacked(problem, self.attack, self.hostile),
            optimizer=self.optimizer,
            batch_size=self.batch_size,
            codec=self.codec,
            schedule=self.schedule,
            epochs=self.epochs,
            points=self.points,
        )
        scenario = Scenario(
            policy=self.policy,
            workers=self.workers,
            delay=self.delay,
            link=self.link,
            topology=self.topology,
            seed=seed,
        )
        return begin_training(scenario, plan, commits=self.steps(problem))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The training of an arm with one seed."""

    arm: Arm
    seed: int
    outcome: TrainingOutcome
    train_loss: float  # of the run's answer at the end, on the training data
    train_value: float  # of the problem's metric, likewise

    @property
    def last(self) -> Point:
        """The end of its curve."""
        return self.outcome.curve[-1]

    def time_to(self, problem: Problem, target: float) -> float:
        """The virtual time at which the metric first reached the target on the test data; infinite if never."""
        reached = self.outcome.time_to(problem, target)
        return math.inf if reached is None else reached

    def epochs_to(self, problem: Problem, target: float) -> float:
        """The epochs until then; infinite if never."""
        good = (point for point in self.outcome.curve if problem.metric.reaches(point.value, target))
        reached = next(good, None)
        return math.inf if reached is None else self.arm.epochs * reached.commits / self.last.commits

    def as_record(self) -> dict[str, Any]:
        """All measurements as a dict that fits JSON."""
        return {"arm": self.arm.name, "group": self.arm.group, "seed": self.seed, **record_of(self.outcome)}


Measure = Callable[[Trial], float]


@dataclass(frozen=True, kw_only=True)
class Trials:
    """The trials of all arms; after an interrupt there are fewer."""

    problem: Problem
    done: tuple[Trial, ...]
    interrupted_at: str | None  # None if it was not

    def of(self, arm: Arm, measure: Measure) -> list[float]:
        """A measurement of every seed of an arm, in the order of the seeds."""
        return [measure(trial) for trial in self.done if trial.arm == arm]

    def mean(self, arm: Arm, measure: Measure) -> Interval:
        """Its mean over the seeds."""
        return interval(self.of(arm, measure))

    def differences(self, arm: Arm, other: Arm, measure: Measure) -> list[float]:
        """By how much it is larger in the first arm than in the other, with each seed that both had."""
        return [a - b for a, b in zip(self.of(arm, measure), self.of(other, measure), strict=False)]

    def arms(self) -> list[Arm]:
        """The arms with a trial, in their order."""
        return list(dict.fromkeys(trial.arm for trial in self.done))

    def time_to(self, target: float) -> Measure:
        """The measurement ``Trial.time_to`` of the problem."""
        return lambda trial: trial.time_to(self.problem, target)

    def epochs_to(self, target: float) -> Measure:
        """The measurement ``Trial.epochs_to`` of the problem."""
        return lambda trial: trial.epochs_to(self.problem, target)

    def curve(self, arm: Arm, y: Callable[[Point], float], *, by_time: bool = False) -> Series:
        """The mean of ``y`` over the seeds, against the epochs or the mean time; the start is left out."""
        trials = [trial for trial in self.done if trial.arm == arm]
        points = list(zip(*(trial.outcome.curve[1:] for trial in trials), strict=True))
        per_epoch = points[-1][0].commits / arm.epochs
        times = [interval([point.seconds for point in column]).mean for column in points]
        return Series(
            label=arm.name,
            panel=arm.group,
            x=tuple(times if by_time else [column[0].commits / per_epoch for column in points]),
            y=tuple(interval([*map(y, column)]).mean for column in points),
        )


def run_arms(
    arms: Sequence[Arm], problem: Problem, seeds: int, context: StudyContext, kept: KeptTrials | None = None
) -> Trials:
    """Train every arm with every seed, seed after seed, but for what is kept; Ctrl-C returns the trials so far.

    If there are none, a ``KeyboardInterrupt`` is raised that says so.
    """
    done: list[Trial] = []
    cases = [(context.seed + number, arm) for number in range(seeds) for arm in arms]
    with context.interrupts.collected() as stop, one_thread():
        for number, (seed, arm) in enumerate(cases):
            context.tell(f"{arm.name}, seed {seed}", number, len(cases))
            try:
                trial = (kept and kept.find(arm, seed)) or _train(arm, problem, seed, stop, kept)
            except KeyboardInterrupt:
                trial = None
            if trial is None:
                where = f"interrupted in training {number + 1} of {len(cases)}"
                if not done:
                    raise KeyboardInterrupt(where) from None
                return Trials(problem=problem, done=tuple(done), interrupted_at=where)
            done.append(trial)
        context.tell("done", len(cases), len(cases))
    return Trials(problem=problem, done=tuple(done), interrupted_at=None)


def _train(arm: Arm, problem: Problem, seed: int, stop: Sequence[object], kept: KeptTrials | None) -> Trial | None:
    training = arm.begin(problem, seed)
    training.finish(stop)
    if stop:
        return None
    judged = problem.train if arm.judges is None else first(problem.train, arm.judges)
    loss, value, _ = evaluate(training.model, dataclasses.replace(problem, test=judged))
    trial = Trial(arm=arm, seed=seed, outcome=training.outcome(), train_loss=loss, train_value=value)
    if kept is not None:
        kept.keep(trial)
    return trial


def error(point: Point) -> float:
    """The percentage of test examples that are not classified rightly."""
    return 100 * (1 - point.value)


def first(dataset: Dataset[Any], examples: int) -> TensorDataset:
    """The first examples of a data set."""
    if not isinstance(dataset, TensorDataset):
        raise UsageError(f"wanted the first {examples:,} examples of a TensorDataset, found {type(dataset).__name__}")
    if len(dataset) < examples:
        raise UsageError(
            f"wanted {examples:,} examples of a data set that has {len(dataset):,}; give at most as many: --examples "
            "is for the training data, --judges for the test data"
        )
    return TensorDataset(*(tensor[:examples] for tensor in dataset.tensors))
