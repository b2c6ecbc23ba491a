"""All server policies on a live server: what each promises of its commits, and every batch exactly once."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import TypeAlias

import pytest
import torch
from ledger import samples, seen_state, times_used, train
from live import Cluster

from paceline.policies.state import ServerState
from paceline.server.live import CommitSummary
from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState

WORKERS, SAMPLES, BATCH, EPOCHS = 3, 50, 4, 3
BATCHES = math.ceil(SAMPLES / BATCH)

POLICIES = [
    "sync",
    "k-sync(k=1)",
    "k-sync(k=2)",
    "k-batch-sync(k=2)",
    "k-batch-sync(k=5)",
    "async",
    "k-async(k=2)",
    "k-batch-async(k=2)",
    "k-batch-async(k=5)",
    "ssp(bound=0)",
    "ssp(bound=2)",
    "ada-sync(k0=1, window=0.01)",
    "ada-sync(k0=1, over=k-batch-async, window=0.01)",
]
FRESH = ("sync", "k-sync", "k-batch-sync")  # whose commits are of the newest parameters alone


Ended: TypeAlias = tuple[Cluster, list[tuple[list[bool], WorkerSession, torch.Tensor]]]


def work(session: WorkerSession, train_state: TrainState) -> tuple[list[bool], WorkerSession, torch.Tensor]:
    """Two epochs in one go, then one that ends for all together; worker 2 is slow."""

    def dawdle() -> None:
        if session.rank == 2:
            time.sleep(0.002)

    data = samples(SAMPLES)
    cancelled = train(session, train_state.model, data, batch_size=BATCH, epochs=EPOCHS - 1, before_step=dawdle)
    for _ in session.epochs(EPOCHS):
        cancelled += train(session, train_state.model, data, batch_size=BATCH, before_step=dawdle)
    return cancelled, session, next(train_state.model.parameters()).detach().clone()


@pytest.fixture(scope="module", params=POLICIES)
def ended(request: pytest.FixtureRequest) -> Ended:
    """A run of three workers, to its end."""
    with Cluster(request.param, seen_state(SAMPLES), workers=WORKERS) as cluster:
        results = cluster.run([seen_state(SAMPLES) for _ in range(WORKERS)], work)
        cluster.wait_for_end()
    return cluster, results


def test_every_sample_is_used_once_an_epoch(ended: Ended) -> None:
    cluster, _ = ended
    assert times_used(cluster) == [EPOCHS] * SAMPLES
    assert sum(commit.examples for commit in cluster.host.commits) == EPOCHS * SAMPLES


def test_all_end_with_the_parameters_of_the_server(ended: Ended) -> None:
    cluster, results = ended
    for _, session, parameters in results:
        assert torch.equal(parameters, next(cluster.train_state.model.parameters()))
        assert session.steps == len(cluster.host.commits)
        assert session.epoch == EPOCHS


def test_versions_count_the_commits(ended: Ended) -> None:
    cluster, _ = ended
    assert [commit.version for commit in cluster.host.commits] == list(range(1, len(cluster.host.commits) + 1))


def test_commits_are_as_the_policy_promises(ended: Ended) -> None:
    cluster, _ = ended
    name, k = cluster.policy.name, getattr(cluster.policy, "k", 0)
    over = getattr(cluster.policy, "over", name)
    sizes = Counter(len(commit.workers) for commit in cluster.host.commits)
    assert sum(size * count for size, count in sizes.items()) == EPOCHS * BATCHES
    if name in ("async", "ssp"):
        assert set(sizes) == {1}
    if "batch" not in over:  # a worker waits for the commit of its push
        assert all(len(set(commit.workers)) == len(commit.workers) for commit in cluster.host.commits)
    if name in ("k-batch-sync", "k-batch-async"):  # all of k, but the last before each of two ends
        ends = [(EPOCHS - 1) * BATCHES % k, BATCHES % k]
        assert sizes - Counter([size for size in ends if size]) == Counter({k: sizes[k]})
    if name in ("k-sync", "k-async"):
        assert max(sizes) == k
    if over in FRESH:
        assert all(stale == 0 for commit in cluster.host.commits for stale in commit.staleness)


def test_only_late_work_is_cancelled(ended: Ended) -> None:
    cluster, results = ended
    figures = cluster.server.figures()
    cancelled = sum(result[0].count(True) for result in results)
    if getattr(cluster.policy, "cancels", False):
        assert sum(told["cancelled"] for told in figures.values()) >= cancelled
    else:
        assert cancelled == 0 == sum(told["cancelled"] + told["dropped"] for told in figures.values())
    assert sum(told["pushes"] for told in figures.values()) == EPOCHS * BATCHES
    assert sum(told["examples"] for told in figures.values()) == EPOCHS * SAMPLES


def test_staleness_and_bytes_are_counted(ended: Ended) -> None:
    cluster, _ = ended
    figures = cluster.server.figures()
    for worker, told in figures.items():
        pairs = [pair for commit in cluster.host.commits for pair in zip(commit.workers, commit.staleness, strict=True)]
        stale = [number for pusher, number in pairs if pusher == worker]
        assert told["pushes"] == len(stale)
        assert told["staleness"] == (pytest.approx(sum(stale) / len(stale)) if stale else None)
        assert told["bytes_in"] >= 4 * SAMPLES * told["pushes"]
        assert told["bytes_out"] > 0 or not told["pushes"]  # others may have used all batches before it came


def test_nobody_runs_ahead_further_than_the_bound_of_ssp() -> None:
    clocks: list[int] = []

    class Watching(list[CommitSummary]):
        def append(self, commit: CommitSummary) -> None:
            state: ServerState = cluster.server._state
            clocks.append(max(state.clocks.values()) - min(state.clocks.values()))  # type: ignore[attr-defined]
            super().append(commit)

    with Cluster("ssp(bound=1)", seen_state(SAMPLES), workers=WORKERS) as cluster:
        cluster.host.commits = Watching()
        cluster.run([seen_state(SAMPLES) for _ in range(WORKERS)], work)
    assert 1 <= max(clocks) <= 2, "one over the bound: from then on it waits"


def test_a_worker_that_comes_too_late_for_any_step_ends_with_the_newest_parameters() -> None:
    first, late = seen_state(SAMPLES), seen_state(SAMPLES)
    with Cluster("async", seen_state(SAMPLES), workers=2) as cluster:
        with cluster.session(first, 0) as session:
            train(session, first.model, samples(SAMPLES), batch_size=BATCH, epochs=1)
            with cluster.session(late, 1) as too_late:
                assert [*too_late.epochs(1)] == []
            assert cluster.server.figures()[1]["bytes_out"] > 0
        newest = next(cluster.train_state.model.parameters())
        assert torch.equal(next(late.model.parameters()), newest) and newest.any()
