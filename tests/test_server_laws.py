"""Laws of every server policy over random orders of events."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hand import Hand, told
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.policies import POLICIES, SSP, ServerPolicy, parse_policy
from paceline.policies.messages import Push
from paceline.policies.ssp import SSPState

LAWFUL = [
    "sync",
    "k-sync(k=1)",
    "k-sync(k=3)",
    "k-batch-sync(k=1)",
    "k-batch-sync(k=4)",
    "async",
    "k-async(k=2)",
    "k-async(k=4)",
    "k-batch-async(k=1)",
    "k-batch-async(k=5)",
    "downpour(period=2)",
    "ssp(bound=0)",
    "ssp(bound=2)",
    "ada-sync(k0=2, window=3)",
    "ada-sync(k0=1, over=k-batch-async, rule=root, window=2)",
]
WORKERS = 4  # at the start
every_policy = pytest.mark.parametrize("text", LAWFUL)
Deed = tuple[str, int]
deeds = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "push", "push", "leave", "rejoin", "join", "ask", "old", "twice", "save"]),
        st.integers(0, 10**6),
    ),
    max_size=50,
)


def policy_of(text: str) -> ServerPolicy:
    policy = parse_policy(text)
    assert isinstance(policy, ServerPolicy)
    return policy


def test_the_laws_are_tried_on_every_server_policy() -> None:
    wanted = {name for name, policy in POLICIES.items() if issubclass(policy, ServerPolicy)}
    assert {policy_of(text).name for text in LAWFUL} == wanted


class Chaos:
    """A hand that does as the dice say; deeds that are not possible at the moment are left out."""

    def __init__(self, policy: ServerPolicy, there: int = WORKERS) -> None:
        """All are expected; ``there`` of them have joined and asked."""
        self.hand = Hand(policy, WORKERS, together=False)
        for worker in range(there):
            self.hand.join(worker)
            self.hand.ask(worker)
        self.old: list[Push] = []  # cancelled, abandoned or of the dead: may still arrive

    def play(self, deeds: list[Deed], after: Callable[[], None] = lambda: None) -> None:
        for name, number in deeds:
            self.hand.at += 0.5
            getattr(self, f"_{name}")(number)
            after()

    def _remember(self, worker: int) -> None:
        if self.hand.workers[worker].computing:
            self.old.append(self.hand.result_of(worker))

    def _push(self, number: int) -> None:
        busy = self.hand.busy
        if busy:
            worker = busy[number % len(busy)]
            for other in busy:
                if other != worker:
                    self._remember(other)
            self.hand.push(worker, loss=1.0 / (1 + number % 50), examples=1 + number % 3)

    def _leave(self, number: int) -> None:
        present = self.hand.present
        if present:
            worker = present[number % len(present)]
            self._remember(worker)
            self.hand.leave(worker)

    def _rejoin(self, number: int) -> None:
        if not self.hand.workers:
            return
        worker = number % len(self.hand.workers)
        self._remember(worker)
        self.hand.join(worker, self.hand.workers[worker].incarnation + 1)
        if number % 2:
            self.hand.ask(worker)

    def _join(self, number: int) -> None:
        if len(self.hand.workers) < WORKERS + 3:
            self.hand.join(len(self.hand.workers))

    def _ask(self, number: int) -> None:
        present = self.hand.present
        if present:
            worker = present[number % len(present)]
            self._remember(worker)
            self.hand.ask(worker)

    def _old(self, number: int) -> None:
        """A push of a step that is over arrives after all."""
        current = {
            (w, its.incarnation, its.step) for w, its in self.hand.workers.items() if its.alive and its.computing
        }
        late = [push for push in self.old if push[:3] not in current]
        if late:
            self.hand.deliver(late[number % len(late)])

    def _twice(self, number: int) -> None:
        done = list(self.hand.committed)
        if done:
            self.hand.deliver(done[number % len(done)])

    def _save(self, number: int) -> None:
        self.hand.through_json()


@every_policy
@settings(max_examples=30)
@given(deeds=deeds)
def test_no_push_is_committed_twice_or_lost_without_a_drop(text: str, deeds: list[Deed]) -> None:
    chaos = Chaos(policy_of(text))
    hand = chaos.hand

    def all_accounted_for() -> None:
        assert all(times == 1 for times in hand.committed.values())
        pending: dict[Push, int] = dict.fromkeys(hand.state.pending, 1)
        assert len(pending) == len(hand.state.pending)
        for push, times in hand.sent.items():
            assert times == hand.committed[push] + hand.dropped[push] + pending.get(push, 0)
        assert hand.committed.keys() | hand.dropped.keys() | pending.keys() == hand.sent.keys()

    chaos.play(deeds, all_accounted_for)


@every_policy
@settings(max_examples=30)
@given(deeds=deeds)
def test_every_commit_has_its_k_and_versions_only_grow(text: str, deeds: list[Deed]) -> None:
    policy = policy_of(text)
    chaos = Chaos(policy)
    hand = chaos.hand
    most = {"sync": 99, "async": 1, "downpour": 1, "ssp": 1}.get(policy.name) or getattr(policy, "k", None)
    versions = [0]

    def check() -> None:
        assert hand.state.version >= versions[-1]
        versions.append(hand.state.version)

    for deed in deeds:
        enough = most if most is not None else hand.state.k  # type: ignore[attr-defined]  # adaptive
        before = len(hand.commits)
        chaos.play([deed], check)
        for commit in hand.commits[before:]:
            learners = hand.state.members.keys() | {push.worker for push in commit.pushes}
            assert len(commit.pushes) == size_of(policy, enough, len(learners))
            assert sum(commit.weights) == pytest.approx(1)
    assert versions == sorted(versions) and versions[-1] == len(hand.commits)


def size_of(policy: ServerPolicy, enough: int, learners: int) -> int:
    """How many pushes a commit must have when so many workers can be in it."""
    return enough if getattr(policy, "counts_batches", False) or policy.name == "ssp" else min(enough, learners)


@every_policy
def test_the_first_commit_takes_as_many_pushes_as_schedules_are_told(text: str) -> None:
    hand = Hand(policy_of(text), WORKERS)
    while not hand.commits:
        for worker in hand.busy:
            if not hand.commits:
                hand.push(worker)
    assert len(hand.commits[0].pushes) == hand.policy.pushes_per_commit(WORKERS)


@every_policy
@settings(max_examples=30)
@given(deeds=deeds)
def test_the_end_commits_what_is_pending_and_no_more(text: str, deeds: list[Deed]) -> None:
    chaos = Chaos(policy_of(text))
    hand = chaos.hand
    chaos.play(deeds)
    pending, before = tuple(hand.state.pending), len(hand.commits)
    hand.end()
    assert [commit.pushes for commit in hand.commits[before:]] == ([pending] if pending else [])
    assert not hand.state.pending
    assert hand.end() == []


@every_policy
@settings(max_examples=30)
@given(deeds=deeds)
def test_sync_policies_are_never_stale_and_others_count_commits(text: str, deeds: list[Deed]) -> None:
    policy = policy_of(text)
    chaos = Chaos(policy)
    chaos.play(deeds)
    for version, commit in enumerate(chaos.hand.commits):
        assert all(0 <= push.version <= version for push in commit.pushes)
        if getattr(policy, "cancels", False) or policy.name == "sync":
            assert all(push.version == version for push in commit.pushes)


@every_policy
@settings(max_examples=30)
@given(deeds=deeds, order=st.randoms(use_true_random=False), ended=st.booleans())
def test_nobody_waits_for_ever(text: str, deeds: list[Deed], order: random.Random, ended: bool) -> None:
    chaos = Chaos(policy_of(text))
    hand = chaos.hand
    chaos.play(deeds)
    if ended:  # and the run goes on all the same, with more epochs
        hand.end()
    for worker in range(WORKERS):  # whoever is there and idle asks
        if worker in hand.present and not hand.workers[worker].computing:
            hand.ask(worker)
    for worker in [worker for worker in hand.present if worker >= WORKERS and not hand.workers[worker].computing]:
        hand.ask(worker)
    begun = {worker: len(hand.begun[worker]) for worker in hand.present}
    for _ in range(12):  # from here all do their work, in any order
        for worker in order.sample(hand.present, len(hand.present)):
            if hand.workers[worker].computing:
                hand.push(worker, loss=1.0)
    assert all(len(hand.begun[worker]) > steps for worker, steps in begun.items())


@pytest.mark.parametrize("bound", [0, 1, 3])
@given(deeds=deeds)
def test_ssp_lets_wait_those_who_are_too_far_ahead_and_nobody_else(bound: int, deeds: list[Deed]) -> None:
    chaos = Chaos(SSP(bound=bound))
    hand = chaos.hand

    def check() -> None:
        state = hand.state
        assert isinstance(state, SSPState)
        furthest = min(state.clocks.values(), default=0) + bound
        assert all(state.clocks[worker] > furthest for worker in state.waiting)
        assert all(state.clocks[worker] <= furthest for worker in hand.busy)
        assert state.clocks.keys() == state.members.keys()

    chaos.play(deeds, check)


@pytest.mark.parametrize("bound", [0, 1, 3])
@given(deeds=deeds, there=st.integers(0, WORKERS))
@example(deeds=[("push", 0)] * 20 + [("join", 0)], there=WORKERS - 1)
def test_under_ssp_nobody_gets_further_ahead_of_anybody_than_the_bound(
    bound: int, deeds: list[Deed], there: int
) -> None:
    """The positions are counted here: pushes since the run began; one who comes again begins at the slowest."""
    chaos = Chaos(SSP(bound=bound), there=there)
    hand = chaos.hand
    positions = dict.fromkeys(range(WORKERS), 0)  # of those expected, too
    incarnations = {worker: its.incarnation for worker, its in hand.workers.items()}
    counted = 0

    def check() -> None:
        nonlocal counted
        for worker in positions.keys() - hand.state.members.keys():
            del positions[worker]
        for worker, its in hand.workers.items():
            first_of_the_expected = worker < WORKERS and worker not in incarnations
            if its.alive and incarnations.get(worker) != its.incarnation and not first_of_the_expected:
                positions.pop(worker, None)
                positions[worker] = min(positions.values(), default=0)
            incarnations[worker] = its.incarnation
        for commit in hand.commits[counted:]:
            positions[commit.pushes[0].worker] += 1
        counted = len(hand.commits)
        slowest = min(positions.values(), default=0)
        assert all(positions[worker] <= slowest + bound for worker in hand.busy)
        assert all(position <= slowest + bound + 1 for position in positions.values())  # and its last push

    chaos.play(deeds, check)


@every_policy
@settings(max_examples=30)
@given(deeds=deeds)
def test_a_state_that_was_saved_goes_on_alike(text: str, deeds: list[Deed]) -> None:
    plain, saved = Chaos(policy_of(text)), Chaos(policy_of(text))
    for deed in deeds:
        plain.play([deed])
        saved.play([deed])
        saved.hand.through_json()
        assert saved.hand.commits[-1:] == plain.hand.commits[-1:]
    assert saved.hand.state == plain.hand.state
    assert list(saved.hand.state.waiting) == list(plain.hand.state.waiting)
    assert saved.hand.workers == plain.hand.workers


@every_policy
def test_a_state_is_not_shared(text: str) -> None:
    policy = policy_of(text)
    first, second = Hand(policy, WORKERS), Hand(policy, WORKERS)
    before = second.state.as_dict()
    first.push(0)
    assert second.state.as_dict() == before != first.state.as_dict()


@every_policy
@settings(max_examples=30)
@given(deeds=deeds, order=st.randoms(use_true_random=False), share=st.floats(0, 1))
def test_pushes_told_of_together_are_as_told_of_one_by_one(
    text: str, deeds: list[Deed], order: random.Random, share: float
) -> None:
    one, other = Chaos(policy_of(text)), Chaos(policy_of(text))
    one.play(deeds)
    other.play(deeds)
    workers = order.sample(one.hand.busy, round(share * len(one.hand.busy)))
    room = one.hand.policy.room(one.hand.state)
    if not 0 < len(workers) <= room:  # others are cancelled, or given new steps, by the first answer
        workers = workers[: max(1, room)]
    singly = [said for worker in workers for said in one.hand.push(worker)]
    assert other.hand.push_together(workers) == singly
    assert len(workers) > room or not singly
    assert one.hand.state == other.hand.state


def test_pushes_that_come_together_and_late_are_dropped() -> None:
    hand = Hand(policy_of("k-async(k=4)"), WORKERS)
    first, second = hand.result_of(0), hand.result_of(1)
    pushes = [first, first, second._replace(step=second.step + 100), second]
    actions = hand.policy.pushed_together(hand.state, pushes, 0.0)
    assert [told(action) for action in actions] == ["drop 0", "drop 1"]
    assert hand.state.pending == [first, second]
