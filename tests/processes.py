"""Start the command as a process of its own, and end it at a chosen moment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import paceline

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name != "PACELINE_DATA"},
    "PYTHONPATH": str(Path(paceline.__file__).parent.parent),
    "OMP_NUM_THREADS": "1",  # bits depend on the number of threads
}
DEADLINE = 200.0
MARK = "PACELINE_TEST_MARK"

# The model of a problem's file. Dropout and batch normalisation: a step that is taken twice, or by half, shows.
FRAGILE_MODEL = """
from torch import nn

def make_model():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
"""


@contextlib.contextmanager
def started(arguments: Sequence[str], *, mark: str = "", **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Run ``python -m paceline`` with these arguments; it is dead at the end of the block.

    It and all that it starts carry the ``mark`` in their environments, by which ``living`` finds them, and the other
    ``variables``.
    """
    command = [sys.executable, "-m", "paceline", *arguments]
    environment = {**ENVIRONMENT, MARK: mark, **variables}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(arguments: Sequence[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with more environment variables."""
    with started(arguments, **variables) as process:
        out, err = process.communicate(timeout=DEADLINE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path, *, newer_than: int = -1) -> bool:
    """Wait until the run has a checkpoint of a later step; tell whether the process still lives."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and process.poll() is None:
        steps = [int(path.stem.removeprefix("step-")) for path in run.glob("checkpoints/step-*.safetensors")]
        if max(steps, default=-1) > newer_than:
            return True
        time.sleep(0.002)
    return process.poll() is None


def living(mark: str) -> list[int]:
    """The living processes that carry the mark; zombies have no environment any more."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = f"{MARK}={mark}".encode() in path.read_bytes()
        except OSError:
            continue
        if marked:
            found.append(int(path.parent.name))
    return found


def wait_until_gone(mark: str, seconds: float = DEADLINE) -> list[int]:
    """Wait until no process carries the mark; those that still do after so long are given."""
    end = time.monotonic() + seconds
    while (left := living(mark)) and time.monotonic() < end:
        time.sleep(0.01)
    return left
