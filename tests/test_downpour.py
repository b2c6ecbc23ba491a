"""Pushes of differences: several local steps a push, whose optimizers live with the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from ledger import Seen, samples
from live import Cluster
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.policies import parse_policy
from paceline.problems import load_problem
from paceline.server.local_steps import DifferenceSteps
from paceline.sessions.worker import WorkerSession
from paceline.store.commit_rule import CommitRule
from paceline.train_state import TrainState
from paceline.virtual.plan import TrainingPlan
from paceline.virtual.simulate import Scenario
from paceline.virtual.training import begin_training

COUNT, BATCH = 22, 4  # samples: the last batch of an epoch is shorter


def momentum(model: nn.Module) -> TrainState:
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=1.0, momentum=0.5)])


def plain(model: nn.Module) -> TrainState:
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=1.0)])


def counting(session: WorkerSession, model: nn.Module, data: Any, after: Callable[[], None] = lambda: None) -> None:
    """Train so that a parameter of ``Seen`` counts, below 0, how often its sample was used."""
    for (places,) in data:
        with session.step():
            torch.autograd.backward(model(places).sum())
        after()


def times_counted(cluster: Cluster) -> list[float]:
    return [-number for number in cast(Seen, cluster.train_state.model).seen.tolist()]


# The method ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 5])
def test_a_period_of_1_and_plain_sgd_is_async(workers: int) -> None:
    plan = TrainingPlan(problem=load_problem("logistic"), optimizer="sgd(lr=0.1)", batch_size=8, points=2)
    found = []
    for policy in ("async", "downpour(period=1)"):
        run = begin_training(Scenario(policy=policy, workers=workers, delay="1+exp(1)"), plan, seconds=30)
        run.finish()
        found.append(torch.cat([each.detach().flatten() for each in run.model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


@pytest.mark.parametrize("period", [1, 3, 100])
@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_one_worker_is_the_plain_loop(period: int, name: str) -> None:
    """Its optimizer remembers across pushes; at the end of the data it pushes fewer steps."""
    inputs = torch.randn(COUNT, 3, generator=torch.Generator().manual_seed(0))
    made: dict[str, Callable[[nn.Module], Optimizer]] = {
        "momentum": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9),
        "adam": lambda model: Adam(model.parameters(), lr=0.1),
        "adagrad": lambda model: Adagrad(model.parameters(), lr=0.1),
    }

    def fresh() -> TrainState:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        return TrainState(model=model, optimizers=[made[name](model)])

    by_hand = fresh()
    for _ in range(2):
        for batch in torch.split(inputs, BATCH):
            by_hand.clear_gradients()
            torch.autograd.backward(by_hand.model(batch).square().mean())
            by_hand.update()
    with Cluster(f"downpour(period={period})", fresh(), workers=1) as cluster:
        own = fresh()
        with cluster.session(own, 0) as session:
            for (batch,) in session.batches(TensorDataset(inputs), BATCH, epochs=2, shuffle=False):
                with session.step():
                    torch.autograd.backward(own.model(batch).square().mean())
            torch.testing.assert_close(own.model.state_dict(), cluster.train_state.model.state_dict(), rtol=0, atol=0)
    assert len(cluster.host.commits) == -(-2 * 6 // period)
    torch.testing.assert_close(cluster.train_state.model.state_dict(), by_hand.model.state_dict(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("period", [0, -3])
def test_a_period_below_1_is_refused(period: int) -> None:
    with pytest.raises(UsageError, match=r"period must be at least 1, got .*; for example downpour\(period=4\)"):
        parse_policy(f"downpour(period={period})")


def test_what_corrects_gradients_is_refused() -> None:
    policy: Any = parse_policy("downpour(period=2, aggregator=delay-compensated(scale=1.0))")
    with pytest.raises(UsageError, match="corrects gradients, and under downpour workers push a difference"):
        CommitRule.of(policy)


# Every sample once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [2, 4, 50])
def test_every_sample_is_used_once_an_epoch(period: int) -> None:
    def work(session: WorkerSession, own: TrainState) -> Tensor:
        epochs = 0
        for _ in session.epochs(3):
            counting(session, own.model, session.batches(samples(COUNT), BATCH))
            epochs += 1
        if not epochs:  # it was so slow to come that the others had used all data, and has read nothing
            session.refresh()
        return next(own.model.parameters()).detach().clone()

    with Cluster(f"downpour(period={period})", plain(Seen(COUNT)), workers=3) as cluster:
        ends = cluster.run([plain(Seen(COUNT)) for _ in range(3)], work)
    assert times_counted(cluster) == [3.0] * COUNT
    assert all(torch.equal(end, cast(Seen, cluster.train_state.model).seen) for end in ends), "all have the newest"


def test_what_a_killed_worker_has_not_pushed_is_done_by_another() -> None:
    with Cluster("downpour(period=3)", plain(Seen(COUNT)), workers=2) as cluster:
        doomed, own = plain(Seen(COUNT)), plain(Seen(COUNT))
        session = cluster.session(doomed, 0)
        given = session.batches(samples(COUNT), BATCH, epochs=1)
        for _ in range(4):  # one push of three, and one step more
            counting(session, doomed.model, [next(given)])
        session._client.close()  # without a word
        cluster.until(lambda: 0 not in cluster.server._members)
        with cluster.session(own, 1) as other:
            counting(other, own.model, other.batches(samples(COUNT), BATCH, epochs=1))
        assert times_counted(cluster) == [1.0] * COUNT
        given.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("unused", [False, True])
def test_a_loop_that_is_broken_off_loses_no_batch(unused: bool) -> None:
    """In mid-period, behind a step or with a batch of which no step was made."""
    with Cluster("downpour(period=4)", plain(Seen(COUNT)), workers=1) as cluster:
        own = plain(Seen(COUNT))
        with cluster.session(own, 0) as session:
            for number, (places,) in enumerate(session.batches(samples(COUNT), BATCH, epochs=1)):
                if unused and number == 2:
                    break
                counting(session, own.model, [(places,)])
                if not unused and number == 1:
                    break
            counting(session, own.model, session.batches(samples(COUNT), BATCH, epochs=2))
    assert times_counted(cluster) == [2.0] * COUNT


def test_steps_on_data_of_ones_own_are_pushed_in_the_end() -> None:
    with Cluster("downpour(period=4)", plain(Seen(COUNT)), workers=1) as cluster:
        own = plain(Seen(COUNT))
        with cluster.session(own, 0) as session:
            counting(session, own.model, [(torch.arange(COUNT),)] * 6)
            assert len(cluster.host.commits) == 1
    assert [commit.examples for commit in cluster.host.commits] == [4, 2] and times_counted(cluster) == [6.0] * COUNT


def test_newest_parameters_are_asked_for_in_the_middle_of_a_period() -> None:
    with Cluster("downpour(period=4)", plain(Seen(COUNT)), workers=1) as cluster:
        own = plain(Seen(COUNT))
        with cluster.session(own, 0) as session:
            counting(session, own.model, session.batches(samples(COUNT), BATCH, epochs=1), session.refresh)
            assert session.steps == 6
    assert times_counted(cluster) == [1.0] * COUNT


def test_accumulated_batches_are_one_local_step() -> None:
    with Cluster("downpour(period=2)", plain(Seen(COUNT)), workers=1) as cluster:
        own = plain(Seen(COUNT))
        with cluster.session(own, 0) as session:
            for number, (places,) in enumerate(session.batches(samples(COUNT), BATCH, epochs=1)):
                with session.step(accumulate=number % 2 == 0):
                    torch.autograd.backward(own.model(places).sum())
    assert [commit.examples for commit in cluster.host.commits] == [16, 6]
    assert times_counted(cluster) == [1.0] * COUNT


# What comes to nothing -----------------------------------------------------------------------------------------------


def test_a_skipped_step_leaves_no_trace_in_the_local_optimizer() -> None:
    with Cluster("downpour(period=2)", momentum(Seen(1)), workers=1) as cluster:
        own = momentum(Seen(1))
        with cluster.session(own, 0, on_nan="skip") as session:
            for number, loss in enumerate((1.0, 1.0, 1.0, torch.nan, 1.0, 1.0)):
                with session.step() as step:
                    step.record(loss=loss)
                    torch.autograd.backward(own.model(torch.tensor([0])).sum())
                assert step.skipped == (number == 3)
    # Momentum of four steps, and not of the one before the skipped.
    assert times_counted(cluster) == [1 + 1.5 + 1.75 + 1.875]


def test_a_difference_that_is_not_finite_is_left_out() -> None:
    with Cluster("downpour(period=2)", plain(Seen(1)), workers=1) as cluster:
        own = plain(Seen(1))
        with cluster.session(own, 0) as session:
            for scale in (1.0, torch.inf, 1.0, 1.0):
                with session.step():
                    torch.autograd.backward(scale * own.model(torch.tensor([0])).sum())
    assert times_counted(cluster) == [2.0] and len(cluster.host.commits) == 1


def test_a_worker_that_joins_again_remembers_nothing() -> None:
    with Cluster("downpour(period=2)", momentum(Seen(1)), workers=1) as cluster:
        own = momentum(Seen(1))
        with cluster.session(own, 0) as session:
            for number in range(5):
                with session.step():
                    torch.autograd.backward(own.model(torch.tensor([0])).sum())
                if number == 2:
                    assert session._client._connection is not None
                    session._client._connection.close()
                    cluster.until(lambda: 0 not in cluster.server._members)
    # The third step is lost with the connection; the fourth is cancelled, and the fifth begins anew.
    assert times_counted(cluster) == [(1 + 1.5) + 1.0]


# Local steps by themselves -------------------------------------------------------------------------------------------


def step(local: DifferenceSteps, model: nn.Linear, version: int = 0) -> float:
    """Make a step with a gradient of 1; give by how much the parameter went down."""
    before = float(model.weight.detach())
    local.begin(version)
    model.weight.grad = torch.ones_like(model.weight)
    local.step()
    return before - float(model.weight.detach())


def test_workers_that_share_a_model_have_their_own_momentum() -> None:
    model = nn.Linear(1, 1, bias=False)
    local = DifferenceSteps(momentum(model))
    found = []
    for worker in (0, 0, 7, 0, 7):
        local.become(worker)
        found.append(step(local, model))
        local.end()
    assert found == pytest.approx([1, 1.5, 1, 1.75, 1.5])
    local.forget()
    assert step(local, model) == pytest.approx(1)


def test_what_was_pushed_is_not_undone() -> None:
    model = nn.Linear(1, 1, bias=False)
    local = DifferenceSteps(momentum(model))
    assert [step(local, model), step(local, model)] == pytest.approx([1, 1.5])
    assert local.end()
    local.undo()  # of a step that was cancelled before it had made any
    assert step(local, model) == pytest.approx(1.75)
    local.undo()
    assert step(local, model) == pytest.approx(1.75)


def test_what_adagrad_is_made_with_is_there_again() -> None:
    model = nn.Linear(1, 1, bias=False)
    local = DifferenceSteps(TrainState(model=model, optimizers=[Adagrad(model.parameters(), lr=1.0)]))
    first = [step(local, model), step(local, model)]
    local.forget()
    assert [step(local, model), step(local, model)] == pytest.approx(first)
    local.undo()
    local.become(3)
    assert step(local, model) == pytest.approx(first[0])


def test_the_rate_is_that_of_the_version_also_if_the_server_has_gone_back() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0)
    schedulers = [LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=10)]
    local = DifferenceSteps(TrainState(model=model, optimizers=[optimizer], schedulers=schedulers))
    found = []
    for version in (3, 7, 2, 2):
        found.append(step(local, model, version))
        found.append(step(local, model, version=99))  # of the same push
        local.end()
    assert found == pytest.approx([0.7, 0.7, 0.3, 0.3, 0.8, 0.8, 0.8, 0.8], abs=1e-5)
