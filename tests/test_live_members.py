"""Workers that join, leave, die and come back, message by message: what they had goes to others, and rounds go on."""

from __future__ import annotations

import subprocess

from led_by_hand import DATA, Hand, batches, cluster_of_hands
from live import Cluster

from paceline.transport.messages import Ask, Leave, PushMessage, Skip, Unknown


def test_a_round_is_completed_by_a_leave() -> None:
    with cluster_of_hands("sync", 3) as (cluster, (first, second, third)):
        assert batches(first, second, third) == [0, 1, 2]
        first.push(1.0)
        second.push(3.0)
        third.say(Leave(failed=False))
        assert (first.go().batch, second.go().batch) == (2, 3), "what the one who left had comes back"
        assert cluster.value == -2.0


def test_a_round_is_completed_by_a_death(process: subprocess.Popen[bytes]) -> None:
    with Cluster("k-sync(k=3)", workers=3) as cluster:
        first, second, third = (Hand(cluster, rank, process=process.pid if rank == 2 else None) for rank in range(3))
        assert batches(first, second, third) == [0, 1, 2]
        first.push(1.0)
        second.push(3.0)
        process.kill()
        assert (first.go().batch, second.go().batch) == (2, 3)
        assert cluster.value == -2.0


def test_a_push_left_behind_by_the_dead_counts(process: subprocess.Popen[bytes]) -> None:
    with Cluster("sync", workers=2) as cluster:
        first, second = Hand(cluster, 0), Hand(cluster, 1, process=process.pid)
        assert batches(first, second) == [0, 1]
        second.push(4.0)
        assert second.hears_nothing()
        process.kill()
        process.wait()
        cluster.until(lambda: 1 not in cluster.server._members)
        first.push(2.0)
        assert (first.go().batch, first.value) == (2, -3.0)


def test_the_dead_one_who_comes_back_is_another(process: subprocess.Popen[bytes]) -> None:
    with Cluster("async", workers=1) as cluster:
        old = Hand(cluster, 0, process=process.pid)
        batches(old)
        process.kill()
        new = Hand(cluster, 0)
        assert (old.welcome.incarnation, new.welcome.incarnation) == (0, 1)
        assert batches(new) == [0], "what the dead one had"
        old.push(9.0, step=new.step)
        new.push(1.0)
        assert (new.go().batch, cluster.value) == (1, -1.0)


def test_a_worker_that_has_lost_its_connection_takes_its_own_place() -> None:
    """Its process lives: only the new connection tells."""
    with Cluster("sync", workers=2) as cluster:
        first, old = Hand(cluster, 0), Hand(cluster, 1)
        assert batches(first, old) == [0, 1]
        first.push(2.0)
        new = Hand(cluster, 1)
        assert new.welcome.incarnation == 1
        assert (first.go().version, cluster.value) == (1, -2.0), "a round without what was under way"
        assert (first.step > 0, batches(new)) == (True, [2])


def test_idle_workers_are_woken_by_a_batch_that_comes_back(process: subprocess.Popen[bytes]) -> None:
    with Cluster("async", workers=2) as cluster:
        busy, idle = Hand(cluster, 0, process=process.pid), Hand(cluster, 1)
        batches(busy)
        for number in range(1, 6):
            assert (batches(idle) if number == 1 else [idle.go().batch]) == [number]
            idle.push(1.0)
        assert idle.hears_nothing(), "batch 0 may come back"
        process.kill()
        assert idle.go().batch == 0
        idle.push(1.0)
        assert (idle.finish().version, cluster.value) == (6, -6.0)


def test_k_beyond_the_living() -> None:
    with cluster_of_hands("k-sync(k=3)", 3) as (_, (first, second, third)):
        batches(first, second, third)
        third.say(Leave(failed=True))
        first.push(1.0)
        second.push(1.0)
        assert first.go().version == second.go().version == 1
        second.say(Leave(failed=True))
        for version in (2, 3):
            first.push(1.0)
            assert first.go().version == version


def test_a_newcomer_gets_a_rank_and_the_newest_parameters() -> None:
    with cluster_of_hands("sync", 2) as (cluster, (first, second)):
        for _ in range(3):
            first.ask(), second.ask()
            first.push(1.0)
            second.push(1.0)
            first.go(), second.go()
        newcomer = Hand(cluster)
        assert (newcomer.welcome.rank, newcomer.welcome.version, newcomer.welcome.world_size) == (2, 3, 2)
        assert (newcomer.ask().version, newcomer.value) == (3, -3.0)
        first.push(1.0)
        second.push(1.0)
        assert first.hears_nothing(), "a round is of all who are there"
        newcomer.push(4.0)
        assert (first.go().version, first.value) == (4, -5.0)


def test_workers_are_given_the_ranks_that_are_expected() -> None:
    with Cluster("async", workers=3) as cluster:
        assert Hand(cluster, 1).welcome.rank == 1
        assert [Hand(cluster).welcome.rank for _ in range(3)] == [0, 2, 3]


def test_who_is_no_member_is_told_so() -> None:
    with cluster_of_hands("async", 1) as (cluster, _):
        stranger = Hand(cluster, hello=False)
        for message in (Ask(1, 1), PushMessage(0, 0, 1, 0.0, 0.0, False, 0, b"\1"), Skip(0), Leave(failed=False)):
            stranger.say(message)
            stranger.hear(Unknown)
        assert stranger.join().rank == 1
        assert cluster.value == 0.0


def test_a_lost_connection_to_another_host_is_noticed() -> None:
    with Cluster("sync", workers=2) as cluster:
        first, second = Hand(cluster, 0), Hand(cluster, 1, address=cluster.tcp_address)
        assert batches(first, second) == [0, 1]
        first.push(1.0)
        second.close()
        assert first.go().batch == 1


def test_the_server_ends_when_all_have_left() -> None:
    with Cluster("sync", workers=3) as cluster:
        first, second = Hand(cluster, 0), Hand(cluster, 1)
        for hand in (first, second):
            hand.ask()
            hand.say(Leave(failed=False))
        assert second.hears_nothing() and cluster.ended_well is None, "the third is still expected"
        third = Hand(cluster, 2)
        third.say(Leave(failed=True))
        cluster.wait_for_end()


def test_one_who_never_comes_can_be_said_to_be_gone() -> None:
    with Cluster("sync", workers=2) as cluster:
        hand = Hand(cluster, 0)
        hand.ask()
        hand.push(1.0)
        assert hand.hears_nothing()
        cluster.server.worker_is_gone(1)
        assert hand.go().version == 1


def test_a_round_of_batches_begins_when_all_ask_and_the_first_batch_is_that_of_the_first_rank() -> None:
    with cluster_of_hands("sync", 3) as (cluster, (first, second, third)):
        for hand in (third, second):
            hand.say(DATA)
            hand.request(1)
            assert hand.hears_nothing()
        first.close()
        assert (second.answer().batch, third.answer().batch) == (0, 1), "one that will not come is not waited for"
        cluster.check()
