"""Real processes, really killed: the command, resumed, ends with the bits of the run that was left alone."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE, ENVIRONMENT, FRAGILE_MODEL, started, wait_for_checkpoint
from quick import quick
from same_bits import assert_same, metrics_of

from paceline.commands.cli import main
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint

pytestmark = pytest.mark.processes

# Where it is to be killed or interrupted it becomes slow, so that it does not end before.
PROBLEM = f"""
{FRAGILE_MODEL}
import os, time
from dataclasses import replace
from paceline.problems.load import load_problem

steps = 0

def problem():
    digits = load_problem("digits")
    def loss(outputs, targets):
        global steps
        steps += outputs.requires_grad
        if outputs.requires_grad and steps > 60 and "TO_BE_ENDED" in os.environ:
            time.sleep(1.0)
        return digits.loss(outputs, targets)
    return replace(digits, make_model=make_model, loss=loss)
"""
TO_BE_ENDED = {"TO_BE_ENDED": "1"}


def train(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "--json", *arguments])
    assert caught.value.code == 0


def final(run: Path) -> Any:
    (*_, last) = CheckpointFolder(run / "checkpoints").files()
    state = read_checkpoint(last)
    del state["session"]["metrics_bytes"]  # they hold times
    return state, metrics_of(run)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("problem") / "fragile.py"
    file.write_text(PROBLEM)
    schedule = ["--warmup", "gradual", "--warmup-start", "0.1", "--warmup-epochs", "2", "--decay", "cosine"]
    return [str(file), "--epochs", "4", "--batch-size", "32", "--optimizer", "adam(lr=0.003)", *schedule]


@pytest.fixture(scope="module")
def undisturbed(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = tmp_path_factory.mktemp("whole") / "run"
    train(*command, "--save-every", "7", "--run", str(run))
    return final(run)


@pytest.mark.parametrize("kills", quick([1, 3], 1))
def test_a_run_killed_again_and_again_ends_with_the_same_bits(
    kills: int, command: list[str], undisturbed: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    dice = random.Random()
    arguments = [*command, "--save-every", "7", "--run", str(run)]
    for _ in range(kills):
        before = CheckpointFolder(run / "checkpoints").files()
        done = int(before[-1].stem.removeprefix("step-")) if before else -1
        with started(["train", *arguments], **TO_BE_ENDED) as process:
            wait_for_checkpoint(process, run, newer_than=done)
            time.sleep(dice.uniform(0, 0.05))
            process.kill()
            assert process.wait(DEADLINE) == -signal.SIGKILL, "it ended before it was killed"
        arguments = ["--resume", str(run)]
    train(*arguments)
    assert_same(final(run), undisturbed)


@pytest.mark.parametrize("name", quick(["SIGINT", "SIGTERM"], "SIGINT"))
def test_an_interrupted_run_says_how_to_go_on_and_does(
    name: str, command: list[str], undisturbed: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with started(["train", *command, "--save-every", "40", "--run", str(run)], **TO_BE_ENDED) as process:
        assert wait_for_checkpoint(process, run)
        time.sleep(random.Random().uniform(0, 0.05))
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert err.splitlines()[-1] == f"paceline: interrupted; go on with: paceline train --resume {run}"
    assert "Traceback" not in err + out
    train("--resume", str(run), "--save-every", "7")
    assert_same(final(run), undisturbed)


FULL_DISK = """
import subprocess, sys
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", sys.argv[1]], capture_output=True).returncode:
    sys.exit(77)
from pathlib import Path
from paceline.commands.cli import main
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint
run = Path(sys.argv[1]) / "run"
try:
    main(["train", "--json", *sys.argv[2:], "--save-every", "7", "--run", str(run)])
except SystemExit as stop:
    print(stop.code)
files = CheckpointFolder(run / "checkpoints").files()
print(read_checkpoint(files[-1])["session"]["steps"])
print([path.name for path in run.rglob("*.partial")])
subprocess.run(["mount", "-o", "remount,size=64m", sys.argv[1]], check=True)
try:
    main(["train", "--json", "--resume", str(run)])
except SystemExit as stop:
    print(stop.code)
subprocess.run(["cp", "-r", str(run), sys.argv[1] + "-kept"], check=True)
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="needs a mount of its own")
def test_a_run_that_fills_the_disk_stops_clearly_and_goes_on_when_there_is_room(
    command: list[str], undisturbed: Any, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    found = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", FULL_DISK, str(disk), *command],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env=ENVIRONMENT,
    )
    if found.returncode == 77 or "unshare" in found.stderr:
        pytest.skip("mounting is not allowed here")
    assert found.returncode == 0, found.stderr
    code, saved, partial, *_, code_again = found.stdout.splitlines()
    assert (code, partial, code_again) == ("1", "[]", "0"), found.stderr
    assert int(saved) % 7 == 0
    assert found.stderr.count("\n") == 1, found.stderr
    assert "full" in found.stderr or "No space left" in found.stderr
    assert_same(final(disk.with_name("disk-kept")), undisturbed)
