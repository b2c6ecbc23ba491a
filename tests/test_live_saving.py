"""Checkpoints of a run with a server: asked for by a worker, at any moment, and gone on from without losing a batch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from led_by_hand import Hand, batches, cluster_of_hands
from ledger import Seen, samples, seen_state, times_used, train
from live import DEADLINE, Cluster, weights_state

from paceline.errors import CommError
from paceline.policies import parse_policy
from paceline.policies.server import ServerPolicy
from paceline.record.checkpoint import read_checkpoint
from paceline.record.metrics import read_metrics
from paceline.record.run import Run
from paceline.server.live import CommitSummary
from paceline.server.work_queue import WorkQueue
from paceline.sessions.server import ServerRun
from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState
from paceline.transport.messages import Data, Record, Save, Saved

WORKERS, COUNT, EPOCHS = 2, 12, 3


def test_a_checkpoint_does_not_wait_for_a_round_that_waits_for_its_asker() -> None:
    with cluster_of_hands("sync", 2) as (cluster, (first, second)):
        batches(first, second)
        second.push(1.0)
        cluster.until(lambda: bool(cluster.server._state.pending))
        first.say(Save("there"))
        assert first.hear(Saved).path == "there"
        first.push(1.0)
        assert first.go().version == 1


@pytest.mark.parametrize("policy", ["sync", "k-batch-async(k=3)"])
def test_what_is_pushed_and_not_committed_is_unused_in_a_checkpoint(policy: str) -> None:
    with Cluster(policy, workers=2) as cluster:
        first, second = Hand(cluster, 0), Hand(cluster, 1)
        batches(first, second)
        second.push(1.0)
        cluster.until(lambda: bool(cluster.server._state.pending))
        saved = cluster.queue.state_dict()
        assert 1 in saved["unused"]
        first.push(1.0)
        if policy != "sync":
            first.go()
            first.push(1.0)
        cluster.until(lambda: len(cluster.host.commits) == 1)
        assert not {0, 1} & set(cluster.queue.state_dict()["unused"])


def test_a_checkpoint_asked_for_while_the_data_ends() -> None:
    """The word that there are no more batches comes before that of the checkpoint."""

    def work(session: WorkerSession, own: TrainState) -> list[bool]:
        cancelled = []
        for (places,) in session.batches(samples(8), 2, epochs=2):
            with session.step() as step:
                own.model(places).mean().backward()
            cancelled.append(step.cancelled)
            assert session.save("there") == (Path("there") if session.rank == 0 else None)
        return cancelled

    with Cluster("async", seen_state(8), workers=2) as cluster:
        cluster.run([seen_state(8) for _ in range(2)], work)
    assert times_used(cluster) == [2.0] * 8


class Watched(ServerRun):
    """The session of a server's process; that catches signals, which is not for a thread, so its parts are called."""

    def __init__(
        self, path: Path, train_state: TrainState, policy: str, *, resume: bool = False, **options: Any
    ) -> None:
        parsed = parse_policy(policy)
        assert isinstance(parsed, ServerPolicy)
        run = Run(path, resume=resume)
        defaults = {"seed": 7, "save_every": None, "log_every": 1, "on_nan": "stop", "codec": None}
        settings: dict[str, Any] = {**defaults, **options}
        super().__init__(train_state, workers=WORKERS, policy=parsed, run=run, **settings)
        self.commits: list[CommitSummary] = []
        self.then: Callable[[], None] = lambda: None
        self.start(path, resume, {})

    def committed(self, commit: CommitSummary) -> None:
        self.commits.append(commit)
        super().committed(commit)
        self.then()

    def cluster(self) -> Cluster:
        queue, train_state = self._progress.queue, self._train_state
        policy = str(self.policy)
        return Cluster(policy, train_state, host=self, workers=WORKERS, queue=queue, version=self.steps, seed=self.seed)


def work(session: WorkerSession, own: TrainState) -> None:
    train(session, own.model, samples(COUNT), batch_size=2, epochs=EPOCHS)


@pytest.mark.parametrize(
    ("policy", "later"),
    [
        ("sync", "sync"),
        ("k-sync(k=1)", "k-sync(k=1)"),
        ("k-batch-sync(k=4)", "k-batch-sync(k=4)"),
        ("k-batch-async(k=3)", "k-batch-async(k=3)"),
        ("async", "async"),
        ("gradient-coding(stragglers=1)", "gradient-coding(stragglers=1)"),
        ("sync", "async"),
        ("k-batch-async(k=3)", "gradient-coding(stragglers=1)"),
    ],
)
@pytest.mark.parametrize("commits", [1, 2, 4])
def test_a_run_goes_on_where_its_server_was_stopped(tmp_path: Path, policy: str, later: str, commits: int) -> None:
    """With pushes that wait for a commit, and steps under way; every sample is used once an epoch all the same."""
    used = torch.zeros(COUNT)
    all_joined = threading.Barrier(WORKERS)  # one that came later would look for a server that is gone

    def work_until_told_to_stop(session: WorkerSession, own: TrainState) -> None:
        all_joined.wait(DEADLINE)
        with contextlib.suppress(CommError):
            work(session, own)

    with Watched(tmp_path, seen_state(COUNT), policy) as host, host.cluster() as cluster:
        host.then = lambda: cluster.stop() if len(host.commits) >= commits else None
        cluster.run([seen_state(COUNT) for _ in range(WORKERS)], work_until_told_to_stop)
    used += torch.tensor(times_used(cluster))
    with Watched(tmp_path, seen_state(COUNT), later, resume=True) as host, host.cluster() as cluster:
        assert host.steps >= commits
        cluster.run([seen_state(COUNT) for _ in range(WORKERS)], work)
        cluster.wait_for_end()
    used += torch.tensor(times_used(cluster))
    assert used.tolist() == [EPOCHS] * COUNT
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["event"] == "commit"]
    assert [line["step"] for line in lines] == list(range(1, host.steps + 1))
    assert sum(line["examples"] for line in lines) == EPOCHS * COUNT


def test_a_run_goes_on_from_a_checkpoint_that_a_worker_asked_for(tmp_path: Path) -> None:
    """What was done after it is done again."""
    with Watched(tmp_path / "first", seen_state(COUNT), "async") as host, host.cluster() as cluster:
        hands = [Hand(cluster, rank, model=Seen(COUNT)) for rank in range(2)]
        data = Data(COUNT, 2, "short", shuffle=True)
        for hand in hands:
            hand.say(data)
            hand.ask(EPOCHS)
        for _ in range(3):
            hands[0].push(1.0, examples=2)
            hands[0].go()
        hands[0].say(Save(str(tmp_path / "kept")))
        saved = Path(hands[0].hear(Saved).path)
        hands[0].push(1.0, examples=2)
        hands[0].go()
    state = read_checkpoint(saved)
    assert state["session"]["steps"] == 3
    queue = WorkQueue()
    queue.load_state_dict(state["exchange"])
    left = [queue.take(0, EPOCHS) for _ in range(EPOCHS * COUNT // 2 - 3)]
    assert left[:3] == [(0, 1), (0, 4), (0, 5)], "batches 0, 2 and 3 are used; the second worker had 1, the first 4"
    assert None not in left and queue.take(0, EPOCHS) is None


def test_a_checkpoint_holds_the_model_alone(tmp_path: Path) -> None:
    """Not the memory that is shared with the workers, in which the parameters lie."""
    with Watched(tmp_path, weights_state(100_000), "sync") as host, host.cluster():
        file = host.save()
        assert file is not None and file.stat().st_size < 2 * 400_000


def test_the_server_saves_every_so_many_commits(tmp_path: Path) -> None:
    train_state = seen_state(COUNT)
    with Watched(tmp_path, train_state, "async", save_every=4) as host, host.cluster() as cluster:
        cluster.run([seen_state(COUNT) for _ in range(WORKERS)], work)
        steps = [int(file.stem.removeprefix("step-")) for file in host.run.checkpoints.files()]  # type: ignore[union-attr]
    assert steps == [EPOCHS * COUNT // 2 // 4 * 4 - 4 * back for back in (2, 1, 0)]


def test_a_worker_records_what_it_likes(tmp_path: Path) -> None:
    with Watched(tmp_path, weights_state(), "async") as host, host.cluster() as cluster:
        hand = Hand(cluster, 0)
        hand.say(Record("mine", '{"event": 1, "self": 2, "time": 3, "step": 4, "worker": 9}'))
        hand.ask()
        hand.push(1.0)
        hand.go()
    (line,) = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "self" in line]
    assert line["worker"] == 0
