"""Laws of codecs between peers: every codec joins by one line in CODED, every policy by one in POLICIES."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import (
    CASES,
    Case,
    assert_close,
    backward,
    copy_for,
    deal,
    differences,
    momentum,
    peers_of,
    train_joined,
    uneven_sizes,
)
from quick import in_turn
from replicas import CASE, agree, plain, train
from same_bits import assert_same
from test_many_resume import WithStatistics
from torch import Tensor, nn
from torch.optim import SGD, SparseAdam

import paceline
from paceline.codecs import CODECS, parse_codec
from paceline.errors import UsageError
from paceline.peers.connect import begin_exchange
from paceline.peers.exchange import BackwardPass
from paceline.policies import AllReduce

CODED = [
    "cast(to=bf16)",
    "cast(to=fp8)",
    "qsgd",
    "qsgd(norm=2, form=elias)",
    "sign",
    "sign(vote=majority)",
    "top-k(density=0.1)",
    "top-k(density=0.1, momentum=0.5, warm_up=4)",
    "sparse-ternary(density=0.1)",
    "threshold(tau=0.001, adaptive=0.1)",
    "power-sgd(rank=1)",
]
POLICIES = [
    "local-sgd(every=4)",
    "post-local-sgd(every=4, start=2)",
    "ada-comm(every=4, window=2)",
    "diloco(every=4)",
    "diloco(every=5, fragments=2, overlap=3)",
    "sync-easgd",
    "sma(every=4, momentum=0.5)",
]
LOSSLESS = "top-k(density=1.0)"  # but for the bits of sums
every_codec = pytest.mark.parametrize("codec", CODED)
every_policy = pytest.mark.parametrize("policy", POLICIES)


def test_the_table_of_this_suite_has_every_codec() -> None:
    assert {parse_codec(text).name for text in CODED} == CODECS.keys()


@pytest.mark.sampled(3)
@every_codec
def test_workers_have_the_same_parameters_after_every_step(world: World, codec: str) -> None:
    """With short batches, and in the last step of the epoch a worker that has none."""
    template = WithStatistics()
    found = world(3, lambda group: train(group, template, "all-reduce", codec=codec, batch_size=7))
    assert agree(found) == list(range(1, found[0]["steps"] + 1))
    for each in found[1:]:
        assert_same(found[0]["model"], each["model"])


@pytest.mark.sampled(3)
@every_codec
def test_a_quadratic_is_minimised(world: World, codec: str) -> None:
    goal = torch.linspace(-1.0, 1.0, 40)

    def work(group: Any) -> float:
        model = nn.Linear(40, 1, bias=False)
        rate = torch.optim.lr_scheduler.ExponentialLR
        optimizer = SGD(model.parameters(), lr=0.3)
        scheduler = rate(optimizer, 0.98)
        with paceline.join(model, optimizer, scheduler=scheduler, codec=codec, seed=0, group=group) as session:
            nn.init.zeros_(model.weight)
            for _ in range(150):
                with session.step():
                    # Each worker has another minimum; the mean of the two is the goal.
                    backward((model.weight - goal - 0.1 + 0.2 * session.rank).square().sum() / 2)
        return float((model.weight.detach() - goal).norm() / goal.norm())

    assert max(world(2, work)) < 0.1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("codec", "workers"), in_turn(CODED, [2, 3]))
def test_a_resumed_run_equals_one_that_was_never_stopped(
    world: World, codec: str, workers: int, tmp_path: Path
) -> None:
    """What each worker's codec remembers is its own, and saved."""
    template = WithStatistics()
    options: dict[str, Any] = {"policy": "all-reduce", "make_optimizer": momentum, "save_every": 2, "codec": codec}
    whole = world(workers, lambda group: train(group, template, run=tmp_path / "whole", **options))
    world(workers, lambda group: train(group, template, run=tmp_path / "cut", stop=4, **options))
    resumed = world(workers, lambda group: train(group, template, run=tmp_path / "cut", resume=True, **options))
    for before, after in zip(whole, resumed, strict=True):
        assert_same(before["model"], after["model"])
        assert_same(before["optimizer"], after["optimizer"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", ["qsgd", "top-k(density=0.1)"])
@every_policy
def test_changes_of_parameters_are_coded_and_resumed(world: World, policy: str, codec: str, tmp_path: Path) -> None:
    template = WithStatistics()
    options: dict[str, Any] = {"policy": policy, "make_optimizer": momentum, "save_every": 3, "codec": codec}
    whole = world(3, lambda group: train(group, template, run=tmp_path / "whole", **options))
    world(3, lambda group: train(group, template, run=tmp_path / "cut", stop=6, **options))
    resumed = world(3, lambda group: train(group, template, run=tmp_path / "cut", resume=True, **options))
    for before, after in zip(whole, resumed, strict=True):
        assert_same(before["model"], after["model"])
        assert_same(before["optimizer"], after["optimizer"])
    assert_same(whole[0]["model"], whole[1]["model"])


AVERAGING = ["local-sgd(every=4)", "diloco(every=4, outer_lr=1.0, outer_momentum=0.0)"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [*AVERAGING, "diloco(every=4, fragments=2)"])
def test_a_run_that_is_resumed_right_after_an_exchange(world: World, policy: str, tmp_path: Path) -> None:
    """What a worker has not sent is then still in its codec, and not yet in its parameters."""
    template = WithStatistics()
    options: dict[str, Any] = {"policy": policy, "make_optimizer": momentum, "save_every": 4, "codec": "sign"}
    whole = world(3, lambda group: train(group, template, run=tmp_path / "whole", **options))
    world(3, lambda group: train(group, template, run=tmp_path / "cut", stop=4, **options))
    resumed = world(3, lambda group: train(group, template, run=tmp_path / "cut", resume=True, **options))
    for before, after in zip(whole, resumed, strict=True):
        assert_same(before["model"], after["model"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("codec", ["top-k(density=0.1)", "sparse-ternary(density=0.1)", "sign", "power-sgd(rank=1)"])
@pytest.mark.parametrize("policy", AVERAGING)
def test_what_is_not_sent_stays_with_its_worker(world: World, policy: str, codec: str) -> None:
    """Where gradients do not depend on the parameters, a codec does not change the average of all workers."""

    def work(group: Any, codec: str | None) -> Tensor:
        model = nn.Linear(8, 5, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = SGD(model.parameters(), lr=0.1)
        with paceline.join(model, optimizer, policy=policy, codec=codec, seed=0, group=group) as session:
            for number in range(9):  # one after an exchange
                gradient = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * number + session.rank))
                with session.step(examples=1 + session.rank):
                    backward((model.weight * gradient).sum())
            with session.averaged():
                return model.weight.detach().clone()

    coded = world(2, lambda group: work(group, codec))
    plain = world(2, lambda group: work(group, None))
    torch.testing.assert_close(coded[0], plain[0])


@pytest.mark.sampled(3)
@every_policy
def test_a_codec_that_sends_all_changes_nothing(world: World, policy: str) -> None:
    template = CASE.build()
    found, wanted = (
        world(3, lambda group, codec=codec: train(group, template, policy, codec=codec))  # type: ignore[misc]
        for codec in (LOSSLESS, None)
    )
    for name, value in wanted[0]["model"].items():
        torch.testing.assert_close(found[0]["model"][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("known_total", [True, False])
@pytest.mark.parametrize("case", ["mlp", "channels last", "tied", "dtypes", "odd", "gpt"])
def test_a_codec_that_sends_all_gives_the_gradients_of_the_joined_batch(
    world: World, case: str, known_total: bool
) -> None:
    """On any model, with uneven batches and borrowed data."""
    chosen = CASES[case]
    template, dealt = chosen.build(), deal(chosen, uneven_sizes(3))

    def work(group: Any) -> nn.Module:
        return train_coded(group, chosen, template, dealt, known_total=known_total)

    expected = train_joined(chosen, template, momentum, dealt)
    for model in world(3, work):
        if case == "dtypes":  # packets have float32, also of float64
            model, expected = model.float(), expected.float()
            assert max(distance for _, distance in differences(model, expected)) < 3e3
        else:
            assert_close(model, expected)


def train_coded(group: Any, case: Case, template: nn.Module, dealt: Any, *, known_total: bool) -> nn.Module:
    model = copy_for(group, template)
    optimizer = momentum(model)
    policy = AllReduce(bucket_cap_mb=0.001, first_bucket_mb=0.0005)
    exchange = begin_exchange(model, policy, peers_of(group), parse_codec(LOSSLESS))
    for batches in dealt:
        mine = batches[group.rank()]
        optimizer.zero_grad()
        exchange.begin(BackwardPass(len(mine), sum(map(len, batches)) if known_total else None))
        backward(case.loss(model, mine if len(mine) else case.inputs(1)))
        exchange.finish()
        optimizer.step()
        exchange.release()
    exchange.close()
    return model


@pytest.mark.parametrize("codec", ["top-k(density=0.1)", "threshold(tau=0.3)", "sign"])
def test_what_was_applied_and_what_is_remembered_is_the_sum_of_the_gradients(world: World, codec: str) -> None:
    """Though one worker has no data in some steps, and some steps do not use a parameter."""
    slopes = torch.randn(7, 2, 50, generator=torch.Generator().manual_seed(0))

    def work(group: Any) -> tuple[Tensor, Tensor]:
        model = nn.ParameterList([torch.zeros(50), torch.zeros(50)])
        exchange = begin_exchange(model, AllReduce(), peers_of(group), parse_codec(codec))
        applied = torch.zeros(2, 50)
        for step, slope in enumerate(slopes):
            examples = [3, step % 2]
            exchange.begin(BackwardPass(examples[exchange.rank], total=sum(examples)))
            used = (0,) if step == 5 else (0, 1)
            backward(sum(((model[i] * slope[i]).sum() * (1 + exchange.rank) for i in used), torch.zeros(())))
            exchange.finish()
            for i in range(2):
                if model[i].grad is not None:
                    applied[i] += model[i].grad
                model[i].grad = None
            exchange.release()
        assert exchange.coding is not None
        (state,) = exchange.coding.state_dict().values()
        residual = torch.stack([state["residual"][start : start + 50] for start in (64, 0)])
        return applied, residual

    found = world(2, work)
    wanted = torch.zeros(2, 50)
    for step, slope in enumerate(slopes):
        weight = (3 + 2 * (step % 2)) / (3 + step % 2)
        wanted += weight * (slope if step != 5 else slope * torch.tensor([[1.0], [0.0]]))
    for applied, _ in found:
        torch.testing.assert_close(applied + found[0][1] + found[1][1], wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(applied, wanted, rtol=1e-2)


@pytest.mark.parametrize("codec", ["top-k(density=0.1)", "qsgd", "power-sgd(rank=1)", "cast"])
def test_nan_is_nan_on_all_and_leaves_no_trace(world: World, codec: str) -> None:
    """Then a scaler, or on_nan, skips the step on all workers alike."""

    def work(group: Any, bad: int | None) -> tuple[list[bool], dict[str, Any]]:
        model = nn.Linear(8, 8)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        exchange = begin_exchange(model, AllReduce(), peers_of(group), parse_codec(codec))
        spoiled = []
        for step in range(4):
            if step == 2 and bad is None:
                continue
            exchange.begin(BackwardPass(1, total=2))
            x = torch.full((1, 8), math.nan if step == bad and exchange.rank == 1 else 1.0 + step)
            backward(model(x).square().sum())
            exchange.finish()
            spoiled.append(bool(model.weight.grad.isnan().any()))  # type: ignore[union-attr]
            exchange.release()
            model.zero_grad()
        assert exchange.coding is not None
        return spoiled, exchange.coding.state_dict()

    with_nan, without = (world(2, lambda group, bad=bad: work(group, bad)) for bad in (2, None))  # type: ignore[misc]
    for (spoiled, state), (_, wanted) in zip(with_nan, without, strict=True):
        assert spoiled == [False, False, True, False]
        assert_same(state, wanted)


def train_scaled(group: Any, template: nn.Module, codec: str, scales: Sequence[float], *, wrapped: bool) -> Any:
    """Train with these scales of the losses. Infinite ones make a step overflow; with 1.0 alone there is no scaler."""
    model = copy_for(group, template)
    optimizer = momentum(model)
    scaler = torch.amp.GradScaler("cpu", enabled=set(scales) != {1.0})
    scaler.scale(torch.zeros(1))  # else it has no scale yet that can be changed
    draw = torch.Generator().manual_seed(group.rank())
    if wrapped:
        ddp = paceline.DistributedDataParallel(model, process_group=group, codec=codec, scaler=scaler)
    else:
        session = paceline.join(model, optimizer, seed=0, group=group, codec=codec, scaler=scaler)
    for scale in scales:
        overflows = math.isinf(scale)
        if not overflows:
            scaler.update(scale)
            x = torch.randn(4, 6, generator=draw)
        factor = math.inf if overflows and group.rank() == 1 else 1.0
        if wrapped:
            optimizer.zero_grad()
            backward(scaler.scale(ddp(x).square().mean() * factor))
            scaler.step(optimizer)
            scaler.update()
            continue
        with session.step():
            backward(scaler.scale(model(x).square().mean() * factor))
    if not wrapped:
        session.close()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("wrapped", [False, True], ids=["session", "wrapper"])
@pytest.mark.parametrize("codec", [*CODED, "top-k(density=0.1, clip=0.05)", "top-k(feedback=false, clip=0.05)"])
def test_a_scaler_changes_nothing(world: World, codec: str, wrapped: bool) -> None:
    """However its scale changes; powers of two are exact. A step that overflows is as if it had never been."""
    template = CASE.build()
    scales = [64.0, 128.0, math.inf, 2.0, 1024.0, math.inf, 512.0, 4.0]
    scaled, plainly = (
        world(2, lambda group, scales=scales: train_scaled(group, template, codec, scales, wrapped=wrapped))  # type: ignore[misc]
        for scales in (scales, [1.0] * 6)
    )
    for one, other in zip(scaled, plainly, strict=True):
        assert_same(one, other)


def test_sparse_gradients_accumulation_and_a_scaler_go_on_working(world: World) -> None:
    def work(group: Any) -> dict[str, Tensor]:
        model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
        optimizers = [SparseAdam(model[0].parameters()), plain(model[1])]
        with paceline.join(model, optimizers, codec="top-k(density=0.2)", group=group) as session:
            for number in range(6):
                with session.step(accumulate=number % 2 == 0):
                    backward(model(torch.tensor([number, session.rank])).square().sum())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        head = model[1]
        with paceline.join(head, plain(head), codec="top-k(density=0.2)", scaler=scaler, group=group) as session:
            for number in range(6):
                with session.step():
                    x = torch.full((1, 4), 1e30 if number == 3 and session.rank == 0 else 1.0)
                    backward(scaler.scale(head(x).square().sum()))
        return model.state_dict()

    one, other = world(2, work)
    assert_same(one, other)
    assert all(bool(value.isfinite().all()) for value in one.values())


@pytest.mark.parametrize(
    ("policy", "codec", "reason"),
    [
        ("gossip", "cast", "a message has the parameters themselves"),
        ("local-sgd(every=2)", "top-k(momentum=0.9)", "changes of parameters"),
        ("sma", "sign(vote=majority)", "changes of parameters"),
    ],
)
def test_what_cannot_be_right_is_refused(policy: str, codec: str, reason: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=reason):
        paceline.join(model, plain(model), policy=policy, codec=codec)


def test_a_codec_sends_fewer_bytes(world: World) -> None:
    """All that is sent is counted: packets and their lengths once for each receiver, control numbers as ever."""
    template = CASES["huge"].build()

    def work(group: Any, codec: str | None) -> int:
        model = copy_for(group, template)
        exchange = begin_exchange(model, AllReduce(), peers_of(group), None if codec is None else parse_codec(codec))
        before = exchange.num_bytes
        exchange.begin(BackwardPass(1, total=3))
        backward(model(torch.ones(1, 1000)).sum())
        exchange.finish()
        return exchange.num_bytes - before

    (plainly, *_), (coded, *_) = (
        world(3, lambda group, codec=codec: work(group, codec))  # type: ignore[misc]
        for codec in (None, "sign(feedback=false)")
    )
    assert plainly / coded == pytest.approx(32 / 2, rel=0.05), "32 bits, and one bit for each of two receivers"


def test_the_wrapper_has_codecs_too(world: World) -> None:
    def work(group: Any) -> tuple[list[Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        model = paceline.DistributedDataParallel(nn.Linear(6, 4), process_group=group, codec="top-k(density=0.1)")
        for _ in range(3):
            backward(model(torch.full((1, 6), 1.0 + group.rank())).square().sum())
        state = model.codec_state()
        model.load_codec_state(state)
        return [parameter.grad for parameter in model.parameters()], state  # type: ignore[misc]

    (one, own), (other, _) = world(2, work)
    assert_same(one, other)
    assert any(bool(state["residual"].any()) for state in own.values())
