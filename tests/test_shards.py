"""Several servers, each with a part of the parameters: together they do what one does, bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from led_by_hand import Hand
from ledger import samples
from live import weights_state
from same_bits import assert_same
from sharded import ShardedCluster, lead, pushers
from test_live_saving import Watched
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from paceline.codecs import read_codec
from paceline.errors import CommError, UsageError
from paceline.record.checkpoint import read_checkpoint
from paceline.server.client import Client
from paceline.server.demand import OWN_DATA
from paceline.sessions.worker import WorkerSession
from paceline.store.partition import deal, layouts_of
from paceline.train_state import TrainState, parameters_of
from paceline.transport import messages as wire
from paceline.transport.calling import call
from paceline.transport.wire import decode, encode

POLICIES = [
    "sync",
    "k-sync(k=2)",
    "k-batch-sync(k=2)",
    "async",
    "k-async(k=2)",
    "k-batch-async(k=2)",
    "ssp(bound=1)",
    "ada-sync(k0=1)",
]
TURNS = 20


class Model(nn.Module):
    """Trained tensors of several sizes, one that is not trained, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.last = nn.Linear(7, 3)


def adam(**options: Any) -> TrainState:
    torch.manual_seed(5)
    model = Model()
    optimizer = Adam(model.parameters(), lr=0.1)
    return TrainState(
        model=model, optimizers=[optimizer], schedulers=[StepLR(optimizer, step_size=3, gamma=0.5)], **options
    )


def momentum() -> TrainState:
    """In two groups, and clipped: for which all servers' gradients have to be known."""
    torch.manual_seed(6)
    model = Model()
    groups = [[*model.first.parameters()], [*model.norm.parameters(), *model.last.parameters()]]
    optimizer = SGD([{"params": group} for group in groups], lr=0.1, momentum=0.9)
    return TrainState(model=model, optimizers=[optimizer], clip_norm=0.7)


def outcome(policy: str, make: Callable[[], TrainState], servers: int, workers: int = 3) -> Any:
    """All that a server and its workers have after the same pushes."""
    cluster = ShardedCluster(policy, make, servers=servers, workers=workers)
    with pushers(cluster, [Model() for _ in range(workers)]) as made:
        lead(made, range(TURNS))
        cluster.collect()
        commits = [(commit.version, commit.workers, commit.staleness) for commit in cluster.host.commits]
        pulled = [(worker.client.version, worker.model.state_dict()) for worker in made]
        figures = [(told["pushes"], told["dropped"]) for told in cluster.server.figures().values()]
        return copy.deepcopy((commits, in_order(cluster.train_state.state_dict()), pulled, figures))


def in_order(state: dict[str, Any]) -> dict[str, Any]:
    """A trainee's state, with that of the optimizers in the order of the parameters and not of their first use."""
    for optimizer in [*state["optimizers"], state.get("remembered", {"state": {}})]:
        optimizer["state"] = dict(sorted(optimizer["state"].items()))
    return state


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("policy", POLICIES)
def test_several_servers_commit_what_one_does(policy: str, make: Callable[[], TrainState]) -> None:
    alone = outcome(policy, make, servers=1)
    assert len(alone[0]) > 4
    for servers in (2, 3):
        assert_same(outcome(policy, make, servers), alone)


@given(sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=40), servers=st.integers(1, 8))
def test_tensors_are_dealt_out_in_order_and_evenly(sizes: list[int], servers: int) -> None:
    if len(sizes) < servers:
        with pytest.raises(UsageError, match=f"{len(sizes)} trained tensors cannot be dealt out to {servers} servers"):
            deal(sizes, servers)
        return
    parts = deal(sizes, servers)
    assert [place for part in parts for place in part] == list(range(len(sizes)))
    assert len(parts) == servers and all(len(part) for part in parts)
    if sizes == [sizes[0]] * len(sizes):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_buffers_and_what_is_not_trained_stay_with_the_first_server() -> None:
    model = Model()
    first, *others = layouts_of(model, 3)
    assert first.buffers == list(model.buffers()) and not any(each.buffers for each in others)
    assert any(parameter is model.frozen for parameter in first.parameters)
    assert [id(p) for each in (first, *others) for p in each.trained] == [
        id(p) for p in model.parameters() if p.requires_grad
    ]


# A pull is one version ---------------------------------------------------------------------------------------------


def versions(count: int = 5) -> TrainState:
    """Tensors that all hold the version, which a gradient of -1 moves on."""
    return weights_state(*range(2000, 2000 + count))


def held(model: nn.Module) -> list[float]:
    """The numbers that are in the tensors."""
    return sorted({float(number) for each in model.parameters() for number in each.detach().aminmax()})


@pytest.mark.parametrize(("policy", "servers"), [("async", 2), ("async", 3), ("k-sync(k=2)", 3)])
def test_a_pull_never_mixes_versions(policy: str, servers: int) -> None:
    def work(session: WorkerSession, own: TrainState) -> None:
        for _ in range(60):
            with session.step():
                assert held(own.model) == [float(session.steps)]
                torch.autograd.backward([-parameter.sum() for parameter in own.model.parameters()])

    with ShardedCluster(policy, versions, servers=servers, workers=4) as cluster:
        cluster.run([versions() for _ in range(4)], work, address=cluster.tcp_address)
        assert cluster.value == len(cluster.host.commits) >= 60


class SeenInParts(nn.Module):
    """One parameter for each sample, in several tensors; the gradient of a batch's mean names its samples."""

    def __init__(self, count: int, tensors: int) -> None:
        super().__init__()
        self.seen = nn.ParameterList(nn.Parameter(torch.zeros(count)) for _ in range(tensors))
        self.before = nn.Identity()

    def forward(self, places: Tensor) -> Tensor:
        places = self.before(places)
        return torch.stack([each[places] for each in self.seen]).sum(0)


@pytest.mark.parametrize("policy", ["k-sync(k=2)", "k-batch-async(k=3)"])
def test_an_epoch_uses_every_sample_once(policy: str) -> None:
    def make() -> TrainState:
        model = SeenInParts(24, 3)
        return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=1.0)])

    def work(session: WorkerSession, own: TrainState) -> None:
        for (places,) in session.batches(samples(24), 1, epochs=3):
            with session.step():
                torch.autograd.backward(own.model(places).mean())

    with ShardedCluster(policy, make, servers=2, workers=3) as cluster:
        before = [each.detach().clone() for each in cluster.train_state.model.parameters()]
        cluster.run([make() for _ in range(3)], work)
        cluster.wait_for_end()
        sizes = [commit.examples for commit in cluster.host.commits]
        assert sum(sizes) == 3 * 24
        # Every commit is a mean over its pushes, so all commits of one size have moved all samples alike.
        moved = [
            -(each - old).detach() for each, old in zip(cluster.train_state.model.parameters(), before, strict=True)
        ]
        assert sum(float(each.sum()) for each in moved) == pytest.approx(3 * len(sizes), rel=1e-5)
        for each in moved[1:]:
            assert torch.equal(each, moved[0]), "a push is in all servers' commits, or in none"


# What is refused, and resent ----------------------------------------------------------------------------------------


def in_first_step(cluster: ShardedCluster) -> tuple[TrainState, Client]:
    """A worker that has its first step, and gradients to push."""
    train_state = versions()
    client = cluster.client(train_state.model, 0)
    client.ask(OWN_DATA)
    client.next_step(OWN_DATA)
    for parameter in train_state.model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    return train_state, client


def test_a_part_that_is_not_finite_is_refused_by_name() -> None:
    with ShardedCluster("async", versions, servers=3, workers=1) as cluster:
        train_state, client = in_first_step(cluster)
        last = [*train_state.model.parameters()][-1].grad
        assert last is not None
        last[7] = math.inf
        client.push(examples=1, loss=None, seconds=0.0)
        client.next_step(-1)
        assert cluster.server.figures()[0]["refused"] == 1 and not cluster.host.commits
        last[7] = -1.0
        client.push(examples=1, loss=None, seconds=0.0)
        assert client.next_step(-1).version == 1
        assert held(train_state.model) == [1.0]
        client.close()


def test_the_name_of_what_is_not_finite_is_told(caplog: pytest.LogCaptureFixture) -> None:
    test_a_part_that_is_not_finite_is_refused_by_name()
    assert "step 0 of worker 0: the gradient of weights.4 is not finite; it is left out" in caplog.text


def test_a_push_without_all_its_parts_is_refused() -> None:
    """Which no worker of ours sends."""
    with ShardedCluster("async", versions, servers=2, workers=1) as cluster:
        part = Hand(cluster, 0, model=versions().model)
        part.layouts, part.model = layouts_of(part.model, 2)[0], part.model
        part.parameters = torch.zeros(part.layouts.down.nbytes, dtype=torch.uint8)
        part.ask()
        part.push(used=b"\x1f")
        assert "not every server has its part" in part.hear(wire.Refused).reason
        assert not cluster.host.commits


def test_an_order_that_comes_again_is_answered_and_not_carried_out() -> None:
    with ShardedCluster("async", versions, servers=2, workers=1) as cluster:
        _, client = in_first_step(cluster)
        client.push(examples=1, loss=None, seconds=0.0)
        client.next_step(-1)
        assert cluster.shards is not None
        (other,) = cluster.shards._others
        cluster.until_quiet()
        cluster.shards.settle()
        update = wire.Update(cluster.shards._orders - 2, 1, math.nan)
        other.send(update)
        other.wait()
        assert other.answer.number == update.number and held(cluster.train_state.model) == [1.0]
        other.send(update._replace(number=update.number + 5))
        with pytest.raises(CommError, match=f"refused an order: wanted order {update.number + 3}"):
            other.wait()
        other.awaited = 0
        client.close()


def test_only_the_first_server_gives_orders() -> None:
    with ShardedCluster("async", versions, servers=2, workers=1) as cluster:
        line = call(cluster.beside[0].address, bytes(range(32)), sealed=False, seconds=5)
        for order in (wire.Update(2, 1, math.nan), wire.Begin(1, 0, 1, 0, True, "mean", "gradient")):
            line.send(encode(order))
            while (received := line.receive()) is None:
                line.wait(0.1)
            assert isinstance(refused := decode(received.head), wire.Refused)
            assert "the first server decides" in refused.reason
        line.close()


def test_too_few_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"2 trained tensors cannot be dealt out to 3 servers.*--servers 2"):
        layouts_of(weights_state(3, 4).model, 3)


def test_parameters_and_gradients_that_are_sealed_on_their_way() -> None:
    """As between hosts."""
    cluster = ShardedCluster("sync", adam, servers=3, sealed=True, workers=2)
    with pushers(cluster, [Model(), Model()], address=cluster.tcp_address) as made:
        lead(made, range(TURNS))
        cluster.collect()
        assert_same(in_order(cluster.train_state.state_dict()), outcome("sync", adam, servers=1, workers=2)[1])


def test_a_worker_whose_connection_to_one_server_is_lost_comes_back() -> None:
    cluster = ShardedCluster("async", adam, servers=3, workers=1)
    with pushers(cluster, [Model()]) as (worker,):
        lead([worker], range(5))
        assert worker.client._others is not None
        cast(Any, worker.client._others._parts[1])._connection.close()
        worker.client.push(examples=1, loss=None, seconds=0.0)
        worker.client.next_step(-1)
        worker.has_step = True
        lead([worker], range(5, 10))
        assert worker.client.incarnation > 0
        assert_same(worker.model.state_dict(), cluster.train_state.model.state_dict())
        assert len(cluster.host.commits) == 10


# Checkpoints --------------------------------------------------------------------------------------------------------


def saved_after(
    folder: Path,
    turns: range,
    servers: int,
    *,
    resume: Path | None = None,
    policy: str = "async",
    codec: str | None = None,
) -> Path:
    """A checkpoint after one worker's pushes, gone on from another if one is given."""
    with Watched(folder / "run", adam(clip_norm=0.7), policy, codec=read_codec(codec)) as host:
        if resume is not None:
            host.stand_at(host._run_state.load(read_checkpoint(resume)))
        cluster = ShardedCluster(
            policy,
            lambda: adam(clip_norm=0.7),
            train_state=host._train_state,
            servers=servers,
            workers=1,
            host=host,
            version=host.steps,
            codec=codec,
            codec_state=host._progress.codecs,
        )
        host._shards, host._progress.codecs_now = cluster.shards, cluster.server.codec_state
        with pushers(cluster, [Model()], here=codec is not None) as (worker,):
            worker.saves_to = str(folder / "last")  # after every push
            lead([worker], turns)
        host._shards = None
    return folder / "last"


@pytest.mark.parametrize("policy", ["async", "async(aggregator=delay-compensated(scale=2.0, momentum=0.95))"])
@pytest.mark.parametrize("servers", [1, 3])
def test_a_run_of_two_servers_goes_on_with_another_number(tmp_path: Path, servers: int, policy: str) -> None:
    undisturbed = saved_after(tmp_path / "whole", range(16), 1, policy=policy)
    half = saved_after(tmp_path / "half", range(8), 2, policy=policy)
    rest = saved_after(tmp_path / "rest", range(8, 16), servers, resume=half, policy=policy)
    assert ("remembered" in parts_of(half)["trainee"]) == (policy != "async")
    assert_same(parts_of(half)["session"]["steps"], 8)
    assert_same(parts_of(rest), parts_of(undisturbed))


CODECS = [
    "qsgd(levels=3, bucket=8, raw_below=0)",
    "sign(bucket=8)",
    "top-k(density=0.25, momentum=0.5, warm_up=12)",
    "threshold(tau=0.2, adaptive=0.1)",
    "power-sgd(rank=1)",
]
BOTH = ["cast(to=fp8, both=true)", "sign(bucket=8, both=true)", "power-sgd(rank=1, both=true)"]


@pytest.mark.parametrize(("codec", "servers"), [*((each, 2) for each in CODECS), *((each, 1) for each in BOTH)])
def test_a_run_with_a_codec_goes_on_to_the_bit(tmp_path: Path, codec: str, servers: int) -> None:
    """With the same number of servers, since each has a packet of its own."""
    undisturbed = saved_after(tmp_path / "whole", range(16), servers, codec=codec)
    half = saved_after(tmp_path / "half", range(8), servers, codec=codec)
    rest = saved_after(tmp_path / "rest", range(8, 16), servers, resume=half, codec=codec)
    assert_same(parts_of(rest), parts_of(undisturbed))
    assert_same(read_checkpoint(rest)["exchange"]["codecs"], read_checkpoint(undisturbed)["exchange"]["codecs"])


def test_what_codecs_keep_is_not_for_another_number_of_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = saved_after(tmp_path / "half", range(8), 2, codec="sign(bucket=8)")
    saved_after(tmp_path / "rest", range(8, 12), 3, resume=half, codec="sign(bucket=8)")
    assert "version 8: what codec sign(bucket=8) has kept back on workers 0 is lost" in caplog.text


def test_the_first_server_keeps_its_own_part_alone(tmp_path: Path) -> None:
    """Though it has read the whole of a checkpoint, and collects the whole for every one that it writes."""
    with Watched(tmp_path / "run", adam(), "async") as host:
        host.stand_at(host._run_state.load(read_checkpoint(saved_after(tmp_path / "before", range(4), 1))))
        cluster = ShardedCluster(
            "async", adam, train_state=host._train_state, servers=2, workers=1, host=host, version=host.steps
        )
        host._shards = cluster.shards
        with pushers(cluster, [Model()]) as (worker,):
            worker.saves_to = str(tmp_path / "last")
            lead([worker], range(4, 8))
        host._shards = None
    parameters = parameters_of(cluster.train_state.optimizers[0])
    kept = {id(parameters[number]) for _, number, _ in cluster.server._double_buffer._placed}
    own = layouts_of(cluster.train_state.model, 2)[0]
    assert kept == {id(parameter) for parameter in own.trained}


def parts_of(file: Path) -> dict[str, Any]:
    state = read_checkpoint(file)
    for name in ("metrics_bytes", "seed"):
        del state["session"][name]
    return {"trainee": in_order(state["trainee"]), "session": state["session"]}
