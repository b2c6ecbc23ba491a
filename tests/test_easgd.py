"""Elastic averaging with a server: workers with parameters of their own, which exchange with the server's."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hand import Hand
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger import samples
from live import DEADLINE, TOKEN, Cluster
from sharded import ShardedCluster
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.policies import EASGD, parse_policy
from paceline.policies.messages import PushKind
from paceline.problems import Metric, Problem, Recipe
from paceline.server.client import Client
from paceline.server.local_steps import ElasticSteps
from paceline.sessions.worker import WorkerSession
from paceline.store.commit_rule import CommitRule
from paceline.store.gathering import adopt
from paceline.store.layout import Arena, ModelLayouts
from paceline.store.parameter_store import ParameterStore
from paceline.store.pending import PushKey, Share
from paceline.train_state import TrainState
from paceline.virtual.plan import TrainingPlan
from paceline.virtual.simulate import Scenario
from paceline.virtual.training import begin_training

START = 3.0  # of all parameters


# The policy ----------------------------------------------------------------------------------------------------------


def hand_of(workers: int, order: Any = "round-robin") -> Hand:
    return Hand(EASGD(period=1, alpha=0.5, order=order), workers)


def test_whoever_comes_is_exchanged_with_at_once() -> None:
    hand = hand_of(3, "first-come")
    assert [hand.push(worker) for worker in (2, 2, 0)] == [["commit 2", "send 2"]] * 2 + [["commit 0", "send 0"]]
    assert hand.commits[0].weights == (0.5,)


def test_workers_take_turns_in_the_order_of_their_ranks() -> None:
    hand = hand_of(3)
    assert hand.push(1) == hand.push(2) == []
    assert hand.push(0) == ["commit 0", "send 0", "commit 1", "send 1", "commit 2", "send 2"]
    assert hand.push(2) == []
    assert hand.push(0) == ["commit 0", "send 0"]
    assert hand.push(0) == []
    assert hand.push(1) == ["commit 1", "send 1", "commit 2", "send 2", "commit 0", "send 0"]


def test_the_dead_are_passed_over_but_not_what_they_have_pushed() -> None:
    hand = hand_of(4)
    assert hand.push(1) == hand.push(2) == hand.leave(2) == []
    assert hand.leave(0) == ["commit 1", "send 1", "commit 2"]
    assert hand.push(1) == []
    assert hand.leave(3) == ["commit 1", "send 1"]


def test_one_that_joins_again_waits_for_what_it_has_left() -> None:
    hand = hand_of(2)
    assert hand.push(1) == hand.leave(1) == hand.join(1, 1) == hand.ask(1) == []
    assert hand.push(0) == ["commit 0", "send 0", "commit 1", "send 1"]


def test_a_newcomer_is_waited_for_when_its_turn_comes() -> None:
    hand = hand_of(2)
    assert hand.push(0) == ["commit 0", "send 0"]
    hand.join(5)
    assert hand.ask(5) == ["send 5"]
    assert hand.push(0) == []
    assert hand.push(1) == ["commit 1", "send 1"]
    assert hand.push(5) == ["commit 5", "send 5", "commit 0", "send 0"]


def test_when_the_data_ends_all_are_exchanged_with_in_their_order() -> None:
    hand = hand_of(4)
    hand.push(0)
    assert hand.push(0) == hand.push(3) == hand.push(2) == []
    assert hand.end() == ["commit 2", "send 2", "commit 3", "send 3", "commit 0", "send 0"]
    assert hand.push(1) == ["commit 1", "send 1"]


def test_the_order_goes_on_behind_a_server_that_was_killed() -> None:
    hand = hand_of(3)
    hand.push(0)
    other = hand_of(3)
    other.state.take_over(hand.state.carry())
    other.version = 1
    assert other.push(0) == []
    assert other.push(1) == ["commit 1", "send 1"]


@pytest.mark.parametrize("aggregator", ["median", "delay-compensated(scale=0.5)"])
def test_there_is_nothing_to_combine(aggregator: str) -> None:
    policy: Any = parse_policy(f"easgd(period=2, alpha=0.1, aggregator={aggregator})")
    with pytest.raises(UsageError, match="exchanges with one worker at a time; leave the aggregator out"):
        CommitRule.of(policy)


# The exchange --------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Two parameters, one that is frozen, statistics and a count."""

    mean: Tensor
    mask: Tensor
    count: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2))
        self.frozen = nn.Parameter(torch.ones(5, dtype=dtype), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2, dtype=dtype))
        self.register_buffer("mask", torch.full((2,), -torch.inf, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Stored:
    """A store of parameters that are all one number, and pushes of the same kind."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        self.model = Model(dtype)
        self.model.one.data.fill_(value)
        self.layouts = ModelLayouts(self.model)
        memory = torch.zeros(self.layouts.down.nbytes, dtype=torch.uint8)
        adopt(self.layouts, memory)
        state = TrainState(model=self.model, optimizers=[SGD(self.model.parameters(), lr=1.0)])
        rule = CommitRule(adds_up=False, kind=PushKind.PARAMETERS)
        self.store = ParameterStore(state, self.layouts, memory, rule)

    def push(self, worker: int, number: float) -> tuple[PushKey, Arena]:
        push = Arena(self.layouts.up)
        for view in push.views[:3]:
            view.fill_(number)
        push.views[3].fill_(-torch.inf)
        push.views[4].fill_(worker)
        key = PushKey(worker, step=0)
        self.store.take(key, push, examples=1, used=b"\3")
        return key, push


NUMBER = st.floats(-1e6, 1e6, width=32)
WEIGHT = st.floats(2**-20, 1, width=32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@settings(max_examples=settings().max_examples // 2)
@given(value=NUMBER, pushes=st.lists(st.tuples(NUMBER, WEIGHT), min_size=1, max_size=4))
def test_an_exchange_conserves_the_sum(dtype: torch.dtype, value: float, pushes: list[tuple[float, float]]) -> None:
    limit = torch.finfo(dtype).max / 32
    value = max(-limit, min(limit, value))
    stored = Stored(value, dtype)
    before = float(stored.model.one.detach()[0])
    waiting = [stored.push(worker, max(-limit, min(limit, number))) for worker, (number, _) in enumerate(pushes)]
    owns = [float(push.views[0][0]) for _, push in waiting]
    stored.store.commit([Share(key, weight) for (key, _), (_, weight) in zip(waiting, pushes, strict=True)])
    differences = [float(push.views[0][0]) for _, push in waiting]
    rounding = 4 * torch.finfo(dtype).eps * (abs(before) + 2 * sum(map(abs, owns))) * len(pushes)
    for own, difference, (_, weight) in zip(owns, differences, pushes, strict=True):
        assert difference == pytest.approx(weight * (own - before), abs=rounding + torch.finfo(dtype).tiny)
    after = float(stored.model.one.detach()[0])
    assert after == pytest.approx(before + sum(differences), abs=rounding)
    after_workers = sum(own - difference for own, difference in zip(owns, differences, strict=True))
    assert after + after_workers == pytest.approx(before + sum(owns), abs=rounding)
    assert bool((stored.model.frozen == 1).all())


def test_statistics_move_as_the_parameters_do_and_counts_are_those_of_the_push() -> None:
    stored = Stored(0.0)
    key, _ = stored.push(worker=7, number=8.0)
    stored.store.commit([Share(key, 0.25)])
    assert stored.model.mean.tolist() == [2.0, 2.0] and int(stored.model.count) == 7
    assert stored.model.mask.tolist() == [-torch.inf] * 2
    shares = [Share(stored.push(worker, number)[0], 0.75) for worker, number in enumerate((4.0, 8.0))]
    stored.store.commit(shares)  # a variance must not leave what was pushed
    assert stored.model.mean.tolist() == [6.0, 6.0] and int(stored.model.count) == 1


def test_a_push_of_weight_0_changes_nothing() -> None:
    stored = Stored(1.0)
    key, push = stored.push(0, 5.0)
    stored.store.commit([Share(key, 0.0)])
    assert stored.model.one.tolist() == [1.0] * 3 and stored.model.mean.tolist() == [0.0] * 2
    assert push.views[0].tolist() == [0.0] * 3


# The method, against loops by hand -----------------------------------------------------------------------------------


class Point(nn.Module):
    """Two tensors of double precision, which servers can share, and a loss with its minimum at a target."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.left, self.right = (nn.Parameter(torch.full((2,), START, dtype=torch.float64)) for _ in range(2))

    def forward(self, target: float | Tensor) -> Tensor:
        return 0.5 * ((self.left - target).square().sum() + 2.0 * (self.right - target).square().sum())


def point(rate: float = 0.1, **options: Any) -> TrainState:
    model = Point()
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=rate)], **options)


def numbers_of(train_state: TrainState) -> list[float]:
    return trained_in(train_state.model)


def trained_in(model: nn.Module) -> list[float]:
    return [float(each.detach()[0]) for each in model.parameters() if each.requires_grad]


class Method(NamedTuple):
    """The options of EASGD, and of the loop that is made of it by hand."""

    workers: int
    period: int
    alpha: float = 0.3
    momentum: float = 0.0
    rate: float = 0.1

    @property
    def policy(self) -> str:
        options = f"period={self.period}, alpha={self.alpha}, momentum={self.momentum}"
        return f"easgd({options}, order=round-robin)"


def target_of(worker: int, step: int) -> float:
    return float(np.sin(1.7 * worker + 0.9 * step))


def by_hand(
    method: Method, steps: int, curvature: float, target: Callable[[int, int], float] = target_of
) -> tuple[float, list[float]]:
    """z, and every x, after so many steps of each worker and the exchange that follows, as the paper's algorithm."""
    z, x, v = START, [START] * method.workers, [0.0] * method.workers
    for step, worker in itertools.product(range(steps + 1), range(method.workers)):
        pull = 0.0
        if step % method.period == 0 or step == steps:
            pull = method.alpha * (x[worker] - z)
            z += pull
        if step < steps:
            v[worker] *= method.momentum
            x[worker] += v[worker]
            change = -method.rate * curvature * (x[worker] - target(worker, step))
            x[worker] += change
            v[worker] += change
        x[worker] -= pull
    return z, x


METHODS = [
    Method(workers=1, period=1),
    Method(workers=1, period=1, momentum=0.9),
    Method(workers=1, period=3, alpha=0.7),
    Method(workers=2, period=3),
    Method(workers=2, period=3, momentum=0.5),
    Method(workers=3, period=1, alpha=0.2, momentum=0.9),
]


class Here(ShardedCluster):
    """Servers whose workers share their memory."""

    def client(self, model: nn.Module, rank: int = -1, *, address: str | None = None, here: bool = True) -> Client:
        return Client(
            model,
            address=self.address,
            token=TOKEN,
            sealed=False,
            rank=rank,
            incarnation=0,
            memory=self.memory,
            shard_memories=[each.memory for each in self.beside],
        )


@pytest.mark.parametrize(("cluster_of", "servers"), [(ShardedCluster, 1), (ShardedCluster, 2), (Here, 1), (Here, 2)])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_live_workers_make_the_paper_s_steps(method: Method, cluster_of: type[ShardedCluster], servers: int) -> None:
    """The last push has fewer steps than the period."""
    steps, all_there = 7, threading.Barrier(method.workers)

    def work(session: WorkerSession, own: TrainState) -> None:
        for number in range(steps):
            with session.step():
                if number == 0:
                    all_there.wait(DEADLINE)  # one that comes later begins with what others have made of z
                torch.autograd.backward(own.model(target_of(session.rank, number)))

    with cluster_of(method.policy, lambda: point(method.rate), servers=servers, workers=method.workers) as cluster:
        cluster.run([point(method.rate) for _ in range(method.workers)], work)
        cluster.wait_for_end()
        cluster.collect()
        found = numbers_of(cluster.train_state)
    wanted = [by_hand(method, steps, curvature)[0] for curvature in (1.0, 2.0)]
    assert found == pytest.approx(wanted, abs=1e-12)


def constant_problem(make_model: Callable[[], nn.Module]) -> Problem:
    """A problem whose loss does not depend on the data."""
    data = TensorDataset(torch.zeros(64), torch.zeros(64))
    return Problem(
        name="constant",
        make_model=make_model,
        train=data,
        test=data,
        loss=lambda outputs, targets: outputs,
        metric=Metric(name="loss", measure=lambda outputs, targets: outputs, higher_is_better=False),
        recipe=Recipe(batch_size=1),
    )


class ToZero(Point):
    """Of which the loss depends on nothing else."""

    def forward(self, target: float | Tensor) -> Tensor:
        return super().forward(0.0)


def on_virtual_workers(method: Method, rounds: int, delay: str = "1") -> list[float]:
    plan = TrainingPlan(problem=constant_problem(ToZero), optimizer=f"sgd(lr={method.rate})", batch_size=1, points=1)
    scenario = Scenario(policy=method.policy, workers=method.workers, delay=delay)
    training = begin_training(scenario, plan, seconds=rounds * method.period + 0.5)
    training.finish()
    assert training.outcome().run.commits == rounds * method.workers
    return trained_in(training.model)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_virtual_workers_make_the_paper_s_steps(method: Method) -> None:
    wanted = [by_hand(method, 4 * method.period, curvature, lambda worker, step: 0.0)[0] for curvature in (1.0, 2.0)]
    assert on_virtual_workers(method, 4) == pytest.approx(wanted, abs=1e-12)


def test_virtual_workers_may_diverge() -> None:
    z, _ = on_virtual_workers(Method(workers=2, period=2, rate=1e9), rounds=25)
    assert not np.isfinite(z)


# Stability -----------------------------------------------------------------------------------------------------------


def linear_map(workers: int, rate: float, alpha: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One round of exchanges and steps on f(x) = x^2 / 2, of the vector of all x and, last, z."""
    total = np.eye(workers + 1)
    for worker in range(workers):
        one = np.eye(workers + 1)
        one[worker, worker], one[worker, -1] = 1 - rate - alpha, alpha
        one[-1, worker], one[-1, -1] = alpha, 1 - alpha
        total = one @ total
    return total


def radius(workers: int, rate: float, alpha: float) -> float:
    return float(np.abs(np.linalg.eigvals(linear_map(workers, rate, alpha))).max())


RATES = (0.1, 1.0, 1.9)


def limit(rate: float) -> float:
    """The largest alpha at which round-robin EASGD is stable, for one worker; for more it is enough."""
    return (4 - 2 * rate) / (4 - rate)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_round_robin_is_stable_up_to_the_closed_form(workers: int, rate: float) -> None:
    """Our runs have the numbers of the linear map, and so its stability: exactly for one worker, and more for many."""
    rounds = 15
    for alpha in (0.3 * limit(rate), 0.99 * limit(rate), min(0.999, 1.05 * limit(rate))):
        z, _ = on_virtual_workers(Method(workers, 1, alpha=alpha, rate=rate), rounds)
        first = np.full(workers + 1, START)
        first[:-1] *= 1 - rate  # by the steps before the first exchange
        wanted = np.linalg.matrix_power(linear_map(workers, rate, alpha), rounds) @ first
        assert z == pytest.approx(wanted[-1], abs=1e-9 * max(START, float(np.abs(wanted).max())))
        is_stable, is_within = radius(workers, rate, alpha) < 1, alpha <= limit(rate)
        assert is_stable == is_within if workers == 1 else is_stable or not is_within


# Workers that keep their parameters ----------------------------------------------------------------------------------


DATA = TensorDataset(torch.zeros(7, dtype=torch.float64))


def train(session: WorkerSession, own: TrainState, data: Any) -> None:
    for (targets,) in data:
        with session.step():
            torch.autograd.backward(own.model(targets.mean()))


def to_zero(worker: int, step: int) -> float:
    return 0.0


@pytest.mark.parametrize("cluster_of", [ShardedCluster, Here])
def test_an_epoch_ends_with_the_server_s_parameters_and_the_next_begins_with_the_worker_s(
    cluster_of: type[ShardedCluster],
) -> None:
    """Each epoch ends with a push of one step, and an exchange behind it: as a loop of such periods by hand."""
    method, epochs = Method(workers=1, period=2, momentum=0.5), 3
    seen = []
    with cluster_of(method.policy, point, servers=2, workers=1) as cluster:
        own = point()
        with cluster.session(own, 0) as session:
            for _ in session.epochs(epochs):
                train(session, own, session.batches(DATA, 1))
                seen.append(numbers_of(own)[0])
                session.refresh()
                assert numbers_of(own)[0] == seen[-1]
        cluster.collect()
        assert numbers_of(cluster.train_state)[0] == seen[-1]
    assert seen == pytest.approx(periods_by_hand(method, [2, 2, 2, 1] * epochs)[3::4], abs=1e-12)


def periods_by_hand(method: Method, lengths: Sequence[int], rate: Callable[[int], float] | None = None) -> list[float]:
    """z of one worker after each of these numbers of steps to 0, with an exchange behind each."""
    z, x, v, pull, found = START, START, 0.0, 0.0, []
    for version, length in enumerate(lengths):
        for _ in range(length):
            v *= method.momentum
            x += v
            change = -(rate(version) if rate is not None else method.rate) * x
            x, v = x + change - pull, v + change
            pull = 0.0
        pull = method.alpha * (x - z)
        z += pull
        found.append(z)
    return found


def test_newest_parameters_are_asked_for_in_the_middle_of_a_period() -> None:
    method = Method(workers=1, period=3)
    with Cluster(method.policy, point(), workers=1) as cluster:
        own = point()
        with cluster.session(own, 0) as session:
            for number, (targets,) in enumerate(session.batches(DATA, 1, epochs=1)):
                train(session, own, [(targets,)])
                if number == 3:
                    session.refresh()
                    assert session.steps == 2 and numbers_of(own) == numbers_of(cluster.train_state)
    wanted = periods_by_hand(method, [3, 1, 3])[-1]
    assert numbers_of(cluster.train_state)[0] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("unused", [False, True])
def test_a_loop_that_is_broken_off(unused: bool) -> None:
    """In mid-period, behind a step, which is pushed; or with a batch of which no step was made, which undoes others."""
    method = Method(workers=1, period=3, momentum=0.5)
    with Cluster(method.policy, point(), workers=1) as cluster:
        own = point()
        with cluster.session(own, 0) as session:
            for number, (targets,) in enumerate(session.batches(DATA, 1, epochs=1)):
                if unused and number == 4:
                    break
                train(session, own, [(targets,)])
                if not unused and number == 3:
                    break
            train(session, own, session.batches(DATA, 1, epochs=2))
    wanted = periods_by_hand(method, [3, 3, 3, 3, 2] if unused else [3, 1, 3, 3, 3, 1])[-1]
    assert numbers_of(cluster.train_state)[0] == pytest.approx(wanted, abs=1e-12)


def test_accumulated_batches_are_one_local_step() -> None:
    method = Method(workers=1, period=2, momentum=0.5)
    with Cluster(method.policy, point(), workers=1) as cluster:
        own = point(rate=0.05)  # of two batches each
        with cluster.session(own, 0) as session:
            for number, (targets,) in enumerate(session.batches(TensorDataset(DATA.tensors[0][:6]), 1, epochs=1)):
                with session.step(accumulate=number % 2 == 0):
                    torch.autograd.backward(own.model(targets.mean()))
    wanted = periods_by_hand(method, [2, 1])[-1]
    assert numbers_of(cluster.train_state)[0] == pytest.approx(wanted, abs=1e-12)


def test_a_scheduler_has_the_rate_of_the_version() -> None:
    def falling(train_state: TrainState) -> TrainState:
        scheduler = LinearLR(train_state.optimizers[0], start_factor=1.0, end_factor=0.0, total_iters=10)
        return TrainState(model=train_state.model, optimizers=train_state.optimizers, schedulers=[scheduler])

    method = Method(workers=1, period=3)
    with Cluster(method.policy, falling(point()), workers=1) as cluster:
        own = falling(point())
        with cluster.session(own, 0) as session:
            train(session, own, session.batches(DATA, 1, epochs=2))
    wanted = periods_by_hand(method, [3] * 4 + [2], lambda version: 0.1 - 0.01 * version)[-1]
    assert numbers_of(cluster.train_state)[0] == pytest.approx(wanted, abs=1e-12)


# What comes to nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_skipped_step_and_numbers_that_are_not_finite_leave_no_trace(bad: float) -> None:
    """A bad loss skips a step, and a bad gradient makes parameters that are not pushed; both undo the period."""
    method = Method(workers=1, period=2, momentum=0.5)
    with Cluster(method.policy, point(), workers=1) as cluster:
        own = point()
        with cluster.session(own, 0, on_nan="skip") as session:
            for scale in (1.0, 1.0, 1.0, bad, 1.0, 1.0):
                with session.step() as step:
                    if bad is torch.nan:
                        step.record(loss=scale)
                    torch.autograd.backward(scale * own.model(0.0))
    wanted = periods_by_hand(method, [2, 2])[-1]
    assert numbers_of(cluster.train_state)[0] == pytest.approx(wanted, abs=1e-12)
    assert len(cluster.host.commits) == 2


@pytest.mark.parametrize(("cluster_of", "servers"), [(ShardedCluster, 1), (ShardedCluster, 2), (Here, 1), (Here, 2)])
def test_a_push_that_comes_late_leaves_no_trace(cluster_of: type[ShardedCluster], servers: int) -> None:
    """The step that was sent before a mean is replaced behind it; the answer that crosses its push is to an earlier."""
    method = Method(workers=1, period=1, momentum=0.5)
    with cluster_of(method.policy, point, servers=servers, workers=1) as cluster:
        own = point()
        with cluster.session(own, 0) as session:
            cancelled = session._client.cancelled
            for number in range(5):
                deaf = (lambda: False) if number == 2 else cancelled
                session._cancellation._cancelled = session._client.cancelled = deaf  # type: ignore[method-assign]
                train(session, own, [(torch.zeros(1),)])
                if number == 1:
                    session.mean(1.0)
        cluster.wait_for_end()
        cluster.collect()
    assert cluster.server.figures()[0]["dropped"] == 1
    assert numbers_of(cluster.train_state)[0] == pytest.approx(periods_by_hand(method, [1] * 4)[-1], abs=1e-12)


class Marked(Point):
    """With a buffer that its forward pass sets, to what must not be pushed if that is wanted."""

    mark: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mark", torch.zeros(1))

    def forward(self, target: float | Tensor) -> Tensor:
        self.mark.fill_(float(target))
        return super().forward(0.0)


def marked() -> TrainState:
    model = Marked()
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=0.1)])


def test_a_push_that_the_server_refuses_leaves_no_trace() -> None:
    method = Method(workers=1, period=1, momentum=0.5)
    with Cluster(method.policy, marked(), workers=1) as cluster:
        own = marked()
        with cluster.session(own, 0) as session:
            for mark in (1.0, torch.nan, 2.0):
                with session.step():
                    torch.autograd.backward(own.model(mark))
    assert numbers_of(cluster.train_state)[0] == pytest.approx(periods_by_hand(method, [1, 1])[-1], abs=1e-12)
    # By the exchange of 0.3 it was moved to 1, and then to 2.
    assert float(cluster.train_state.model.mark) == pytest.approx(0.3 + 0.3 * (2 - 0.3))  # type: ignore[arg-type]


def test_buffers_are_the_worker_s_own_also_behind_an_evaluation() -> None:
    with Cluster("easgd(period=1, alpha=0.5)", marked(), workers=1) as cluster:
        own = marked()
        with cluster.session(own, 0) as session:
            found = []
            for mark in (4.0, 8.0):
                with session.step():
                    found.append(float(own.model.mark))  # type: ignore[arg-type]
                    torch.autograd.backward(own.model(mark))
                session.refresh()
                found.append(float(own.model.mark))  # type: ignore[arg-type]
    assert found == [0.0, 2.0, 4.0, 5.0]


def test_a_worker_that_joins_again_begins_with_the_server_s_parameters() -> None:
    method = Method(workers=1, period=2, momentum=0.5)
    with Cluster(method.policy, point(), workers=1) as cluster:
        own = point()
        with cluster.session(own, 0) as session:
            for number in range(6):
                with session.step():
                    torch.autograd.backward(own.model(0.0))
                if number == 2:
                    assert session._client._connection is not None
                    session._client._connection.close()
                    cluster.until(lambda: 0 not in cluster.server._members)
    # The third step is lost with the connection, and the fourth is cancelled.
    z = periods_by_hand(method, [2])[-1]
    x, v = z, 0.0
    for _ in range(2):
        v = 0.5 * v - 0.1 * (x + 0.5 * v)
        x += v
    assert numbers_of(cluster.train_state)[0] == pytest.approx(z + 0.3 * (x - z), abs=1e-12)


@pytest.mark.parametrize("order", ["first-come", "round-robin"])
def test_what_a_killed_worker_has_not_pushed_is_done_by_another(order: str) -> None:
    used: list[int] = []

    def log(session: WorkerSession, own: TrainState, data: Any) -> None:
        for (places,) in data:
            with session.step():
                torch.autograd.backward(own.model(0.0))
            used.extend(places.tolist())

    with Cluster(f"easgd(period=3, alpha=0.3, order={order})", point(), workers=2) as cluster:
        doomed, own = point(), point()
        session = cluster.session(doomed, 0)
        given = session.batches(samples(22), 4, epochs=1)
        for _ in range(3 + 1):  # a push of three, and one step more
            log(session, doomed, [next(given)])
        session._client.close()  # without a word
        cluster.until(lambda: 0 not in cluster.server._members)
        del used[-4:]
        with cluster.session(own, 1) as other:
            log(other, own, other.batches(samples(22), 4, epochs=1))
        assert sorted(used) == [*range(22)]
        given.close()  # type: ignore[attr-defined]


def test_virtual_workers_that_fail_are_passed_over() -> None:
    plan = TrainingPlan(problem=constant_problem(ToZero), optimizer="sgd(lr=0.1)", batch_size=1, points=1)
    policy = "easgd(period=1, alpha=0.3, order=round-robin)"
    scenario = Scenario(policy=policy, workers=3, delay="1 fails(worker=1, at=5)", notice=2.0)
    training = begin_training(scenario, plan, seconds=20.5)
    training.finish()
    # Five rounds of three; at 6 one of worker 0; then both others wait until 7, when it is known, and go on.
    assert training.outcome().run.commits == 5 * 3 + 1 + 2 * 14


def test_one_that_waits_for_a_mean_does_not_hold_up_the_others() -> None:
    """A worker that waits for its turn, or whose turn it is, asks for a mean of all."""
    with Cluster("easgd(period=1, alpha=0.3, order=round-robin)", point(), workers=3) as cluster:

        def work(session: WorkerSession, own: TrainState) -> float:
            train(session, own, session.batches([(torch.zeros(1),)] * (2 + session.rank), epochs=1))
            total = float(session.mean(float(session.rank)))
            train(session, own, session.batches([(torch.zeros(1),)], epochs=2))
            return total

        assert cluster.run([point() for _ in range(3)], work) == [1.0] * 3
        cluster.wait_for_end()
    late = sum(figures["dropped"] for figures in cluster.server.figures().values())  # of steps sent before the mean
    assert len(cluster.host.commits) + late == 2 + 3 + 4 + 3


# Local steps by themselves -------------------------------------------------------------------------------------------


def test_workers_that_share_a_model_have_their_own_parameters() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    local = ElasticSteps(TrainState(model=model, optimizers=[SGD(model.parameters(), lr=1.0)]), momentum=0.5)
    found = []
    for worker, added in ((0, 0.25), (7, None), (0, 0.0), (7, 0.0)):
        local.become(worker)
        with torch.no_grad():
            model.weight.fill_(1.0)  # as read from the server
        local.begin(0)
        model.weight.grad = torch.ones_like(model.weight)
        local.step()
        assert local.end()
        found.append(float(model.weight.detach()))
        local.answered(None if added is None else [torch.tensor([[added]])])
        local.answered([torch.tensor([[99.0]])])  # it is told twice if it asks twice
    # The second step of worker 0 has a velocity of 1 * 0.5, and takes what was added; that of worker 7 begins again.
    assert found == [0.0, 0.0, 0.0 - 0.5 - 1.0 - 0.25, 0.0]
    local.forget()
    with torch.no_grad():
        model.weight.fill_(9.0)
    local.begin(0)
    assert float(model.weight.detach()) == 9.0


def test_the_state_of_other_optimizers_lasts_too() -> None:
    """With a difference of 0 the steps are those of a plain loop."""
    weights = []
    for elastic in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        state = TrainState(model=model, optimizers=[Adam(model.parameters(), lr=0.1)])
        local = ElasticSteps(state, momentum=0.0)
        for number in range(6):
            if elastic:
                local.begin(0)
            state.clear_gradients()
            torch.autograd.backward(model(torch.full((1, 3), 1.0 + number)).square().sum())
            if elastic:
                local.step()
                assert local.end()
                local.answered([torch.zeros_like(each) for each in model.parameters()])
            else:
                state.update()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)
