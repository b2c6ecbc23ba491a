"""Laws of every server policy, as the invariants of one state machine over random events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, cast

import pytest
from hand import Hand, told
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from paceline.policies import EASGD, POLICIES, SSP, ServerPolicy, parse_policy
from paceline.policies.ada_sync import AdaState
from paceline.policies.coded import Coded, CodedState
from paceline.policies.messages import Commit, Push, PushKind, Work, mean_of
from paceline.policies.ssp import SSPState
from paceline.policies.state import NOT_YET, ServerState
from paceline.policies.weights import parse_weights

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
    "gradient-coding(stragglers=1)",
    "gradient-coding(stragglers=2)",
    "easgd(period=2, alpha=0.4)",
    "easgd(period=1, alpha=0.5, order=round-robin)",
    "draco(faulty=1)",
    "ssp(bound=0)",
    "ssp(bound=1)",
    "ssp(bound=2)",
    "ssp(bound=3)",
    "ada-sync(k0=2, window=3)",
    "ada-sync(k0=1, over=k-batch-async, rule=root, window=2)",
    "k-batch-async(k=3, weights=staleness)",
    "ssp(bound=2, weights=staleness(power=0.5))",
]
WORKERS = 4  # expected at the start
MOST_WORKERS = 7
every_policy = pytest.mark.parametrize("text", LAWFUL)


def policy_of(text: str) -> ServerPolicy:
    policy = parse_policy(text)
    assert isinstance(policy, ServerPolicy)
    return policy


def one_of(attribute: str) -> st.SearchStrategy[Any]:
    """An element of a list of the machine, as it is at that moment."""
    return st.runner().flatmap(lambda machine: st.sampled_from(getattr(machine, attribute)))


class ServerLaws(RuleBasedStateMachine):
    """Random events under a policy; after each of them every law must hold.

    Every event happens in two runs, which must do the same. The run ``saved`` is saved and loaded after each event, and
    receives pushes together where ``hand`` receives them one by one.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.policy = policy_of(text)
        self.hand, self.saved = (Hand(self.policy, WORKERS, together=False) for _ in range(2))
        self.abandoned: list[Push] = []  # results of steps that ended otherwise than by their push
        self.positions = dict.fromkeys(range(WORKERS), 0)  # worker -> pushes, as SSP should count them
        self.lives: dict[int, int] = {}  # worker -> the incarnation that has a position
        self.counted = 0  # commits that the positions contain
        self.first_step = 0  # since the data last ended

    @initialize(there=st.integers(0, WORKERS))
    def begin(self, there: int) -> None:
        """The first ``there`` of the expected workers have joined and asked."""
        for worker in range(there):
            self.join(worker, asks=True)

    # What the rules draw from ------------------------------------------------------------------------------------

    @property
    def busy(self) -> list[int]:
        return self.hand.busy

    @property
    def present(self) -> list[int]:
        return self.hand.present

    @property
    def expected(self) -> list[int]:
        return [worker for worker, life in self.hand.state.members.items() if life == NOT_YET]

    @property
    def members(self) -> list[int]:
        """Those who are present, and those who are expected."""
        return list(self.hand.state.members)

    @property
    def late(self) -> list[Push]:
        """Pushes of steps that are over."""
        return [*self.abandoned, *self.hand.sent]

    # Events -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.busy)
    @rule(worker=one_of("busy"), loss=st.floats(0.02, 1.0), examples=st.integers(1, 3))
    def push(self, worker: int, loss: float, examples: int) -> None:
        self._happen(lambda hand: hand.push(worker, loss=loss, examples=examples))

    @rule(order=st.randoms(use_true_random=False))
    def push_each(self, order: Random) -> None:
        """All present workers that have a step when it is their turn push once."""
        for worker in order.sample(self.present, len(self.present)):
            if worker in self.busy:
                self.push(worker, loss=1.0, examples=1)

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def push_together(self, data: st.DataObject) -> None:
        """Pushes that are reported together have the effect of single ones; none, as long as there is room."""
        room = self.policy.room(self.hand.state)
        # Beyond it, the first answer may cancel the others or give them new steps.
        workers = data.draw(st.lists(st.sampled_from(self.busy), unique=True, max_size=max(1, room)))
        said = self._happen(
            lambda hand: [word for worker in workers for word in hand.push(worker)],
            lambda hand: hand.push_together(workers),
        )
        assert not said or len(workers) > room

    @precondition(lambda self: self.late)
    @rule(push=one_of("late"))
    def push_late(self, push: Push) -> None:
        """A push of a cancelled or abandoned step, of an earlier incarnation, or one that came before, is dropped."""
        assert self._happen(lambda hand: hand.deliver(push)) == [f"drop {push.worker}"]

    @rule(worker=st.integers(0, MOST_WORKERS - 1), asks=st.booleans())
    def join(self, worker: int, asks: bool) -> None:
        """A worker joins, for the first time or again; the server may not have noticed that it had left."""
        known = self.hand.workers.get(worker)
        self._happen(lambda hand: hand.join(worker, known.incarnation + 1 if known else 0))
        if asks:
            self._happen(lambda hand: hand.ask(worker))

    @precondition(lambda self: self.expected)
    @rule(worker=one_of("expected"), asks=st.booleans())
    def come(self, worker: int, asks: bool) -> None:
        """An expected worker joins."""
        self.join(worker, asks)

    @precondition(lambda self: self.members)
    @rule(worker=one_of("members"))
    def leave(self, worker: int) -> None:
        """A worker leaves, or an expected one will never come."""
        self._happen(lambda hand: hand.leave(worker))

    @precondition(lambda self: self.busy)
    @rule(worker=one_of("busy"))
    def skip(self, worker: int) -> None:
        """A worker's gradients are not finite."""
        self._happen(lambda hand: hand.skip(worker))

    @precondition(lambda self: self.busy and self.policy.coded)
    @rule(worker=one_of("busy"))
    def idle(self, worker: int) -> None:
        """There is no batch for the parts that a worker was sent."""
        self._happen(lambda hand: hand.idle(worker))

    @precondition(lambda self: self.present)
    @rule(worker=one_of("present"))
    def ask(self, worker: int) -> None:
        """A worker asks for a step and abandons the one that it has."""
        self._happen(lambda hand: hand.ask(worker))

    @rule()
    def end(self) -> None:
        """The end of the data commits the pending pushes, and no others; then the run goes on."""
        pending, before = tuple(self.hand.state.pending), len(self.hand.commits)
        wanted = [pending] if pending else []
        if isinstance(self.policy, EASGD):  # of pushes that wait for their turn each is a commit
            ranks = in_turn({push.worker for push in pending}, self.last_exchanged)
            wanted = [(push,) for rank in ranks for push in pending if push.worker == rank]
        if isinstance(self.policy, Coded):
            wanted = [in_places(self.hand.state)] if pending else []
        self.first_step = self.hand.state.step
        self._happen(lambda hand: hand.end(), last=True)
        assert [commit.pushes for commit in self.hand.commits[before:]] == wanted
        assert not self.hand.state.pending
        assert self._happen(lambda hand: hand.end()) == []

    @rule(order=st.randoms(use_true_random=False))
    def work(self, order: Random) -> None:
        """If all present workers work, in any order, and nobody else is expected, each of them begins another step."""
        for worker in self.expected:
            self.leave(worker)
        for worker in [worker for worker in self.present if worker not in self.busy]:
            self.ask(worker)
        begun = {worker: len(self.hand.begun[worker]) for worker in self.present}
        for _ in range(12):
            self.push_each(order)
            if all(len(self.hand.begun[worker]) > steps for worker, steps in begun.items()):
                return
        raise AssertionError(f"of {begun} not all have begun another step: {self.hand.begun}")

    def _happen(
        self,
        event: Callable[[Hand], list[str]],
        to_saved: Callable[[Hand], list[str]] | None = None,
        *,
        last: bool = False,
    ) -> list[str]:
        """Let an event happen in both runs, check its commits, and return the actions.

        ``last``: the event ends the data, so that a commit may have fewer pushes than usual.
        """
        hand, saved = self.hand, self.saved
        k = hand.state.k if isinstance(hand.state, AdaState) else getattr(self.policy, "k", 1)  # at this moment
        before, results = len(hand.commits), [hand.result_of(worker) for worker in self.busy]
        exchanged = self.last_exchanged
        hand.at += 0.5
        saved.at = hand.at
        said = event(hand)
        assert (to_saved or event)(saved) == said
        saved.through_json()
        current = [hand.result_of(worker) for worker in self.busy]
        self.abandoned += [push for push in results if push not in current]
        if is_round_robin(self.policy):
            self._check_turns(before, exchanged, of_all=not last)
        for number, commit in enumerate(hand.commits[before:], before):
            self._check(commit, number, last=last)
            if not last and not self.policy.coded:
                learners = hand.state.members.keys() | {push.worker for push in commit.pushes}
                assert len(commit.pushes) == size_of(self.policy, k, len(learners))
        return said

    # Laws ---------------------------------------------------------------------------------------------------------

    def _check(self, commit: Commit, version: int, *, last: bool) -> None:
        """Weights are shares of 1, less of stale pushes if so wanted. No push is from the future.

        Under a sync policy none is stale.
        """
        if self.policy.coded:
            self._check_round(commit, last=last)
        elif isinstance(self.policy, EASGD):
            assert commit.weights == (self.policy.alpha,)
        else:
            self._check_weights(commit, version)
        cancels, waits = getattr(self.policy, "cancels", self.policy.coded), self.policy.name == "sync"
        for push in commit.pushes:
            assert 0 <= push.version <= version
            # sync does not wait for a step that is under way when the data ends
            assert push.version == version or not (cancels or (waits and push.step >= self.first_step))

    def _check_weights(self, commit: Commit, version: int) -> None:
        power, shares = getattr(parse_weights(self.policy.weights), "power", 0.0), mean_of(commit.pushes).weights
        staleness = [max(1, version - push.version) for push in commit.pushes]
        assert sum(shares) == pytest.approx(1)
        assert commit.weights == pytest.approx([one / old**power for one, old in zip(shares, staleness, strict=True)])

    def _check_round(self, commit: Commit, *, last: bool) -> None:
        """The pushes of a commit are of one round, and their weighted sum has every part of it once."""
        work = [self.hand.work[push.worker, push.step] for push in commit.pushes]
        (number,) = {each.round for each in work}
        if any(commit.weights) or not (last or number in self.hand.failed or self._has_no_majority(work)):
            sums = [0.0] * work[0].num_parts
            for its, weight in zip(work, commit.weights, strict=True):
                for part, coefficient in its.parts:
                    sums[part] += weight * coefficient
            full = [total for part, total in enumerate(sums) if part not in self.hand.empty[number]]
            assert full == pytest.approx([1.0] * len(full))

    def _has_no_majority(self, work: list[Work]) -> bool:
        """Whether a group of the round has too few pushes for a vote."""
        groups = Counter(its.parts for its in work if not {part for part, _ in its.parts} <= self.hand.empty[its.round])
        least = getattr(self.policy, "faulty", -1) + 1
        return sum(map(len, groups)) + len(self.hand.empty[work[0].round]) < work[0].num_parts or any(
            count < least for count in groups.values()
        )

    @invariant()
    def under_a_code_nothing_that_suffices_waits(self) -> None:
        state = self.hand.state
        if isinstance(self.policy, Coded) and isinstance(state, CodedState) and state.pending:
            assert not self.policy.code(state.num_parts).enough([*state.arrived, *state.empty])

    @invariant()
    def every_push_is_committed_once_or_dropped_or_pending(self) -> None:
        hand = self.hand
        assert all(times == 1 for times in hand.committed.values())
        pending = dict.fromkeys(hand.state.pending, 1)
        assert len(pending) == len(hand.state.pending)
        for push, times in hand.sent.items():
            assert times == hand.committed[push] + hand.dropped[push] + pending.get(push, 0)
        assert hand.committed.keys() | hand.dropped.keys() | pending.keys() == hand.sent.keys()

    @invariant()
    def the_version_counts_the_commits(self) -> None:
        assert self.hand.state.version == len(self.hand.commits)

    @invariant()
    def a_saved_state_equals_the_original(self) -> None:
        hand, saved = self.hand, self.saved
        assert saved.state == hand.state
        assert list(saved.state.waiting) == list(hand.state.waiting)
        assert saved.workers == hand.workers
        assert saved.commits == hand.commits

    @property
    def last_exchanged(self) -> int:
        return self.hand.commits[-1].pushes[0].worker if self.hand.commits else -1

    def _check_turns(self, before: int, last: int, *, of_all: bool) -> None:
        """Each commit since then is of the next in the order of ranks: of all members and pushes, or of the latter."""
        hand = self.hand
        workers = [commit.pushes[0].worker for commit in hand.commits[before:]]
        others = {push.worker for push in hand.state.pending} | (hand.state.members.keys() if of_all else set())
        for place, worker in enumerate(workers):
            assert worker == in_turn(others | {*workers[place:]}, last)[0]
            last = worker

    @invariant()
    def who_has_pushed_parameters_is_sent_nothing_before_their_commit(self) -> None:
        if self.policy.kind is PushKind.PARAMETERS:
            assert {push.worker for push in self.hand.state.pending}.isdisjoint(self.busy)

    @invariant()
    def in_round_robin_only_those_wait_whose_turn_it_is_not(self) -> None:
        state = self.hand.state
        waiting = {push.worker for push in state.pending}
        if is_round_robin(self.policy) and waiting:
            assert in_turn(waiting | state.members.keys(), self.last_exchanged)[0] not in waiting

    @invariant()
    def ssp_holds_back_who_is_too_far_ahead_and_nobody_else(self) -> None:
        state = self.hand.state
        if not isinstance(self.policy, SSP):
            return
        assert isinstance(state, SSPState)
        furthest = min(state.clocks.values(), default=0) + self.policy.bound
        assert all(state.clocks[worker] > furthest for worker in state.waiting)
        assert all(state.clocks[worker] <= furthest for worker in self.busy)
        assert state.clocks.keys() == state.members.keys()

    @invariant()
    def under_ssp_nobody_gets_further_ahead_of_anybody_than_the_bound(self) -> None:
        """The positions are counted here: pushes since the run began; one that comes again begins at the slowest."""
        if not isinstance(self.policy, SSP):
            return
        self._count_positions()
        slowest, bound = min(self.positions.values(), default=0), self.policy.bound
        assert all(self.positions[worker] <= slowest + bound for worker in self.busy)
        assert all(position <= slowest + bound + 1 for position in self.positions.values())  # with its last push

    def _count_positions(self) -> None:
        for worker in self.positions.keys() - self.hand.state.members.keys():
            del self.positions[worker]
        for worker, its in self.hand.workers.items():
            is_first_of_expected = worker in self.positions and worker not in self.lives
            if its.alive and self.lives.get(worker) != its.incarnation and not is_first_of_expected:
                self.positions.pop(worker, None)
                self.positions[worker] = min(self.positions.values(), default=0)
            self.lives[worker] = its.incarnation
        for commit in self.hand.commits[self.counted :]:
            self.positions[commit.pushes[0].worker] += 1
        self.counted = len(self.hand.commits)


def in_places(state: ServerState) -> tuple[Push, ...]:
    """The pending pushes of a round in the order of their places, in which they are committed."""
    assert isinstance(state, CodedState)
    return tuple(push for _, push in sorted(zip(state.arrived, state.pending, strict=True)))


def size_of(policy: ServerPolicy, k: int, learners: int) -> int:
    """The number of pushes that a commit must have when so many workers can be in it."""
    if policy.name == "sync":
        return learners
    return k if policy.name == "ssp" or getattr(policy, "counts_batches", False) else min(k, learners)


def is_round_robin(policy: ServerPolicy) -> bool:
    return isinstance(policy, EASGD) and policy.order == "round-robin"


def in_turn(workers: set[int], last: int) -> list[int]:
    """The workers in the cyclic order of their ranks, from the one behind the last."""
    return sorted(workers, key=lambda worker: (worker <= last, worker))


@pytest.mark.sampled(3)
@pytest.mark.laws
@every_policy
def test_every_policy_obeys_the_laws(text: str) -> None:
    machine = cast(type[ServerLaws], partial(ServerLaws, text))  # any function that makes a machine will do
    run_state_machine_as_test(machine, settings=settings())


def test_the_laws_are_tried_on_every_server_policy() -> None:
    wanted = {name for name, policy in POLICIES.items() if issubclass(policy, ServerPolicy)}
    assert {policy_of(text).name for text in LAWFUL} == wanted


@every_policy
def test_the_first_commit_takes_as_many_pushes_as_schedules_are_told(text: str) -> None:
    hand = Hand(policy_of(text), WORKERS)
    while not hand.commits:
        for worker in hand.busy:
            if not hand.commits:
                hand.push(worker)
    assert len(hand.commits[0].pushes) == hand.policy.pushes_per_commit(WORKERS)


@every_policy
def test_a_state_is_not_shared(text: str) -> None:
    policy = policy_of(text)
    first, second = Hand(policy, WORKERS), Hand(policy, WORKERS)
    before = second.state.as_dict()
    first.push(0)
    assert second.state.as_dict() == before != first.state.as_dict()


def test_pushes_that_come_together_and_late_are_dropped() -> None:
    hand = Hand(policy_of("k-async(k=4)"), WORKERS)
    first, second = hand.result_of(0), hand.result_of(1)
    pushes = [first, first, second._replace(step=second.step + 100), second]
    actions = hand.policy.pushed_together(hand.state, pushes, 0.0)
    assert [told(action) for action in actions] == ["drop 0", "drop 1"]
    assert hand.state.pending == [first, second]
