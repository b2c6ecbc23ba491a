"""The live server under policies that choose which of the pushes that wait they commit."""

from __future__ import annotations

from led_by_hand import DATA, batches, cluster_of_hands
from listed import Listed, Turn

from paceline.policies.messages import Actions, Drop, Push
from paceline.policies.state import ServerState
from paceline.store.double_buffer import read_note

KEEP = Turn()


def commit(*shares: tuple[int, float]) -> Turn:
    return Turn((shares,))


def test_the_last_may_be_committed_alone_while_others_wait() -> None:
    policy = Listed(turns=(KEEP, commit((1, 0.5)), commit((0, 2.0), (0, 1.0))))
    with cluster_of_hands(policy, 2) as (cluster, (first, second)):
        first.ask()
        second.ask()
        first.push(1.0)
        assert first.go().version == 0
        second.push(10.0)
        assert second.go().version == 1 and cluster.value == -5.0
        second.push(100.0)
        assert second.go().version == 2 and cluster.value == -107.0


def test_pushes_that_go_on_waiting_are_lost_with_the_server_and_told_of() -> None:
    policy = Listed(turns=(KEEP, KEEP, commit((2, 1.0))))
    with cluster_of_hands(policy, 1) as (cluster, (hand,)):
        batches(hand)
        for number in (1.0, 2.0, 4.0):
            hand.push(number)
            hand.go()
        found = read_note(cluster.memory)
        assert found is not None and (found["version"], found["taken"]) == (1, 2)
        assert found["queue"]["unused"] == [0, 1], "the batches of those that wait are handed out again"


def test_a_push_of_a_worker_that_has_left_is_committed() -> None:
    policy = Listed(turns=(KEEP, commit((0, 1.0), (0, 1.0))))
    with cluster_of_hands(policy, 2) as (cluster, (first, second)):
        batches(first, second)
        first.push(1.0)
        first.go()
        first.close()
        cluster.until(lambda: 0 not in cluster.server._members)
        second.push(10.0)
        assert second.go().version == 1 and cluster.value == -11.0
        assert cluster.host.commits[0].workers == [0, 1]
        assert cluster.queue.state_dict()["unused"] == [2], "given to the first, and then to the second"


def test_what_is_left_is_committed_when_the_data_ends() -> None:
    with cluster_of_hands(Listed(turns=(KEEP,), last=(1.0, -1.0)), 1) as (cluster, (hand,)):
        hand.say(DATA)
        hand.ask(1)
        for number in range(6):
            hand.push(float(number))
            if number < 5:
                hand.go()
        assert hand.finish().version == 1 and cluster.value == -(0 - 1 + 2 - 3 + 4 - 5)
        assert cluster.queue.state_dict()["unused"] == []


class Choosy(Listed):
    """Drop every second push, and send its worker on."""

    def pushed(self, state: ServerState, push: Push, at: float) -> Actions:
        if push.step % 2 == 0 or not state.end_step(push):
            return super().pushed(state, push, at)
        return (Drop(push), state.send((push.worker,)))


def test_a_worker_whose_push_is_dropped_may_be_sent_on_and_its_batch_goes_out_again() -> None:
    with cluster_of_hands(Choosy(turns=(commit((0, 1.0)),)), 1) as (cluster, (hand,)):
        assert batches(hand) == [0]
        given = []
        for number in (1.0, 2.0, 4.0):
            hand.push(number)
            given.append(hand.go().batch)
        assert given == [1, 1, 2] and cluster.value == -5.0
