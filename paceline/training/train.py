"""Trains a problem from a configuration, for ``paceline train`` and the studies."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from paceline.aggregators import aggregator_of
from paceline.attacks import attacked
from paceline.codecs import read_codec
from paceline.data.feed import DatasetFeed, Fetched
from paceline.data.sampler import ShardedSampler
from paceline.errors import UsageError, check_whole, unknown_name
from paceline.launch.environment import read_world, take_server_assignment
from paceline.optim import make_optimizer
from paceline.peers.connect import check_codec
from paceline.policies import parse_policy
from paceline.policies.server import ServerPolicy
from paceline.problems import Problem, ProblemOptions, load_problem
from paceline.schedules import ScheduleConfig
from paceline.seeding import derive_seed, seed_streams
from paceline.sessions.join import join
from paceline.sessions.nan_guard import OnNaN
from paceline.sessions.session import Session
from paceline.store.commit_rule import CommitRule
from paceline.store.partition import check_dealt

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that determines a training run; ``None`` means the value of the problem's recipe."""

    problem: str = "digits"
    model: str | None = None
    data: str | None = None
    normalise: bool = False  # images to mean 0 and deviation 1 of the training data
    xavier: bool = False  # weights filled by Xavier's rule
    attack: str | None = None
    hostile: int = 0  # workers that attack, from worker 0
    policy: str = "all-reduce"
    codec: str | None = None
    optimizer: str | None = None
    batch_size: int | None = None  # of each worker
    epochs: int | None = None
    max_steps: int | None = None  # stop after this many updates, also within an epoch
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    clip_norm: float | None = None
    precision: Precision = "fp32"
    device: str = "auto"
    seed: int = 0
    run: str | None = None
    resume: bool = False
    save_every: int | None = None  # updates; None: once an epoch
    keep: int = 3  # checkpoints that stay
    log_every: int = 1
    evaluate: bool = True  # after every epoch
    on_nan: OnNaN = "stop"

    def __post_init__(self) -> None:
        if self.on_nan not in get_args(OnNaN):
            raise unknown_name("on-nan choice", self.on_nan, get_args(OnNaN))
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be a whole number from 0 to 2**63 - 1, got {self.seed}")
        if self.precision not in get_args(Precision):
            raise unknown_name("precision", self.precision, get_args(Precision))
        for name in ("batch_size", "epochs", "max_steps", "save_every", "keep", "log_every"):
            value = getattr(self, name)
            if value is not None:
                check_whole(name.replace("_", " "), value)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip norm must be above 0, got {self.clip_norm}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a configuration from the result of ``asdict`` after a round trip through JSON."""
        schedule = dict(values["schedule"])
        schedule["decay_epochs"] = tuple(schedule["decay_epochs"])
        return cls(**{**values, "schedule": ScheduleConfig(**schedule)})


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run, reported after every update."""

    step: int
    total_steps: int
    epoch: int
    loss: float
    examples_per_second: float  # of all workers
    timing: dict[str, float]  # seconds of the last update, as in paceline.Timing


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run."""

    problem: str
    metric: str
    value: float  # of the metric on the test data, at the end
    loss: float  # mean on the test data, at the end
    target: float | None
    reached: bool | None
    steps: int
    resumed_at: int  # steps made by earlier processes; all, if the run was finished already
    epochs: int
    seconds: float  # of this process
    workers: int
    run: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


Watch = Callable[[Progress], None]


def train(
    config: TrainConfig,
    problem: Problem | None = None,
    watch: Watch | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TrainResult:
    """Train a problem to the end of its epochs and evaluate it.

    When ``stop`` returns true, the run is saved after the present update and ends with a ``KeyboardInterrupt``.
    """
    if problem is None:
        problem = load_config_problem(config)
    return _Training(config, problem, watch, stop).run()


def check_config(config: TrainConfig, problem: Problem, workers: int = 1, servers: int = 1) -> None:
    """Raise the errors that ``train`` would raise before its first step, without making a run."""
    policy = parse_policy(config.policy)
    codec = read_codec(config.codec)
    check_codec(policy, codec)
    if config.hostile > workers:
        raise UsageError(f"wanted {config.hostile} hostile workers, found {workers} workers; lower --hostile")
    if isinstance(policy, ServerPolicy):
        policy.begin(workers)
        aggregator_of(policy, workers)
        CommitRule.of(policy, codec, servers=servers)
    pick_device(config.device)
    model = problem.make_model()
    check_dealt(model, servers)
    make_optimizer(config.optimizer or problem.recipe.optimizer, model.parameters())
    training_sampler(config, problem, 1 if isinstance(policy, ServerPolicy) else workers)


def training_sampler(config: TrainConfig, problem: Problem, workers: int) -> ShardedSampler:
    """Make the sampler of the problem's training data; raise if the options do not fit the data."""
    return ShardedSampler(
        num_samples=len(problem.train),  # type: ignore[arg-type]  # a Dataset with a length
        batch_size=config.batch_size or problem.recipe.batch_size,
        world_size=workers,
    )


def load_config_problem(config: TrainConfig) -> Problem:
    """Load the problem that a configuration names."""
    data = Path(config.data) if config.data is not None else None
    options = ProblemOptions(
        data=data, model=config.model, seed=config.seed, normalise=config.normalise, xavier=config.xavier
    )
    return attacked(load_problem(config.problem, options), config.attack, config.hostile)


def make_model(config: TrainConfig, problem: Problem) -> nn.Module:
    """Make the initial model of a run of this configuration, the same in every process."""
    device = pick_device(config.device)
    seed_streams(derive_seed(config.seed, "model"))
    return problem.make_model().to(device)


def server_pace(config: TrainConfig, problem: Problem, policy: ServerPolicy, workers: int) -> tuple[int, int]:
    """The expected updates per epoch with a server, and the batches whose mean an update takes."""
    batches = policy.batches_per_commit(workers)
    return -(-training_sampler(config, problem, 1).steps_per_epoch // (batches * policy.local_steps)), batches


def build_scheduler(
    config: TrainConfig, problem: Problem, optimizer: Optimizer, pace: tuple[int, int]
) -> LRScheduler | None:
    """Make the learning-rate schedule; ``pace`` is the updates per epoch and the batches per update."""
    steps_per_epoch, batches = pace
    return config.schedule.build(
        optimizer,
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs or problem.recipe.epochs,
        batch=(config.batch_size or problem.recipe.batch_size) * batches,
    )


def loss_of(
    config: TrainConfig, problem: Problem, model: nn.Module, inputs: Tensor, targets: Tensor, *, worker: int
) -> Tensor:
    """The loss of a batch, which must be on the model's device, as this worker computes it."""
    with _autocast(config, inputs.device):
        return problem.batch_loss(model, inputs, targets, worker=worker)


def _autocast(config: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[object]:
    if config.precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def evaluate(
    model: nn.Module, problem: Problem, device: torch.device | None = None, *, rank: int = 0, world_size: int = 1
) -> tuple[float, float, int]:
    """Measure the mean loss, the metric and the number of examples on a worker's share of the test data.

    The model is in evaluation mode meanwhile.
    """
    was_training = model.training
    model.eval()
    loss = value = 0.0
    examples = 0
    with torch.no_grad():
        for batch in _evaluation_batches(problem.test, rank, world_size):
            if batch.examples:
                inputs, targets = (tensor.to(device) for tensor in batch.data)
                outputs = model(inputs)
                loss += float(problem.loss(outputs, targets)) * batch.examples
                value += float(problem.metric.measure(outputs, targets)) * batch.examples
                examples += batch.examples
    model.train(was_training)
    return loss / max(1, examples), value / max(1, examples), examples


class _Training:
    """The objects of one call of ``train``, made in the order that the seeds require."""

    def __init__(self, config: TrainConfig, problem: Problem, watch: Watch | None, stop: Callable[[], bool]) -> None:
        self.config, self.problem, self.watch, self.stop = config, problem, watch, stop
        self.device = pick_device(config.device)
        self.batch_size = config.batch_size or problem.recipe.batch_size
        self.epochs = config.epochs or problem.recipe.epochs
        self.model = make_model(config, problem)
        optimizer = config.optimizer or problem.recipe.optimizer
        self.optimizer = make_optimizer(optimizer, self.model.parameters())
        self.needs_closure = isinstance(self.optimizer, torch.optim.LBFGS)
        self.evaluated: tuple[int, tuple[float, float]] | None = None  # the step of the last evaluation, and its result

    def run(self) -> TrainResult:
        started = time.perf_counter()
        with self._join() as session:
            resumed_at = session.steps
            self._train(session, started)
            session.refresh()
            loss, value = self._evaluation(session)
            metric, target = self.problem.metric, self.problem.target
            return TrainResult(
                problem=self.problem.name,
                metric=metric.name,
                value=value,
                loss=loss,
                target=target,
                reached=None if target is None else metric.reaches(value, target),
                steps=session.steps,
                resumed_at=resumed_at,
                epochs=session.epoch,
                seconds=time.perf_counter() - started,
                workers=session.world_size,
                run=self.config.run,
            )

    def _join(self) -> Session:
        config = self.config
        pace = self._pace()
        scheduler = build_scheduler(config, self.problem, self.optimizer, pace)
        return join(
            self.model,
            self.optimizer,
            policy=config.policy,
            codec=config.codec,
            scheduler=() if scheduler is None else scheduler,
            clip_norm=config.clip_norm,
            seed=config.seed,
            run=config.run,
            resume=config.resume,
            save_every=config.save_every or pace[0],
            keep=config.keep,
            log_every=config.log_every,
            on_nan=config.on_nan,
            config={"train": asdict(config), "epochs": self.epochs},
        )

    def _pace(self) -> tuple[int, int]:
        """The expected updates per epoch, and the batches per update."""
        world, assignment, policy = read_world(), take_server_assignment(), parse_policy(self.config.policy)
        workers = world.size if world is not None else 1
        if assignment is None or not isinstance(policy, ServerPolicy):
            return self._sampler(workers).steps_per_epoch, workers
        return server_pace(self.config, self.problem, policy, assignment.workers or workers)

    def _sampler(self, workers: int) -> ShardedSampler:
        return training_sampler(self.config, self.problem, workers)

    def _train(self, session: Session, started: float) -> None:
        session.stop_when(self.stop)
        total_steps, generation = self._total_steps(session), session.generation
        last_step = self.config.max_steps or math.inf
        examples = 0
        for _ in session.epochs(self.epochs):
            for inputs, targets in session.batches(self.problem.train, self.batch_size):
                if session.steps >= last_step:
                    return
                loss = self._step(session, inputs.to(self.device), targets.to(self.device))
                examples += len(inputs) * session.world_size
                if session.generation != generation:  # more workers make fewer steps
                    total_steps, generation = self._total_steps(session), session.generation
                if self.stop() and session.rank == 0 and not session.in_step:
                    session.save()  # the others continue until this worker has ended
                    raise KeyboardInterrupt
                if self.watch is not None and loss is not None:
                    self.watch(
                        Progress(
                            step=session.steps,
                            total_steps=total_steps,
                            epoch=session.epoch,
                            loss=float(loss),
                            examples_per_second=examples / (time.perf_counter() - started),
                            timing=asdict(session.timing),
                        )
                    )
            if self.config.evaluate:
                self._evaluation(session)

    def _total_steps(self, session: Session) -> int:
        """The updates made so far, by any number of workers, plus those to come; with a server an estimate."""
        if not session.in_step:
            steps_per_epoch, _ = self._pace()
            total = steps_per_epoch * self.epochs
            return min(total, self.config.max_steps or total)
        sampler = self._sampler(session.world_size)
        whole_epochs = self.epochs - session.epoch - 1
        to_come = whole_epochs * sampler.steps_per_epoch + sampler.steps_left(session.consumed)
        total = session.steps + max(0, to_come)
        return min(total, self.config.max_steps or total)

    def _step(self, session: Session, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Make one step and return its loss; None if it was cancelled."""
        if self.needs_closure:
            return session.minimize(lambda: self._backward(session, inputs, targets))
        loss: Tensor | None = None
        with session.step() as step:
            loss = self._loss(session, inputs, targets)
            step.record(loss=loss)  # before backward: then it is sent with the gradients
            torch.autograd.backward(loss)
        return None if step.cancelled or loss is None else loss.detach()

    def _backward(self, session: Session, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._loss(session, inputs, targets)
        torch.autograd.backward(loss)
        return loss.detach()

    def _loss(self, session: Session, inputs: Tensor, targets: Tensor) -> Tensor:
        return loss_of(self.config, self.problem, self.model, inputs, targets, worker=session.rank)

    def _evaluation(self, session: Session) -> tuple[float, float]:
        """Evaluate the parameters, averaged if replicas differ, unless this step is already evaluated."""
        if self.evaluated is None or self.evaluated[0] != session.steps:
            with session.averaged():
                loss, value = self._evaluate_together(session) if session.in_step else self._evaluate_alone()
            session.record("evaluation", test_loss=loss, **{self.problem.metric.name: value})
            self.evaluated = session.steps, (loss, value)
        return self.evaluated[1]

    def _evaluate_together(self, session: Session) -> tuple[float, float]:
        while True:
            rank, world_size, generation = session.rank, session.world_size, session.generation
            *own, examples = evaluate(self.model, self.problem, self.device, rank=rank, world_size=world_size)
            loss, value = session.mean(torch.tensor(own, dtype=torch.float64), examples=examples).tolist()
            if session.generation == generation:  # else the share of a worker that has died is missing
                return loss, value

    def _evaluate_alone(self) -> tuple[float, float]:
        """Evaluate all test data on every worker: under a server a worker may die, and its share would be lost."""
        loss, value, _ = evaluate(self.model, self.problem, self.device)
        return loss, value


def _evaluation_batches(dataset: Dataset[Any], rank: int, world_size: int) -> Iterator[Fetched]:
    samples = len(dataset)  # type: ignore[arg-type]  # a Dataset with a length
    if world_size > samples:
        rank, world_size = 0, 1  # too few to divide
    sampler = ShardedSampler(samples, min(500, samples // world_size), rank, world_size, shuffle=False)
    return DatasetFeed(dataset, sampler).start(0, 0)


def pick_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is the GPU of this worker's local rank, if there are any."""
    if name == "auto" and torch.cuda.is_available():
        world = read_world()
        return torch.device("cuda", 0 if world is None else world.local_rank % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"device {name!r} cannot be used here: {reason}; try --device cpu") from error
    return device
