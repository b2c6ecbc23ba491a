"""Rounds whose parts several workers compute, on live servers: exact sums, every sample once, deaths, refusals."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from led_by_hand import DATA, batches, cluster_of_hands
from ledger import samples, seen_state, times_used, train
from live import Cluster
from sharded import ShardedCluster
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from paceline.attacks import parse_attack
from paceline.attacks.attacked import AttackedProblem
from paceline.data.numbered import NumberedBatches
from paceline.data.sampler import ShardedSampler
from paceline.errors import PacelineError, UsageError
from paceline.policies import parse_policy
from paceline.problems import Metric, Problem, load_problem
from paceline.sessions.worker import WorkerSession
from paceline.store.double_buffer import read_note
from paceline.train_state import TrainState
from paceline.transport.messages import Ask, BatchMessage, More, Refused
from paceline.virtual.plan import TrainingPlan
from paceline.virtual.simulate import Scenario, simulate
from paceline.virtual.training import begin_training

COUNT, BATCH, SEED = 46, 4, 3  # samples: 12 batches an epoch, the last of which is shorter
EPOCHS = 2
POLICIES = ["gradient-coding(stragglers=1)", "gradient-coding(stragglers=2)", "draco(faulty=1)"]
every_policy = pytest.mark.parametrize("policy", POLICIES)


def data() -> TensorDataset:
    dice = torch.Generator().manual_seed(0)
    inputs = torch.randn(COUNT, 3, generator=dice, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def fresh() -> TrainState:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=0.1, momentum=0.9)])


def loss_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def by_hand(workers: int) -> TrainState:
    """Each update takes the gradient of the next so many batches, joined."""
    own = fresh()
    numbered = NumberedBatches(data(), ShardedSampler(COUNT, BATCH, seed=SEED))
    per_epoch = numbered.sampler.steps_per_epoch
    fetched = [cast(list[Tensor], numbered.fetch(*divmod(at, per_epoch))[0]) for at in range(EPOCHS * per_epoch)]
    for first in range(0, len(fetched), workers):
        joined = [torch.cat(parts) for parts in zip(*fetched[first : first + workers], strict=True)]
        own.clear_gradients()
        torch.autograd.backward(loss_of(own.model, joined))
        own.update()
    return own


def learn(session: WorkerSession, own: TrainState, pause: Callable[[], None] = lambda: None) -> None:
    for batch in session.batches(data(), BATCH, epochs=EPOCHS):
        with session.step() as step:
            pause()
            loss = loss_of(own.model, batch)
            step.record(loss=loss)
            torch.autograd.backward(loss)


def parameters(train_state: TrainState) -> Tensor:
    return torch.cat([each.detach().flatten() for each in train_state.model.parameters()])


# Exact ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("policy", "workers"),
    [
        ("gradient-coding(stragglers=1)", 4),
        ("gradient-coding(stragglers=1)", 3),
        ("gradient-coding(stragglers=2)", 5),
    ],
)
def test_whoever_straggles_the_gradient_is_that_of_all_batches(policy: str, workers: int, servers: int) -> None:
    with ShardedCluster(policy, fresh, servers=servers, workers=workers, seed=SEED) as cluster:

        def work(session: WorkerSession, own: TrainState) -> Tensor:
            learn(session, own, lambda: time.sleep(0.002 * ((session.rank + session.steps) % 3)))
            return parameters(own)

        ends = cluster.run([fresh() for _ in range(workers)], work)
        cluster.collect()
    expected = parameters(by_hand(workers))
    for end in [parameters(cluster.train_state), *ends]:
        torch.testing.assert_close(end, expected, rtol=0, atol=1e-10)
    assert sum(commit.examples for commit in cluster.host.commits) == EPOCHS * COUNT


def test_scaled_gradients_are_unscaled_once_they_are_added_up() -> None:
    def scaled() -> TrainState:
        return replace(fresh(), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))

    def work(session: WorkerSession, own: TrainState) -> None:
        for batch in session.batches(data(), BATCH, epochs=EPOCHS):
            with session.step():
                assert own.scaler is not None
                torch.autograd.backward(own.scaler.scale(loss_of(own.model, batch)))

    with Cluster("gradient-coding(stragglers=1)", scaled(), workers=3, seed=SEED) as cluster:
        cluster.run([scaled() for _ in range(3)], work)
    torch.testing.assert_close(parameters(cluster.train_state), parameters(by_hand(3)), rtol=0, atol=1e-10)


@every_policy
def test_every_sample_is_used_once_an_epoch(policy: str) -> None:
    def work(session: WorkerSession, own: TrainState) -> None:
        for _ in session.epochs(2):
            train(session, own.model, samples(COUNT), batch_size=BATCH)
            session.refresh()
            session.mean(1.0)

    with Cluster(policy, seen_state(COUNT), workers=4) as cluster:
        cluster.run([seen_state(COUNT) for _ in range(4)], work)
    assert times_used(cluster) == [2.0] * COUNT


@every_policy
def test_a_round_that_nobody_is_in_returns_its_batches(policy: str) -> None:
    """One worker is in a later epoch than the others, and leaves its loop with batches of both epochs in its round."""

    def work(session: WorkerSession, own: TrainState) -> None:
        if session.rank == 0:
            for _ in session.batches(samples(2), batch_size=1, epochs=2):
                break
        session.mean(1.0)
        if session.rank > 0:
            train(session, own.model, samples(2), batch_size=1)

    with Cluster(policy, seen_state(2), workers=4) as cluster:
        cluster.run([seen_state(2) for _ in range(4)], work)
    assert times_used(cluster) == [1.0] * 2


@every_policy
def test_a_loop_may_be_broken_off_between_two_batches_of_a_push(policy: str) -> None:
    def work(session: WorkerSession, own: TrainState) -> None:
        for _ in session.batches(samples(COUNT), batch_size=BATCH):
            with session.step():
                own.model(torch.arange(4)).sum().backward()
            break
        session.refresh()
        session.mean(1.0)

    with Cluster(policy, seen_state(COUNT), workers=4) as cluster:
        cluster.run([seen_state(COUNT) for _ in range(4)], work)


# Votes ---------------------------------------------------------------------------------------------------------------


def with_norm() -> TrainState:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)])


def noise(own: TrainState) -> None:
    for parameter in own.model.parameters():
        parameter.grad = torch.randn_like(parameter)


def nothing(own: TrainState) -> None:
    """The gradients are zeros that are said not to be there, which only the first bits of a push tell."""
    for parameter in own.model.parameters():
        parameter.grad = None


def wrong_statistics(own: TrainState) -> None:
    for buffer in own.model.buffers():
        buffer += 1


def small(session: WorkerSession, own: TrainState, lie: Callable[[TrainState], None]) -> None:
    """Train in single precision; a liar changes what it computed at the end of each block."""
    inputs, targets = (tensor.float() for tensor in data().tensors)
    for batch in session.batches(TensorDataset(inputs, targets), BATCH, epochs=EPOCHS):
        with session.step() as step:
            torch.autograd.backward(loss_of(own.model, batch))
            lie(own)
        del step


def outcome(cluster: ShardedCluster) -> list[Tensor]:
    cluster.collect()
    return [tensor.detach().clone() for tensor in cluster.train_state.model.state_dict().values()]


def voted(workers: int, liars: dict[int, Callable[[TrainState], None]], *, faulty: int = 1, servers: int = 1) -> Any:
    make = with_norm
    with ShardedCluster(f"draco(faulty={faulty})", make, servers=servers, workers=workers, seed=SEED) as cluster:
        cluster.run(
            [make() for _ in range(workers)],
            lambda session, own: small(session, own, liars.get(session.rank, lambda _: None)),
        )
        return outcome(cluster), len(cluster.host.commits)


@pytest.mark.parametrize(
    ("workers", "liars", "options"),
    [
        (3, {0: noise}, {}),
        (3, {1: nothing}, {"servers": 2}),
        (4, {0: wrong_statistics}, {"servers": 2}),
        (9, {4: noise}, {}),
        (5, {0: noise, 3: wrong_statistics}, {"faulty": 2}),
    ],
)
def test_the_run_of_liars_is_that_without_them_bit_for_bit(
    workers: int, liars: dict[int, Callable[[TrainState], None]], options: dict[str, int]
) -> None:
    clean, commits = voted(workers, {}, faulty=options.get("faulty", 1))
    assert commits == -(-EPOCHS * 12 // workers)
    found, _ = voted(workers, liars, **options)
    assert all(torch.equal(one, other) for one, other in zip(found, clean, strict=True))


def test_more_liars_than_were_told_of_leave_every_commit_out(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        PacelineError, match=r"too few agree for aggregator vote\(faulty=1\), and so were the 50 before"
    ):
        voted(3, {0: noise, 1: nothing})
    assert "version 1: a commit of 3 pushes is left out" in caplog.text


# Nobody is waited for ------------------------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("killed", [1, 2])
def test_what_killed_workers_leave_is_done_by_others(policy: str, killed: int) -> None:
    with Cluster(policy, seen_state(COUNT), workers=4) as cluster:
        doomed = [cluster.session(seen_state(COUNT), rank) for rank in range(killed)]
        given = [session.batches(samples(COUNT), BATCH, epochs=2) for session in doomed]
        for session, batches in zip(doomed, given, strict=True):  # in the middle of a push
            (places,) = next(batches)
            with session.step():
                torch.autograd.backward(session._train_state.model(places).mean())

        def work(rank: int) -> None:
            own = seen_state(COUNT)
            with cluster.session(own, rank) as session:
                if rank == 3:
                    for session_of_doomed in doomed:
                        session_of_doomed._client.close()  # without a word
                train(session, own.model, samples(COUNT), batch_size=BATCH, epochs=2)

        cluster.together([lambda rank=rank: work(rank) for rank in range(killed, 4)])  # type: ignore[misc]
        assert times_used(cluster) == [2.0] * COUNT
        for batches in given:
            batches.close()  # type: ignore[attr-defined]


def test_the_batches_of_a_round_are_unused_until_its_commit() -> None:
    """So a server that takes over, or a resumed run, hands them out again."""
    with cluster_of_hands("gradient-coding(stragglers=1)", 3) as (cluster, hands):
        assert batches(*hands) == [0, 1, 0]
        go = hands[0].ask(1)
        assert (go.batch, go.more) == (0, 1), "the same work again"
        hands[0].say(More(go.step))
        assert hands[0].hear(BatchMessage).batch == 1
        assert cluster.queue.state_dict()["unused"] == [0, 1, 2]
        hands[0].push(1.0)
        cluster.until(lambda: bool(cluster.server._state.pending))
        assert cluster.queue.state_dict()["unused"] == [0, 1, 2]
        hands[1].push(1.0)
        assert {hand.go().batch for hand in hands} == {3, 4}
        assert cluster.queue.state_dict()["unused"] == [3, 4, 5]
        found = read_note(cluster.memory)
        assert found is not None and found["queue"]["unused"] == []


def test_a_worker_without_a_batch_in_the_last_round_waits_for_its_commit() -> None:
    with cluster_of_hands("gradient-coding(stragglers=1)", 3) as (cluster, (first, idle, other)):
        for hand in (first, idle, other):
            hand.say(DATA._replace(num_samples=1))
        assert (first.ask(1).more, other.ask(1).more) == (0, 0)
        idle.say(Ask(1, 1))
        assert idle.hears_nothing()
        other.push(1.0)
        for hand in (first, idle, other):
            assert hand.finish().version == 1
        assert cluster.host.commits[0].examples == 1


# A batch without a gradient ------------------------------------------------------------------------------------------


@every_policy
def test_a_batch_that_is_skipped_costs_no_other_sample(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    bad = 7  # in the second batch

    def work(session: WorkerSession, own: TrainState) -> None:
        for (places,) in session.batches(samples(COUNT), BATCH, epochs=1, shuffle=False):
            with session.step() as step:
                loss = own.model(places).mean() * (torch.nan if bad in places else 1.0)
                step.record(loss=loss)
                torch.autograd.backward(loss)

    with Cluster(policy, seen_state(COUNT), workers=3) as cluster:
        cluster.run([seen_state(COUNT) for _ in range(3)], work, on_nan="skip")
    assert times_used(cluster) == [1.0] * 4 + [0.0] * 4 + [1.0] * (COUNT - 8)


# Refused -------------------------------------------------------------------------------------------------------------


def refused(policy: str, work: Callable[[WorkerSession, TrainState], object], match: str) -> None:
    with Cluster(policy, seen_state(COUNT), workers=1 if "coding" not in policy else 2) as cluster:
        own = seen_state(COUNT)
        with pytest.raises(UsageError, match=match), cluster.session(own, 0) as session:
            work(session, own)


def blocks(session: WorkerSession, own: TrainState, after: Callable[[], object], **options: Any) -> None:
    for (places,) in session.batches(samples(COUNT), BATCH, epochs=1):
        with session.step(**options):
            torch.autograd.backward(own.model(places).mean())
        after()


@pytest.mark.parametrize(
    ("work", "match"),
    [
        (
            lambda session, own: session.step().__enter__(),
            "the server has to hand them out; take them",
        ),
        (lambda session, own: session.batches(DataLoader(samples(COUNT), sampler=[1])), "the server has to hand them"),
        (lambda session, own: session.batches([torch.ones(2)]), "the server has to hand them out"),
        (lambda session, own: blocks(session, own, bool, accumulate=True), "accumulate=True cannot be combined with"),
        (lambda session, own: blocks(session, own, bool, examples=1), "examples=1 for a batch of 4, and under"),
        (lambda session, own: blocks(session, own, session.refresh), r"refresh\(\) was called between two batches"),
        (
            lambda session, own: blocks(session, own, lambda: session.mean(1)),
            r"mean\(\) was called between",
        ),
        (lambda session, own: blocks(session, own, session.step().__enter__), "a second step was made of one batch"),
    ],
)
def test_what_cannot_be_coded_is_refused(work: Callable[..., object], match: str) -> None:
    refused("gradient-coding(stragglers=1)", work, match)


def test_another_aggregator_is_refused() -> None:
    with pytest.raises(UsageError, match="so aggregator=median cannot combine them; leave it out"):
        parse_policy("gradient-coding(stragglers=1, aggregator=median)")


def test_who_asks_for_steps_on_data_of_its_own_is_refused_by_the_server() -> None:
    with cluster_of_hands("draco(faulty=1)", 3) as (_, (hand, *_)):
        hand.say(Ask(-1, 1))
        assert "under draco(faulty=1) workers share batches" in hand.hear(Refused).reason


# On the virtual cluster ----------------------------------------------------------------------------------------------


def trained(policy: str, problem: Problem, *, workers: int, commits: int, delay: str = "1+exp(1)") -> Tensor:
    plan = TrainingPlan(problem=problem, optimizer="sgd(lr=0.05, momentum=0.9)", batch_size=5)
    scenario = Scenario(policy=policy, workers=workers, delay=delay, seed=SEED)
    run = begin_training(scenario, plan, seconds=1e6)
    work = cast(Any, run)._work
    cast(Any, run)._cluster.run(commits=commits)
    return torch.cat([tensor.double().flatten() for tensor in work.model.state_dict().values()])


def problem_with_dropout() -> Problem:
    dice = torch.Generator().manual_seed(0)
    inputs = torch.randn(203, 6, generator=dice)
    train_data = TensorDataset(inputs.double(), inputs.double().mean(1, keepdim=True))
    mse = nn.functional.mse_loss
    return Problem(
        name="dropping",
        make_model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1)).double(),
        train=train_data,
        test=train_data,
        loss=mse,
        metric=Metric(name="loss", measure=mse, higher_is_better=False),
    )


def test_virtual_workers_come_to_the_gradient_of_sync() -> None:
    """Batches are the same, and random streams are theirs."""
    wanted = trained("sync", problem_with_dropout(), workers=8, commits=20)
    for stragglers in (1, 2):
        found = trained(f"gradient-coding(stragglers={stragglers})", problem_with_dropout(), workers=8, commits=20)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_virtual_liars_change_no_bit() -> None:
    problem = load_problem("logistic")
    clean = trained("draco(faulty=1)", problem, workers=7, commits=5)
    hostile = AttackedProblem.of(problem, parse_attack("gaussian"), 1)
    assert torch.equal(trained("draco(faulty=1)", hostile, workers=7, commits=5), clean)
    assert not torch.equal(trained("sync", hostile, workers=7, commits=5), clean)


def test_a_slow_worker_does_not_slow_a_round() -> None:
    """Two batches of one second each, whoever is ten times slower."""
    times = {
        policy: simulate(Scenario(policy=policy, workers=6, delay="1 slow(1, 10)"), commits=20).iteration
        for policy in ("sync", "gradient-coding(stragglers=1)", "draco(faulty=1)")
    }
    assert times == pytest.approx({"sync": 10.0, "gradient-coding(stragglers=1)": 2.0, "draco(faulty=1)": 30.0})


def test_a_failed_worker_is_done_without() -> None:
    found = simulate(Scenario(policy="gradient-coding(stragglers=1)", workers=5, delay="1 fails(2, at=7)"), commits=30)
    assert found.iteration == pytest.approx(2.0) and found.throughput < 2.5
