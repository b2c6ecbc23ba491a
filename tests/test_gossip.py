"""Gossip: workers mix their parameters with those of neighbours, and nobody waits for all."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import CASES, backward, copy_for, peers_of
from torch import Tensor, nn
from torch.optim import SGD

import paceline
from paceline.errors import CommError
from paceline.peers.exchange import BackwardPass
from paceline.peers.gossip import GossipExchange
from paceline.policies import Gossip, Progress

TOPOLOGIES = ["ring", "exponential", "random-pairs"]
every_topology = pytest.mark.parametrize("topology", TOPOLOGIES)


def mix(group: Any, policy: Gossip, steps: int, *, size: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Parameters that differ from worker to worker, mixed without any updates: as they were, and after each step."""
    model = nn.Linear(size, size, dtype=dtype)
    exchange = GossipExchange(model, peers_of(group), policy)
    exchange.started(Progress())
    generator = torch.Generator().manual_seed(group.rank())
    with torch.no_grad():
        model.weight.copy_(torch.randn(size, size, generator=generator))
    seen = [model.weight.detach().clone()]
    for step in range(1, steps + 1):
        exchange.begin(BackwardPass(1))
        exchange.finish()
        exchange.updated(Progress(steps=step))
        seen.append(model.weight.detach().clone())
    exchange.conclude()
    return [*seen, model.weight.detach().clone()]


@every_topology
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_mean_of_all_workers_is_conserved_and_is_the_answer(world: World, topology: Any, workers: int) -> None:
    found = world(workers, lambda group: mix(group, Gossip(topology=topology), steps=6))
    mean = torch.stack([seen[0] for seen in found]).mean(0)
    for step in range(1, 8):
        torch.testing.assert_close(torch.stack([seen[step] for seen in found]).mean(0), mean, rtol=1e-12, atol=1e-12)
    for seen in found:
        torch.testing.assert_close(seen[-1], mean, rtol=1e-12, atol=1e-12)
        assert torch.equal(seen[-1], found[0][-1])


def test_four_workers_agree_after_two_exponential_mixings(world: World) -> None:
    found = world(4, lambda group: mix(group, Gossip(topology="exponential"), steps=2))
    for seen in found:
        torch.testing.assert_close(seen[2], found[0][2], rtol=1e-14, atol=1e-14)
    assert not torch.allclose(found[0][1], found[1][1])


class Star(Gossip):
    """Worker 0 sends to all, and gets from one other at a time: weights differ, and must be divided out."""

    def sends(self, step: int, workers: int) -> tuple[tuple[int, int], ...]:
        other = 1 + step % (workers - 1)
        return (*((0, rank) for rank in range(1, workers)), (other, 0))


def test_weights_are_divided_out_where_a_topology_is_not_balanced(world: World) -> None:
    found = world(3, lambda group: mix(group, Star(), steps=60))
    mean = torch.stack([seen[0] for seen in found]).mean(0)
    assert not torch.allclose(torch.stack([seen[1] for seen in found]).mean(0), mean)  # not of x / w, at first
    for seen in found:
        torch.testing.assert_close(seen[-1], mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(seen[-2], mean, rtol=1e-9, atol=1e-9)


def test_updates_count_alike_where_weights_differ(world: World) -> None:
    """Every worker's gradient moves the mean as far, as under stochastic gradient push."""

    def work(group: Any) -> Tensor:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        exchange = GossipExchange(model, peers_of(group), Star())
        exchange.started(Progress())
        for step in range(1, 8):
            exchange.begin(BackwardPass(1))
            exchange.finish()
            with torch.no_grad():
                model.weight.add_(10.0 ** group.rank())
            exchange.updated(Progress(steps=step))
        exchange.conclude()
        return model.weight.detach().clone()

    for answer in world(3, work):
        torch.testing.assert_close(answer, torch.full((1, 1), 7 * 37.0, dtype=torch.float64), rtol=1e-12, atol=0)


@every_topology
def test_long_messages_do_not_block_each_other(world: World, topology: Any) -> None:
    """Two workers that send at the same time, far more than any buffer of a socket holds."""
    found = world(3, lambda group: mix(group, Gossip(topology=topology), steps=3, size=1500, dtype=torch.float32))
    for seen in found[1:]:
        assert torch.equal(seen[-1], found[0][-1])


def test_halves_are_mixed_in_single_precision(world: World) -> None:
    found = world(2, lambda group: mix(group, Gossip(), steps=1, dtype=torch.bfloat16))
    first, second = (seen[0].float() for seen in found)
    for seen in found:
        torch.testing.assert_close(seen[1], ((first + second) / 2).bfloat16(), rtol=0, atol=0)


def test_a_worker_waits_only_for_its_senders(world: World) -> None:
    """On a ring of three, worker 1 gets from worker 0 alone: it goes on while worker 2 has not begun."""
    began = threading.Event()

    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        with paceline.join(
            model, SGD(model.parameters(), lr=0.1), policy="gossip(topology=ring)", group=group
        ) as session:
            if session.rank == 2:
                assert began.wait(30)
            with session.step():
                backward(model(torch.ones(1, 1)).sum())
            if session.rank == 1:
                began.set()

    world(3, work)


@every_topology
@pytest.mark.parametrize("late", [0, 2])
def test_one_that_ends_early_is_found_out(world: World, topology: Any, late: int) -> None:
    """Worker ``late`` makes a step more; under random pairs of three it may be alone in it."""

    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        policy = Gossip(topology=topology)
        with paceline.join(model, SGD(model.parameters(), lr=0.1), policy=policy, group=group) as session:
            for _ in range(3 + 4 * (session.rank == late)):
                with session.step():
                    backward(model(torch.ones(1, 1)).sum())

    with pytest.raises(CommError, match=r"out of step: it .* after step"):
        world(3, work)


@every_topology
@pytest.mark.parametrize("workers", [2, 3])
def test_all_stop_after_the_same_update(world: World, topology: Any, workers: int) -> None:
    template = CASES["linear"].build()

    def work(group: Any) -> int:
        model = copy_for(group, template)
        policy = Gossip(topology=topology)
        session = paceline.join(model, SGD(model.parameters(), lr=0.1), policy=policy, group=group)
        session.stop_when(lambda: session.rank > 0 and session.steps >= 2 + session.rank)
        with pytest.raises(KeyboardInterrupt), session:
            for _ in range(50):
                with session.step():
                    backward(CASES["linear"].loss(model, torch.randn(2, 6)))
        return session.steps

    steps = world(workers, work)
    assert len(set(steps)) == 1
    assert steps[0] < 20


def test_bytes_are_those_of_one_message_a_step(world: World) -> None:
    def work(group: Any) -> int:
        peers = peers_of(group)
        exchange = GossipExchange(nn.Linear(10, 9), peers, Gossip(topology="ring"))
        exchange.started(Progress())
        before = peers.traffic.num_bytes
        exchange.updated(Progress(steps=1))
        sent = peers.traffic.num_bytes - before
        exchange.conclude()  # the last messages arrive before any worker leaves
        return sent

    assert world(3, work) == [4 * 99 + 8 * 3] * 3
