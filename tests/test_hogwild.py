"""Workers that share parameters without locks: what they compute, what they count, and what is refused."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import backward, copy_for, momentum
from processes import ENVIRONMENT
from replicas import CASE, plain, take_turn
from torch import Tensor, nn
from torch.optim import SGD

import paceline
from paceline.errors import UsageError
from paceline.peers.race_counts import NUM_PROBES, RaceCounts
from paceline.peers.without_locks import WithoutLocks
from paceline.record.checkpoint import read_checkpoint
from paceline.record.metrics import read_metrics
from paceline.sessions.peers import PeersSession

STEPS = 7
BATCHES = torch.randn(4, STEPS, 4, 6, generator=torch.Generator().manual_seed(2))  # by rank and step


class Odd(nn.Module):
    """Tied, frozen and channels-last parameters, a scalar, an empty one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty, self.also_empty = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
        self.unused = nn.Parameter(torch.ones(2))
        self.conv = nn.Conv2d(1, 2, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs)) * self.frozen
        pixels = self.conv(inputs.reshape(1, 1, 4, 6)).sum()
        return torch.add(self.scale * self.second(hidden), pixels)


def two_optimizers(model: nn.Module) -> list[SGD]:
    first, *rest = model.parameters()
    return [SGD([first], lr=0.1, momentum=0.9), SGD([p for p in rest if p.requires_grad], lr=0.02, nesterov=True,
                                                    momentum=0.5)]  # fmt: skip


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.mean(model(batch).square())


@pytest.mark.parametrize("workers", [2, 4])
def test_in_turn_it_is_the_loop_by_hand(world: World, workers: int) -> None:
    """Several optimizers, schedulers, clipping and accumulation, each worker's own; parameters of all kinds."""
    template = Odd()

    def work(group: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        model = copy.deepcopy(template)
        optimizers = two_optimizers(model)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
        with paceline.join(
            model, optimizers, policy="hogwild", scheduler=schedulers, clip_norm=0.5, group=group
        ) as session:
            assert isinstance(session, PeersSession)
            assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
            for batch in BATCHES[session.rank]:
                take_turn(session)
                for half in (0, 1):
                    with session.step(accumulate=not half):
                        backward(loss_of(model, batch * (1 + half)))
            with session.averaged():
                counts = session._exchange.counts()["races"]
        return model.state_dict(), counts

    by_hand = copy.deepcopy(template)
    optimizers = [two_optimizers(by_hand) for _ in range(workers)]
    schedulers = [[torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in own] for own in optimizers]
    for step, rank in itertools.product(range(STEPS), range(workers)):
        by_hand.zero_grad()
        for half in (0, 1):
            backward(loss_of(by_hand, BATCHES[rank, step] * (1 + half)))
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
        for optimizer in optimizers[rank]:
            optimizer.step()
        for scheduler in schedulers[rank]:
            scheduler.step()
    for found, counts in world(workers, work):
        for name, value in by_hand.state_dict().items():
            assert torch.equal(found[name], value), name
        assert counts == {"updates": workers * STEPS, "torn": 0, "between": 0, "most_between": 0, "lost": 0.0}


def test_one_worker_is_plain_sgd(tmp_path: Path) -> None:
    model = CASE.build()
    by_hand = copy.deepcopy(model)
    optimizer = momentum(by_hand)
    with paceline.join(model, momentum(model), policy="hogwild", run=tmp_path) as session:
        for batch in BATCHES[0]:
            with session.step():
                backward(CASE.loss(model, batch))
    for batch in BATCHES[0]:
        optimizer.zero_grad()
        backward(CASE.loss(by_hand, batch))
        optimizer.step()
    for name, value in by_hand.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("policy", ["hogwild", "hogwild-easgd(period=3, alpha=0.3)"])
def test_a_quadratic_is_minimised_in_any_order(world: World, policy: str) -> None:
    goal = torch.linspace(-1, 1, 50)

    def work(group: Any) -> Tensor:
        model = nn.Linear(50, 1, bias=False)
        with paceline.join(model, SGD(model.parameters(), lr=0.1), policy=policy, group=group) as session:
            for _ in range(200):
                with session.step():
                    backward((model.weight - goal).square().sum())
        return model.weight.detach()

    for found in world(4, work):
        torch.testing.assert_close(found[0], goal, rtol=0, atol=1e-3)


def test_sparse_gradients_touch_only_their_rows(world: World) -> None:
    """Workers whose rows are disjoint disturb nobody: the result has the bits of the serial loop, in any order."""
    template = nn.Embedding(400, 8, sparse=True)

    def train(model: nn.Embedding, session: Any, rank: int) -> None:
        for step in range(40):
            with session.step():
                backward(model(torch.arange(rank, 400, 4)[step::2]).square().sum())
                assert model.weight.grad is not None and model.weight.grad.is_sparse

    def work(group: Any) -> Tensor:
        model = copy.deepcopy(template)
        with paceline.join(model, SGD(model.parameters(), lr=0.03), policy="hogwild", group=group) as session:
            train(model, session, session.rank)
        return model.weight.detach()

    alone = copy.deepcopy(template)
    for rank in range(3):
        with paceline.join(alone, SGD(alone.parameters(), lr=0.03)) as session:
            train(alone, session, rank)
    for found in world(3, work):
        assert torch.equal(found, alone.weight)
        assert torch.equal(found[3::4], template.weight[3::4])


# Counts ---------------------------------------------------------------------------------------------------------------


def counters(workers: int) -> list[RaceCounts]:
    probes = torch.zeros(NUM_PROBES, dtype=torch.float64)
    words = memoryview(bytearray(8 * 8 * workers)).cast("q")
    slots = [words[8 * rank : 8 * rank + 8] for rank in range(workers)]
    return [RaceCounts(slots, rank, probes) for rank in range(workers)]


def test_reads_that_others_disturb_are_counted() -> None:
    one, two, three = counters(3)
    for each in (one, two, three):
        each.read()
    two.write()  # nobody has written since it read
    two.wrote()
    one.write()  # torn by the update of two
    three.write()  # by that of two, and by that of one, which is under way
    one.wrote()
    one.read()
    three.wrote()
    one.write()  # by that of three, which was under way when it began to read
    one.wrote()
    two.read()
    two.write()
    assert one.told() == {"updates": 5, "torn": 3, "between": 4, "most_between": 2, "lost": 0.0}


def test_lost_updates_are_counted_by_elements() -> None:
    """One worker reads a fourth of the elements before and writes them after another."""
    one, two = counters(2)
    part = slice(0, NUM_PROBES // 4)
    for _ in range(8):
        one.read()
        before = one._probes[part].clone()
        two.read()
        two.write()
        two.wrote()
        one.write()
        one._probes[part] = before + 1
        one.wrote()
    assert one.told()["lost"] == 2.0
    assert one.told()["torn"] == 8


def test_counts_are_in_the_metrics(world: World, tmp_path: Path) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(6, 1)
        with paceline.join(model, plain(model), policy="hogwild", group=group, run=tmp_path, log_every=1) as session:
            for batch in BATCHES[session.rank]:
                take_turn(session)
                with session.step():
                    backward(loss_of(model, batch))

    world(2, work)
    lines = [line["races"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["event"] == "step"]
    assert len(lines) == STEPS
    assert [line["torn"] for line in lines] == [0] * STEPS


# The answer, and checkpoints ------------------------------------------------------------------------------------------


def test_one_that_looks_for_longer_is_not_disturbed(world: World) -> None:
    others_go_on = threading.Event()

    def work(group: Any) -> None:
        model = nn.Linear(6, 1)
        with paceline.join(model, plain(model), policy="hogwild", group=group) as session:
            with session.averaged():
                before = model.weight.detach().clone()
                if session.rank == 0:
                    assert others_go_on.wait(30)
                    assert torch.equal(model.weight, before)
            with session.step():
                backward(loss_of(model, BATCHES[0, session.rank]))
            assert not torch.equal(model.weight, before)
            others_go_on.set()

    world(2, work)


def test_a_checkpoint_has_the_parameters_once(world: World, tmp_path: Path) -> None:
    template = CASE.build()

    def work(group: Any) -> None:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), policy="hogwild", group=group, run=tmp_path) as session:
            for batch in BATCHES[session.rank]:
                with session.step():
                    backward(CASE.loss(model, batch))

    world(3, work)
    (file,) = (tmp_path / "checkpoints").iterdir()
    state = read_checkpoint(file)
    assert state["trainee"]["model"].keys() == template.state_dict().keys()
    assert [replica["trainee"]["model"] for replica in state["replicas"]] == [{}] * 3
    assert all(replica["trainee"]["optimizers"][0]["state"] for replica in state["replicas"])


# Without a lock on the center -----------------------------------------------------------------------------------------


def test_easgd_in_turn_is_the_loop_by_hand_and_conserves_the_sum(world: World) -> None:
    template, workers, policy = CASE.build(), 3, paceline.HogwildEASGD(period=2, alpha=0.25)

    def work(group: Any) -> tuple[list[Tensor], list[Tensor]]:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), policy=policy, group=group) as session:
            assert isinstance(session, PeersSession) and isinstance(session._exchange, WithoutLocks)
            for batch in BATCHES[session.rank]:
                take_turn(session)
                with session.step():
                    backward(CASE.loss(model, batch))
            own = [parameter.detach().clone() for parameter in model.parameters()]
        return own, [parameter.detach() for parameter in model.parameters()]

    center = [parameter.detach().clone() for parameter in template.parameters()]
    replicas = [copy.deepcopy(template) for _ in range(workers)]
    optimizers = [momentum(replica) for replica in replicas]
    for step, rank in itertools.product(range(STEPS), range(workers)):
        optimizers[rank].zero_grad()
        backward(CASE.loss(replicas[rank], BATCHES[rank, step]))
        optimizers[rank].step()
        if (step + 1) % 2 == 0:
            with torch.no_grad():
                before = _sum(replicas, center)
                for parameter, z in zip(replicas[rank].parameters(), center, strict=True):
                    move = (parameter - z) * 0.25
                    z.add_(move)
                    parameter.sub_(move)
                torch.testing.assert_close(_sum(replicas, center), before)
    for (own, answer), replica in zip(world(workers, work), replicas, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, replica.parameters(), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(answer, center, strict=True))


def _sum(replicas: list[nn.Module], center: list[Tensor]) -> list[Tensor]:
    return [sum(parts, start=z) for z, *parts in zip(center, *(each.parameters() for each in replicas), strict=True)]


# Refused --------------------------------------------------------------------------------------------------------------


def test_threads_are_for_sparse_problems() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"threads are for sparse problems.*--workers 2 --policy hogwild"):
        paceline.join(model, plain(model), policy="hogwild(threads=2)")


def join(group: Any, model: nn.Module) -> None:
    paceline.join(model, plain(model), policy="hogwild", group=group)


def test_several_hosts_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = itertools.count()
    monkeypatch.setattr("paceline.peers.without_locks.host_of_memory", lambda: f"host {next(hosts)}")
    with pytest.raises(UsageError, match="policy hogwild is for the workers of one host"):
        world(2, lambda group: join(group, nn.Linear(1, 1)))


def test_parameters_in_the_same_memory_are_refused(world: World) -> None:
    def work(group: Any) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight.data = model[0].weight.data
        join(group, model)

    with pytest.raises(UsageError, match="two parameters are views of the same memory"):
        world(2, work)


# Processes ------------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, torch, paceline

model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(2000, 20))
with paceline.join(model, optimizer, run="run", resume=True, log_every=100) as session:
    for (x,) in session.batches(data, 4, epochs=int(os.environ["EPOCHS"])):
        if session.steps == 300 and session.rank == 1 and session.generation == 1:
            os.kill(os.getpid() if os.environ["HOW"] == "SIGKILL" else os.getppid(), signal.Signals[os.environ["HOW"]])
        with session.step():
            model(x).square().mean().backward()
print("ended", session.steps, session.world_size)
"""


def run_script(folder: Path, how: str, epochs: int, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline", "run", "--workers", "2", "--policy", "hogwild", *options, "script.py"]
    environment = {**ENVIRONMENT, "HOW": how, "EPOCHS": str(epochs)}
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.processes
@pytest.mark.soak
def test_workers_that_are_killed_are_replaced(tmp_path: Path) -> None:
    ended = run_script(tmp_path, "SIGKILL", 60, "--respawn")
    assert ended.returncode == 0, ended.stderr
    assert "worker 1 was killed by SIGKILL; the run goes on with 1" in ended.stderr
    changes = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["event"] == "re-formed"]
    assert [(line["died"], line["joined"]) for line in changes] == [([1], []), ([], [1])]


@pytest.mark.processes
@pytest.mark.soak
def test_a_run_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    stopped = run_script(tmp_path, "SIGINT", 40)
    assert "interrupted after step" in stopped.stderr and "saved in" in stopped.stderr
    ended = run_script(tmp_path, "SIGINT", 40)
    assert ended.returncode == 0 and "ended 10000 2" in ended.stdout
