"""Replays of users' scripts: the same workers again, in the recorded order, to the same bits."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE, ENVIRONMENT, finished

from paceline.record.trace import Asked, Began, Cancelled, Given, Joined, Late, Left, Pushed, Record
from paceline.replay.reads import Read, read_versions

SCRIPT = """
import os, random, sys, time, torch, paceline
from torch import nn
torch.manual_seed(0)
inputs = torch.randn(160, 8)
data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
cancelled, loss, told = 0, torch.zeros(()), torch.zeros(())
with paceline.join(model, optimizer, scheduler=scheduler, run="run", save_every=10) as session:
    for epoch in session.epochs(2):
        for batch, targets in session.batches(data, batch_size=8):
            with session.step() as step:
                loss = nn.functional.cross_entropy(model(batch), targets) * random.random()
                if "clock" in sys.argv and session.steps == 7:
                    loss = loss * (time.time() % 7)
                step.record(loss=loss)
                loss.backward()
            cancelled += step.cancelled
            if os.environ.get("DIE") and session.rank == 1 and session.steps > 5 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), 9)
        told = session.mean(epoch + float(loss.detach()))
    print(session.rank, session.steps, cancelled, float(told))
"""


def record(policy: str, *arguments: str, workers: int = 2, servers: int = 1, **variables: str) -> list[str]:
    """Run the script on workers, and give what they print."""
    Path("script.py").write_text(SCRIPT)
    options = ["--workers", str(workers), "--respawn", "--policy", policy, "--delay", "exp(1)", "--delay-unit", "2ms"]
    options += ["--servers", str(servers)]
    ran = finished(["run", *options, "script.py", *arguments], **variables)
    assert ran.returncode == 0, ran.stderr
    return sorted(ran.stdout.splitlines())


@pytest.mark.processes
@pytest.mark.soak
def test_a_script_replays_to_the_last_bit_and_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script prints is the same too: cancelled steps are cancelled again, and means are the same."""
    monkeypatch.chdir(tmp_path)
    printed = record("k-batch-sync(k=2)", DIE="1")
    monkeypatch.chdir(tmp_path.parent)
    again = finished(["replay", str(tmp_path / "run")])
    assert again.returncode == 0, again.stderr
    *lines, verdict = sorted(again.stdout.splitlines(), key=lambda line: "equal" in line)
    assert sorted(lines) == printed
    assert "40 pushes" in verdict and verdict.endswith("equal to the last bit")
    assert "worker 1 was killed" in again.stderr
    looked = subprocess.run(
        [sys.executable, "-m", "paceline", "replay", str(tmp_path / "run"), "--until", "5", "--shell"],
        input="print('seen', version, [push.worker for push in pushes], list(pushes[0].gradients)[0])\n",
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=DEADLINE,
    )
    assert looked.returncode == 0, looked.stderr
    assert "seen 5" in looked.stdout and "0.weight" in looked.stdout
    assert "version 5 has the hash" in looked.stdout


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize(("order", "servers"), [("first-come", 1), ("round-robin", 2)])
def test_workers_with_parameters_of_their_own_replay_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, servers: int
) -> None:
    """A killed worker's are gone, and its replacement begins with the server's."""
    monkeypatch.chdir(tmp_path)
    policy = f"easgd(period=3, alpha=0.4, order={order}, momentum=0.5)"
    printed = record(policy, servers=servers, DIE="1")
    again = finished(["replay", str(tmp_path / "run")])
    assert again.returncode == 0, again.stderr
    *lines, verdict = sorted(again.stdout.splitlines(), key=lambda line: "equal" in line)
    assert sorted(lines) == printed and verdict.endswith("equal to the last bit")
    assert "worker 1 was killed" in again.stderr


# Worker 1 comes after version 5; in the replay when the shell is open, and then it is to end without a word.
IMPATIENT = """
import atexit, os, time, torch, paceline
from torch import nn

if os.environ.get("RANK") == "1":
    while not os.path.exists(os.environ["COME_FOR"]):
        time.sleep(0.01)
    atexit.register(lambda: open("gone from " + os.environ["COME_FOR"], "w").close())
torch.manual_seed(0)
model = nn.Linear(4, 4)
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.01), run="run", seed=0) as session:
    for epoch in session.epochs(1):
        data = torch.utils.data.TensorDataset(torch.ones(8, 4))
        for number, (batch,) in enumerate(session.batches(data, batch_size=1)):
            with session.step():
                model(batch).square().mean().backward()
            if number == 6:
                open("far", "w").close()
"""
IMPATIENT_COMMAND = """
from paceline.__main__ import main
from paceline.launch import service
service._TIME_TO_FINISH = 0.5
main()
"""


@pytest.mark.soak
@pytest.mark.processes
def test_a_shell_may_be_open_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are answered meanwhile, and the server may take longer than any other does after the last of them."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(IMPATIENT)
    recorded = finished(["run", "--workers", "2", "--policy", "async", "script.py"], COME_FOR="far")
    assert recorded.returncode == 0, recorded.stderr
    command = [sys.executable, "-c", IMPATIENT_COMMAND, "replay", "run", "--until", "5", "--shell"]
    pipes: dict[str, Any] = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    with subprocess.Popen(command, text=True, env={**ENVIRONMENT, "COME_FOR": "open"}, **pipes) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and not line.startswith("version 5:"):
            pass
        Path("open").touch()
        end = time.monotonic() + DEADLINE / 4  # of thinking; a worker that is not answered takes longer to give up
        while not Path("gone from open").exists():
            assert time.monotonic() < end, "worker 1 waits for an answer"
            time.sleep(0.01)
        time.sleep(1.5)
        out, err = process.communicate("print('seen', version)\n", timeout=DEADLINE)
    assert process.returncode == 0, err
    assert err == ""
    assert "seen 5" in out and "version 5 has the hash" in out


@pytest.mark.soak
@pytest.mark.processes
def test_a_script_that_depends_on_the_time_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record("sync", "clock", workers=1)
    again = finished(["replay", "run", "--json"])
    assert again.returncode == 1
    assert '"equal": false' in again.stdout and ", on version 7: loss" in again.stdout


def test_two_pushes_may_both_come_too_late() -> None:
    """The third step was given before the first push came; but its worker heard of it behind the second."""
    told: list[Record] = [
        Began(0),
        Joined(0, 0, 0.0),
        *(record for step in range(3) for record in (Given(0, step, step, True, 0, 0), Cancelled(0, step))),
        Late(0, 0, 1),
        Late(0, 1, 2),
    ]
    assert read_versions(told) == {2: Read(version=1), 4: Read(version=2, pushes=1), 6: Read(doomed=True, pushes=2)}


def test_what_became_of_steps() -> None:
    """A step may be read later than it was given, be cancelled, pushed too late, given up, or die with its worker."""
    told: list[Record] = [
        Began(0),
        Joined(0, 0, 0.0),
        Asked(0, 1, 0),
        Given(0, 0, 0, True, 0, 0),  # 3: read at version 2
        Pushed(0, 0, 2, 8, 0.0, 0, 0.0),
        Given(0, 1, 2, True, 0, 1),  # 5: pushed too late
        Cancelled(0, 1),
        Given(0, 2, 3, True, 0, 1),  # 7: not to be told before that push, which is the second
        Late(0, 1, 2),
        Cancelled(0, 2),
        Given(0, 3, 4, True, 0, 2),  # 10: given up, by asking anew
        Asked(0, 0, 5),
        Given(0, 4, 5, True, 0, 3),  # 12: dies
        Left(0, True, 0.0),
        Joined(0, 1, 0.0),
        Given(0, 5, 6, True, 0, 4),  # 15: has it when it leaves
        Left(0, False, 0.0, 7),
    ]
    assert read_versions(told) == {
        3: Read(version=2),
        5: Read(version=2, pushes=1),
        7: Read(doomed=True, pushes=2),
        10: Read(version=5, pushes=2),
        12: Read(lost=True, pushes=2),
        15: Read(version=7),
    }
