"""Server policies, fed by hand: every row of the table, and joins, leaves and late messages at every point."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hand import Hand

from paceline.errors import UsageError
from paceline.policies import (
    SSP,
    AdaSync,
    Async,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    ServerPolicy,
    Sync,
    parse_policy,
)
from paceline.policies.ada_sync import AdaState
from paceline.policies.messages import Push, mean_of


def policy_of(text: str) -> ServerPolicy:
    policy = parse_policy(text)
    assert isinstance(policy, ServerPolicy)
    return policy


# The rows of the table ------------------------------------------------------------------------------------


def test_sync_waits_for_all() -> None:
    hand = Hand(Sync(), 3)
    assert hand.push(1) == hand.push(0) == []
    assert hand.push(2) == ["commit 1 0 2", "send 1 0 2"]
    assert [its.version for its in hand.workers.values()] == [1, 1, 1]


def test_k_sync_takes_the_first_k_and_cancels_the_rest() -> None:
    hand = Hand(KSync(k=2), 4)
    assert hand.push(2) == []
    assert hand.push(0) == ["commit 2 0", "cancel 1 3", "send 0 1 2 3"]
    assert hand.busy == [0, 1, 2, 3]
    assert {its.version for its in hand.workers.values()} == {1}


def test_k_batch_sync_goes_on_with_the_same_parameters_until_k_batches_are_there() -> None:
    hand = Hand(KBatchSync(k=3), 2)
    assert hand.push(0) == ["continue 0"]
    assert hand.push(0) == ["continue 0"]
    assert hand.workers[0].version == 0
    assert hand.push(0) == [
        "commit 0 0 0",
        "cancel 1",
        "send 0 1",
    ]


def test_async_commits_every_push() -> None:
    hand = Hand(Async(), 3)
    assert hand.push(1) == ["commit 1", "send 1"]
    assert hand.push(1) == ["commit 1", "send 1"]
    assert hand.push(0) == ["commit 0", "send 0"]
    assert [its.version for its in hand.workers.values()] == [3, 2, 0]


def test_k_async_lets_the_late_ones_run() -> None:
    hand = Hand(KAsync(k=2), 3)
    assert hand.push(2) == []
    assert hand.push(0) == ["commit 2 0", "send 2 0"]
    assert hand.workers[1].version == 0 and hand.workers[1].computing
    assert hand.push(1) == []  # stale by one, and kept
    assert hand.push(0) == ["commit 1 0", "send 1 0"]


def test_k_batch_async_sends_the_parameters_as_they_are() -> None:
    hand = Hand(KBatchAsync(k=2), 3)
    assert hand.push(0) == ["send 0"]
    assert hand.workers[0].version == 0
    assert hand.push(0) == ["commit 0 0", "send 0"]


@pytest.mark.parametrize("policy", [KBatchAsync(k=2), KAsync(k=2), KSync(k=2), KBatchSync(k=2)], ids=str)
def test_the_kth_pusher_reads_what_its_push_has_made(policy: ServerPolicy) -> None:
    hand = Hand(policy, 3)
    hand.push(0)
    actions = hand.push(1)
    assert actions[0] == "commit 0 1"
    assert actions[-1].startswith("send") and "1" in actions[-1].split()
    assert hand.workers[1].version == 1


def test_ssp_holds_back_who_is_too_far_ahead() -> None:
    hand = Hand(SSP(bound=1), 2)
    assert hand.push(0) == ["commit 0", "send 0"]
    assert hand.push(0) == ["commit 0"]  # two ahead of worker 1
    assert hand.push(1) == ["commit 1", "send 0 1"]
    assert [its.version for its in hand.workers.values()] == [3, 3]


def test_ssp_without_slack_is_lock_step() -> None:
    hand = Hand(SSP(bound=0), 3)
    assert hand.push(2) == ["commit 2"]
    assert hand.push(0) == ["commit 0"]
    assert hand.push(1) == ["commit 1", "send 2 0 1"]


def test_weights_are_shares_of_the_examples() -> None:
    hand = Hand(Sync(), 3)
    hand.push(0, examples=30)
    hand.push(1, examples=10)
    hand.push(2, examples=0)
    assert hand.commits[0].weights == (0.75, 0.25, 0.0)
    assert mean_of([Push(0, 0, 0, 0, examples=9)] * 4).weights == (0.25,) * 4
    assert mean_of([Push(0, 0, 0, 0, examples=0)] * 2).weights == (0.0, 0.0)


def test_a_stale_push_counts_for_less() -> None:
    hand = Hand(policy_of("async(weights=staleness)"), 3)
    for worker in (0, 0, 1, 0, 2):
        hand.push(worker)
    assert [commit.weights for commit in hand.commits] == [(1.0,), (1.0,), (1 / 2,), (1.0,), (1 / 4,)]


def test_staleness_and_examples_both_count() -> None:
    hand = Hand(policy_of("k-async(k=2, weights=staleness(power=2))"), 4)
    for worker in (0, 1, 0, 1):
        hand.push(worker)
    hand.push(2, examples=3)
    hand.push(0, examples=1)
    assert hand.commits[2].weights == (0.75 / 4, 0.25)


@pytest.mark.parametrize(
    "text",
    [
        "sync",
        "k-sync(k=2)",
        "k-batch-sync(k=2)",
        "ada-sync(over=k-sync)",
        "ada-sync(over=k-batch-sync)",
        "gradient-coding(stragglers=1)",
    ],
)
def test_weights_by_staleness_are_refused_where_no_push_is_stale(text: str) -> None:
    policy = policy_of(text)
    with pytest.raises(UsageError, match=r"no push is ever stale under .*, so weights=staleness changes nothing"):
        replace(policy, weights="staleness")
    assert not policy.has_stale_pushes


def test_weights_have_a_text_form() -> None:
    assert str(policy_of("async(weights=examples)")) == "async"
    assert str(policy_of("async(weights=staleness(power=0.5))")) == "async(weights=staleness(power=0.5))"
    assert not policy_of("async(weights=staleness)").adds_up
    with pytest.raises(UsageError, match=r"no weights called 'stalenes'. Did you mean 'staleness'\?"):
        policy_of("async(weights=stalenes)")
    for power in ("0", "-1", "inf", "nan"):
        with pytest.raises(UsageError, match="power must be above 0 and finite"):
            policy_of(f"async(weights=staleness(power={power}))")


# Coming and going -----------------------------------------------------------------------------------------


def test_nobody_is_sent_anything_before_asking() -> None:
    hand = Hand(KSync(k=1), 2, together=False)
    assert hand.join(0) == []
    assert hand.ask(0) == ["send 0"]
    hand.join(1)
    assert hand.push(0) == ["commit 0", "send 0"]
    assert hand.ask(1) == ["send 1"]
    assert hand.workers[1].version == 1


def test_a_stranger_that_asks_gets_no_answer() -> None:
    state = Sync().begin(2)
    assert Sync().asked(state, 1, 0.0) == ()  # expected, but it has not joined
    assert Sync().asked(state, 7, 0.0) == ()


def test_sync_waits_for_workers_that_have_not_come_yet() -> None:
    hand = Hand(Sync(), 2, together=False)
    hand.join(0)
    hand.ask(0)
    assert hand.push(0) == []
    hand.join(1)
    hand.ask(1)
    assert hand.push(1) == ["commit 0 1", "send 0 1"]


def test_one_that_never_comes_can_leave() -> None:
    hand = Hand(Sync(), 2, together=False)
    hand.join(0)
    hand.ask(0)
    hand.push(0)
    assert hand.leave(1) == ["commit 0", "send 0"]


def test_a_newcomer_takes_part_in_the_round_under_way() -> None:
    hand = Hand(Sync(), 2)
    hand.push(0)
    hand.join(2)
    assert hand.ask(2) == ["send 2"]
    assert hand.push(1) == []
    assert hand.push(2) == ["commit 0 1 2", "send 0 1 2"]


def test_a_death_can_complete_a_round() -> None:
    hand = Hand(Sync(), 3)
    hand.push(0)
    hand.push(1)
    assert hand.leave(2) == ["commit 0 1", "send 0 1"]


def test_the_push_of_one_that_died_still_counts() -> None:
    hand = Hand(Sync(), 3)
    hand.push(0)
    assert hand.leave(0) == []
    assert hand.push(1) == []  # worker 2 is still waited for
    assert hand.push(2) == ["commit 0 1 2", "send 1 2"]


def test_one_that_comes_back_in_the_same_round_waits_for_its_commit() -> None:
    hand = Hand(Sync(), 2)
    hand.push(0)
    hand.leave(0)
    hand.join(0, incarnation=1)
    assert hand.ask(0) == []
    assert hand.push(1) == ["commit 0 1", "send 0 1"]
    assert hand.workers[0].version == 1


def test_one_that_comes_back_and_has_not_asked_is_sent_nothing() -> None:
    hand = Hand(Sync(), 2)
    hand.push(0)
    hand.join(0, incarnation=1)  # its death was not even noticed
    assert hand.push(1) == ["commit 0 1", "send 1"]
    assert hand.ask(0) == ["send 0"]


def test_when_all_have_left_their_pushes_are_committed() -> None:
    hand = Hand(KSync(k=2), 3)
    hand.push(0)
    assert hand.leave(0) == hand.leave(1) == []
    assert hand.leave(2) == ["commit 0"]
    hand.join(0, incarnation=1)
    assert hand.ask(0) == ["send 0"]


def test_mini_batches_wait_for_a_worker_to_come() -> None:
    hand = Hand(KBatchAsync(k=2), 1)
    assert hand.push(0) == ["send 0"]
    assert hand.leave(0) == []
    hand.join(5)
    assert hand.ask(5) == ["send 5"]
    assert hand.push(5) == ["commit 0 5", "send 5"]


def test_k_is_clamped_after_deaths() -> None:
    hand = Hand(KAsync(k=3), 4)
    hand.leave(3)
    hand.leave(2)
    assert hand.push(0) == []
    assert hand.push(1) == ["commit 0 1", "send 0 1"]
    hand.join(2, incarnation=1)
    hand.ask(2)
    hand.push(0)
    hand.push(1)
    assert len(hand.push(2)) == 2  # three again


def test_ssp_forgets_the_slowest_when_it_leaves() -> None:
    hand = Hand(SSP(bound=0), 3)
    hand.push(0)
    hand.push(1)
    assert hand.leave(2) == ["send 0 1"]


def test_ssp_lets_a_newcomer_begin_at_the_slowest() -> None:
    hand = Hand(SSP(bound=1), 2)
    for _ in range(5):
        hand.push(0)
        hand.push(1)
    hand.join(2)
    assert hand.ask(2) == ["send 2"]
    assert hand.push(0) == ["commit 0", "send 0"]
    assert hand.push(2) == ["commit 2", "send 2"]


@pytest.mark.parametrize("bound, workers", [(0, 3), (1, 4), (2, 5), (3, 4)])
def test_ssp_lets_an_expected_worker_begin_at_the_beginning_however_late_it_comes(bound: int, workers: int) -> None:
    hand = Hand(SSP(bound=bound), workers, together=False)
    *early, late = range(workers)
    for worker in early:
        hand.join(worker)
        hand.ask(worker)
    for _ in range(bound + 1):
        for worker in early:
            hand.push(worker)
    assert hand.busy == []  # they have as many pushes as they may have before the late one has any
    assert hand.join(late) == []
    assert hand.ask(late) == [f"send {late}"]
    assert hand.push(late)[0] == f"commit {late}"
    assert sorted(hand.busy) == list(range(workers))


@pytest.mark.parametrize("policy", [Sync(), Async(), SSP(bound=1)], ids=str)
def test_who_comes_back_needs_a_larger_incarnation(policy: ServerPolicy) -> None:
    hand = Hand(policy, 2)
    hand.leave(0)
    with pytest.raises(UsageError, match=r"worker 0 joined as incarnation 0, but incarnation 0 .* such as 1"):
        hand.join(0)
    hand.join(0, incarnation=1)
    with pytest.raises(UsageError, match="incarnation"):
        hand.join(0, incarnation=1)


def test_leaving_twice_or_without_having_joined_is_nothing() -> None:
    hand = Hand(Async(), 2)
    assert hand.leave(9) == hand.leave(1) == hand.leave(1) == []


# The end of the data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [KBatchSync(k=5), KBatchAsync(k=5)], ids=str)
def test_the_last_commit_of_mini_batches_may_be_smaller(policy: ServerPolicy) -> None:
    hand = Hand(policy, 2)
    hand.push(0, examples=3)
    hand.push(0, examples=1)
    assert hand.end()[0] == "commit 0 0"
    assert hand.commits[0].weights == (0.75, 0.25)
    assert hand.end() == []


def test_who_waits_when_the_data_ends_is_sent_what_its_push_has_made() -> None:
    hand = Hand(KAsync(k=2), 3)
    hand.push(1)
    assert hand.end() == ["commit 1", "send 1"]
    assert hand.workers[1].version == 1


@pytest.mark.parametrize("policy", [Async(), SSP(bound=0)], ids=str)
def test_where_every_push_is_committed_the_end_changes_nothing(policy: ServerPolicy) -> None:
    hand = Hand(policy, 2)
    hand.push(0)
    assert hand.end() == []


def test_the_pushes_of_a_commit_at_the_start() -> None:
    texts = ["sync", "async", "ssp(bound=3)", "k-sync(k=3)", "k-batch-async(k=20)", "ada-sync(k0=0.2)"]
    policies = [parse_policy(text) for text in texts]
    found = [policy.pushes_per_commit(8) for policy in policies if isinstance(policy, ServerPolicy)]
    assert found == [8, 1, 1, 3, 20, 1]


# Late messages --------------------------------------------------------------------------------------------


def test_a_late_cancel_does_not_kill_the_next_step() -> None:
    hand = Hand(KSync(k=1), 2)
    late = hand.result_of(1)  # worker 1 has pushed it when the cancel reaches it
    hand.push(0)
    assert hand.cancelled == [(1, late.step)]
    assert hand.deliver(late) == ["drop 1"]
    assert hand.workers[1].computing and hand.workers[1].step not in (None, late.step)
    assert hand.push(1)[0] == "commit 1"


@pytest.mark.parametrize("policy", [Async(), Sync(), KBatchSync(k=2), SSP(bound=2)], ids=str)
def test_the_push_of_an_earlier_incarnation_is_dropped(policy: ServerPolicy) -> None:
    hand = Hand(policy, 2)
    old = hand.result_of(0)
    hand.leave(0)
    assert hand.deliver(old) == ["drop 0"]
    hand.join(0, incarnation=1)
    assert hand.deliver(old) == ["drop 0"]
    hand.ask(0)
    assert hand.deliver(old) == ["drop 0"]
    assert hand.committed == {}


@pytest.mark.parametrize("policy", [Async(), Sync(), KAsync(k=2), KBatchAsync(k=9), SSP(bound=2)], ids=str)
def test_a_push_that_comes_twice_is_dropped_once(policy: ServerPolicy) -> None:
    hand = Hand(policy, 2)
    push = hand.result_of(0)
    hand.push(0)
    assert hand.deliver(push) == ["drop 0"]


def test_one_that_asks_again_has_given_up_its_step() -> None:
    hand = Hand(Async(), 1)
    given_up = hand.result_of(0)
    assert hand.ask(0) == ["send 0"]
    assert hand.deliver(given_up) == ["drop 0"]
    assert hand.push(0)[0] == "commit 0"


# k and the number of workers ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["k-sync(k=9)", "k-async(k=9)", "ada-sync(k0=9)"])
def test_more_than_there_are_is_an_error_at_the_start(text: str) -> None:
    policy = parse_policy(text)
    assert isinstance(policy, ServerPolicy)
    with pytest.raises(UsageError, match=r"a commit needs 9 workers, but the run has 8; use at most k0?=8"):
        policy.begin(8)
    assert len(policy.begin(9).members) == 9


def test_one_worker_may_bring_all_the_batches() -> None:
    assert KBatchSync(k=9).begin(1).version == KBatchAsync(k=9).begin(1).version == 0


def test_a_run_without_workers_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1 worker, got 0"):
        Async().begin(0)


@pytest.mark.parametrize(
    ("one", "other"),
    [(KSync(k=4), Sync()), (KAsync(k=4), Sync()), (KAsync(k=1), Async()), (KBatchAsync(k=1), Async())],
    ids=str,
)
def test_the_ends_of_the_family_meet(one: ServerPolicy, other: ServerPolicy) -> None:
    first, second = Hand(one, 4), Hand(other, 4)
    for turn in range(40):
        worker = sorted(first.busy)[turn * 7 % len(first.busy)]
        assert first.push(worker) == second.push(worker)


# Adaptive k -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k0", [1, 2, 5])
@pytest.mark.parametrize("fallen", [1.0, 1.7, 4.0, 30.0])
def test_the_quadratic_rule_solves_its_equation(k0: int, fallen: float) -> None:
    # In the limit of many workers the rounding does not show: k^2 / (P - k) has grown as the loss has fallen.
    workers = 100_000 * k0
    k = AdaSync(k0=1000 * k0).best_k(workers, first_loss=fallen, loss=1.0)
    assert k**2 / (workers - k) == pytest.approx(fallen * (1000 * k0) ** 2 / (workers - 1000 * k0), rel=2e-3)


@pytest.mark.parametrize("rule", ["quadratic", "root"])
def test_k_starts_at_k0_and_rises_to_all_as_the_loss_falls(rule: str) -> None:
    policy = parse_policy(f"ada-sync(k0=2, rule={rule})")
    assert isinstance(policy, AdaSync)
    found = [policy.best_k(8, 2.3, 2.3 * 0.8**fall) for fall in range(60)]
    assert found[0] == 2 and found == sorted(found) and found[-1] == 8
    assert policy.best_k(8, 2.3, 0.0) == 8
    assert policy.best_k(8, 2.3, 1e6) == 1
    assert policy.best_k(1, 2.3, 1.0) == 1  # the others have left


def test_the_root_rule() -> None:
    assert AdaSync(k0=2, rule="root").best_k(100, 9.0, 1.0) == 6


def test_a_start_below_one_waits_until_the_loss_has_fallen() -> None:
    policy = AdaSync(k0=0.5, rule="root")
    assert Hand(policy, 4).push(0) == ["commit 0", "cancel 1 2 3", "send 0 1 2 3"]
    assert [policy.best_k(8, first_loss, 1.0) for first_loss in (1.0, 8.0, 10.0, 36.0)] == [1, 1, 2, 3]


def test_k_is_chosen_once_a_window_from_the_losses_in_it() -> None:
    hand = Hand(AdaSync(k0=1, rule="root", window=10.0), 4)
    hand.push(0, loss=4.0)
    hand.at = 9.0
    hand.push(0, loss=0.1)
    assert isinstance(hand.state, AdaState)
    assert (hand.state.k, hand.state.first_loss) == (1, 4.0)
    hand.at = 10.0
    hand.push(0, loss=1.233)  # mean of the window: 1.7777
    assert hand.state.k == 2  # sqrt(4 / 1.7777) = 1.5
    assert hand.push(1, loss=0.25) == []
    hand.at = 20.0
    assert len(hand.push(2, loss=0.25)) == 3
    assert hand.state.k == 4  # sqrt(4 / 0.25)


def test_losses_that_are_missing_or_no_numbers_are_left_out() -> None:
    hand = Hand(AdaSync(k0=1, rule="root", window=0.0), 4)
    for loss in (None, math.nan, math.inf):
        hand.push(0, loss=loss)
    assert isinstance(hand.state, AdaState)
    assert (hand.state.k, hand.state.num_first, hand.state.loss) == (1, 0, 0.0)


@pytest.mark.parametrize("over", ["k-sync", "k-batch-sync", "k-async", "k-batch-async"])
def test_an_adaptive_policy_without_losses_is_its_base(over: str) -> None:
    base, policy = parse_policy(f"{over}(k=2)"), parse_policy(f"ada-sync(k0=2, over={over})")
    assert isinstance(base, ServerPolicy) and isinstance(policy, ServerPolicy)
    first, second = Hand(base, 4), Hand(policy, 4)
    for turn in range(40):
        worker = sorted(first.busy)[turn * 7 % len(first.busy)]
        assert first.push(worker) == second.push(worker)
