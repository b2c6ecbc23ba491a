"""Training with real gradients on the virtual clock, in one process: each worker's gradient of its own parameters."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from paceline.codecs import read_codec
from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.policies import ServerPolicy
from paceline.policies.messages import Commit, Push, Work
from paceline.seeding import derive_seed, seed_streams
from paceline.server.local_steps import make_local_steps
from paceline.server.part_sum import PartSum
from paceline.store.behind import Behind
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import adopt, fill_push, read_parameters
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.packets import PushPackets
from paceline.store.parameter_store import ParameterStore
from paceline.store.pending import PushKey, shares_of
from paceline.train_state import TrainState
from paceline.virtual.agenda import Times
from paceline.virtual.batches import BatchQueue
from paceline.virtual.peers import PeersTraining
from paceline.virtual.plan import Curve, TrainingOutcome, TrainingPlan
from paceline.virtual.recording import RunRecord
from paceline.virtual.simulate import Scenario, check_length, summary


class GradientWork:
    """Computes the virtual workers' gradients of a problem; the parameters of each version are kept while in use.

    Every step's random streams are seeded from (seed, batch), and each batch is part of one commit; cancelled and
    dropped ones go back into the queue. Module buffers, such as BatchNorm's, travel with parameters and gradients.
    """

    def __init__(
        self, plan: TrainingPlan, scenario: Scenario, policy: ServerPolicy, curve: Curve, *, by_commits: bool = False
    ) -> None:
        rule = CommitRule.of(policy, read_codec(plan.codec))
        self._problem, self._seed, self.curve = plan.problem, scenario.seed, curve
        seed_streams(derive_seed(scenario.seed, "model"))
        self.model = plan.problem.make_model()
        made = make_optimizer(plan.optimizer or plan.problem.recipe.optimizer, self.model.parameters())
        if isinstance(made, torch.optim.LBFGS):
            raise UsageError("LBFGS evaluates a loss several times in a step, and a server has only gradients; use sgd")
        scheduler = plan.make_scheduler(made, policy.batches_per_commit(scenario.workers))
        self._replica = copy.deepcopy(self.model)
        self._layouts, self._replicas = (
            ModelLayouts(model, with_reads=rule.with_reads) for model in (self.model, self._replica)
        )
        self._memory = torch.zeros(self._layouts.down.nbytes, dtype=torch.uint8)
        adopt(self._layouts, self._memory)
        schedulers = () if scheduler is None else (scheduler,)
        train_state = TrainState(model=self.model, optimizers=[made], schedulers=schedulers)
        rule.check_optimizers(train_state)
        self._store = ParameterStore(rule.remembering(train_state), self._layouts, self._memory, rule)
        own = make_optimizer(plan.optimizer or plan.problem.recipe.optimizer, self._replica.parameters())
        self._local = make_local_steps(
            rule.kind, TrainState(model=self._replica, optimizers=[own]), momentum=policy.local_momentum
        )
        if self._local is not None and schedulers:
            raise UsageError(f"under {policy} workers make their own steps, for which no schedule is simulated")
        self._parts = PartSum(self._replica) if rule.coded else None
        self._packing = [
            PushPackets(rule.codec, [self._replicas], rule.kind, seed=scenario.seed, rank=worker)
            for worker in range(scenario.workers)
            if rule.codec is not None
        ]
        self._packets = dict[int, float]()  # by worker: the bytes of its last push
        self._behind = [
            Behind(rule.codec, self._layouts, seed=scenario.seed, rank=worker)
            for worker in range(scenario.workers)
            if rule.codec is not None and rule.codec.both
        ]
        self._sent = dict[int, float]()  # by worker: the bytes of what it was sent last
        self._scale = scenario.nbytes / self.nbytes if scenario.nbytes else 1.0
        self._newest = self._memory.clone()
        self._loaded: Tensor | None = self._newest  # what the replica has
        self._queue = BatchQueue(plan.problem.train, plan.batch, scenario.seed)
        self._reads: list[Tensor] = [self._newest] * scenario.workers  # parameters and buffers, as bytes
        self._local_steps = policy.local_steps
        self._batches: list[list[int]] = [[] for _ in range(scenario.workers)]  # of each worker's step
        self._weights: list[list[float]] = [[] for _ in range(scenario.workers)]  # of these, in a sum
        self._round, self._round_batches = 0, list[int]()
        self._done: dict[PushKey, tuple[Arena, bytes, list[int]]] = {}  # push, which parameters it has, batches
        self._free: list[Arena] = []
        self._commits, self._committed_at = 0, 0.0
        self._by_commits = by_commits  # the curve's times are counted in commits

    @property
    def nbytes(self) -> int:
        """The size of the trained parameters."""
        return sum(parameter.nbytes for parameter in self._layouts.trained)

    def begin(self, workers: Sequence[int], version: int | None, work: Sequence[Work] = ()) -> None:
        for worker in workers:
            if self._packing:
                self._packing[worker].answered(taken=False)  # if its last push is still on its way, it comes too late
            if version is not None:
                self._reads[worker] = self._send(worker, version) if self._behind else self._newest
            if not work:
                self._batches[worker] = [self._queue.take() for _ in range(self._local_steps)]
        for worker, its in zip(workers, work, strict=False):
            if self._round != its.round:
                self._round, self._round_batches = its.round, [self._queue.take() for _ in range(its.num_parts)]
            self._batches[worker] = [self._round_batches[part] for part, _ in its.parts]
            self._weights[worker] = [
                coefficient * self._queue.examples(self._round_batches[part]) / self._examples_of_round()
                for part, coefficient in its.parts
            ]

    def _send(self, worker: int, version: int) -> Tensor:
        """Send a worker a packet, or at first all parameters; return what it then has."""
        memory, behind = self._newest.clone(), self._behind[worker]
        views = self._layouts.down.views(memory)
        packet = behind.encode(views, version=version)
        if packet is None:
            behind.take_all(views)
        behind.write(views)
        self._sent[worker] = self._scale * (self.nbytes if packet is None else packet.numel())
        return memory

    def sent_bytes(self, workers: Sequence[int]) -> Times | None:
        return np.array([self._sent[worker] for worker in workers]) if self._behind else None

    def _examples_of_round(self) -> int:
        return sum(map(self._queue.examples, self._round_batches))

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
        for block, number in enumerate(batches):
            if self._local is not None:
                self._local.begin(version=0)  # there are no schedules here
            loss, count = self._compute(worker, number)
            examples += count
            if self._parts is not None:
                self._parts.add(self._weights[worker][block])
            if self._local is not None:
                self._local.step()
        if self._parts is not None:
            self._parts.end()
        if self._replicas.buffers:
            self._keep_buffers(worker)
        if self._local is not None:
            self._local.end()
            self._loaded = None  # the replica has parameters of its own
        if self._packing:
            self._packets[worker] = self._scale * self._packing[worker].code()
        arena = self._free.pop() if self._free else Arena(self._layouts.up)
        self._done[PushKey(worker, step)] = arena, fill_push(self._replicas, arena).used, batches
        return loss, examples

    def _compute(self, worker: int, number: int) -> tuple[float, int]:
        """Have a worker's gradients of a batch in the replica; give its loss and number of examples."""
        inputs, targets = self._queue.fetch(number)
        seed_streams(derive_seed(self._seed, "batch", number))
        for parameter in self._replicas.trained:
            parameter.grad = None
        loss = self._problem.batch_loss(self._replica, inputs, targets, worker=worker)
        torch.autograd.backward(loss)
        return float(loss.detach()), len(inputs)

    def _keep_buffers(self, worker: int) -> None:
        """Keep a worker's buffers for its next step, in case that does not read the parameters again."""
        kept = self._loaded = self._reads[worker] = self._reads[worker].clone()
        views = self._replicas.down.views(kept)[len(self._replicas.parameters) :]
        for view, buffer in zip(views, self._replicas.buffers, strict=True):
            view.copy_(buffer)

    def pushed_bytes(self, worker: int) -> float | None:
        return self._packets.get(worker)

    def take(self, push: Push) -> None:
        if self._packing:
            self._packing[push.worker].answered(taken=True)

    def drop(self, push: Push) -> None:
        arena, _, batches = self._done.pop(PushKey(push.worker, push.step))
        self._free.append(arena)
        self._give_back(batches)
        self._answer(push.worker, None)

    def _give_back(self, batches: Sequence[int]) -> None:
        for number in batches if self._parts is None else ():  # batches of a round stay with it
            self._queue.give_back(number)

    def commit(self, commit: Commit, at: float) -> int:
        self.look(self._commits + 1 if self._by_commits else at)
        self._committed_at = at
        shares = shares_of(commit)
        arenas = []
        for share, push in zip(shares, commit.pushes, strict=True):
            arena, used, _ = self._done.pop(share.push)
            self._store.take(share.push, arena, examples=push.examples, used=used)
            arenas.append(arena)
        counts = self._store.commit(shares)
        for push, arena in zip(commit.pushes, arenas, strict=True):
            self._answer(push.worker, arena)
        self._free += arenas
        self._newest = self._memory.clone()
        self._commits += 1
        if self._parts is None:
            return sum(push.examples for push in commit.pushes)
        if not counts:
            for number in self._round_batches:
                self._queue.give_back(number)
        return self._examples_of_round() if counts else 0

    def _answer(self, worker: int, push: Arena | None) -> None:
        """Give a worker what has become of its push in a commit; None: it was dropped."""
        if self._local is not None:
            self._local.become(worker)
            self._local.answered(None if push is None else push.views[: len(self._layouts.trained)])

    def look(self, before: float) -> None:
        """Evaluate the parameters for all evaluation times before this one that are not done yet."""
        self.curve.look(self.model, self._commits, before, self._committed_at if self._by_commits else None)


class SimulatedTraining(Protocol):
    """A training plan on a virtual cluster; ``outcome`` gives the results so far at any time."""

    @property
    def model(self) -> nn.Module:
        """Has the parameters of the run when the clock is at its end."""
        ...

    @property
    def now(self) -> float:
        """The time of the virtual clock."""
        ...

    @property
    def dead(self) -> list[int]:
        """The workers that have failed."""
        ...

    def finish(self, stop: Sequence[object] = ()) -> None:
        """Run the clock to its end, or until ``stop`` is not empty."""
        ...

    def outcome(self) -> TrainingOutcome:
        """The results so far."""
        ...


class ServerTraining:
    """A training plan under a policy of a server."""

    def __init__(
        self,
        scenario: Scenario,
        plan: TrainingPlan,
        policy: ServerPolicy,
        *,
        commits: int | None = None,
        seconds: float = math.inf,
        record: RunRecord | None = None,
    ) -> None:
        self._scenario, self._commits, self._seconds = scenario, commits, seconds
        curve = Curve(plan.problem, plan.times(seconds if commits is None else commits))
        self._work = GradientWork(plan, scenario, policy, curve, by_commits=commits is not None)
        nbytes = scenario.nbytes or self._work.nbytes
        whole = dataclasses.replace(scenario, nbytes=nbytes, examples=plan.batch)
        self._cluster = whole.cluster(self._work)
        self._cluster.record = record
        self.model = self._work.model

    @property
    def now(self) -> float:
        return self._cluster.now

    @property
    def dead(self) -> list[int]:
        return self._cluster.dead

    def finish(self, stop: Sequence[object] = ()) -> None:
        self._cluster.run(commits=self._commits, seconds=self._seconds, stop=stop)
        if not stop:
            self._work.look(math.inf)

    def outcome(self) -> TrainingOutcome:
        return TrainingOutcome(run=summary(self._scenario, self._cluster), curve=tuple(self._work.curve.points))


def begin_training(
    scenario: Scenario,
    plan: TrainingPlan,
    *,
    commits: int | None = None,
    seconds: float = math.inf,
    record: RunRecord | None = None,
) -> SimulatedTraining:
    """Make the virtual cluster of a training that ends after ``commits``, or ``seconds``; its clock stands at 0.

    The times of the plan's evaluations are counted in that unit, in commits if they are given. What the workers do is
    written to ``record``.
    """
    check_length(commits, seconds)
    policy = scenario.check_training()
    if isinstance(policy, ServerPolicy):
        return ServerTraining(scenario, plan, policy, commits=commits, seconds=seconds, record=record)
    training = PeersTraining(scenario, plan, commits=commits, seconds=seconds)
    training.record = record
    return training


def simulate_training(
    scenario: Scenario, plan: TrainingPlan, *, commits: int | None = None, seconds: float = math.inf
) -> TrainingOutcome:
    """Train a problem on a virtual cluster for ``commits`` or ``seconds``; the same seed gives the same bits.

    Bits also depend on torch's number of threads; one is fastest for small models.
    """
    training = begin_training(scenario, plan, commits=commits, seconds=seconds)
    training.finish()
    return training.outcome()
