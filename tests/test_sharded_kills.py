"""Several servers that are killed, each at the worst instants: all go on from one version, bit for bit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from processes import finished
from recorded import problem_file

from paceline.record.trace import Began, Trace
from paceline.replay.plan import read_plan

pytestmark = [pytest.mark.processes, pytest.mark.soak]

# In every incarnation of the servers one kills itself: which, at a method of its double buffer, before or behind it,
# after how many commits.
KILLS = """
import os, signal
from paceline.launch.environment import take_server_assignment
from paceline.store.double_buffer import DoubleBuffer

def count():
    before = DoubleBuffer.before_update
    def counted(buffer):
        global made
        made += 1
        before(buffer)
    DoubleBuffer.before_update = counted

def kill_at(name, when, commits):
    method = getattr(DoubleBuffer, name)
    def killed(buffer, *arguments):
        due = made >= commits
        if due and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        method(buffer, *arguments)
        if made >= commits and when == "behind":
            os.kill(os.getpid(), signal.SIGKILL)
    setattr(DoubleBuffer, name, killed)

place, made = take_server_assignment(), 0
if place is not None and place.role == "server" and place.incarnation < len(PLAN):
    shard, *kill = PLAN[place.incarnation]
    if shard == place.shard:
        count()
        kill_at(*kill)
"""
Kill: TypeAlias = tuple[int, str, str, int]

NOT_DECIDED = (0, "after_update", "before", 4)  # the others have made the commit
NOT_ANSWERED = (1, "after_update", "behind", 3)
GOING_BACK = (1, "recover", "before", 0)


@pytest.mark.parametrize(
    ("policy", "plan"),
    [
        ("k-async(k=2)", [NOT_DECIDED, GOING_BACK]),
        ("sync", [NOT_ANSWERED]),
        ("k-batch-async(k=3, aggregator=geometric-median)", [NOT_DECIDED]),
        ("downpour(period=3)", [NOT_DECIDED, NOT_ANSWERED]),
        ("easgd(period=3, alpha=0.4)", [NOT_DECIDED, NOT_ANSWERED]),
        ("easgd(period=2, alpha=0.4, order=round-robin, momentum=0.5)", [NOT_ANSWERED]),
        ("async(aggregator=delay-compensated(scale=2.0, momentum=0.95))", [NOT_ANSWERED, NOT_DECIDED]),
        ("gradient-coding(stragglers=1)", [NOT_DECIDED, NOT_ANSWERED]),
    ],
)
def test_no_commit_is_lost_or_made_twice(tmp_path: Path, paceline: Any, policy: str, plan: list[Kill]) -> None:
    problem, run = Path(problem_file(tmp_path)), tmp_path / "run"
    problem.write_text(killed_by(plan) + problem.read_text())
    (tmp_path / "hurry").touch()
    run_options = ["--run", str(run), "--workers", "2", "--servers", "2", "--policy", policy, "--save-every", "10"]
    training = ["--optimizer", "sgd(lr=0.05, momentum=0.9)", "--clip-norm", "2", "--epochs", "3", "--seed", "3"]
    ended = finished(["train", f"{problem}:with_dropout", "--json", *run_options, *training])
    assert ended.returncode == 0, ended.stderr
    assert told_of(ended.stderr) == deaths(plan)
    assert "this worker had" not in ended.stderr, "a version was told that is lost"
    trace = Trace(run / "trace.bin")
    assert sum(record.replaced for record in trace if isinstance(record, Began)) >= len(plan) - (GOING_BACK in plan)
    used = Counter(batch for commit in read_plan(trace).commits for push in commit.pushes for batch in push.batches)
    assert set(used.values()) == {1} and len(used) == 3 * 38, "of 600 samples in batches of 16"
    replayed = paceline("replay", str(run))
    assert (replayed.code, replayed.err) == (0, "")
    assert replayed.out.endswith("hashes: equal to the last bit\n")


def killed_by(plan: Sequence[Kill]) -> str:
    """What a script begins with, to have it so."""
    return f"PLAN = {plan!r}\n{KILLS}"


def deaths(plan: Sequence[Kill]) -> list[str]:
    """What is told of it."""
    names = ["server 1" if shard else "the server" for shard, *_ in plan]
    return [f"{name} was killed by SIGKILL; all servers start anew" for name in names]


def told_of(stderr: str) -> list[str]:
    return re.findall(r"^paceline: (.*)$", stderr, re.MULTILINE)
