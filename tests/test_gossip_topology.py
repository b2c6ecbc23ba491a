"""Who sends to whom: laws of the mixing that hold for every topology and number of workers."""

from __future__ import annotations

from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.policies import Gossip

TOPOLOGIES = get_args(get_type_hints(Gossip)["topology"])
topologies = st.builds(Gossip, topology=st.sampled_from(TOPOLOGIES), seed=st.integers(0, 5))
workers_and_step = st.tuples(st.integers(1, 20), st.integers(0, 10_000))


def matrix(policy: Gossip, step: int, workers: int) -> np.ndarray:
    """What each worker (a row) gets of each (a column)."""
    mixing = np.zeros((workers, workers))
    for rank in range(workers):
        neighbours = policy.neighbours(rank, step, workers)
        mixing[[rank, *neighbours.receivers], rank] = neighbours.share
    return mixing


@given(topologies, workers_and_step)
def test_mixing_creates_and_loses_nothing(policy: Gossip, where: tuple[int, int]) -> None:
    workers, step = where
    mixing = matrix(policy, step, workers)
    np.testing.assert_array_equal(mixing.sum(0), 1)
    assert all(sender != receiver for sender, receiver in policy.sends(step, workers))


@given(topologies, workers_and_step)
def test_senders_and_receivers_expect_each_other(policy: Gossip, where: tuple[int, int]) -> None:
    workers, step = where
    neighbours = [policy.neighbours(rank, step, workers) for rank in range(workers)]
    sent = {(rank, receiver) for rank in range(workers) for receiver in neighbours[rank].receivers}
    assert sent == {(sender, rank) for rank in range(workers) for sender in neighbours[rank].senders}


@given(topologies, workers_and_step)
def test_every_worker_gets_as_much_weight_as_it_gives(policy: Gossip, where: tuple[int, int]) -> None:
    """So push-sum weights stay 1, exactly."""
    workers, step = where
    np.testing.assert_array_equal(matrix(policy, step, workers).sum(1), 1)


@given(topologies, workers_and_step)
def test_a_step_has_the_same_messages_whenever_it_is_asked_for(policy: Gossip, where: tuple[int, int]) -> None:
    workers, step = where
    assert policy.sends(step, workers) == Gossip(topology=policy.topology, seed=policy.seed).sends(step, workers)


@given(topologies, workers_and_step, st.data())
def test_word_reaches_everybody_when_it_is_said_to(policy: Gossip, where: tuple[int, int], data: st.DataObject) -> None:
    workers, step = where
    sender = data.draw(st.integers(0, workers - 1))
    steps = policy.spread(step, workers, sender)
    known = np.eye(workers)[sender]
    for later in range(steps):
        assert np.count_nonzero(known) < workers
        known = matrix(policy, step + later, workers) @ known
    assert np.count_nonzero(known) == workers


@pytest.mark.parametrize("turns", range(1, 6))
@pytest.mark.parametrize("start", [0, 1, 7])
def test_exponential_neighbours_reach_consensus_after_as_many_mixings_as_there_are(turns: int, start: int) -> None:
    workers = 2**turns
    mixed = np.eye(workers)
    for step in range(start, start + turns):
        mixed = matrix(Gossip(topology="exponential"), step, workers) @ mixed
    np.testing.assert_array_equal(mixed, 1 / workers)


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 16])
def test_distances_shrink_on_a_ring_by_its_second_eigenvalue(workers: int) -> None:
    """cos(pi / P), the greatest absolute value of (1 + exp(2 pi i k / P)) / 2 for k > 0."""
    mixing = matrix(Gossip(topology="ring"), 0, workers)
    values = np.sort(np.abs(np.linalg.eigvals(mixing)))
    assert values[-2] == pytest.approx(np.cos(np.pi / workers), abs=1e-12)


@pytest.mark.parametrize("workers", [2, 3, 6, 7])
def test_random_pairs_are_pairs_and_leave_out_one_of_an_odd_number(workers: int) -> None:
    for step in range(50):
        partner = dict(Gossip(topology="random-pairs").sends(step, workers))
        assert len(partner) == workers - workers % 2
        assert all(partner[partner[rank]] == rank for rank in partner)


def test_random_pairs_meet_equally_often() -> None:
    policy, workers, steps = Gossip(topology="random-pairs"), 5, 4000
    met = sum(matrix(policy, step, workers) != 0 for step in range(steps))
    others = met[~np.eye(workers, dtype=bool)] / steps
    np.testing.assert_allclose(others, 1 / workers, atol=0.03)  # and each stays alone as often


def test_other_seeds_give_other_pairs() -> None:
    one, other = (Gossip(topology="random-pairs", seed=seed) for seed in (0, 1))
    assert [one.sends(step, 8) for step in range(5)] != [other.sends(step, 8) for step in range(5)]
