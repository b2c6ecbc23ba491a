"""Policies of peers on the virtual cluster: the real exchanges on virtual clocks, and their decisions alone."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import World
from hypothesis import given
from hypothesis import strategies as st
from same_bits import assert_same
from test_simulated_training import dropout_problem, make_plan
from torch import Tensor, nn

import paceline
from paceline import native
from paceline.errors import CommError, UsageError
from paceline.optim import make_optimizer
from paceline.peers.group import Peers
from paceline.policies import POLICIES, PeersPolicy, parse_policy
from paceline.problems import Problem, load_problem
from paceline.seeding import derive_seed, seed_streams
from paceline.virtual.links import parse_link, ring_bytes, ring_seconds
from paceline.virtual.network import PeersNetwork
from paceline.virtual.peers import ExchangeTimes, PeersTraining
from paceline.virtual.peers_group import Meeting, VirtualGroup
from paceline.virtual.simulate import Scenario, Simulated, simulate, summary
from paceline.virtual.turns import Turns

PLAIN = "sgd(lr=0.05)"


def text_of(kind: type[PeersPolicy]) -> str:
    """A policy of this kind with a period of 3, if it has to be told one."""
    needed = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    return f"{kind.name}({', '.join(f'{name}=3' for name in needed)})" if needed else kind.name


PEERS = [
    *sorted(text_of(kind) for kind in POLICIES.values() if issubclass(kind, PeersPolicy) and not kind.shares_memory),
    "diloco(every=4, fragments=2)",
    "diloco(every=4, fragments=2, overlap=2)",
    "gossip(topology=random-pairs)",
    "sma(every=2)",
]


def run(policy: str, workers: int = 3, *, seconds: float = 20.0, plan: Any = None, **options: Any) -> PeersTraining:
    scenario = Scenario(policy=policy, workers=workers, **{"delay": "1+exp(1)", **options})
    training = PeersTraining(scenario, plan or make_plan(optimizer=PLAIN), seconds=seconds)
    training.finish()
    return training


def without_name(result: Simulated) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(result).items() if name != "policy"}


# All policies through one table -----------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", PEERS)
def test_the_same_seed_gives_the_same_bits(policy: str) -> None:
    plan = make_plan(dropout_problem(), optimizer=PLAIN)
    options: dict[str, Any] = {"plan": plan, "link": "10ms 1MB/s", "seconds": 15.0}
    first, again, other = (run(policy, seed=seed, **options) for seed in (5, 5, 6))
    assert_same(first.model.state_dict(), again.model.state_dict())
    assert first.outcome() == again.outcome()
    assert not torch.equal(first.model.last.weight, other.model.last.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", PEERS)
def test_it_learns_and_its_times_are_those_without_gradients(policy: str) -> None:
    """Drawn times are the same; messages are larger by the few numbers that an exchange adds to the parameters."""
    problem = load_problem("logistic")
    training = run(policy, 4, seconds=80.0, plan=make_plan(problem, optimizer=PLAIN), link="50ms 4kB/s")
    found = training.outcome()
    assert found.curve[-1].loss < found.curve[0].loss
    assert [point.seconds for point in found.curve] == [0, 20, 40, 60, 80]
    if parse_policy(policy).needs_loss:
        return
    scenario = Scenario(policy=policy, workers=4, delay="1+exp(1)", link="50ms 4kB/s", nbytes=4 * 33, examples=16)
    alone = simulate(scenario, commits=found.run.commits)
    assert found.run.iteration == pytest.approx(alone.iteration, rel=0.1)
    assert dataclasses.asdict(found.run).keys() == dataclasses.asdict(alone).keys()
    assert found.run.staleness == alone.staleness == 0
    assert found.run.pushes == alone.pushes == 4 * found.run.commits


@pytest.mark.parametrize("policy", PEERS)
def test_looking_costs_nothing_and_changes_nothing(policy: str) -> None:
    often, seldom = (run(policy, plan=make_plan(optimizer=PLAIN, points=n), link="10ms 1MB/s") for n in (20, 1))
    assert often.outcome().run == seldom.outcome().run
    assert_same(often.model.state_dict(), seldom.model.state_dict())


@pytest.mark.parametrize("policy", PEERS)
def test_one_worker_is_a_plain_loop(policy: str) -> None:
    one, plain = run(policy, 1, delay="1"), run("all-reduce", 1, delay="1")
    assert_same(one.model.state_dict(), plain.model.state_dict())
    assert one.outcome().run.bytes_out == 0 and one.outcome().run.waiting == 0


# Against what is known --------------------------------------------------------------------------------------


def test_averaging_after_every_step_of_plain_sgd_has_the_curve_of_all_reduce() -> None:
    together, local = (run(policy, 4).outcome() for policy in ("all-reduce", "local-sgd(every=1)"))
    for one, other in zip(together.curve, local.curve, strict=True):
        assert (one.seconds, one.commits) == (other.seconds, other.commits)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert without_name(together.run) == {**without_name(local.run), "bytes_out": together.run.bytes_out}


def by_sessions(
    group: Any, problem: Problem, policy: str, steps: int, batch_size: int, codec: str | None = None
) -> dict[str, Tensor]:
    """Train as a live worker does, on any process group."""
    model = problem.make_model()
    optimizer = make_optimizer("sgd(lr=0.05, momentum=0.9)", model.parameters())
    with paceline.join(model, optimizer, policy=policy, codec=codec, seed=7, group=group) as session:
        for inputs, targets in session.batches(problem.train, batch_size, epochs=9):
            if session.steps == steps:
                break
            with session.step() as step:
                loss = problem.loss(model(inputs), targets)
                step.record(loss=loss)
                torch.autograd.backward(loss)
    return model.state_dict()


@pytest.mark.sampled(3)
@pytest.mark.skipif(not native.available(), reason="sums over Gloo have another order")
@pytest.mark.parametrize(
    ("policy", "codec"),
    [
        *((policy, None) for policy in PEERS),
        ("all-reduce", "qsgd(raw_below=0)"),
        ("all-reduce", "power-sgd(rank=1)"),
        ("local-sgd(every=3)", "top-k(density=0.1)"),
    ],
)
def test_it_is_the_live_run_to_the_bit(policy: str, codec: str | None) -> None:
    """The same batches, with the short ones of an epoch's end, the same seeds, and sums in the same order."""
    problem = load_problem("logistic")
    seed_streams(derive_seed(7, "model"))
    start = problem.make_model()
    same_start = dataclasses.replace(problem, make_model=lambda: _copied(problem.make_model(), start.state_dict()))
    live = World("shared memory")(3, lambda group: by_sessions(group, same_start, policy, 11, 200, codec))
    plan = make_plan(problem, optimizer="sgd(lr=0.05, momentum=0.9)", batch_size=200, codec=codec)
    virtual = run(policy, 3, plan=plan, seed=7, delay="1", seconds=11.5)
    assert virtual.outcome().run.commits == 11
    assert_same(live[0], virtual.model.state_dict())


def _copied(model: Any, state: dict[str, Tensor]) -> Any:
    model.load_state_dict(state)
    return model


def test_packets_take_the_time_and_the_bytes_that_they_have() -> None:
    plan = make_plan(optimizer=PLAIN)
    fast, slow = (
        run("all-reduce", plan=dataclasses.replace(plan, codec=codec), link="1ms 1kB/s", delay="1", seconds=60.0)
        for codec in ("top-k(density=0.1)", None)
    )
    for training in (fast, slow):
        assert training.outcome().run.commits > 0
    one, other = (each.outcome().run for each in (fast, slow))
    assert one.bytes_out / one.commits < other.bytes_out / other.commits
    assert one.commits > other.commits


@pytest.mark.parametrize("every", [1, 4])
def test_a_round_takes_the_longest_of_sums(every: int) -> None:
    found = simulate(Scenario(policy=f"local-sgd(every={every})", workers=6, delay="exp(2)"), commits=4000)
    draws = np.random.default_rng(1).exponential(0.5, (20_000, 6, every))
    longest = draws.sum(axis=2).max(axis=1)
    error = longest.std() / np.sqrt(4000 / every)
    assert abs(every * found.iteration - longest.mean()) < 4 * error


@pytest.mark.parametrize(("every", "commits"), [(2, 40), (8, 40), (8, 43)])
def test_bytes_are_those_of_the_averages(every: int, commits: int) -> None:
    scenario = Scenario(policy=f"local-sgd(every={every})", workers=8, nbytes=1e6, link="1ms 1MB/s", delay="1")
    found = simulate(scenario, commits=commits)
    often = simulate(dataclasses.replace(scenario, policy="local-sgd(every=1)"), commits=commits)
    assert found.bytes_out == commits // every * 8 * ring_bytes(1e6, 8)
    assert often.bytes_out == commits * 8 * ring_bytes(1e6, 8)
    assert found.seconds == pytest.approx(commits + commits // every * ring_seconds(parse_link("1ms 1MB/s"), 1e6, 8))


def test_many_workers_without_gradients_take_no_time() -> None:
    found = simulate(Scenario(policy="local-sgd(every=5)", workers=100_000, delay="exp(1)"), commits=10)
    assert found.pushes == 1_000_000
    assert 5 * found.iteration == pytest.approx(20, rel=0.2)


@pytest.mark.parametrize("overlap", ["true", "false"])
def test_all_reduce_overlaps_as_its_formula_says(overlap: str) -> None:
    """Buckets of the real reducer, of equal layers, against those of the simulation without gradients."""
    problem = load_problem("logistic")
    layers = dataclasses.replace(
        problem, make_model=lambda: nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(32)), nn.Linear(32, 1))
    )
    policy = f"all-reduce(bucket_cap_mb={1 / 64}, first_bucket_mb={1 / 64}, overlap={overlap})"
    options: dict[str, Any] = {"workers": 4, "link": "1ms 1MB/s", "delay": "1"}
    found = run(policy, plan=make_plan(layers, optimizer=PLAIN), **options).outcome().run
    alone = simulate(Scenario(policy=policy, nbytes=32 * 4096, **options), commits=10)
    assert alone.iteration - 1 > 0.02
    assert found.iteration - 1 == pytest.approx(alone.iteration - 1, rel=0.15)  # one more, small bucket


def test_a_size_that_is_not_the_models_counts_in_all_messages() -> None:
    small, large = (run("local-sgd(every=2)", nbytes=nbytes, delay="1").outcome().run for nbytes in (1e3, 1e6))
    assert large.bytes_out == pytest.approx(1e3 * small.bytes_out)


def test_an_exchange_that_is_known_by_itself_alone_has_times_too() -> None:
    options: dict[str, Any] = {"workers": 4, "link": "1ms 1MB/s", "nbytes": 1e5, "examples": 32, "seed": 3}
    scenario = Scenario(policy="local-sgd(every=3)", **options)
    exchange = ExchangeTimes(scenario)
    exchange.run(commits=9)
    by_exchange, by_rounds = summary(scenario, exchange), simulate(scenario, commits=9)
    assert by_exchange.bytes_out == pytest.approx(by_rounds.bytes_out, rel=1e-2)
    assert by_exchange.seconds == pytest.approx(by_rounds.seconds, rel=1e-2)
    assert by_exchange.throughput == pytest.approx(by_rounds.throughput, rel=1e-2)
    strong = dataclasses.replace(scenario, scaling="strong")
    faster = ExchangeTimes(strong)
    faster.run(seconds=30.0)
    assert summary(strong, faster).commits > summary(scenario, exchange).commits


# The group --------------------------------------------------------------------------------------------------


def on_group(workers: int, work: Any, link: str = "instant") -> tuple[list[Any], PeersNetwork]:
    """Call ``work(peers, network)`` on virtual workers."""
    found: dict[int, Any] = {}
    seconds = functools.partial(ring_seconds, parse_link(link), workers=workers)
    network, turns = PeersNetwork(workers, link, seconds), Turns(workers)
    meeting = Meeting(network, turns)

    def one(rank: int) -> None:
        group = VirtualGroup(meeting, rank)
        with group.taking_time():
            found[rank] = work(Peers(group, rank, workers, torch.device("cpu")), network)

    turns.run(one)
    return [found[rank] for rank in range(workers)], network


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=6))
def test_sums_go_in_the_order_of_ranks(values: list[float]) -> None:
    def work(peers: Peers, _: PeersNetwork) -> list[float]:
        sums, highest = torch.tensor([values[peers.rank]]), torch.tensor([values[peers.rank]])
        peers.all_reduce(sums).wait()
        peers.all_reduce(highest, dist.ReduceOp.MAX).wait()
        return [*sums.tolist(), *highest.tolist()]

    folded = functools.reduce(torch.add, map(torch.tensor, values)).item()
    assert on_group(len(values), work)[0] == [[folded, max(values)]] * len(values)


def test_collectives_end_after_the_last_has_come() -> None:
    def work(peers: Peers, network: PeersNetwork) -> list[float]:
        times = []
        network.advance(peers.rank, float(peers.rank))
        peers.all_reduce(torch.zeros(250), now=True).wait()
        times.append(float(network.clocks[peers.rank]))
        first, second = peers.all_reduce(torch.zeros(250)), peers.all_reduce(torch.zeros(250))
        network.advance(peers.rank, times[0] + 10.0)  # computes meanwhile: both are done by then
        first.wait()
        second.wait()
        times.append(float(network.clocks[peers.rank]))
        third, fourth = peers.all_reduce(torch.zeros(250)), peers.all_reduce(torch.zeros(250))
        third.wait()
        fourth.wait()
        return [*times, float(network.clocks[peers.rank])]

    found, network = on_group(3, work, "1kB/s")
    cost = 4 / 3
    assert found == [pytest.approx([2 + cost, 12 + cost, 12 + 3 * cost])] * 3
    assert network.bytes_out == pytest.approx(5 * 3 * ring_bytes(1000, 3))


def test_only_the_receiver_waits_for_a_message() -> None:
    def work(peers: Peers, network: PeersNetwork) -> tuple[float, float]:
        network.advance(peers.rank, 10.0 * peers.rank)
        value = torch.tensor([float(peers.rank)])
        if peers.rank == 1:
            for receiver in (0, 2):
                peers.group.send([value], receiver, 0).wait()
        else:
            peers.group.recv([value], 1, 0).wait()
        return value.item(), float(network.clocks[peers.rank])

    found, _ = on_group(3, work, "1s 4B/s")
    assert found == [(1.0, 12.0), (1.0, 10.0), (1.0, 20.0)]  # the second message left at 12, and came at 13


def test_values_are_shared_and_gathered() -> None:
    def work(peers: Peers, _: PeersNetwork) -> tuple[Any, Any]:
        peers.barrier()
        return peers.share({"of": peers.rank}, root=2), peers.gather([peers.rank] * peers.rank)

    assert on_group(3, work)[0] == [({"of": 2}, [[], [1], [2, 2]])] * 3


# What goes wrong --------------------------------------------------------------------------------------------


def broken_problem(rank_and_step: tuple[int, int]) -> Problem:
    problem = load_problem("logistic")
    calls = iter(range(1000))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled() and divmod(next(calls), 3)[::-1] == rank_and_step:
            raise ZeroDivisionError("of the user")
        return problem.loss(outputs, targets)

    return dataclasses.replace(problem, loss=loss)


@pytest.mark.parametrize("policy", ["all-reduce", "local-sgd(every=2)"])
@pytest.mark.parametrize("place", [(0, 0), (2, 3), (1, 2)])
def test_a_failed_worker_fails_the_run_with_its_own_error(policy: str, place: tuple[int, int]) -> None:
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError, match="of the user") as caught:
        run(policy, plan=make_plan(broken_problem(place)))
    assert any(entry.name == "loss" for entry in caught.traceback)
    assert threading.active_count() == before


def test_workers_that_wait_for_each_other_are_told() -> None:
    with pytest.raises(CommError, match=r"wait for each other: worker 0 for a message of worker 1; worker 1 for"):
        on_group(2, lambda peers, _: peers.group.recv([torch.zeros(1)], 1 - peers.rank, 0).wait())
    with pytest.raises(CommError, match=r"worker 1: its collective 0 is the barrier, and that of worker 0 the all-red"):
        on_group(2, lambda peers, _: peers.barrier() if peers.rank else peers.all_reduce(torch.zeros(1)).wait())
    with pytest.raises(CommError, match=r"worker 0 for the barrier, its collective 0"):
        on_group(2, lambda peers, _: None if peers.rank else peers.barrier())


def test_an_interrupt_ends_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()

    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.virtual.tally.Tally.commit_together", pressed)
    with pytest.raises(KeyboardInterrupt):
        run("local-sgd(every=2)")
    assert threading.active_count() == before


def test_a_run_can_be_stopped_between_steps() -> None:
    stop: list[int] = []
    problem = load_problem("logistic")
    calls = iter(range(1000))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        stop.extend([1] * (torch.is_grad_enabled() and next(calls) == 3 * 4))
        return problem.loss(outputs, targets)

    scenario = Scenario(policy="local-sgd(every=2)", workers=3, delay="1")
    training = PeersTraining(scenario, make_plan(dataclasses.replace(problem, loss=loss)), seconds=50)
    training.finish(stop)
    assert training.now == 5 and training.outcome().run.waiting == 0
    assert [point.seconds for point in training.outcome().curve] == [0]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"workers": 257}, "at most 256 are simulated, got 257"),
        ({"delay": "1 fails(worker=1, at=3)"}, r"wait for each other, so fails\(worker=1, at=3\) would end the run"),
    ],
)
@pytest.mark.parametrize("policy", ["all-reduce", "local-sgd(every=2)"])
def test_mistakes(policy: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        run(policy, **options)


def test_mistakes_of_plans() -> None:
    with pytest.raises(UsageError, match="LBFGS"):
        run("local-sgd(every=2)", plan=make_plan(optimizer="lbfgs"))
    with pytest.raises(UsageError, match="clock stands still at 0 s"):
        simulate(Scenario(policy="local-sgd(every=2)", workers=2, delay="0"), commits=None, seconds=3)
    with pytest.raises(UsageError, match="fails"):
        simulate(Scenario(policy="local-sgd(every=2)", workers=2, delay="1 fails(worker=1, at=3)"))
