"""What the server answers, message by message: commits, late work, batches, the ends of epochs."""

from __future__ import annotations

import pytest
from led_by_hand import DATA, batches, cluster_of_hands

from paceline.transport.messages import Ask, BatchMessage, Finished, Leave, More, Skip


def test_who_is_ahead_of_those_that_have_finished_has_finished_too() -> None:
    with cluster_of_hands("ssp(bound=1)", 3) as (_, (ahead, slower, late)):
        for hand in (ahead, slower, late):
            hand.say(DATA._replace(num_samples=3))
        ahead.ask(1)
        slower.ask(1)
        ahead.push(1.0)
        ahead.go()
        ahead.push(1.0)
        assert ahead.hears_nothing(), "it is two ahead, and has to wait"
        slower.push(1.0)
        slower.finish()
        ahead.finish()
        late.say(Ask(1, 7))
        assert late.finish().ask == 7


def test_the_push_that_completes_a_commit_is_answered_after_it() -> None:
    with cluster_of_hands("k-async(k=2)", 3) as (_, (first, second, third)):
        assert [hand.ask().version for hand in (first, second, third)] == [0, 0, 0]
        first.push(2.0)
        assert first.hears_nothing()
        second.push(4.0)
        for hand in (first, second):
            go = hand.go()
            assert (go.version, go.fresh, hand.value) == (1, True, -3.0)
        assert third.hears_nothing(), "the third goes on with what it has"
        third.push(0.0)
        first.push(6.0)
        assert [third.go().version, first.go().version] == [2, 2]
        assert (third.value, first.value) == (-6.0, -6.0)


def test_whoever_is_late_is_cancelled_by_a_later_step() -> None:
    with cluster_of_hands("k-sync(k=1)", 2) as (cluster, (quick, late)):
        assert batches(quick, late) == [0, 1]
        old = late.step
        quick.push(1.0)
        assert quick.go().batch == 1, "the batch of the late one has come back, and is handed out before new ones"
        go = late.go()
        assert go.step > old and (go.version, go.batch) == (1, 2)
        late.push(5.0, step=old, version=0)  # it was on its way
        late.push(2.0)
        assert (late.go().version, cluster.value) == (2, -3.0)
        figures = cluster.server.figures()[1]
        assert (figures["dropped"], figures["cancelled"], figures["pushes"]) == (1, 1, 1)


def test_the_worker_whose_push_was_dropped_keeps_its_new_batch() -> None:
    with cluster_of_hands("k-sync(k=1)", 2) as (_, (quick, late)):
        batches(quick, late)
        old = late.step
        quick.push(1.0)
        quick.go()
        mine = late.go().batch
        late.push(5.0, step=old, version=0)
        quick.push(1.0)
        assert quick.go().batch == mine
        assert late.go().batch == 3, "cancelled again: what it had was still its own, and came back"


def test_those_who_wait_all_get_the_same_step() -> None:
    with cluster_of_hands("sync", 3) as (cluster, hands):
        for hand in hands:
            hand.ask()
        for number, hand in enumerate(hands):
            hand.push(3.0 * number, examples=number + 1)
        assert len({hand.go().step for hand in hands}) == 1
        assert cluster.value == pytest.approx(-(0 * 1 + 3 * 2 + 6 * 3) / 6), "weighted by examples"


def test_mini_batches_of_one_worker_make_a_commit() -> None:
    with cluster_of_hands("k-batch-sync(k=3)", 2) as (cluster, (quick, slow)):
        quick.ask(), slow.ask()
        for _ in range(2):
            quick.push(1.0)
            go = quick.go()
            assert (go.fresh, go.version) == (False, 0)
        quick.push(4.0)
        assert (quick.go().version, quick.value) == (1, -2.0)
        assert slow.go().version == 1
        assert cluster.host.commits[0].workers == [0, 0, 0]


def test_the_last_commit_of_an_epoch_may_be_smaller() -> None:
    with cluster_of_hands("k-batch-sync(k=4)", 1) as (cluster, (hand,)):
        batches(hand)
        for _ in range(5):
            hand.push(1.0)
            hand.go()
        hand.push(3.0)
        assert (hand.finish().version, hand.value) == (2, -3.0)
        assert [len(commit.workers) for commit in cluster.host.commits] == [4, 2]


def test_the_barrier_between_epochs() -> None:
    """Who is done waits for the others, and no batch of the next epoch is handed out before that."""
    with cluster_of_hands("async", 2) as (_, (quick, slow)):
        batches(quick, slow)
        for number in (2, 3, 4, 5):
            quick.push(1.0)
            assert quick.go().batch == number
        quick.push(1.0)
        assert quick.hears_nothing()
        slow.push(1.0)
        assert [hand.finish().version for hand in (quick, slow)] == [6, 6]
        assert (quick.value, slow.value) == (-6.0, -6.0)
        assert [(go.epoch, go.batch) for go in (quick.ask(2), slow.ask(2))] == [(1, 0), (1, 1)]


def test_all_are_members_again_before_the_first_goes_on() -> None:
    """A round of the next epoch is not completed by those who happen to ask first."""
    with cluster_of_hands("sync", 2) as (_, (first, second)):
        for epoch in range(2):
            batches(first, second, epochs=epoch + 1)
            for number in range(3):
                first.push(1.0)
                second.push(1.0)
                for hand in (first, second):
                    hand.finish() if number == 2 else hand.go()
        first.request(3)
        assert first.hears_nothing(), "the second has not even asked"
        second.request(3)
        assert first.answer().epoch == second.answer().epoch == 2
        first.push(1.0)
        assert first.hears_nothing()
        second.push(1.0)
        assert first.go().version == second.go().version == 7


def test_a_skipped_batch_is_used() -> None:
    with cluster_of_hands("async", 1) as (cluster, (hand,)):
        batches(hand)
        for number in range(1, 6):
            hand.say(Skip(hand.step))
            assert hand.go().batch == number
        hand.say(Skip(hand.step))
        assert hand.finish().version == 0
        assert not cluster.host.commits


def test_more_batches_for_the_same_step() -> None:
    with cluster_of_hands("k-sync(k=1)", 2) as (_, (first, second)):
        batches(first, second)
        first.say(More(first.step))
        assert first.hear(BatchMessage) == BatchMessage(first.step, 0, 2)
        second.push(1.0)
        assert first.go().batch == 0, "both of the cancelled step's have come back"
        assert second.go().batch == 2
        second.say(More(0))  # of a step that is no more
        second.say(More(second.step))
        assert second.hear(BatchMessage).batch == 3
        second.push(1.0)
        second.go()
        second.say(Leave(failed=False))


def test_the_newest_parameters_are_had_without_a_commit() -> None:
    """Who wants no batch ends nothing: what others have pushed waits on."""
    with cluster_of_hands("k-batch-async(k=3)", 2) as (cluster, (first, second)):
        batches(first, second)
        first.push(1.0)
        assert first.go().batch == 2
        second.say(Ask(0, 7))
        assert second.finish() == Finished(0, 7)
        assert not cluster.host.commits
        assert second.ask(1).batch == 1, "what it had given up"


def test_asking_again_gives_up_what_was_under_way() -> None:
    with cluster_of_hands("async", 1) as (_, (hand,)):
        batches(hand)
        assert hand.ask(1).batch == 0
        first = hand.step
        assert hand.ask(1).batch == 0
        assert hand.step > first
        hand.push(7.0, step=first)
        hand.push(1.0)
        assert (hand.go().batch, hand.value) == (1, -1.0)
