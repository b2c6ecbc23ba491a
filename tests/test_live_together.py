"""What all workers do together under a live server: means, whoever dies, comes late or has stopped training."""

from __future__ import annotations

import subprocess

import pytest
import torch
from led_by_hand import Hand, batches, cluster_of_hands
from ledger import samples, seen_state, times_used
from live import Cluster

from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState
from paceline.transport.messages import Averaged, Finished, Leave, Mean

COUNT = 24


@pytest.mark.parametrize("shape", [(), (3,), (70, 70), (0, 2)], ids=str)
def test_the_mean_of_numbers_and_tensors(shape: tuple[int, ...]) -> None:
    def work(session: WorkerSession, own: TrainState) -> list[torch.Tensor]:
        values = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + session.rank
        by_examples = session.mean(values, examples=session.rank + 1)
        return [session.mean(values), by_examples, session.mean(torch.tensor(session.rank))]

    with Cluster("async", seen_state(2), workers=3) as cluster:
        results = cluster.run([seen_state(2) for _ in range(3)], work)
    base = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    for plain, by_examples, of_whole_numbers in results:
        torch.testing.assert_close(plain, base + 1)
        torch.testing.assert_close(by_examples, base + (1 * 2 + 2 * 3) / 6)
        assert float(of_whole_numbers) == 1.0


def test_a_mean_of_nothing_is_none() -> None:
    with Cluster("async", seen_state(2), workers=1) as cluster, cluster.session(seen_state(2)) as session:
        assert torch.isnan(session.mean(1.0, examples=0))


@pytest.mark.parametrize("told", [True, False])
def test_who_dies_is_not_waited_for(process: subprocess.Popen[bytes], told: bool) -> None:
    """What it had told before counts."""
    with Cluster("sync", workers=3) as cluster:
        first, second, third = (Hand(cluster, rank, process=process.pid if rank == 2 else None) for rank in range(3))
        if told:
            third.say(Mean(0, "0/1", 1.0, (6.0,)))
            cluster.until(lambda: bool(cluster.server._averages))
        for hand in (first, second):
            hand.say(Mean(0, "0/1", 1.0, (3.0,)))
        assert first.hears_nothing() if not told else True
        process.kill()
        assert [hand.hear(Averaged).values for hand in (first, second)] == 2 * [(4.0,) if told else (3.0,)]


def test_who_leaves_is_not_waited_for() -> None:
    with cluster_of_hands("sync", 2) as (_, (first, second)):
        first.say(Mean(0, "0/1", 1.0, (3.0,)))
        second.say(Leave(failed=True))
        assert first.hear(Averaged).values == (3.0,)


@pytest.mark.parametrize("policy", ["sync", "k-sync(k=2)", "k-async(k=3)", "ssp(bound=0)"])
def test_who_has_stopped_training_holds_up_nobody(policy: str) -> None:
    """Workers that make different numbers of steps and then average: who is done waits, and the others train on."""

    def work(session: WorkerSession, own: TrainState) -> tuple[int, float]:
        steps = 0
        for (places,) in session.batches(samples(COUNT), 1, epochs=4):
            with session.step() as step:
                torch.autograd.backward(own.model(places).mean())
            steps += not step.cancelled
            if steps == 3 + 4 * session.rank:
                break
        return steps, float(session.mean(float(steps)))

    with Cluster(policy, seen_state(COUNT), workers=3) as cluster:
        results = cluster.run([seen_state(COUNT) for _ in range(3)], work)
    assert [steps for steps, _ in results] == [3, 7, 11]
    assert {mean for _, mean in results} == {7.0}


def test_training_goes_on_after_a_mean_in_the_middle_of_an_epoch() -> None:
    def work(session: WorkerSession, own: TrainState) -> list[float]:
        means = []
        for number, (places,) in enumerate(session.batches(samples(COUNT), 2, epochs=2)):
            with session.step():
                torch.autograd.backward(own.model(places).mean())
            if number in (0, 2):
                means.append(float(session.mean(float(session.rank))))
        return means

    with Cluster("sync", seen_state(COUNT), workers=3) as cluster:
        assert cluster.run([seen_state(COUNT) for _ in range(3)], work) == 3 * [[1.0, 1.0]]
    assert times_used(cluster) == [2.0] * COUNT


def test_a_batch_that_comes_back_does_not_go_to_one_who_averages(process: subprocess.Popen[bytes]) -> None:
    with Cluster("async", workers=3) as cluster:
        first, second, third = (Hand(cluster, rank, process=process.pid if rank == 2 else None) for rank in range(3))
        assert batches(third, first) == [0, 1]
        for number in (2, 3, 4, 5):
            first.push(1.0)
            assert first.go().batch == number
        first.push(1.0)
        first.say(Mean(0, "0/1", 1.0, (1.0,)))  # it does not wait for the end of the epoch
        cluster.until(lambda: bool(cluster.server._averages))
        process.kill()
        assert batches(second) == [0]
        second.push(1.0)
        second.finish()
        second.say(Mean(0, "0/1", 1.0, (3.0,)))
        assert second.hear(Averaged).values == (2.0,)
        first.hear(Finished)
        assert first.hear(Averaged).values == (2.0,)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_one_who_comes_when_the_others_average_the_epoch_before(policy: str) -> None:
    """It begins with the next epoch; nobody waits for what it cannot tell."""

    def epochs_of(session: WorkerSession, own: TrainState, begun: list[int]) -> list[float]:
        means = []
        for epoch in session.epochs(3):
            begun.append(epoch)
            for (places,) in session.batches(samples(COUNT), 4):
                with session.step():
                    torch.autograd.backward(own.model(places).mean())
            if session.rank == 0 and epoch == 0:
                cluster.until(lambda: len(cluster.server._members) == 3)
            means.append(float(session.mean(float(session.rank))))
        return means

    def late() -> list[float]:
        cluster.until(lambda: cluster.queue.described and cluster.queue.epoch == 1)
        own = seen_state(COUNT)
        with cluster.session(own, 2) as session:
            return epochs_of(session, own, begun)

    def early(rank: int) -> list[float]:
        own = seen_state(COUNT)
        with cluster.session(own, rank) as session:
            return epochs_of(session, own, [])

    begun: list[int] = []
    with Cluster(policy, seen_state(COUNT), workers=2) as cluster:
        first, second, third = cluster.together([lambda: early(0), lambda: early(1), late])
    assert begun == [1, 2]
    assert first == second == [0.5, 1.0, 1.0]
    assert third == [1.0, 1.0]
    assert times_used(cluster) == [3.0] * COUNT
