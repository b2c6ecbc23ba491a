"""Workers of peers policies that die and join: the others go on, and no sample is lost or used twice."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from joined_batch import backward
from mortals import Fate, Killed, Life, Mortals, mortals
from quick import in_turn, quick
from same_bits import assert_same
from test_many_resume import WithStatistics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline import native
from paceline.errors import CommError, LostContactError
from paceline.launch.roster import Member
from paceline.record.metrics import read_metrics
from paceline.sessions.peers import PeersSession

SAMPLES, EPOCHS = 50, 3
INPUTS = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
TEMPLATE = WithStatistics()
DATA = TensorDataset(INPUTS, torch.arange(SAMPLES))
POLICIES = [
    "all-reduce",
    "local-sgd(every=3)",
    "ada-comm(every=3)",
    "diloco(every=3)",
    OVERLAPPED := "diloco(every=4, fragments=2, overlap=1)",
    "sync-easgd",
    "sma(every=2)",
    "gossip",
]


@pytest.fixture(params=quick(["on this thread", "in the background"], "on this thread"))
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mortals:
    """Workers as threads, whose exchanges run where the parameter says."""
    if not native.available():
        pytest.skip(native.reason())
    monkeypatch.setattr("paceline.peers.group.Peers.overlaps", lambda _: request.param == "in the background")
    return mortals()


def train(
    life: Life,
    policy: str = "all-reduce",
    *,
    die_before: int | None = None,
    worker: int = 1,
    evaluate: bool = False,
    epochs: int = EPOCHS,
    batch_size: int = 4,
    accumulate: int = 1,
    source: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train to the end; the first process of ``worker`` dies before update number ``die_before``."""
    model = copy.deepcopy(TEMPLATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    means, cancelled, blocks = [], 0, 0
    with paceline.join(model, optimizer, policy=policy, seed=1, **options) as session:
        assert isinstance(session, PeersSession)
        for epoch in session.epochs(epochs):
            batches = session.batches(DATA, batch_size) if source is None else session.batches(source(session.rank))
            for x, samples in batches:
                life.group = session.generation
                if session.steps + 1 == die_before and life.member == Member(worker):
                    raise Killed
                blocks += 1
                own = session._data.batch is not None and session._data.batch.examples != 0  # else a borrowed sample
                life.used.append((epoch, samples.tolist() if own else [], session.steps))
                with session.step(accumulate=blocks % accumulate != 0) as step:
                    backward(model(x).square().mean())
                if step.cancelled:
                    cancelled += 1
                    del life.used[-accumulate:]
            if evaluate:
                means.append(float(session.mean(float(session.steps))))
                with session.averaged():
                    session.mean(1.0)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps": session.steps,
        "rank": session.rank,
        "size": session.world_size,
        "means": means,
        "cancelled": cancelled,
        "owed": session._data.owed,
        "policy": session.policy,
    }


def check(world: Mortals, found: list[dict[str, Any]], survivors: int | None = None, epochs: int = EPOCHS) -> None:
    """So many have ended with the same model, and every sample was used once in each epoch."""
    assert len(found) == (survivors or sum(not life.killed for life in world.lives))
    for other in found[1:]:
        assert_same(other["model"], found[0]["model"])
        assert other["steps"] == found[0]["steps"]
    assert len({result["rank"] for result in found}) == len(found)
    policy, uses = found[0]["policy"], world.uses()
    if isinstance(policy, paceline.Gossip | paceline.SyncEASGD | paceline.SMA) or str(policy) == OVERLAPPED:
        return  # their exchanges have not all of what a worker has learned: what is under way is lost, or done again
    if not isinstance(policy, paceline.AllReduce):  # what is lost at the end of an epoch comes in the next one
        times = Counter(sample for _, sample in uses.elements()) + Counter(found[0]["owed"])  # no epoch follows
        assert times == dict.fromkeys(range(SAMPLES), epochs)
        return
    assert sorted(uses) == [(epoch, sample) for epoch in range(epochs) for sample in range(SAMPLES)]
    assert set(uses.values()) == {1}


@pytest.mark.parametrize(("policy", "death"), in_turn(POLICIES, [(0, 14), (1, 4), (2, 5), (0, 1)]))
def test_the_others_go_on_without_one_that_dies(world: Mortals, policy: str, death: tuple[int, int]) -> None:
    worker, step = death
    found = world(3, lambda life: train(life, policy, die_before=step, worker=worker, evaluate=True))
    check(world, found, 2)
    assert [(each["rank"], each["size"]) for each in found] == [(0, 2), (1, 2)]
    assert found[0]["means"] == found[1]["means"] and len(found[0]["means"]) == EPOCHS


@pytest.mark.parametrize("policy", POLICIES)
def test_another_takes_the_place_of_one_that_dies(world: Mortals, policy: str) -> None:
    found = world(3, lambda life: train(life, policy, die_before=4, evaluate=True), respawn=True)
    assert {each["size"] for each in found} == {3}
    check(world, found, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_one_after_the_other_until_one_is_left(world: Mortals, policy: str) -> None:
    def work(life: Life) -> Any:
        worker = life.member.worker
        return train(life, policy, die_before=2 * worker if worker else None, worker=worker)

    check(world, world(4, work), None if policy == "gossip" else 1)


def at_call(fates: dict[tuple[int, int, int], Fate]) -> Callable[..., Fate | None]:
    """The fate of worker, group and call."""
    return lambda member, group, call, _: fates.get((member.worker, group, call)) if not member.incarnation else None


CALLS = 60  # that the first group makes at most, in the runs below


@pytest.mark.parametrize("policy", quick(POLICIES, *POLICIES[:2]))
@pytest.mark.parametrize("call", quick(range(CALLS), *range(0, CALLS, 7)))
@pytest.mark.parametrize("fate", quick(["die before", "die after"], "die before"))
def test_one_may_die_at_any_call(world: Mortals, policy: str, call: int, fate: Fate, tmp_path: Path) -> None:
    """While all begin too: in agreeing on model, seed and directory; and while they save and end."""
    dies = call % 3
    options: dict[str, Any] = {"run": tmp_path / "run", "save_every": 2, "epochs": 1, "evaluate": True}
    found = world(3, lambda life: train(life, policy, **options), at_call({(dies, 1, call): fate}))
    check(world, found, epochs=1)
    assert max(int(file.stem[-4:]) for file in (tmp_path / "run" / "checkpoints").glob("step-*")) == found[0]["steps"]


@pytest.mark.parametrize("policy", quick(POLICIES, *POLICIES[:2]))
@pytest.mark.parametrize("call", quick(range(CALLS), *range(14, 31, 3)))
def test_one_that_missed_what_others_have_done_catches_up(world: Mortals, policy: str, call: int) -> None:
    """A result is lost on one worker when another has died, and the third has it."""
    fates: dict[tuple[int, int, int], Fate] = {(0, 1, call): "die after", (1, 1, call): "lose"}
    found = world(3, lambda life: train(life, policy, epochs=2, evaluate=True), at_call(fates))
    check(world, found, epochs=2)


@pytest.mark.parametrize("policy", quick(POLICIES, *POLICIES[:2]))
@pytest.mark.parametrize("call", quick(range(12), 0, 3, 5))
def test_another_may_die_while_they_form_a_new_group(world: Mortals, policy: str, call: int) -> None:
    fates: dict[tuple[int, int, int], Fate] = {(0, 1, 25): "die before", (2, 2, call): "die before"}
    found = world(4, lambda life: train(life, policy, epochs=2), at_call(fates), respawn=call % 2 == 0)
    check(world, found, epochs=2)


def test_two_may_die_at_once(world: Mortals) -> None:
    def work(life: Life) -> Any:
        return train(life, die_before=4 if life.member.worker != 1 else None, worker=life.member.worker)

    check(world, world(3, work), 1)


@pytest.mark.parametrize("step", [4, 6])
def test_it_goes_on_as_the_run_resumed_from_a_checkpoint(world: Mortals, step: int, tmp_path: Path) -> None:
    """Bit for bit: three workers of which one dies, and two that resume at the same step."""
    found = world(3, lambda life: train(life, die_before=step))

    def cut(life: Life) -> Any:
        return train(life, die_before=step, worker=life.member.worker, run=tmp_path, save_every=1)

    mortals()(3, cut)
    resumed = mortals()(2, lambda life: train(life, run=tmp_path, resume=True))
    assert_same(found[0]["model"], resumed[0]["model"])
    assert_same(found[0]["optimizer"], resumed[0]["optimizer"])
    assert found[0]["steps"] == resumed[0]["steps"]


def test_accumulated_blocks_are_given_up_together(world: Mortals) -> None:
    found = world(3, lambda life: train(life, accumulate=3, batch_size=2, die_before=2, epochs=1))
    assert [(each["cancelled"], each["steps"]) for each in found] == [(1, 3), (1, 3)]
    assert sorted(world.uses().values()) == [1] * SAMPLES


def test_a_loader_of_ones_own_gives_its_batch_again(world: Mortals) -> None:
    def source(rank: int) -> Any:
        return [(INPUTS[start : start + 5], torch.arange(start, start + 5)) for start in range(0, SAMPLES, 5)]

    found = world(3, lambda life: train(life, die_before=4, source=source, epochs=1))
    assert [each["steps"] for each in found] == [10, 10]
    for life in world.lives:
        if not life.killed:
            assert sorted(sample for _, samples, _ in life.used for sample in samples) == list(range(SAMPLES))


def test_a_plain_loader_stays_shared_when_one_is_left(world: Mortals) -> None:
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    check(world, world(2, lambda life: train(life, die_before=4, source=lambda _: loader)), 1)


def test_an_optimizer_that_evaluates_a_loss_goes_back_to_where_it_began(world: Mortals) -> None:
    def work(life: Life) -> Any:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
        evaluations = 0
        with paceline.join(model, optimizer, seed=1) as session:
            for x, _ in session.batches(DATA, 4, epochs=1):

                def loss(x: torch.Tensor = x) -> torch.Tensor:
                    nonlocal evaluations
                    evaluations += 1
                    if life.member == Member(1) and evaluations == 5:
                        raise Killed
                    optimizer.zero_grad()
                    found: torch.Tensor = model(x).square().mean()
                    backward(found)
                    return found

                session.minimize(loss)
        return {"model": model.state_dict(), "steps": session.steps}

    one, other = world(3, work)
    assert one["steps"] == other["steps"] == 6
    assert_same(one["model"], other["model"])


def test_what_is_told_in_the_metrics(world: Mortals, tmp_path: Path) -> None:
    world(3, lambda life: train(life, die_before=5, worker=0, run=tmp_path / "run"), respawn=True)
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    changes = [line for line in lines if line["event"] == "re-formed"]
    assert (changes[0]["step"], changes[0]["died"]) == (4, [0])
    assert [worker for change in changes for worker in change["joined"]] == [0]  # perhaps at once
    assert (changes[-1]["workers"], changes[-1]["generation"]) == (3, 1 + len(changes))
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == list(range(1, steps[-1] + 1))


def test_an_error_without_a_death_is_raised(world: Mortals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.peers.forming._TIME_TO_LEARN", 0.3)
    with pytest.raises(LostContactError, match="the result of this call was lost"):
        world(2, train, at_call({(1, 1, 20): "lose"}))


def test_who_comes_when_nobody_has_the_state_is_told(world: Mortals) -> None:
    def work(life: Life) -> Any:
        return train(life, die_before=3, worker=life.member.worker)

    with pytest.raises(CommError, match="no worker is left that has the state of the run; start it anew"):
        world(2, work, respawn=True)


def test_models_that_differ_are_found_when_one_joins(world: Mortals) -> None:
    def work(life: Life) -> Any:
        if not life.member.incarnation:
            return train(life, die_before=4, epochs=1000)
        model = nn.Linear(2, 2)
        return paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(paceline.UsageError, match="worker 1 has another model than worker 0"):
        world(2, work, respawn=True)
