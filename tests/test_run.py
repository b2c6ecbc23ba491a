"""A run directory has one owner at a time, and tells why when it cannot be used."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import PacelineError, RunInUseError, UsageError
from paceline.record.metrics import read_metrics
from paceline.record.run import Run

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent), "OMP_NUM_THREADS": "1"}


def test_a_run_in_use_is_refused_and_free_again_when_closed(tmp_path: Path) -> None:
    first = Run(tmp_path)
    with pytest.raises(RunInUseError, match=f"process {os.getpid()}") as caught:
        Run(tmp_path, resume=True)
    assert str(tmp_path) in str(caught.value)
    first.close()
    Run(tmp_path, resume=True).close()


def test_an_owner_that_was_refused_takes_nothing_from_the_other(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.open_metrics().write("step", loss=1.0)
    for _ in range(2):
        with pytest.raises(RunInUseError):
            Run(tmp_path, resume=True)
    run.close()
    assert [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1.0]


OWNER = """
import os, sys, time
from paceline.record.run import Run
run = Run(sys.argv[1])
run.open_metrics()
child = os.fork() if sys.argv[2] == "fork" else -1
if child != 0:
    print(child, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def owner(run: Path, kind: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that owns the run; given with the pid of its forked child, or -1."""
    command = [sys.executable, "-c", OWNER, str(run), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        child = -1
        try:
            assert process.stdout is not None
            child = int(process.stdout.readline())
            yield process, child
        finally:
            process.kill()
            if child > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


@pytest.mark.processes
def test_a_killed_owner_frees_its_run_though_a_child_of_it_lives(tmp_path: Path) -> None:
    with owner(tmp_path / "run", "fork") as (process, child):
        with pytest.raises(RunInUseError, match=f"process {process.pid} "):
            Run(tmp_path / "run", resume=True)
        process.kill()
        process.wait(timeout=10)
        os.kill(child, 0)  # it lives
        Run(tmp_path / "run", resume=True).close()


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError, match="cannot make the run directory") as caught:
            Run(path)
        assert str(path) in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory that even root cannot write to")
@pytest.mark.parametrize("path", ["/proc/self", "/proc/self/run"])
def test_an_unwritable_directory(path: str) -> None:
    with pytest.raises(UsageError, match=path):
        Run(path)


def test_a_directory_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(UsageError, match="No space left"):
        Run(tmp_path / "run")


def test_a_directory_in_place_of_the_lock(tmp_path: Path) -> None:
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(PacelineError, match=r"run\.lock"):
        Run(tmp_path)


@pytest.mark.parametrize("left", ["metrics.jsonl", "checkpoints/step-0000000001.safetensors"])
def test_a_directory_with_a_run_in_it_is_only_resumed(left: str, tmp_path: Path) -> None:
    file = tmp_path / left
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(UsageError, match="already holds a run"):
        Run(tmp_path)
    assert file.read_text() == "mine"
    Run(tmp_path, resume=True).close()  # the refusal left no lock


def test_a_directory_with_other_things_may_become_a_run(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    Run(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_configuration_is_json(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.write_config({"lr": 0.1, "path": Path("x"), "nested": {"a": [1, None]}})
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "lr": 0.1,
        "path": "x",
        "nested": {"a": [1, None]},
    }
    run.close()
    assert not list(tmp_path.glob(".*"))
