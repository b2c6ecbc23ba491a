"""Workers of peers policies that die and join: the others go on, and no sample is lost or used twice."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

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
from paceline.errors import CommError, LostContactError, OutOfStepError
from paceline.launch.roster import Member
from paceline.record.checkpoint import CheckpointFolder
from paceline.record.metrics import read_metrics
from paceline.sessions.peers import PeersSession

SAMPLES, EPOCHS = 50, 3
Ask = Literal["", "before", "after", "at times"]
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
    "hogwild",
    "hogwild-easgd(period=2, alpha=0.2)",
]

# Their exchanges have not all of what a worker has learned: what is under way is lost, or done again.
PARTLY = (paceline.Gossip, paceline.SyncEASGD, paceline.SMA, paceline.Hogwild, paceline.HogwildEASGD)


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
    ask: Ask = "",
    epochs: int = EPOCHS,
    batch_size: int = 4,
    accumulate: int = 1,
    source: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train to the end; the first process of ``worker`` dies before update number ``die_before``.

    Workers may ``ask`` each other for a mean in every turn of the loop, before or after the step, or after some.
    """
    model = copy.deepcopy(TEMPLATE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    means: list[tuple[int, float]] = []
    cancelled, blocks = 0, 0
    with paceline.join(model, optimizer, policy=policy, seed=1, **options) as session:
        assert isinstance(session, PeersSession)
        life.operations = lambda: session._operations

        def take_mean() -> None:
            steps = session.steps
            means.append((steps, float(session.mean(steps + life.member.worker / 8))))

        for epoch in session.epochs(epochs):
            batches = session.batches(DATA, batch_size) if source is None else session.batches(source(session.rank))
            for x, samples in batches:
                life.group = session.generation
                if session.steps + 1 == die_before and life.member == Member(worker):
                    raise Killed
                if ask == "before":
                    take_mean()
                blocks += 1
                own = session._data.batch is not None and session._data.batch.examples != 0  # else a borrowed sample
                life.used.append((epoch, samples.tolist() if own else [], session.steps))
                with session.step(accumulate=blocks % accumulate != 0) as step:
                    backward(model(x).square().mean())
                if step.cancelled:
                    cancelled += 1
                    del life.used[-accumulate:]
                if ask == "after" or (ask == "at times" and session.steps % 5 == 3):
                    take_mean()
            if evaluate:
                take_mean()
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
        "made": made_by_codec(session),
    }


def made_by_codec(session: PeersSession) -> int | None:
    """The sums that the worker's codec has made, and remembers."""
    coding = session._exchange.coding
    return None if coding is None else max(each["made"] for each in coding.state_dict().values())


def check(world: Mortals, found: list[dict[str, Any]], survivors: int | None = None, epochs: int = EPOCHS) -> None:
    """So many have ended with the same model, and every sample was used once in each epoch."""
    assert len(found) == (survivors or sum(not life.killed for life in world.lives))
    for other in found[1:]:
        assert_same(other["model"], found[0]["model"])
        assert other["steps"] == found[0]["steps"]
    # The last one may find out alone that all others have ended well.
    assert len({(result["rank"], result["size"]) for result in found}) == len(found)
    policy, uses = found[0]["policy"], world.uses()
    if isinstance(policy, PARTLY) or str(policy) == OVERLAPPED:
        return
    if not isinstance(policy, paceline.AllReduce):  # what is lost at the end of an epoch comes in the next one
        times = Counter(sample for _, sample in uses.elements()) + Counter(found[0]["owed"])  # no epoch follows
        assert times == dict.fromkeys(range(SAMPLES), epochs)
        return
    assert sorted(uses) == [(epoch, sample) for epoch in range(epochs) for sample in range(SAMPLES)]
    assert set(uses.values()) == {1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("policy", "death"), in_turn(POLICIES, [(0, 14), (1, 4), (2, 5), (0, 1)]))
def test_the_others_go_on_without_one_that_dies(world: Mortals, policy: str, death: tuple[int, int]) -> None:
    worker, step = death
    found = world(3, lambda life: train(life, policy, die_before=step, worker=worker, evaluate=True))
    check(world, found, 2)
    assert [(each["rank"], each["size"]) for each in found] == [(0, 2), (1, 2)]
    assert found[0]["means"] == found[1]["means"] and len(found[0]["means"]) == EPOCHS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_another_takes_the_place_of_one_that_dies(world: Mortals, policy: str) -> None:
    found = world(3, lambda life: train(life, policy, die_before=4, evaluate=True), respawn=True)
    assert {each["size"] for each in found} == {3}
    check(world, found, 3)


@pytest.mark.sampled(3)
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
TIMES = ("before", "after")  # to ask each other, seen from a step
# Mixes that some workers of a topology may be ahead of one that has not mixed, between two means.
LEADS: list[tuple[str, Ask, int]] = [
    ("exponential", "before", 1),
    ("exponential", "after", 1),
    ("random-pairs", "after", 1),
    ("random-pairs", "at times", 1),
    ("ring", "before", 1),
    ("ring", "at times", 2),
]


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", quick(POLICIES, *POLICIES[:2]))
@pytest.mark.parametrize(
    "place",
    quick(
        [(call, "") for call in range(CALLS)] + [(call, ask) for call in range(14, CALLS, 3) for ask in TIMES],
        *((call, ask) for call in range(14, 31, 6) for ask in ("", "before")),
    ),
)
def test_one_that_missed_what_others_have_done_catches_up(world: Mortals, policy: str, place: tuple[int, Ask]) -> None:
    """A result is lost on one worker when another has died, and the third has it."""
    fates: dict[tuple[int, int, int], Fate] = {(0, 1, place[0]): "die after", (1, 1, place[0]): "lose"}
    found = world(3, lambda life: train(life, policy, epochs=2, evaluate=True, ask=place[1]), at_call(fates))
    check(world, found, epochs=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", quick(POLICIES, POLICIES[1], OVERLAPPED))
@pytest.mark.parametrize(
    "place",
    quick(
        [(call, ask) for call in range(14, 54) for ask in ("", *TIMES)],
        (15, "before"),
        (25, "after"),
        (31, ""),
        (35, "before"),
        (38, "after"),
    ),
)
def test_two_go_on_with_one_that_missed_what_they_have_done(
    world: Mortals, policy: str, place: tuple[int, Ask]
) -> None:
    """Also where the two have ended an epoch, and another takes the place of the dead."""
    call, ask = place
    fates: dict[tuple[int, int, int], Fate] = {(call % 4, 1, call): "die after", ((call + 1) % 4, 1, call): "lose"}

    def work(life: Life) -> Any:
        return train(life, policy, epochs=2, evaluate=True, ask=ask, batch_size=3)

    check(world, world(4, work, at_call(fates), respawn=call % 3 == 0), epochs=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("ahead", LEADS)
@pytest.mark.parametrize("number", quick(range(2, 6), 3))
def test_gossips_may_be_ahead_of_one_whose_mean_failed(
    world: Mortals, ahead: tuple[str, Ask, int], number: int
) -> None:
    """All get the same means, in the same steps; the one behind takes part in each of them."""
    topology, ask, lead = ahead
    barriers: Counter[Member] = Counter()

    def fates(member: Member, group: int, call: int, name: str) -> Callable[[], Fate] | None:
        """In a mean one worker dies and another does not hear of its end, when others have mixed ``lead`` times."""
        barriers[member] += name == "barrier"
        fate = {Member(0): "die after", Member(1): "lose"}.get(member)
        if fate is None or (group, name, barriers[member]) != (1, "barrier", number):
            return None

        def when_others_are_ahead() -> Fate:
            own = next(life.operations() for life in world.lives if life.member == member)
            while max(life.operations() for life in world.lives) < own + 1 + lead:
                time.sleep(0.001)
            return cast("Fate", fate)

        return when_others_are_ahead

    def work(life: Life) -> Any:
        return train(life, f"gossip(topology={topology})", ask=ask, batch_size=1)

    found = world(6, work, fates, respawn=number % 2 == 0)
    assert len(found) >= 5
    check(world, found)
    means = found[-1]["means"]
    everybody, survivors = sum(range(6)) / 6 / 8, sum(range(1, 6)) / 5 / 8
    assert {round(mean - steps, 6) for steps, mean in means} <= {round(each, 6) for each in (everybody, survivors)}
    for each in found:  # one that has joined has the last of them
        assert each["means"] == means[len(means) - len(each["means"]) :]


@pytest.mark.parametrize("policy", quick(POLICIES, *POLICIES[:2]))
@pytest.mark.parametrize("call", quick(range(12), 0, 3, 5))
def test_another_may_die_while_they_form_a_new_group(world: Mortals, policy: str, call: int) -> None:
    fates: dict[tuple[int, int, int], Fate] = {(0, 1, 25): "die before", (2, 2, call): "die before"}
    found = world(4, lambda life: train(life, policy, epochs=2), at_call(fates), respawn=call % 2 == 0)
    check(world, found, epochs=2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", quick(POLICIES, *POLICIES[:2]))
@pytest.mark.parametrize("ask", TIMES)
@pytest.mark.parametrize("call", quick(range(14, CALLS, 4), *range(14, 31, 4)))
def test_workers_may_ask_each_other_between_any_two_steps(world: Mortals, policy: str, ask: Ask, call: int) -> None:
    """Before a step too, with a batch in hand that was shared out among workers of which one has died since."""
    fates: dict[tuple[int, int, int], Fate] = {(call % 3, 1, call): "die before"}
    found = world(3, lambda life: train(life, policy, ask=ask, epochs=2), at_call(fates), respawn=call % 2 == 0)
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


@pytest.mark.parametrize("call", quick(range(20, 44), *range(20, 44, 6)))
def test_accumulated_blocks_keep_their_weights_when_a_worker_dies_between_them(world: Mortals, call: int) -> None:
    """A number for each sample grows by 1 with each use, if all gradients of an update have the right weights."""

    def work(life: Life) -> Any:
        model = nn.Embedding(SAMPLES, 1)
        nn.init.zeros_(model.weight)
        blocks = 0
        with paceline.join(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=1) as session:
            for _, samples in session.batches(DATA, 2, epochs=3):
                blocks += 1
                total = session._data.batch.total if session._data.batch is not None else 1
                with session.step(accumulate=blocks % 3 != 0):
                    backward(-model(samples).mean() * total)
                session.mean(1.0)
        return model.weight.detach().flatten()

    one, other = world(3, work, at_call({(1, 1, call): "die before"}))
    assert torch.equal(one, other)
    used = one.round()
    torch.testing.assert_close(one, used)
    assert set(used.tolist()) <= {2.0, 3.0}, "what is left at the end is not used"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["local-sgd(every=99)", "diloco(every=99)"])
@pytest.mark.parametrize("ask", TIMES)
@pytest.mark.parametrize("call", quick(range(16, 48), *range(16, 48, 8)))
def test_replicas_weigh_no_blocks_that_were_given_up(world: Mortals, policy: str, ask: str, call: int) -> None:
    """A worker's weight in the next average is the number of examples in the updates that it has made."""

    def work(life: Life) -> Any:
        model = copy.deepcopy(TEMPLATE)
        used = blocks = under_way = 0
        with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.05), policy=policy, seed=1) as session:
            assert isinstance(session, PeersSession)
            for x, _ in session.batches(DATA, 2, epochs=2):
                if ask == "before":
                    session.mean(1.0)
                examples = session._data.batch.examples if session._data.batch is not None else 0
                with session.step(accumulate=blocks < 2) as step:
                    backward(model(x).square().mean())
                blocks, under_way = (0, 0) if step.cancelled else (blocks + 1, under_way + (examples or 0))
                if blocks == 3:
                    used, blocks, under_way = used + under_way, 0, 0
                    state = session._exchange.kept_state()
                    assert {state["examples"], *state.get("since", [])} == {used}
                if ask == "after":
                    session.mean(1.0)
        return used

    assert all(world(3, work, at_call({(call % 3, 1, call): "die before"})))


@pytest.mark.parametrize("policy", ["sync-easgd", "sma(every=2)"])
def test_what_is_exchanged_in_the_background_dies_with_nobody(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker has learned up to the last exchange is in the central average, and is not learned again."""
    monkeypatch.setattr("paceline.peers.group.Peers.overlaps", lambda _: True)
    world = mortals()
    world(3, lambda life: train(life, policy, die_before=5, epochs=1))
    again = sum(len(samples) for life in world.lives for _, samples, _ in life.used) - SAMPLES
    assert again <= 3 * 4, "a batch of each worker, or two of the one that died"


@pytest.mark.parametrize("policy", ["local-sgd(every=6)", "diloco(every=6)"])
def test_what_a_worker_learned_before_a_checkpoint_is_owed_too(policy: str, tmp_path: Path) -> None:
    """A run is cut between two exchanges and resumed; then a worker dies, and all since the exchange dies with it."""

    def work(life: Life, *, resume: bool) -> Any:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options: dict[str, Any] = {"policy": policy, "run": tmp_path, "save_every": 4, "resume": resume}
        with paceline.join(model, optimizer, seed=1, **options) as session:
            for _, samples in session.batches(DATA, 4, epochs=2):
                if session.steps == 5 if resume and life.member == Member(1) else session.steps == 4 and not resume:
                    raise Killed
                with session.step() as step:
                    backward(model(INPUTS[samples]).square().mean())
                if not step.cancelled:
                    life.used.append((0, samples.tolist(), session.steps))
        return session._data.owed

    cut, resumed = mortals(), mortals()
    cut(2, lambda life: work(life, resume=False))
    (owed,) = resumed(2, lambda life: work(life, resume=True))
    survivor = [world.lives[0] for world in (cut, resumed)]
    times = Counter(sample for life in survivor for _, samples, _ in life.used for sample in samples)
    assert times + Counter(owed) == dict.fromkeys(range(SAMPLES), 2)


def test_batches_of_another_size_are_owed_as_they_were(world: Mortals) -> None:
    """A script may have larger batches in later epochs, and an exchange may be due after several of them."""

    def work(life: Life) -> Any:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with paceline.join(model, optimizer, policy="local-sgd(every=99)", seed=1) as session:
            for epoch in session.epochs(4):
                for x, samples in session.batches(DATA, 4 * (epoch + 1)):
                    if epoch == 1 and life.member == Member(1):
                        raise Killed
                    own = session._data.batch is not None and session._data.batch.examples != 0  # no borrowed sample
                    with session.step() as step:
                        backward(model(x).square().mean())
                    if own and not step.cancelled:
                        life.used.append((epoch, samples.tolist(), session.steps))
        return session._data.owed

    owed = world(3, work)[0]
    lives = [life for life in world.lives if not life.killed]
    times = Counter(sample for life in lives for _, samples, _ in life.used for sample in samples)
    assert times + Counter(owed) == dict.fromkeys(range(SAMPLES), 4)


@pytest.mark.parametrize("policy", ["local-sgd(every=3)", "gossip", "all-reduce"])
def test_all_know_what_is_saved_when_worker_0_dies_while_it_saves(
    world: Mortals, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step, before an evaluation: else one would save once more and another would not."""
    write = CheckpointFolder.write
    killed: list[int] = []

    def die_once(folder: CheckpointFolder, step: int, state: Any) -> Path:
        if step == 5 and not killed:
            killed.append(step)
            raise Killed
        return write(folder, step, state)

    monkeypatch.setattr(CheckpointFolder, "write", die_once)
    options: dict[str, Any] = {"run": tmp_path, "save_every": 5, "epochs": 1, "evaluate": True}
    found = world(3, lambda life: train(life, policy, **options))
    assert killed and len(found) == 2
    check(world, found, epochs=1)
    assert [file.stem for file in (tmp_path / "checkpoints").glob("step-*")] == ["step-0000000005"]


def test_one_that_joins_after_the_last_step_knows_what_is_saved(world: Mortals, tmp_path: Path) -> None:
    """It is let in before the loop finds that no batch is left."""
    nearly_done = threading.Event()

    def work(life: Life) -> Any:
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        options: dict[str, Any] = {"policy": "local-sgd(every=1)", "run": tmp_path / "run", "save_every": 1}
        if life.member.incarnation:
            nearly_done.wait()
        with paceline.join(model, optimizer, seed=1, **options) as session:
            assert isinstance(session, PeersSession)
            for x, _ in session.batches(DATA, 5, epochs=1):
                if session.steps == 2 and life.member == Member(1):
                    raise Killed
                if session._data.consumed == SAMPLES - 10 and session._forming is not None:
                    nearly_done.set()
                    while not session._forming.has_news():
                        session._forming._hear()
                with session.step():
                    backward(model(x).square().mean())
        return session.world_size, session.steps

    found = world(2, work, respawn=True)
    assert {size for size, _ in found} == {2} and len({steps for _, steps in found}) == 1


def test_others_are_let_in_by_one_that_had_to_begin_twice(world: Mortals) -> None:
    """One dies while all begin; the others begin anew, and later let in those that come."""

    def work(life: Life) -> Any:
        model = nn.Linear(6, 1)
        with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.05), seed=1) as session:
            for x, _ in session.batches(DATA, 4, epochs=1000):
                if session.steps == 8 and life.member == Member(1):
                    raise Killed
                with session.step():
                    backward(model(x).square().mean())
                if session.mean(float(life.member == Member(1, 1))) > 0:
                    return True
        return False

    assert all(world(3, work, at_call({(2, 1, 6): "die before"}), respawn=True))


def test_a_death_at_the_start_is_told(world: Mortals, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr("paceline.sessions.reforming.report", lambda event, **values: told.append(values))
    world(3, lambda life: train(life, epochs=1), at_call({(2, 1, 6): "die before"}))
    assert {(each["step"], each["workers"], *each["died"]) for each in told} == {(0, 2, 2)}


@pytest.mark.parametrize("topology", ["ring", "random-pairs"])
def test_others_join_an_odd_number_of_gossips(world: Mortals, topology: str) -> None:
    """Of an odd number one worker has no pair, and counts the step as the others do."""
    policy = f"gossip(topology={topology})"
    found = world(4, lambda life: train(life, policy, die_before=4, epochs=6), respawn=True)
    assert {each["size"] for each in found} == {4}
    check(world, found, 4)


def test_a_scaler_forgets_the_step_that_was_given_up(world: Mortals) -> None:
    def work(life: Life) -> Any:
        model = copy.deepcopy(TEMPLATE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with paceline.join(model, optimizer, seed=1, scaler=scaler) as session:
            for x, _ in session.batches(DATA, 4, epochs=1):
                with session.step():
                    backward(scaler.scale(model(x).square().mean()))
                    scaler.unscale_(optimizer)
        return {"model": model.state_dict()}

    def dies_sending_buffers(member: Member, group: int, call: int, name: str) -> Fate | None:
        return "die before" if (member, group, name) == (Member(0), 1, "broadcast") and call > 20 else None

    one, other = world(3, work, dies_sending_buffers)
    assert_same(one["model"], other["model"])


@pytest.mark.parametrize("call", quick(range(24, 40), 26, 29, 32))
def test_a_batch_of_ones_own_loader_is_not_used_again_by_one_that_copies(world: Mortals, call: int) -> None:
    def source(rank: int) -> Any:
        return [(INPUTS[start : start + 5], torch.arange(start, start + 5)) for start in range(0, SAMPLES, 5)]

    fates: dict[tuple[int, int, int], Fate] = {(0, 1, call): "die after", (1, 1, call): "lose"}
    found = world(3, lambda life: train(life, source=source, epochs=1), at_call(fates))
    assert [each["steps"] for each in found] == [10, 10]
    for life in world.lives:
        if not life.killed:
            assert sorted(sample for _, samples, _ in life.used for sample in samples) == list(range(SAMPLES))


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


def test_nobody_joins_a_script_that_has_two_sessions_at_once(world: Mortals) -> None:
    """It would join one of them and wait for the other, while the others wait for it in the first."""

    def work(life: Life) -> Any:
        one, other = nn.Linear(6, 1), nn.Linear(6, 1)
        with (
            paceline.join(one, torch.optim.SGD(one.parameters(), lr=0.1), seed=1) as first,
            paceline.join(other, torch.optim.SGD(other.parameters(), lr=0.1), seed=1) as second,
        ):
            for x, _ in first.batches(DATA, 4, epochs=3):
                if first.steps == 3 and life.member == Member(1):
                    raise Killed
                with first.step():
                    backward(one(x).square().mean())
                with second.step(examples=4):
                    backward(other(x).square().mean())
        return {"steps": first.steps, "one": one.state_dict(), "other": other.state_dict()}

    found = world(3, work, respawn=True)
    assert len(found) == 2
    assert_same(found[0], found[1])


def test_what_is_told_in_the_metrics(world: Mortals, tmp_path: Path) -> None:
    world(3, lambda life: train(life, die_before=5, worker=0, run=tmp_path / "run"), respawn=True)
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    changes = [line for line in lines if line["event"] == "re-formed"]
    assert (changes[0]["step"], changes[0]["died"]) == (4, [0])
    assert [worker for change in changes for worker in change["joined"]] == [0]  # perhaps at once
    assert (changes[-1]["workers"], changes[-1]["generation"]) == (3, 1 + len(changes))
    steps = [line["step"] for line in lines if line["event"] == "step"]
    assert steps == list(range(1, steps[-1] + 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("policy", "odd"), in_turn(POLICIES, [0, 1]))
@pytest.mark.parametrize("what", ["step", "mean", "evaluation"])
def test_workers_that_do_not_do_the_same_are_told_so(world: Mortals, policy: str, odd: int, what: str) -> None:
    """At once, and not that one of them has died."""

    def work(life: Life) -> Any:
        model = copy.deepcopy(TEMPLATE)
        with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.05), policy=policy, seed=1) as session:
            for x, _ in session.batches(DATA, 4, epochs=1):
                with session.step() as step:
                    loss = model(x).square().mean()
                    step.record(loss=loss)
                    backward(loss)
                if session.steps == 2 and session.rank == odd:
                    if what == "step":
                        with session.step(examples=4):
                            backward(model(x).square().mean())
                    elif what == "mean":
                        session.mean(1.0)
                    else:
                        with session.averaged():
                            session.mean(1.0)

    with pytest.raises(OutOfStepError, match="out of step") as told:
        world(2, work)
    assert "died" not in str(told.value)


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


CODED = "top-k(density=0.1)"
CODED_POLICIES = [policy for policy in POLICIES if not policy.startswith(("gossip", "hogwild"))]  # these refuse codecs


@pytest.mark.parametrize("policy", quick(CODED_POLICIES, "all-reduce", "local-sgd(every=3)", "sync-easgd"))
def test_codecs_of_survivors_remember_and_those_of_newcomers_do_not(world: Mortals, policy: str) -> None:
    found = world(3, lambda life: train(life, policy, die_before=5, evaluate=True, codec=CODED), respawn=True)
    check(world, found, 3)
    if policy == "all-reduce":
        assert sorted(each["made"] == each["steps"] for each in found) == [False, True, True]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", quick(CODED_POLICIES, *CODED_POLICIES[:2]))
@pytest.mark.parametrize("call", quick(range(CALLS), 16, 21, 25, 30, 41))
@pytest.mark.parametrize("fate", quick(["die before", "die after"], "die before"))
def test_one_may_die_at_any_call_of_a_codec(world: Mortals, policy: str, call: int, fate: Fate) -> None:
    """What the others' codecs remember is that of before the step which all make again."""
    fates = at_call({(call % 3, 1, call): fate})
    found = world(3, lambda life: train(life, policy, epochs=1, evaluate=True, codec=CODED), fates)
    check(world, found, epochs=1)
    if policy == "all-reduce":
        assert all(each["made"] == each["steps"] for each in found)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", quick(CODED_POLICIES, *CODED_POLICIES[:2]))
@pytest.mark.parametrize("call", quick(range(14, CALLS), 18, 22, 27, 31))
def test_one_that_missed_a_coded_sum_catches_up(world: Mortals, policy: str, call: int) -> None:
    fates: dict[tuple[int, int, int], Fate] = {(0, 1, call): "die after", (1, 1, call): "lose"}
    found = world(3, lambda life: train(life, policy, epochs=2, evaluate=True, codec=CODED), at_call(fates))
    check(world, found, epochs=2)
