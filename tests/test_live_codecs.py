"""Codecs under a live server: packets for gradients, and nothing that they keep back is lost or counted twice."""

from __future__ import annotations

import contextlib
import random
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from led_by_hand import Hand, cluster_of_hands
from live import TOKEN, Cluster, Weights, weights_state
from quick import in_turn
from sharded import ShardedCluster
from test_wire import mutated
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from paceline.codecs import CODECS, parse_codec
from paceline.errors import CommError, UsageError
from paceline.policies import parse_policy
from paceline.policies.server import ServerPolicy
from paceline.server.client import Client
from paceline.sessions.worker import WorkerSession
from paceline.store.commit_rule import CommitRule
from paceline.train_state import TrainState
from paceline.transport.messages import Ask, PushMessage, Refused, Warned

EVERY = {
    "cast": "cast(to=fp8)",
    "qsgd": "qsgd(levels=7, bucket=8, raw_below=0)",
    "sign": "sign(bucket=8)",
    "top-k": "top-k(density=0.25)",
    "sparse-ternary": "sparse-ternary(density=0.25)",
    "threshold": "threshold(tau=0.2)",
    "power-sgd": "power-sgd(rank=1)",
}
POLICIES = ["sync", "k-sync(k=2)", "k-batch-async(k=2)", "ssp(bound=1)", "downpour(period=2)"]
EXCHANGED = "easgd(period=1, alpha=0.5)"
ALL = [
    *((name, policy, both) for name in EVERY for policy in POLICIES for both in (False, True)),
    *((name, EXCHANGED, False) for name in EVERY),
]
DATA = TensorDataset(torch.linspace(-1, 1, 48).view(24, 2))
TARGET = torch.linspace(-1, 1, 24).view(4, 6)


class Quadratic(nn.Module):
    """Its loss is least where the weights are those of the target."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.bias = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(6))

    def distance(self) -> float:
        return float(((self.weights - TARGET).square().sum() + self.bias.square().sum()).detach())

    def forward(self, inputs: Tensor) -> Tensor:
        scale = 1 + inputs.mean() / 4
        return scale * ((self.weights - TARGET).square().sum() + self.bias.square().sum()) / 2


def quadratic_state(rate: float = 0.1) -> TrainState:
    model = Quadratic()
    return TrainState(model=model, optimizers=[SGD(model.parameters(), lr=rate)])


def work(session: WorkerSession, train_state: TrainState) -> dict[int, list[Tensor]]:
    """Train, and give the gradients of all steps that were pushed."""
    pushed: dict[int, list[Tensor]] = {}
    encode = session._client._packing.encode  # type: ignore[union-attr]

    def noting(step: int) -> list[Tensor]:
        gradients = [cast(Tensor, parameter.grad).clone() for parameter in train_state.model.parameters()]
        pushed[session._client._step] = gradients
        return encode(step)

    session._client._packing.encode = noting  # type: ignore[union-attr, method-assign]
    for (inputs,) in session.batches(DATA, batch_size=2, epochs=6):
        with session.step():
            train_state.model(inputs).backward()
    return pushed


def memory_of(client: Client) -> list[Tensor]:
    assert client._packing is not None
    return [tensor for part in client._packing.parts for tensor in part.state.memory.values()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "where"), in_turn(ALL, ["here", "elsewhere"]))
def test_every_codec_trains_under_server_policies(case: tuple[str, str, bool], where: str) -> None:
    name, policy, both = case
    codec = EVERY[name] if not both else EVERY[name].replace(")", ", both=true)")
    with Cluster(policy, quadratic_state(), workers=2, codec=codec) as cluster:
        before = cast(Quadratic, cluster.train_state.model).distance()
        address = cluster.address if where == "here" else cluster.tcp_address
        trainees = [quadratic_state() for _ in range(2)]
        cluster.run(trainees, work, address=address)
        model = cast(Quadratic, cluster.train_state.model)
        assert model.distance() < 0.5 * before
        for trainee in trainees if policy in ("sync", "k-sync(k=2)") else ():  # what they have at the end is exact
            assert torch.equal(cast(Quadratic, trainee.model).weights, model.weights)


def test_the_table_has_every_codec() -> None:
    assert EVERY.keys() == CODECS.keys()


@pytest.mark.parametrize("codec", ["sign(bucket=8)", "top-k(density=0.25)", "threshold(tau=0.02)", "power-sgd(rank=1)"])
def test_applied_and_residuals_are_the_sum_of_all_gradients(codec: str) -> None:
    """What was applied is what the parameters have moved by, over the rate."""
    with Cluster("async", quadratic_state(), workers=1, codec=codec) as cluster:
        trainee = quadratic_state()
        with cluster.session(trainee, 0) as session:
            pushed = work(session, trainee)
            residual = session._client._packing.parts[0].state.memory["residual"]  # type: ignore[union-attr]
        total = torch.stack([torch.cat([each.flatten() for each in one]) for one in pushed.values()]).sum(0)
        model = cast(Quadratic, cluster.train_state.model)
        applied = -torch.cat([parameter.detach().flatten() for parameter in model.parameters()]) / 0.1
        torch.testing.assert_close(applied + residual, total, rtol=1e-4, atol=1e-4)


class CodedHand:
    """A worker that pushes made-up gradients when it is told to."""

    def __init__(self, cluster: Cluster, rank: int, **options: Any) -> None:
        self.model = Weights(8)
        self.client = cluster.client(self.model, rank, **options)
        cluster.lines.append(cast(Any, self.client._connection))
        self.client.ask(-1)

    def push(self, *values: float) -> None:
        self.model.weights[0].grad = torch.tensor(values, dtype=torch.float32)
        self.client.push(examples=1, loss=None, seconds=0.0)

    @property
    def residual(self) -> list[float]:
        return memory_of(self.client)[0].tolist()


def test_a_push_that_comes_too_late_leaves_no_trace_in_the_residual() -> None:
    """It crosses the cancel on its way: the step that comes next says that it was not taken."""
    with Cluster("k-sync(k=1)", weights_state(8), workers=2, codec="top-k(density=0.125)") as cluster:
        first, second = CodedHand(cluster, 0), CodedHand(cluster, 1)
        for hand in (first, second):
            hand.client.next_step(-1)
        second.push(*range(8))
        second.client.next_step(-1)
        assert second.residual == [0, 1, 2, 3, 4, 5, 6, 0]
        first.push(*[9.0] * 8)  # it has not heard yet that its step is cancelled
        assert sum(first.residual) == 63
        first.client.next_step(-1)
        assert first.residual == [0] * 8
        cluster.until(lambda: cluster.server.figures()[0]["dropped"] == 1)
        first.push(*range(8))
        first.client.next_step(-1)
        assert first.residual == [0, 1, 2, 3, 4, 5, 6, 0]
        first.client.close()
        second.client.close()


def test_a_push_that_is_not_finite_is_left_out_and_forgotten() -> None:
    with Cluster("async", weights_state(8), workers=1, codec="top-k(density=0.125)") as cluster:
        hand = CodedHand(cluster, 0)
        hand.client.next_step(-1)
        hand.push(*range(8))
        hand.client.next_step(-1)
        for bad in (float("nan"), float("inf"), 1e30):
            hand.push(bad, *[1.0] * 7)
            hand.client.next_step(-1)
            assert hand.residual == [0, 1, 2, 3, 4, 5, 6, 0]
        assert cluster.server.figures()[0]["refused"] == 3
        hand.push(*[0.0] * 8)
        hand.client.next_step(-1)
        assert cluster.train_state.model.weights[0].tolist() == [0, 0, 0, 0, 0, 0, -6, -7]  # type: ignore[index]
        hand.client.close()


def test_a_worker_that_joins_again_begins_with_nothing() -> None:
    with Cluster("async", weights_state(8), workers=1, codec="top-k(density=0.125)") as cluster:
        hand = CodedHand(cluster, 0)
        hand.client.next_step(-1)
        hand.push(*range(8))
        hand.client.next_step(-1)
        assert any(hand.residual)
        cast(Any, hand.client._connection).give_up()
        hand.client.next_step(-1)
        assert not any(hand.residual)
        hand.client.close()


# In checkpoints -------------------------------------------------------------------------------------------------------


def residuals_in(state: dict[str, Any]) -> dict[int, list[float]]:
    return {each["rank"]: each["up"][0].tolist() for each in state["workers"]}


def test_a_checkpoint_has_what_codecs_remember_of_the_pushes_that_are_committed() -> None:
    """Whether a worker waits, has pushed what is not committed yet, has died, or is on another host."""
    options: dict[str, Any] = {"workers": 4, "codec": "top-k(density=0.125)"}
    kept = [0.0, *map(float, range(1, 7)), 0.0]
    with Cluster("k-async(k=2)", weights_state(8), **options) as cluster:
        hands = [CodedHand(cluster, rank, here=rank < 3) for rank in range(4)]
        for hand in hands:
            hand.client.next_step(-1)
        first, second, third, elsewhere = hands
        assert residuals_in(cluster.server.codec_state()) == {rank: [0.0] * 8 for rank in range(3)}
        for hand in (first, elsewhere):
            hand.push(*range(8))
        for hand in (first, elsewhere):
            hand.client.next_step(-1)
        second.push(*range(8))
        cluster.until(lambda: cluster.server.figures()[1]["pushes"] == 1)
        state = cluster.server.codec_state()
        assert residuals_in(state) == {0: kept, 1: [0.0] * 8, 2: [0.0] * 8}
        assert any(second.residual), "of a push that is not committed"
        first.client.close()
        cluster.until(lambda: 0 not in cluster.server._members)
        assert residuals_in(cluster.server.codec_state()) == residuals_in(state)
        for hand in (second, third, elsewhere):
            hand.client.close()
    with Cluster("k-async(k=2)", weights_state(8), codec_state=state, **options) as cluster:
        assert residuals_in(cluster.server.codec_state()) == residuals_in(state), "before anybody has joined"
        hands = [CodedHand(cluster, rank, here=rank != 1) for rank in range(3)]
        assert [hand.residual for hand in hands] == [kept, [0.0] * 8, [0.0] * 8]
        assert residuals_in(cluster.server.codec_state()) == {0: kept, 2: [0.0] * 8}, "the second is elsewhere now"
        cast(Any, hands[0].client._connection).give_up()
        hands[0].client.next_step(-1)
        assert hands[0].residual == [0.0] * 8, "a new incarnation begins with nothing"
        for hand in hands:
            hand.client.close()


def test_who_goes_on_before_its_pushes_are_committed_begins_anew_in_a_resumed_run() -> None:
    """What its codec remembers is of pushes that the checkpoint does not have."""
    with Cluster("k-batch-async(k=3)", weights_state(8), workers=1, codec="top-k(density=0.125)") as cluster:
        hand = CodedHand(cluster, 0, here=True)
        for pushes, known in ((1, []), (2, []), (3, [0])):
            hand.client.next_step(-1)
            hand.push(*range(8))
            hand.client.next_step(-1) if pushes == 3 else cluster.until(
                lambda pushes=pushes: cluster.server.figures()[0]["pushes"] == pushes  # type: ignore[misc]
            )
            assert [*residuals_in(cluster.server.codec_state())] == known
        hand.client.close()


def test_a_parameter_without_a_gradient_gets_what_waits_for_it() -> None:
    """And one that never had a gradient is none of the optimizer's business."""
    train_state = weights_state(2, 2)
    with Cluster("async", train_state, workers=1, codec="top-k(density=0.5)") as cluster:
        model = Weights(2, 2)
        client = cluster.client(model, 0)
        client.ask(-1)
        client.next_step(-1)
        for gradient in (torch.tensor([1.0, 2.0]), None, None):
            model.weights[0].grad = gradient
            client.push(examples=1, loss=None, seconds=0.0)
            client.next_step(-1)
        weights = cast(Weights, train_state.model).weights
        assert (weights[0].tolist(), weights[1].tolist()) == ([-1, -2], [0, 0])
        client.close()


def test_a_worker_of_this_host_sends_packets_too() -> None:
    """Or its bits would be others."""
    with Cluster("async", weights_state(8), workers=1, codec="cast") as cluster:
        options: dict[str, Any] = {"rank": 0, "incarnation": 0, "memory": cluster.memory}
        client = Client(Weights(8), address=cluster.address, token=TOKEN, sealed=False, **options)
        assert not client._shares and not cluster.server._members[0].local
        client.close()


# Packets that no worker should send ----------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), name=st.sampled_from(sorted(EVERY)))
def test_altered_packets_are_refused_and_counted_and_the_run_goes_on(seed: int, name: str) -> None:
    source = random.Random(seed)
    codec = EVERY[name]
    with Cluster("async", weights_state(40, 3), workers=2, codec=codec) as cluster:
        bad, good = (Hand(cluster, rank, model=Weights(40, 3)) for rank in range(2))
        part = cluster.server._packing
        assert part is not None
        state = parse_codec(codec).new_state(part.state.parts, seed=0)
        packet = bytes(state.encode(torch.linspace(-1, 1, 43), step=0).numpy())
        for hand in (bad, good):
            hand.ask()
        altered = mutated(packet, source)
        bad.say(PushMessage(bad.step, bad.version, 1, 0.0, 0.0, False, 0, b"\3"), altered)
        if altered not in (packet, b""):
            assert bad.hear(Refused).reason.startswith(("a packet", "wanted"))
            assert cluster.server.figures()[0]["refused"] == 1
            assert not any(parameter.any() for parameter in cluster.train_state.model.parameters())
        good.say(PushMessage(good.step, good.version, 1, 0.0, 0.0, False, 0, b"\3"), packet)
        good.go()
        assert cluster.train_state.model.weights[0].any()  # type: ignore[index]


def test_a_packet_of_nothing_says_that_a_gradient_is_not_finite() -> None:
    with cluster_of_hands("async", 1, codec="cast") as (cluster, (hand,)):
        hand.ask()
        hand.say(PushMessage(hand.step, hand.version, 1, 0.0, 0.0, False, 0, b"\1"), b"")
        assert "not finite" in hand.hear(Warned).reason
        assert cluster.value == 0.0


def test_longer_packets_than_there_can_be_are_not_even_read() -> None:
    with cluster_of_hands("async", 1, codec="cast") as (_, (hand,)):
        hand.ask()
        hand.say(PushMessage(hand.step, hand.version, 1, 0.0, 0.0, False, 0, b"\1"), bytes(10_000))
        assert "wanted" in hand.hear(Refused).reason


def test_another_server_refuses_an_altered_packet(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> TrainState:
        return weights_state(8, 8)

    with ShardedCluster("async", make, servers=2, workers=1, codec="sign(bucket=8)") as cluster:
        model = Weights(8, 8)
        client = cluster.client(model, 0)
        client.ask(-1)
        client.next_step(-1)
        for parameter in model.parameters():
            parameter.grad = torch.ones(8)
        assert client._packing is not None
        encode = client._packing.encode
        monkeypatch.setattr(
            client._packing, "encode", lambda step: [packet + (n == 1) for n, packet in enumerate(encode(step))]
        )
        with pytest.raises(CommError, match="packet"):
            client.push(examples=1, loss=None, seconds=0.0)
        assert cluster.value == 0.0
        client.close()


# Where a codec cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "codec", "servers", "reason"),
    [
        ("easgd(period=1, alpha=0.5)", "cast(both=true)", 1, "parameters of their own"),
        ("easgd(period=1, alpha=0.5)", "top-k(momentum=0.5)", 1, "no momentum"),
        ("async", "sign(vote=majority)", 1, "by its aggregator"),
        ("draco(faulty=1)", "cast", 1, "the same bits"),
        ("gradient-coding(stragglers=1)", "top-k", 1, "change its weight"),
        ("async", "top-k(momentum=0.9, both=true)", 1, "no momentum"),
        ("async", "cast(both=true)", 2, "for one server"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(policy: str, codec: str, servers: int, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as error:
        CommitRule.of(cast(ServerPolicy, parse_policy(policy)), parse_codec(codec), servers=servers)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("codec", "momentum"), [("sign(both=true)", 0.9), ("sign(both=true)", 0.0), ("sign", 0.9)])
def test_signs_on_both_ways_are_refused_with_momentum(codec: str, momentum: float) -> None:
    model = Quadratic()
    train_state = TrainState(model=model, optimizers=[SGD(model.parameters(), lr=0.1, momentum=momentum)])
    rule = CommitRule.of(cast(ServerPolicy, parse_policy("sync")), parse_codec(codec))
    refused = pytest.raises(UsageError, match="momentum multiplies them")
    with refused if momentum and "both" in codec else contextlib.nullcontext():
        rule.check_optimizers(train_state)


def test_codecs_that_remember_nothing_go_with_gradient_coding() -> None:
    policy = cast(ServerPolicy, parse_policy("gradient-coding(stragglers=1)"))
    assert CommitRule.of(policy, parse_codec("qsgd")).codec is not None


# Bytes ----------------------------------------------------------------------------------------------------------------


def large_state() -> TrainState:
    return weights_state(50_000)


def push_some(cluster: Cluster, **options: Any) -> dict[str, Any]:
    model = Weights(50_000)
    client = cluster.client(model, 0, **options)
    client.ask(-1)
    for _ in range(5):
        client.next_step(-1)
        model.weights[0].grad = torch.randn(50_000)
        client.push(examples=1, loss=None, seconds=0.0)
    client.next_step(-1)
    client.leave(failed=False)
    cluster.until(lambda: not cluster.server._members)
    return cluster.server.figures()[0]


@pytest.mark.parametrize(
    ("codec", "most_in", "most_out"),
    [
        (None, 1_010_000, 1_210_000),
        ("sign", 33_000, 1_210_000),
        ("sign(both=true)", 33_000, 240_000),  # all parameters once
    ],
)
def test_bytes_are_counted_at_the_socket(codec: str | None, most_in: int, most_out: int) -> None:
    with Cluster("async", large_state(), workers=1, codec=codec) as cluster:
        figures = push_some(cluster, address=cluster.tcp_address)
    assert 0.9 * most_in < figures["received"] < most_in
    assert 0.9 * most_out < figures["sent"] < most_out
    assert figures["bytes_in"] >= 1_000_000 and figures["bytes_out"] >= 1_200_000, "before the codec"


def test_bytes_at_other_servers_are_counted_too() -> None:
    def make() -> TrainState:
        return weights_state(50_000, 50_000)

    with ShardedCluster("async", make, servers=2, workers=1, codec="sign") as cluster:
        client = cluster.client(Weights(50_000, 50_000), 0)
        for _ in range(2):  # it comes back over other connections
            client.ask(-1)
            client.next_step(-1)
            for parameter in client._model.parameters():
                parameter.grad = torch.ones(50_000)
            client.push(examples=1, loss=None, seconds=0.0)
            client.next_step(-1)
            cast(Any, client._connection).give_up()
            client.next_step(-1)
        client.leave(failed=False)
        cluster.wait_for_end()
        before = dict(cluster.server.figures()[0])
        cluster.server.count_bytes_of_others()
        after = cluster.server.figures()[0]
        assert 2 * 6_000 < after["received"] - before["received"] < 2 * 7_000
        assert 6 * 200_000 < after["sent"] - before["sent"] < 7 * 200_000


def test_encrypted_bytes_are_counted_as_they_are_sent() -> None:
    with ShardedCluster("async", large_state, servers=1, sealed=True, workers=1) as cluster:
        figures = push_some(cluster, address=cluster.tcp_address)
        assert figures["received"] > 1_000_000 + 16 * 5 * (200_000 // 65_000)


def test_who_has_not_taken_what_was_sent_is_sent_all_parameters() -> None:
    """A difference is only for one who has had all that was sent before it."""
    count = 1_000_000
    with Cluster("k-batch-sync(k=1)", weights_state(count), workers=2, codec="sign(both=true)") as cluster:
        slow, quick = Hand(cluster, 0, model=Weights(count)), cluster.client(Weights(count), 1)
        slow.say(Ask(-1, 1))  # and reads nothing of the answer
        quick.ask(-1)
        for _ in range(3):
            quick.next_step(-1)
            for parameter in quick._model.parameters():
                parameter.grad = torch.ones(count)
            quick.push(examples=1, loss=None, seconds=0.0)
        quick.next_step(-1)
        assert [(go.version, go.packet) for go in (slow.go(), slow.go())] == [(0, False), (3, False)]
        assert slow.value == cluster.value == -3.0
        quick.close()
