"""One commit means the same everywhere: whatever a policy answers, all who drive it come to the same bits."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import Listed, Turn
from live import TOKEN
from quick import in_turn
from same_bits import assert_same
from sharded import ShardedCluster
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.aggregators import AGGREGATORS, parse_aggregator
from paceline.codecs import CODECS as CODECS_BY_NAME
from paceline.codecs import parse_codec
from paceline.data.numbered import NumberedBatches
from paceline.data.sampler import ShardedSampler
from paceline.delays.delay import Changed, Constant, Factors
from paceline.delays.distributions import Times, Workers
from paceline.optim import make_optimizer
from paceline.policies import POLICIES, Async, KBatchAsync, ServerPolicy, parse_policy
from paceline.problems import Metric, Problem, Recipe
from paceline.record.trace import Trace, TraceWriter
from paceline.replay.plan import read_plan
from paceline.replay.serving import ReplayServer
from paceline.server.client import Client
from paceline.server.local_steps import make_local_steps
from paceline.server.part_sum import PartSum
from paceline.train_state import TrainState
from paceline.training.replay_problem import ProblemReplay
from paceline.training.train import TrainConfig, make_model
from paceline.transport.listening import Listener
from paceline.transport.messages import Go
from paceline.virtual.cluster import Cluster
from paceline.virtual.plan import Curve, TrainingPlan
from paceline.virtual.simulate import Scenario
from paceline.virtual.training import GradientWork

SAMPLES, BATCH, EPOCHS, SEED, WORKERS = 22, 4, 2, 3, 3
PUSHES = EPOCHS * -(-SAMPLES // BATCH)
ENDLESS = 1000  # epochs
CONFIG = TrainConfig(
    policy="async", optimizer="sgd(lr=0.02, momentum=0.9)", batch_size=BATCH, epochs=EPOCHS, device="cpu", seed=SEED
)


class Net(nn.Module):
    """With a layer that only some batches use, and perhaps with buffers."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)))
        if float(inputs.sum()) > 0:
            hidden = torch.tanh(self.rare(hidden))
        return self.last(hidden)  # type: ignore[no-any-return]


def make_problem(*, norm: bool) -> Problem:
    dice = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 3, generator=dice)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
    mse = nn.functional.mse_loss
    return Problem(
        name="law",
        make_model=lambda: Net(norm=norm),
        train=data,
        test=data,
        loss=mse,
        metric=Metric(name="loss", measure=mse, higher_is_better=False),
        recipe=Recipe(batch_size=BATCH),
    )


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run by all: a policy, what it trains, and for how long."""

    policy: ServerPolicy
    problem: Problem
    times: Sequence[int]  # of steps, in the order in which they begin; from the first again when all are over
    ends: bool  # with the data, or after as many pushes as that has batches
    clip_norm: float | None = None
    codec: str | None = None

    @property
    def epochs(self) -> int:
        return EPOCHS if self.ends else ENDLESS

    @property
    def told(self) -> str:
        """A policy with a text form, from which a replay learns all but the commits, which are in the trace."""
        known = self.policy.name in POLICIES
        return str(self.policy if known else Async(aggregator=self.policy.aggregator))

    def train_state(self) -> TrainState:
        model = make_model(CONFIG, self.problem)
        made = make_optimizer(CONFIG.optimizer or "", model.parameters())
        return TrainState(model=model, optimizers=[made], clip_norm=self.clip_norm)


class Outcome(NamedTuple):
    """What a run came to."""

    state: dict[str, Any]
    commits: int


def outcome_of(train_state: TrainState, commits: int) -> Outcome:
    state = copy.deepcopy(train_state.state_dict())
    for optimizer in [*state["optimizers"], state.get("remembered", {"state": {}})]:
        optimizer["state"] = dict(sorted(optimizer["state"].items()))  # and not by their first use
    return Outcome(state, commits)


# On the virtual cluster ----------------------------------------------------------------------------------------------


class Noting(GradientWork):
    """Notes who ended a step, in order, and when there have been enough."""

    def __init__(self, case: Case) -> None:
        plan = TrainingPlan(problem=case.problem, optimizer=CONFIG.optimizer, batch_size=BATCH, codec=case.codec)
        scenario = Scenario(policy=case.policy, workers=WORKERS, seed=SEED)
        super().__init__(plan, scenario, case.policy, Curve(case.problem, ()))
        self.ended: list[int] = []
        self.enough: list[int] = []

    def end(self, worker: int, step: int) -> tuple[float, int]:
        self.ended.append(worker)
        self.enough += [1] * (len(self.ended) == PUSHES)
        return super().end(worker, step)


@dataclass(frozen=True, kw_only=True)
class Listing(Changed):
    """Times as they are listed; forever for a step whose batch there is not, if the data ends."""

    base: Constant = field(default_factory=lambda: Constant(value=1.0))
    changes: tuple[Factors, ...] = (Factors(values=(1.0,)),)
    case: Case
    work: Noting
    drawn: list[int] = field(default_factory=list)

    def sample(self, generator: np.random.Generator, workers: Workers, at: float | Times = 0.0) -> Times:
        return np.array([self.draw(worker) for worker in workers.tolist()])

    def draw(self, worker: int) -> float:
        self.drawn.append(worker)
        if self.case.ends and max(self.work._batches[worker]) >= PUSHES:
            return math.inf
        return float(self.case.times[len(self.drawn) % len(self.case.times)])

    def fails_at(self, worker: int) -> float:
        return math.inf if not self.case.ends else 0.0


def on_virtual_cluster(case: Case) -> tuple[Outcome, list[int]]:
    """Run on the virtual clock; also give the order in which workers ended their steps."""
    work = Noting(case)
    cluster = Cluster(case.policy, WORKERS, Listing(case=case, work=work), work=work, notice=1e9, seed=SEED)
    cluster.run(stop=work.enough, commits=10**9)
    if case.ends:
        cluster._carry_out(case.policy.ended(cluster.state, cluster.now), cluster.now)
    return outcome_of(work._store._train_state, cluster.version), work.ended


# On live servers -----------------------------------------------------------------------------------------------------


class Worker:
    """A worker that computes a step when it is told to."""

    def __init__(self, case: Case, rank: int, address: str) -> None:
        self._case, train_state = case, case.train_state()
        self._model = train_state.model
        self._local = make_local_steps(case.policy.kind, train_state, momentum=case.policy.local_momentum)
        self._parts = PartSum(self._model) if case.policy.coded else None
        self._batches = NumberedBatches(case.problem.train, ShardedSampler(SAMPLES, BATCH, seed=SEED))
        self.client = Client(
            self._model, address=address, token=TOKEN, sealed=False, rank=rank, incarnation=0, memory=None
        )
        self.step: Go | None = None
        self.batches: list[tuple[int, int, float]] = []  # of that step, with their weights
        self.client.describe(SAMPLES, BATCH, "short", True, 0)
        self.client.ask(case.epochs)

    def settle(self) -> None:
        """Wait until the server has heard all that was said, and begin the last step that has come."""
        self.client.save("there")
        while self.client.cancelled():
            self.begin()

    def begin(self) -> None:
        """Wait for a step, or for word that there is none."""
        answer = self.client.next_step(self._case.epochs)
        self.step = answer if isinstance(answer, Go) else None
        if self.step is not None:
            if self._local is not None:
                self._local.answered(self.client.differences)
            self.batches = [(self.step.epoch, self.step.batch, self.step.weight)]
            for _ in range(
                self._case.policy.local_steps - 1 + self.step.more
            ):  # all at once, as on the virtual cluster
                more = self.client.more()
                if more is None:
                    return  # it was cancelled
                self.batches.append((more.epoch, more.batch, more.weight))

    def begin_in_time(self) -> None:
        """Wait for a step that is not cancelled."""
        while self.step is None or self.client.cancelled():
            self.begin()

    def push(self) -> None:
        assert self.step is not None
        examples, loss = 0, torch.zeros(())
        for epoch, number, weight in self.batches:
            (inputs, targets), count = self._batches.fetch(epoch, number)
            self._model.zero_grad()
            if self._local is not None:
                self._local.begin(self.client.version)
            loss = self._case.problem.loss(self._model(inputs), targets)
            torch.autograd.backward(loss)
            examples += count
            if self._local is not None:
                self._local.step()
            if self._parts is not None:
                self._parts.add(weight)
        if self._local is not None:
            assert self._local.end()
        if self._parts is not None:
            self._parts.end()
        self.step = None
        self.client.push(examples=examples, loss=float(loss.detach()), seconds=0.0)


def on_live_server(case: Case, order: Sequence[int], servers: int, trace: Path) -> tuple[Outcome, list[bool]]:
    """Lead workers by hand, in the order in which those of the virtual cluster have ended.

    Also give whether each has a step that it has not pushed.
    """
    about = {"world_size": WORKERS, "seed": SEED, "policy": case.told, "codec": case.codec, "servers": servers}
    writer = TraceWriter(trace, about)
    options: dict[str, Any] = {"workers": WORKERS, "trace": writer, "seed": SEED, "codec": case.codec}
    cluster = ShardedCluster(case.policy, case.train_state, servers=servers, **options)
    with cluster, contextlib.closing(writer):
        workers = []
        for rank in range(WORKERS):
            workers.append(Worker(case, rank, cluster.address))
            workers[-1].settle()
        for worker in workers:  # a round of all begins when the last has joined
            worker.settle()
        for rank in order:
            workers[rank].push()
            workers[rank].settle()
            for worker in workers:
                worker.settle()
        cluster.collect()
        outcome = outcome_of(cluster.train_state, len(cluster.host.commits))
        for worker in workers:
            worker.client.leave(failed=False)
        cluster.wait_for_end()
    return outcome, [worker.step is not None for worker in workers]


# Again from the trace ------------------------------------------------------------------------------------------------


def replayed_as_problem(case: Case, trace: Path, servers: int = 1) -> Outcome:
    plan = read_plan(Trace(trace))
    config = replace(CONFIG, policy=case.told, codec=case.codec)
    replay = ProblemReplay(config, case.problem, plan, seed=SEED, workers=WORKERS, servers=servers)
    object.__setattr__(replay.train_state, "clip_norm", case.clip_norm)
    replayed = replay.run()
    assert replayed.difference is None
    return outcome_of(replay.train_state, replayed.commits)


def replayed_as_script(case: Case, trace: Path, order: Sequence[int], has_step: Sequence[bool]) -> Outcome:
    """Have workers in threads run again, until they have pushed as often as they had, and begun what they had begun."""
    listener = Listener(TOKEN)
    address = listener.bind("tcp://127.0.0.1:0")
    train_state = case.train_state()
    server = ReplayServer(train_state, Trace(trace), listener, keeps_pushes=True)
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            worker = Worker(case, rank, address)
            for _ in range(order.count(rank)):
                worker.begin_in_time()
                worker.push()
            if has_step[rank]:
                worker.begin_in_time()
            elif case.ends:
                worker.begin()
            worker.client.leave(failed=False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(WORKERS)]
    for thread in threads:
        thread.start()
    try:
        replayed = server.run(None)
    finally:
        listener.close()
    for thread in threads:
        thread.join(10.0)
    assert not failures and replayed.difference is None, (failures, replayed.difference)
    last = read_plan(Trace(trace)).commits[-1:]
    wanted = [(push.told.rank, push.told.step) for commit in last for push in commit.pushes]
    assert [(push.worker, push.step) for push in server.last_pushes()] == wanted
    return outcome_of(server._train_state, replayed.commits)


def assert_all_the_same(case: Case) -> None:
    virtual, order = on_virtual_cluster(case)
    with TemporaryDirectory() as folder:
        trace, other_trace = Path(folder) / "one.bin", Path(folder) / "two.bin"
        live, has_step = on_live_server(case, order, 1, trace)
        several = 1 if case.codec is not None and "both" in case.codec else 2  # servers
        parted, _ = on_live_server(case, order, several, other_trace)
        if case.codec is None:  # else every server's part has its own packet
            assert_same(parted, live)
        assert_same(replayed_as_problem(case, trace), live)
        assert_same(replayed_as_problem(case, other_trace, servers=several), parted)
        assert_same(replayed_as_script(case, other_trace, order, has_step), parted)
    if case.clip_norm is None:  # which the virtual cluster knows nothing of
        assert_same(virtual, live)


AGGREGATED = [  # beside the mean
    "median",
    "trimmed-mean(drop=1)",
    "krum(faulty=0)",
    "multi-krum(faulty=0, keep=2)",
    "geometric-median",
    "delay-compensated(scale=0.5)",
    "delay-compensated(scale=2.0, momentum=0.5)",
]
WEIGHT = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1 / 3, 1e-30]), st.floats(-2, 2))
COMMIT = st.lists(st.tuples(st.integers(0, 7), WEIGHT), min_size=1, max_size=4).map(tuple)
TURN = st.builds(Turn, st.lists(COMMIT, max_size=2).map(tuple), st.booleans())


@settings(max_examples=settings().max_examples // 2)  # each is five runs
@given(
    turns=st.lists(TURN, min_size=1, max_size=PUSHES).map(tuple),
    last=st.lists(WEIGHT, min_size=1, max_size=3).map(tuple),
    times=st.lists(st.integers(1, 5), min_size=1, max_size=9),
    norm=st.booleans(),
    clip_norm=st.sampled_from([None, None, 0.1]),
    aggregator=st.sampled_from(["mean", *AGGREGATED]),
)
def test_any_commits_come_to_the_same_bits_under_all_who_drive(
    turns: tuple[Turn, ...],
    last: tuple[float, ...],
    times: list[int],
    norm: bool,
    clip_norm: float | None,
    aggregator: str,
) -> None:
    policy, problem = Listed(turns=turns, last=last, aggregator=aggregator), make_problem(norm=norm)
    assert_all_the_same(Case(policy=policy, problem=problem, times=times, ends=True, clip_norm=clip_norm))


def test_what_an_aggregator_remembers_is_part_of_an_outcome() -> None:
    policy = Async(aggregator="delay-compensated(scale=2.0, momentum=0.5)")
    outcome, _ = on_virtual_cluster(Case(policy=policy, problem=make_problem(norm=False), times=[1, 3], ends=False))
    assert len(outcome.state["remembered"]["state"]) == 6, "one for each tensor"


def test_the_law_has_every_aggregator_but_that_of_draco() -> None:
    assert {parse_aggregator(text).name for text in AGGREGATED} == AGGREGATORS.keys() - {"mean", "vote"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("aggregator", AGGREGATED)
def test_all_aggregators_come_to_the_same_bits_under_all_who_drive(aggregator: str, norm: bool) -> None:
    policy = KBatchAsync(k=3, aggregator=aggregator)
    assert_all_the_same(Case(policy=policy, problem=make_problem(norm=norm), times=[3, 1, 4, 1, 5, 2], ends=False))


@pytest.mark.parametrize("text", ["async(weights=staleness)", "k-batch-async(k=2, weights=staleness(power=0.5))"])
def test_weights_by_staleness_come_to_the_same_bits_under_all_who_drive(text: str) -> None:
    policy = parse_policy(text)
    assert isinstance(policy, ServerPolicy)
    assert_all_the_same(Case(policy=policy, problem=make_problem(norm=True), times=[3, 1, 4, 1, 5, 2], ends=False))


OPTIONS = {
    "ssp": "(bound=1)",
    "downpour": "(period=2)",
    "ada-sync": "(window=0)",
    "gradient-coding": "(stragglers=1)",
    "easgd": "(period=2, alpha=0.4)",
    "draco": "(faulty=1)",
}
IN_TURN = "easgd(period=1, alpha=0.4, order=round-robin, momentum=0.5)"  # several are sent on at once, and take batches


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "name", [*(name for name, kind in POLICIES.items() if issubclass(kind, ServerPolicy)), IN_TURN]
)
def test_all_policies_come_to_the_same_bits_under_all_who_drive(name: str, norm: bool) -> None:
    policy = parse_policy(name + OPTIONS.get(name, "(k=2)" if name.startswith("k-") else ""))
    assert isinstance(policy, ServerPolicy)
    assert_all_the_same(Case(policy=policy, problem=make_problem(norm=norm), times=[3, 1, 4, 1, 5, 2], ends=False))


CODECS = [  # so that something of the small model is coded, and something waits
    "cast(to=fp8)",
    "qsgd(levels=3, bucket=8, raw_below=0)",
    "sign(bucket=8)",
    "top-k(density=0.3, warm_up=2)",
    "top-k(density=0.2, momentum=0.5, clip=1.0)",
    "sparse-ternary(density=0.2)",
    "threshold(tau=0.05, adaptive=0.2)",
    "power-sgd(rank=1)",
]
BOTH = ["cast(both=true)", "qsgd(levels=3, bucket=8, raw_below=0, both=true)", "top-k(density=0.3, both=true)"]
CODED = ["sync", "k-sync(k=2)", "k-batch-sync(k=2)", "k-batch-async(k=2)", "downpour(period=2)"]
EXCHANGED = ["easgd(period=2, alpha=0.4)", IN_TURN]


COMBINED = [
    *in_turn([*CODECS, *BOTH], CODED),
    *in_turn([codec for codec in CODECS if "momentum" not in codec], EXCHANGED),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("codec", "text"), COMBINED)
def test_all_codecs_come_to_the_same_bits_under_all_who_drive(codec: str, text: str) -> None:
    policy = parse_policy(text)
    assert isinstance(policy, ServerPolicy)
    problem = make_problem(norm=text in ("sync", IN_TURN))
    assert_all_the_same(Case(policy=policy, problem=problem, times=[3, 1, 4, 1, 5, 2], ends=False, codec=codec))


def test_the_law_has_every_codec() -> None:
    assert {parse_codec(text).name for text in CODECS} == set(CODECS_BY_NAME)
