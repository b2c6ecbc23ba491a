"""Laws of all policies that let workers update their own parameters: a new one joins by one line in REPLICAS."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import Odd, backward, copy_for, momentum
from replicas import CASE, REPLICAS, agree, plain, take_turn, train
from same_bits import assert_same
from test_many_resume import WithStatistics
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import CommError, NonFiniteLossError, UsageError
from paceline.peers.connect import EXCHANGES
from paceline.policies import AllReduce, parse_policy

every_policy = pytest.mark.parametrize("policy", REPLICAS)
# Plain SGD under each of these is all-reduce, but for rounding.
EXACT = [
    "local-sgd(every=1)",
    "post-local-sgd(every=5)",
    "ada-comm(every=1)",
    "diloco(every=1, outer_lr=1, outer_momentum=0)",
]


def test_the_table_of_this_suite_has_every_policy() -> None:
    assert {type(parse_policy(policy)) for policy in REPLICAS} == EXCHANGES.keys() - {AllReduce}


@pytest.mark.parametrize("batch_size", [4, 7])
@pytest.mark.parametrize("policy", EXACT)
def test_exchanging_after_every_step_of_plain_sgd_is_all_reduce(world: World, policy: str, batch_size: int) -> None:
    """With short batches and, in the last step of the epoch, a worker that has none."""
    template = CASE.build()
    found = world(3, lambda group: train(group, template, policy, batch_size=batch_size))
    together = world(3, lambda group: train(group, template, "all-reduce", batch_size=batch_size))
    for name, wanted in together[0]["model"].items():
        torch.testing.assert_close(found[0]["model"][name], wanted, rtol=1e-6, atol=1e-6)


@every_policy
def test_all_workers_end_with_the_answer(world: World, policy: str) -> None:
    """Statistics of batches are averaged, and counts follow worker 0."""
    template = WithStatistics()
    found = world(3, lambda group: train(group, template, policy, make_optimizer=momentum))
    assert agree(found) != list(range(1, 10)), "replicas differ in between"
    for each in found[1:]:
        assert_same(found[0]["model"], each["model"])
    assert not torch.equal(found[0]["model"]["layers.1.running_mean"], template.layers[1].running_mean)  # type: ignore[arg-type]


@every_policy
def test_momentum_stays_each_workers_own(world: World, policy: str) -> None:
    template = CASE.build()
    found = world(2, lambda group: train(group, template, policy, make_optimizer=momentum))
    one, other = (each["optimizer"]["state"][0]["momentum_buffer"] for each in found)
    assert not torch.equal(one, other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop", [4, 6])
@every_policy
def test_a_resumed_run_equals_one_that_was_never_stopped(world: World, policy: str, stop: int, tmp_path: Path) -> None:
    """In the middle of a round and at its end; momentum, replicas and all counters are saved."""
    template = WithStatistics()
    options: dict[str, Any] = {"policy": policy, "make_optimizer": momentum, "save_every": 2}
    whole = world(3, lambda group: train(group, template, run=tmp_path / "whole", **options))
    world(3, lambda group: train(group, template, run=tmp_path / "cut", stop=stop, **options))
    resumed = world(3, lambda group: train(group, template, run=tmp_path / "cut", resume=True, **options))
    for before, after in zip(whole, resumed, strict=True):
        assert_same(before["model"], after["model"])
        assert_same(before["optimizer"], after["optimizer"])


@pytest.mark.sampled(3)
@every_policy
def test_others_go_on_from_the_answer(world: World, policy: str, tmp_path: Path) -> None:
    """Another number of workers, or a policy under which workers are alike; an uneven last step weighs the average."""
    template, run = CASE.build(), tmp_path / "run"

    def work(group: Any) -> dict[str, Tensor]:
        model = copy_for(group, template)
        with paceline.join(model, plain(model), policy=policy, seed=1, group=group, run=run) as session:
            for batch in torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(session.rank)):
                with session.step(examples=1 + session.rank):
                    backward(CASE.loss(model, batch))
            with session.averaged():
                answer = copy.deepcopy(model.state_dict())
            session.save()
        return answer

    def resume(group: Any, policy: str) -> dict[str, Tensor]:
        model = copy_for(group, template)
        with paceline.join(model, plain(model), policy=policy, group=group, resume=file) as session:
            assert session.steps == 3
            return copy.deepcopy(model.state_dict())

    answer = world(3, work)[0]
    (file,) = (run / "checkpoints").iterdir()
    for workers, by in ((2, policy), (3, "all-reduce")):
        for found in world(workers, lambda group, by=by: resume(group, by)):  # type: ignore[misc]
            torch.testing.assert_close(found, answer)


@pytest.mark.sampled(3)
@every_policy
def test_a_run_goes_on_under_another_policy_and_back(world: World, policy: str, tmp_path: Path) -> None:
    template = WithStatistics()
    options: dict[str, Any] = {"run": tmp_path / "run", "save_every": 1}
    world(2, lambda group: train(group, template, policy, stop=3, **options))
    found = world(2, lambda group: train(group, template, "all-reduce", stop=5, resume=True, **options))
    assert found[0]["steps"] == 5
    assert_same(found[0]["model"], found[1]["model"])
    found = world(2, lambda group: train(group, template, policy, resume=True, **options))
    assert found[0]["steps"] > 5
    assert_same(found[0]["model"], found[1]["model"])


@every_policy
def test_inside_averaged_all_are_the_same_and_after_it_each_is_its_own(world: World, policy: str) -> None:
    def work(group: Any) -> tuple[Tensor, Tensor, Tensor]:
        model = nn.Linear(1, 1)
        with paceline.join(model, plain(model), policy=policy, group=group) as session:
            for _ in range(3):
                with session.step():
                    backward(model(torch.full((1, 1), 1.0 + session.rank)).sum())
            session.mean(0.0)  # where workers share memory, all have made their steps then
            own = model.weight.detach().clone()
            with session.averaged():
                answer = model.weight.detach().clone()
            assert torch.equal(model.weight, own)
        return own, answer, model.weight.detach().clone()

    found = world(3, work)  # two that gossip are always alike
    assert (len({float(own) for own, _, _ in found}) > 1) == (policy != "hogwild")
    for _, answer, end in found:
        assert torch.equal(answer, end)
        assert torch.equal(answer, found[0][1])


@every_policy
def test_halves_are_averaged_in_single_precision(world: World, policy: str) -> None:
    def work(group: Any) -> Tensor:
        model = nn.Linear(1, 1).to(torch.bfloat16)
        nn.init.constant_(model.weight, 1.0)
        with paceline.join(model, plain(model), policy=policy, group=group) as session, session.step():
            backward(0.04 * (1 + session.rank) * model(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        return model.weight.detach()

    one, other = world(2, work)
    assert torch.equal(one, other)
    assert abs(one.float().item() - 0.994) < 0.008


@every_policy
def test_workers_that_are_out_of_step_are_told(world: World, policy: str) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        with paceline.join(model, plain(model), policy=policy, group=group) as session:
            for _ in range(3 + session.rank):
                with session.step() as step:
                    loss = model(torch.ones(1, 1)).sum()
                    step.record(loss=loss)
                    backward(loss)

    with pytest.raises(CommError, match="out of step"):
        world(2, work)


@every_policy
def test_a_worker_without_data_takes_part_with_no_weight(world: World, policy: str) -> None:
    """What borrowed data does to its gradients and statistics, even NaN, reaches nobody."""
    template = WithStatistics()

    def work(group: Any) -> dict[str, Tensor]:
        model = copy_for(group, template)
        with paceline.join(model, plain(model), policy=policy, group=group) as session:
            for _ in range(6):
                inputs = torch.full((2, 6), 1.0 if session.rank == 0 else float("nan"))
                with session.step(examples=2 if session.rank == 0 else 0) as step:
                    loss = model(inputs).square().sum()
                    step.record(loss=loss)
                    backward(loss)
        return model.state_dict()

    found = world(2, work)
    assert_same(found[0], found[1])
    assert all(value.isfinite().all() for value in found[0].values())


@every_policy
def test_one_worker_may_skip_an_update(world: World, policy: str) -> None:
    def work(group: Any) -> tuple[list[bool], Tensor]:
        model = nn.Linear(1, 1)
        skipped = []
        with paceline.join(model, plain(model), policy=policy, group=group, on_nan="skip") as session:
            for number in range(9):
                with session.step() as step:
                    loss = model(torch.full((1, 1), float("nan") if number == session.rank else 1.0)).sum()
                    backward(loss)
                    step.record(loss=loss)
                skipped.append(step.skipped)
        return skipped, model.weight.detach()

    found = world(2, work)
    for rank, (skipped, weight) in enumerate(found):
        assert [number for number, each in enumerate(skipped) if each] == [rank]
        assert weight.isfinite()
        assert torch.equal(weight, found[0][1])


def test_a_replica_that_is_no_longer_finite_is_not_saved(world: World, tmp_path: Path) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        with paceline.join(model, plain(model), policy="local-sgd(every=4)", group=group, run=tmp_path) as session:
            with session.step():
                backward(model(torch.full((1, 1), float("nan") if session.rank else 1.0)).sum())
            session.save()

    with pytest.raises(NonFiniteLossError, match=r"worker 1.*weight is no longer finite"):
        world(2, work)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_checkpoint_elsewhere_is_none_of_the_run(world: World, tmp_path: Path) -> None:
    """The one of the session's end is then written by all together."""

    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        with paceline.join(
            model, plain(model), policy="local-sgd(every=2)", group=group, run=tmp_path / "run"
        ) as session:
            with session.step():
                backward(model(torch.ones(1, 1)).sum())
            session.save(tmp_path / "elsewhere.safetensors")

    world(2, work)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


@every_policy
def test_all_workers_stop_where_one_was_asked(world: World, policy: str, tmp_path: Path) -> None:
    def work(group: Any) -> int:
        model = nn.Linear(1, 1)
        session = paceline.join(model, plain(model), policy=policy, group=group, run=tmp_path)
        session.stop_when(lambda: session.rank == 1 and session.steps >= 3)
        with pytest.raises(KeyboardInterrupt), session:
            for _ in range(20):
                take_turn(session)
                with session.step() as step:
                    loss = model(torch.ones(1, 1)).sum()
                    step.record(loss=loss)
                    backward(loss)
        return session.steps

    steps = world(2, work)
    assert len(set(steps)) == 1
    assert 3 <= steps[0] < 20
    assert (tmp_path / "checkpoints" / f"step-{steps[0]:010}.safetensors").exists()


@every_policy
def test_accumulated_batches_are_one_step(world: World, policy: str) -> None:
    """Two blocks of one example each are as a block of both."""
    template = CASE.build()

    def work(group: Any, parts: int) -> dict[str, Tensor]:
        model = copy_for(group, template)
        with paceline.join(model, plain(model), policy=policy, group=group) as session:
            for batch in torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(session.rank)):
                take_turn(session)
                for number, part in enumerate(batch.chunk(parts), 1):
                    with session.step(accumulate=number < parts, examples=len(part)) as step:
                        loss = CASE.loss(model, part) / parts
                        step.record(loss=1.0)
                        backward(loss)
        return model.state_dict()

    whole = world(2, lambda group: work(group, 1))[0]
    torch.testing.assert_close(world(2, lambda group: work(group, 2))[0], whole)


@every_policy
def test_a_grad_scaler_may_have_an_empty_batch(world: World, policy: str) -> None:
    """The last sample of nine is that of one worker of four; the others have no gradients then."""

    def work(group: Any) -> Tensor:
        model = nn.Linear(1, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with paceline.join(model, plain(model), policy=policy, group=group, scaler=scaler, seed=1) as session:
            for (x,) in session.batches(TensorDataset(torch.ones(9, 1)), 2, epochs=2):
                with session.step() as step:
                    step.record(loss=1.0)
                    backward(scaler.scale(model(x).sum()))
        return model.weight.detach()

    one, *others = world(4, work)
    assert all(torch.equal(one, other) for other in others)


@every_policy
def test_a_grad_scaler_is_each_workers_own(world: World, policy: str) -> None:
    def work(group: Any) -> tuple[float, Tensor]:
        model = nn.Linear(1, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        with paceline.join(model, plain(model), policy=policy, group=group, scaler=scaler) as session:
            for number in range(9):
                overflows = session.rank == 1 and number == 2
                with session.step() as step:
                    step.record(loss=1.0)
                    loss = model(torch.full((1, 1), float("inf") if overflows else 1.0)).sum()
                    backward(scaler.scale(loss))
        return scaler.get_scale(), model.weight.detach()

    (scale, weight), (smaller, other) = world(2, work)
    assert (scale, smaller) == (4.0, 2.0)
    assert weight.isfinite()
    assert torch.equal(weight, other)


@every_policy
def test_odd_parameters_are_averaged_too(world: World, policy: str) -> None:
    """Scalars, empty ones, many tiny ones, and one that nobody uses."""
    template = Odd()
    found = world(2, lambda group: train(group, template, policy))
    assert_same(found[0]["model"], found[1]["model"])
    assert torch.equal(found[0]["model"]["frozen"], template.frozen)


@every_policy
def test_alone_it_is_a_plain_loop(policy: str) -> None:
    model = nn.Linear(2, 1)
    by_hand = copy.deepcopy(model)
    with paceline.join(model, plain(model), policy=policy) as session, session.step():
        backward(model(torch.ones(1, 2)).sum())
    backward(by_hand(torch.ones(1, 2)).sum())
    plain(by_hand).step()
    assert torch.equal(model.weight, by_hand.weight)


# Misuse ---------------------------------------------------------------------------------------------------------------


@every_policy
def test_a_parameter_that_is_unfrozen_later_is_refused(world: World, policy: str) -> None:
    def work(group: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        with paceline.join(model, plain(model), policy=policy, seed=0, group=group) as session:
            with session.step():
                backward(model(torch.ones(1, 2)).sum())
            model[0].requires_grad_(True)
            with pytest.raises(UsageError, match=r"0.weight was frozen when the session began and is trained now"):
                session.step().__enter__()

    world(2, work)


@every_policy
def test_nothing_to_train_is_refused(world: World, policy: str) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(2, 1)
        optimizer = plain(model)
        with pytest.raises(UsageError, match="no parameter of the model requires a gradient"):
            paceline.join(model.requires_grad_(False), optimizer, policy=policy, seed=0, group=group)

    world(2, work)


@every_policy
def test_steps_and_checkpoints_inside_averaged_are_refused(world: World, policy: str, tmp_path: Path) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(2, 1)
        with paceline.join(model, plain(model), policy=policy, seed=0, group=group) as session:
            with session.step():
                backward(model(torch.ones(1, 2)).sum())
            with session.averaged():
                with pytest.raises(UsageError, match=r"save\(\) was called inside a block of session.averaged"):
                    session.save(tmp_path / "checkpoint")
                with pytest.raises(UsageError, match=r"a step was opened inside a block of session.averaged"):
                    session.step().__enter__()
            session.save(tmp_path / "checkpoint")

    world(2, work)


@pytest.mark.parametrize("policy", ["local-sgd", "post-local-sgd", "ada-comm", "diloco"])
def test_a_run_that_goes_on_with_a_shorter_period_follows_it_at_once(world: World, policy: str, tmp_path: Path) -> None:
    template, start = CASE.build(), ", start=0" if policy == "post-local-sgd" else ""
    world(2, lambda group: train(group, template, f"{policy}(every=1000{start})", stop=3, run=tmp_path, save_every=1))
    found = world(2, lambda group: train(group, template, f"{policy}(every=2{start})", run=tmp_path, resume=True))
    together = [
        place
        for place, pairs in enumerate(zip(*(each["replicas"] for each in found), strict=True))
        if all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    ]
    assert together, "after step 3 they never averaged"
