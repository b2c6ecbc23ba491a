"""Replays of runs by real processes, with dropout and BatchNorm: workers killed and replaced, runs broken off."""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE, finished, living, started, wait_for_checkpoint
from recorded import problem_file

from paceline.record.trace import Began, Hashed, Joined, Left, Trace

pytestmark = [pytest.mark.processes, pytest.mark.soak]

DELAY = ("--delay", "0.5+exp(1) slow(1, 2)", "--delay-unit", "2ms")


def train(folder: Path, *options: str) -> list[str]:
    problem = f"{problem_file(folder)}:with_dropout"
    run = str(folder / "run")
    return ["train", problem, "--run", run, "--save-every", "5", "--seed", "3", "--json", *DELAY, *options]


def process_of_worker(mark: str, rank: int) -> int:
    """The process of a worker of the marked run; the server has no rank."""
    rank_of = f"\0RANK={rank}\0".encode()
    (found,) = [process for process in living(mark) if rank_of in Path(f"/proc/{process}/environ").read_bytes()]
    return found


def times_joined(run: Path, rank: int) -> int:
    return sum(isinstance(one, Joined) and one.rank == rank for one in Trace(run / "trace.bin"))


@pytest.mark.parametrize(
    "policy",
    [
        "k-batch-sync(k=3)",
        "downpour(period=3)",
        "gradient-coding(stragglers=1)",
        "easgd(period=3, alpha=0.4, order=round-robin, momentum=0.5)",
        "async(aggregator=delay-compensated(scale=2.0, momentum=0.95), weights=staleness)",
    ],
)
def test_a_worker_is_replaced_and_the_run_broken_off_and_resumed(tmp_path: Path, paceline: Any, policy: str) -> None:
    """All in one run, since starting processes is what takes the time."""
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    adam = ("--optimizer", "adam(lr=0.003)", "--warmup", "gradual", "--warmup-epochs", "1", "--decay", "cosine")
    options = ("--base-batch", "8", "--clip-norm", "2", "--epochs", "600", "--respawn")
    with started(train(tmp_path, "--workers", "2", "--policy", policy, *adam, *options), mark=mark) as process:
        assert wait_for_checkpoint(process, run, newer_than=6), process.communicate()
        os.kill(process_of_worker(mark, 1), signal.SIGKILL)
        end = time.monotonic() + DEADLINE
        while times_joined(run, 1) < 2 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, err
    assert [one.rank for one in Trace(run / "trace.bin") if isinstance(one, Left) and one.dead][:1] == [1]
    assert times_joined(run, 1) == 2, "it never came back"
    (tmp_path / "hurry").touch()
    more = str(next(one.version for one in reversed(list(Trace(run / "trace.bin"))) if isinstance(one, Hashed)) + 20)
    ended = finished(["train", "--resume", str(run), "--max-steps", more, "--json"])
    assert ended.returncode == 0, ended.stderr
    begun = [one.version for one in Trace(run / "trace.bin") if isinstance(one, Began)]
    assert len(begun) == 2 and begun[0] == 0 < begun[1]
    assert max(one.version for one in Trace(run / "trace.bin") if isinstance(one, Hashed)) > begun[1]
    ended = paceline("replay", str(run))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith("hashes: equal to the last bit\n") and not ended.out.startswith("0 ")


def test_a_run_with_a_liar_is_that_without_one(tmp_path: Path, paceline: Any) -> None:
    """Workers that compute the same batches drop out the same units."""
    hashes = []
    for name, attack in (("clean", ()), ("attacked", ("--attack", "gaussian", "--hostile", "1"))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "hurry").touch()
        options = ("--workers", "3", "--servers", "2", "--policy", "draco(faulty=1)", "--epochs", "2")
        ended = finished(train(folder, *options, *attack))
        assert ended.returncode == 0, ended.stderr
        hashes.append([one for one in Trace(folder / "run" / "trace.bin") if isinstance(one, Hashed)])
        ended = paceline("replay", str(folder / "run"))
        assert ended.code == 0 and ended.out.endswith("hashes: equal to the last bit\n")
    assert hashes[0] == hashes[1] and len(hashes[0]) > 2
