"""Replays a run of ``paceline train`` in one process: no workers, no sockets, no policy, and the same bits.

A gradient depends only on the parameters of its version, its batch and the seed of its step. While the parameters are
at a version, the replay computes all pushes of that version, and keeps each until its commit.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paceline.codecs import read_codec
from paceline.data.numbered import NumberedBatches
from paceline.data.sampler import ShardedSampler
from paceline.errors import PacelineError, UsageError
from paceline.optim import make_optimizer
from paceline.policies import parse_policy
from paceline.policies.messages import PushKind
from paceline.policies.server import ServerPolicy
from paceline.problems import Problem
from paceline.record.fingerprints import checksum_of, hash_of, state_tensors
from paceline.record.trace import Pushed
from paceline.replay.outcome import Differs, Replayed, ReplayedPush, Tell, gradients_of, same_bits
from paceline.replay.plan import Plan, RecordedCommit
from paceline.server.local_steps import make_local_steps
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import adopt
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.parameter_store import ParameterStore
from paceline.store.pending import PushKey, Share
from paceline.train_state import TrainState
from paceline.training.replay_sends import SentParameters
from paceline.training.replay_worker import ComputedPush, ReplayWorker
from paceline.training.train import TrainConfig, build_scheduler, make_model, server_pace, training_sampler


class ReplayError(PacelineError):
    """A run cannot be replayed here, since something that its numbers depend on has changed."""


class ProblemReplay:
    """The server's side of a replay; ``train_state`` and ``version`` are those after the last commit."""

    def __init__(
        self, config: TrainConfig, problem: Problem, plan: Plan, *, seed: int, workers: int, servers: int = 1
    ) -> None:
        if plan.first:
            raise ReplayError(
                f"the trace begins at version {plan.first}, from a checkpoint of an untraced run; only a run that is "
                "recorded from its first step can be replayed"
            )
        self.problem = problem
        self.version: int = plan.first
        self._committed: list[ComputedPush] = []
        self._plan = plan
        policy = parse_policy(config.policy)
        assert isinstance(policy, ServerPolicy), "a run with a trace has a server"
        adds_up = all(commit.weights is None for commit in plan.commits)
        rule = replace(CommitRule.of(policy, read_codec(config.codec)), adds_up=adds_up)
        self.train_state = rule.remembering(_make_train_state(config, problem, policy, workers))
        self._exchanges = rule.kind is PushKind.PARAMETERS
        self._layouts = ModelLayouts(self.train_state.model, with_reads=rule.with_reads)
        memory = torch.zeros(self._layouts.down.nbytes, dtype=torch.uint8)
        adopt(self._layouts, memory)
        self._parameters = self._layouts.down.views(memory)
        self._store = ParameterStore(self.train_state, self._layouts, memory, rule)
        sampler = training_sampler(config, problem, 1)
        batches = NumberedBatches(problem.train, ShardedSampler(sampler.num_samples, sampler.batch_size, seed=seed))
        _check_data(plan, batches)
        own = _make_train_state(config, problem, policy, workers)
        local = make_local_steps(policy.kind, own, momentum=policy.local_momentum)
        self._worker = ReplayWorker(config, problem, batches, model=own.model, local=local, rule=rule, servers=servers)
        self._computed_from = plan.computed_from()
        self._sent = SentParameters(plan, rule.codec, self._layouts, seed=seed)
        self._waiting: dict[Pushed, ComputedPush] = {}  # for their commits
        self._free: list[Arena] = []  # memory to be used again
        self._pushes: int = 0
        self._hashes: int = 0

    def run(self, until: int | None = None, tell: Tell = lambda done, total: None) -> Replayed:
        """Replay the commits up to version ``until``, or all; stop at the first difference."""
        plan = self._plan
        last = plan.last if until is None else until
        if not plan.first <= last <= plan.last:
            raise UsageError(f"the run has the versions {plan.first} to {plan.last}, but no version {last}")
        difference = None
        try:
            self._compare_hashes()
            for commit in plan.commits[: last - plan.first]:
                self._compute_pushes()
                self._commit(commit)
                self._compare_hashes()
                tell(self.version - plan.first, last - plan.first)
        except Differs as differs:
            difference = str(differs)
        return Replayed(
            version=self.version,
            commits=self.version - plan.first,
            pushes=self._pushes,
            hashes=self._hashes,
            digest=self._digest().hex(),
            difference=difference,
            whole=plan.ended is not None,
        )

    def last_pushes(self) -> list[ReplayedPush]:
        """The pushes of the last commit."""
        return [
            ReplayedPush(told.rank, told.step, told.version, push.loss, gradients)
            for push in self._committed
            for told in (push.recorded.told,)
            for gradients in (gradients_of(self._layouts, push.gradients, push.filled.used),)
        ]

    def _compute_pushes(self) -> None:
        """Compute and compare all pushes of the present version."""
        self._sent.send(self.version, self._parameters)
        for recorded in self._computed_from.pop(self.version, ()):
            arena = self._free.pop() if self._free else Arena(self._layouts.up)
            push = self._worker.compute(recorded, self._sent.read_by(recorded, self._parameters), arena)
            self._compare(push)
            self._waiting[recorded.told] = push
            self._pushes += 1

    def _compare(self, push: ComputedPush) -> None:
        recorded = push.recorded.told
        checksum = push.filled.checksum
        if not same_bits(push.loss, recorded.loss) or checksum != recorded.checksum:
            raise Differs(
                f"{push.recorded}: loss {push.loss!r} and gradients with the checksum {checksum:016x}, where the run "
                f"had {recorded.loss!r} and {recorded.checksum:016x}"
            )

    def _commit(self, commit: RecordedCommit) -> None:
        self._free += [push.gradients for push in self._committed]
        self._committed = [self._waiting.pop(push.told) for push in commit.pushes]
        keys = [PushKey(push.recorded.told.rank, push.recorded.told.step) for push in self._committed]
        arenas = [self._copied(push.gradients) if self._exchanges else push.gradients for push in self._committed]
        for key, push, arena in zip(keys, self._committed, arenas, strict=True):
            self._store.take(key, arena, examples=push.recorded.told.examples, used=push.filled.used)
        self._store.commit(None if commit.weights is None else [*map(Share, keys, commit.weights, commit.groups)])
        for push, arena in zip(self._committed, arenas, strict=True):
            self._worker.answer(push.recorded, arena)
        self._free += arenas if self._exchanges else []
        self.version = commit.version

    def _copied(self, push: Arena) -> Arena:
        """A copy of a push that a commit changes: ``last_pushes`` has it as it was pushed."""
        arena = self._free.pop() if self._free else Arena(self._layouts.up)
        arena.memory.copy_(push.memory)
        return arena

    def _compare_hashes(self) -> None:
        for digest in self._plan.hashes.get(self.version, ()):
            if self._digest() != digest:
                raise Differs(
                    f"version {self.version}: the parameters and buffers have the hash {self._digest().hex()}, where "
                    f"the run had {digest.hex()}; all pushes before are equal"
                )
            self._hashes += 1

    def _digest(self) -> bytes:
        return hash_of(state_tensors(self.train_state.model))


def _make_train_state(config: TrainConfig, problem: Problem, policy: ServerPolicy, workers: int) -> TrainState:
    model = make_model(config, problem)
    optimizer = make_optimizer(config.optimizer or problem.recipe.optimizer, model.parameters())
    scheduler = build_scheduler(config, problem, optimizer, server_pace(config, problem, policy, workers))
    return TrainState(
        model=model,
        optimizers=[optimizer],
        schedulers=[] if scheduler is None else [scheduler],
        clip_norm=config.clip_norm,
    )


def _check_data(plan: Plan, batches: NumberedBatches) -> None:
    """Raise if the data differs from the run's in its size or first batch."""
    sampler = batches.sampler
    checksum: int | None = None
    for told in plan.data:
        if (told.num_samples, told.batch_size) != (sampler.num_samples, sampler.batch_size):
            raise ReplayError(
                f"the data is not that of the run: it had {told.num_samples} samples in batches of {told.batch_size}, "
                f"but there are {sampler.num_samples} in batches of {sampler.batch_size} here"
            )
        if told.checksum and checksum is None:
            checksum = checksum_of(batches.fetch(0, 0))
        if told.checksum not in (0, checksum):
            raise ReplayError(
                f"the data is not that of the run: its first batch had the checksum {told.checksum:08x}, but has "
                f"{checksum:08x} here; restore the run's files, and the same order of samples"
            )
