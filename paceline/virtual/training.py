"""Training with real gradients on the virtual clock, in one process: each worker's gradient of its own parameters."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.policies import ServerPolicy
from paceline.policies.messages import Push, PushKind
from paceline.problems import Problem
from paceline.seeding import derive_seed, seed_streams
from paceline.server.local_steps import LocalSteps
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import adopt, fill_push, read_parameters
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.parameter_store import ParameterStore
from paceline.store.pending import PushKey, Share
from paceline.train_state import TrainState
from paceline.training.train import evaluate
from paceline.virtual.batches import BatchQueue
from paceline.virtual.simulate import Scenario, Simulated, check_length, summary


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


class GradientWork:
    """Computes the virtual workers' gradients of a problem; the parameters of each version are kept while in use.

    Every step's random streams are seeded from (seed, batch), and each batch is part of one commit; cancelled and
    dropped ones go back into the queue. Module buffers, such as BatchNorm's, travel with parameters and gradients.
    """

    def __init__(
        self,
        problem: Problem,
        workers: int,
        *,
        optimizer: str | None,
        batch_size: int,
        times: Sequence[float],
        policy: ServerPolicy,
        seed: int,
    ) -> None:
        rule = CommitRule.of(policy)
        self._problem, self._seed, self._times = problem, seed, times
        seed_streams(derive_seed(seed, "model"))
        self.model = problem.make_model()
        made = make_optimizer(optimizer or problem.recipe.optimizer, self.model.parameters())
        if isinstance(made, torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates a loss several times in a step, and a server has only gradients; use sgd")
        self._replica = copy.deepcopy(self.model)
        self._layouts, self._replicas = (
            ModelLayouts(model, with_reads=rule.with_reads) for model in (self.model, self._replica)
        )
        self._memory = torch.zeros(self._layouts.down.nbytes, dtype=torch.uint8)
        adopt(self._layouts, self._memory)
        train_state = TrainState(model=self.model, optimizers=[made])
        self._store = ParameterStore(train_state, self._layouts, self._memory, rule)
        self._local: LocalSteps | None = None
        if rule.kind is PushKind.DIFFERENCE:
            own = make_optimizer(optimizer or problem.recipe.optimizer, self._replica.parameters())
            self._local = LocalSteps(TrainState(model=self._replica, optimizers=[own]))
        self._newest = self._memory.clone()
        self._loaded: Tensor | None = self._newest  # what the replica has
        self._queue = BatchQueue(problem.train, batch_size, seed)
        self._reads: list[Tensor] = [self._newest] * workers  # parameters and buffers, as bytes
        self._local_steps = policy.local_steps
        self._batches: list[list[int]] = [[] for _ in range(workers)]  # of each worker's step
        self._done: dict[PushKey, tuple[Arena, bytes, list[int]]] = {}  # push, which parameters it has, batches
        self._free: list[Arena] = []
        self.curve: list[Point] = []
        self._commits = 0

    @property
    def nbytes(self) -> int:
        """The size of the trained parameters."""
        return sum(parameter.nbytes for parameter in self._layouts.trained)

    def begin(self, workers: Sequence[int], version: int | None) -> None:
        for worker in workers:
            self._batches[worker] = [self._queue.take() for _ in range(self._local_steps)]
            if version is not None:
                self._reads[worker] = self._newest

    def cancel(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self._give_back(self._batches[worker])

    def end(self, worker: int, step: int) -> tuple[float, int]:
        if self._loaded is not self._reads[worker]:
            self._loaded = self._reads[worker]
            read_parameters(self._replicas, self._replicas.down.views(self._loaded))
        if self._local is not None:
            self._local.become(worker)
        batches, examples, loss = self._batches[worker], 0, 0.0
        for number in batches:
            loss, count = self._compute(number)
            examples += count
            if self._local is not None:
                self._local.step(version=0)  # there are no schedules here
        if self._replicas.buffers:
            self._keep_buffers(worker)
        if self._local is not None:
            self._local.end()
            self._loaded = None  # the replica has parameters of its own
        arena = self._free.pop() if self._free else Arena(self._layouts.up)
        self._done[PushKey(worker, step)] = arena, fill_push(self._replicas, arena).used, batches
        return loss, examples

    def _compute(self, number: int) -> tuple[float, int]:
        """Have the gradients of a batch in the replica; give its loss and number of examples."""
        inputs, targets = self._queue.fetch(number)
        seed_streams(derive_seed(self._seed, "batch", number))
        for parameter in self._replicas.trained:
            parameter.grad = None
        loss = self._problem.loss(self._replica(inputs), targets)
        torch.autograd.backward(loss)
        return float(loss.detach()), len(inputs)

    def _keep_buffers(self, worker: int) -> None:
        """Keep a worker's buffers for its next step, in case that does not read the parameters again."""
        kept = self._loaded = self._reads[worker] = self._reads[worker].clone()
        views = self._replicas.down.views(kept)[len(self._replicas.parameters) :]
        for view, buffer in zip(views, self._replicas.buffers, strict=True):
            view.copy_(buffer)

    def drop(self, push: Push) -> None:
        arena, _, batches = self._done.pop(PushKey(push.worker, push.step))
        self._free.append(arena)
        self._give_back(batches)

    def _give_back(self, batches: Sequence[int]) -> None:
        for number in batches:
            self._queue.give_back(number)

    def commit(self, pushes: Sequence[Push], weights: Sequence[float], at: float) -> None:
        self.look(at)
        keys = [PushKey(push.worker, push.step) for push in pushes]
        for key, push in zip(keys, pushes, strict=True):
            arena, used, _ = self._done.pop(key)
            self._store.take(key, arena, examples=push.examples, used=used)
            self._free.append(arena)
        self._store.commit([*map(Share, keys, weights)])
        self._newest = self._memory.clone()
        self._commits += 1

    def look(self, at: float) -> None:
        """Evaluate the parameters for all evaluation times before ``at`` that are not done yet."""
        for seconds in itertools.takewhile(lambda time: time < at, self._times[len(self.curve) :]):
            self._add_point(seconds)

    def _add_point(self, seconds: float) -> None:
        if self.curve and self.curve[-1].commits == self._commits:
            loss, value = self.curve[-1].loss, self.curve[-1].value
        else:
            loss, value, _ = evaluate(self.model, self._problem)
        self.curve.append(Point(seconds=seconds, commits=self._commits, loss=loss, value=value))


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What to train, how, and how often to evaluate it."""

    problem: Problem
    optimizer: str | None = None  # None: the problem's own
    batch_size: int | None = None  # of each worker
    points: int = 40  # of the curve
    dense_start: bool = False  # evaluate more often at first, at the squares of equal steps

    def __post_init__(self) -> None:
        for name in ("batch_size", "points"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, got {value}")

    def times(self, seconds: float) -> list[float]:
        """The times of evaluation, from 0 to the end."""
        shares = [index / self.points for index in range(self.points + 1)]
        return [seconds * (share**2 if self.dense_start else share) for share in shares]


class SimulatedTraining:
    """A training plan on a virtual cluster; ``outcome`` gives the results so far at any time."""

    def __init__(self, scenario: Scenario, plan: TrainingPlan, *, seconds: float) -> None:
        check_length(None, seconds)
        problem = plan.problem
        batch_size = plan.batch_size or problem.recipe.batch_size
        if scenario.scaling == "strong":
            raise UsageError("strong scaling is for runs without a problem; with one, choose the workers' batch size")
        self._scenario, self._seconds = scenario, seconds
        self._work = GradientWork(
            problem,
            scenario.workers,
            optimizer=plan.optimizer,
            batch_size=batch_size,
            times=plan.times(seconds),
            policy=scenario.check(has_loss=True),
            seed=scenario.seed,
        )
        nbytes = scenario.nbytes or self._work.nbytes
        whole = dataclasses.replace(scenario, nbytes=nbytes, examples=batch_size)
        self._cluster = whole.cluster(self._work)

    @property
    def now(self) -> float:
        """The time of the virtual clock."""
        return self._cluster.now

    def finish(self, stop: Sequence[object] = ()) -> None:
        """Run the clock to its end, or until ``stop`` is not empty."""
        self._cluster.run(seconds=self._seconds, stop=stop)
        if not stop:
            self._work.look(math.nextafter(self._seconds, math.inf))

    def outcome(self) -> TrainingOutcome:
        """The results so far."""
        return TrainingOutcome(run=summary(self._scenario, self._cluster), curve=tuple(self._work.curve))


def simulate_training(scenario: Scenario, plan: TrainingPlan, *, seconds: float) -> TrainingOutcome:
    """Train a problem on a virtual cluster for ``seconds`` of virtual time; the same seed gives the same bits.

    Bits also depend on torch's number of threads; one is fastest for small models.
    """
    training = SimulatedTraining(scenario, plan, seconds=seconds)
    training.finish()
    return training.outcome()
