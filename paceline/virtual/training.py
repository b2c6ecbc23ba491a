"""Real gradients on the virtual clock: every worker's own, on the parameters that it has, one process, one seed."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.policies.messages import Push
from paceline.problems import Problem
from paceline.seeding import derive_seed, seed_streams
from paceline.training.train import evaluate
from paceline.virtual.batches import BatchQueue
from paceline.virtual.simulate import Scenario, Simulated, check_length, summary


@dataclass(frozen=True, kw_only=True)
class Point:
    """How good the parameters are at some time on the virtual clock."""

    seconds: float
    commits: int
    loss: float  # mean on the test data
    value: float  # of the problem's metric there


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """What a virtual cluster did and learned."""

    run: Simulated
    curve: tuple[Point, ...]

    def time_to(self, problem: Problem, target: float) -> float | None:
        """When the problem's metric first reached the target; None if never."""
        good = (point.seconds for point in self.curve if problem.metric.reaches(point.value, target))
        return next(good, None)


class GradientWork:
    """What virtual workers compute: gradients of a problem. The parameters of each version are kept while in use.

    Every step's random streams are seeded from (seed, batch), and each batch is part of one commit; cancelled and
    dropped ones go back into the queue. Module buffers, such as BatchNorm's, are shared by all workers.
    """

    def __init__(
        self,
        problem: Problem,
        workers: int,
        *,
        optimizer: str | None,
        batch_size: int,
        times: Sequence[float],
        seed: int,
    ) -> None:
        self._problem, self._seed, self._times = problem, seed, times
        seed_streams(derive_seed(seed, "model"))
        self.model = problem.make_model()
        self._optimizer = make_optimizer(optimizer or problem.recipe.optimizer, self.model.parameters())
        if isinstance(self._optimizer, torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates a loss several times in a step, and a server has only gradients; use sgd")
        self._replica = copy.deepcopy(self.model)
        self._trained, _ = _flatten(self.model)
        self._parameters, self._gradient = _flatten(self._replica)
        for own, computed in zip(self.model.parameters(), self._replica.parameters(), strict=True):
            own.grad = computed.grad
        self._newest = self._loaded = self._parameters.clone()
        self._queue = BatchQueue(problem.train, batch_size, seed)
        self._reads: list[Tensor] = [self._newest] * workers
        self._batches = [0] * workers
        self._done: dict[tuple[int, int], tuple[Tensor, int]] = {}  # (worker, step) -> gradient, batch
        self.curve: list[Point] = []
        self._commits = 0

    @property
    def nbytes(self) -> int:
        """The size of the parameters."""
        return self._parameters.nbytes

    def begin(self, workers: Sequence[int], version: int | None) -> None:
        for worker in workers:
            self._batches[worker] = self._queue.take()
            if version is not None:
                self._reads[worker] = self._newest

    def cancel(self, workers: Sequence[int]) -> None:
        for worker in workers:
            self._queue.give_back(self._batches[worker])

    def end(self, worker: int, step: int) -> tuple[float, int]:
        number = self._batches[worker]
        inputs, targets = self._queue.fetch(number)
        seed_streams(derive_seed(self._seed, "batch", number))
        if self._loaded is not self._reads[worker]:
            self._loaded = self._reads[worker]
            self._parameters.copy_(self._loaded)
        self._gradient.zero_()
        loss = self._problem.loss(self._replica(inputs), targets)
        torch.autograd.backward(loss)
        self._done[worker, step] = self._gradient.clone(), number
        return float(loss.detach()), len(inputs)

    def drop(self, push: Push) -> None:
        _, number = self._done.pop((push.worker, push.step))
        self._queue.give_back(number)

    def commit(self, pushes: Sequence[Push], weights: Sequence[float], at: float) -> None:
        self.look(at)
        self._gradient.zero_()
        for push, weight in zip(pushes, weights, strict=True):
            self._gradient.add_(self._done.pop((push.worker, push.step))[0], alpha=weight)
        self._optimizer.step()
        self._newest = self._trained.clone()
        self._commits += 1

    def look(self, at: float) -> None:
        """Evaluate the parameters for all times to look at them that have come since the last commit."""
        for seconds in itertools.takewhile(lambda time: time < at, self._times[len(self.curve) :]):
            self._add_point(seconds)

    def _add_point(self, seconds: float) -> None:
        if self.curve and self.curve[-1].commits == self._commits:
            loss, value = self.curve[-1].loss, self.curve[-1].value
        else:
            for own, seen in zip(self.model.buffers(), self._replica.buffers(), strict=True):
                own.copy_(seen)
            loss, value, _ = evaluate(self.model, self._problem)
        self.curve.append(Point(seconds=seconds, commits=self._commits, loss=loss, value=value))


def _flatten(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Let the trained parameters and their gradients be views of two vectors, which are returned."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if len({(parameter.dtype, parameter.device) for parameter in parameters}) != 1:
        raise UsageError("the virtual cluster trains models whose parameters are all of one type and on one device")
    vector = torch.cat([parameter.detach().flatten() for parameter in parameters])
    gradient = torch.zeros_like(vector)
    offset = 0
    for parameter in parameters:
        end = offset + parameter.numel()
        parameter.data = vector[offset:end].view_as(parameter)
        parameter.grad = gradient[offset:end].view_as(parameter)
        offset = end
    return vector, gradient


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What is trained, how, and how often it is looked at."""

    problem: Problem
    optimizer: str | None = None  # None: the problem's own
    batch_size: int | None = None  # of each worker
    points: int = 40  # of the curve
    dense_start: bool = False  # look more often at first, at the squares of equal steps

    def __post_init__(self) -> None:
        for name in ("batch_size", "points"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name.replace('_', ' ')} must be at least 1, got {value}")

    def times(self, seconds: float) -> list[float]:
        """When to look at the parameters, from 0 to the end."""
        shares = [index / self.points for index in range(self.points + 1)]
        return [seconds * (share**2 if self.dense_start else share) for share in shares]


class SimulatedTraining:
    """A plan on a virtual cluster, under way or done; what is known so far can be asked at any time."""

    def __init__(self, scenario: Scenario, plan: TrainingPlan, *, seconds: float) -> None:
        check_length(None, seconds)
        problem = plan.problem
        batch_size = plan.batch_size or problem.recipe.batch_size
        if scenario.scaling == "strong":
            raise UsageError("strong scaling is of times alone; with a problem, choose the workers' batch size")
        self._scenario, self._seconds = scenario, seconds
        self._learning = GradientWork(
            problem,
            scenario.workers,
            optimizer=plan.optimizer,
            batch_size=batch_size,
            times=plan.times(seconds),
            seed=scenario.seed,
        )
        nbytes = scenario.nbytes or self._learning.nbytes
        whole = dataclasses.replace(scenario, nbytes=nbytes, examples=batch_size)
        self._cluster = whole.cluster(self._learning)

    @property
    def now(self) -> float:
        """Where the clock stands."""
        return self._cluster.now

    def finish(self, stop: Sequence[object] = ()) -> None:
        """Let the clock run to its end, or until ``stop`` is not empty."""
        self._cluster.run(seconds=self._seconds, stop=stop)
        if not stop:
            self._learning.look(math.nextafter(self._seconds, math.inf))

    def outcome(self) -> TrainingOutcome:
        """What is known by now."""
        return TrainingOutcome(run=summary(self._scenario, self._cluster), curve=tuple(self._learning.curve))


def simulate_training(scenario: Scenario, plan: TrainingPlan, *, seconds: float) -> TrainingOutcome:
    """Train a problem on a virtual cluster for so many virtual seconds; the same seed gives the same bits.

    Bits also depend on torch's number of threads; one is fastest for small models.
    """
    training = SimulatedTraining(scenario, plan, seconds=seconds)
    training.finish()
    return training.outcome()
