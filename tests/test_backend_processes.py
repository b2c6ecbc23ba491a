"""The backend "paceline" in real processes: killed ranks, slow ones, and that nothing stays behind."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

import backend_programs as programs
from backend_processes import DEADLINE, Program, result_of, run_processes, started, wait_for
from quick import quick

pytestmark = pytest.mark.processes

NOTICE_SECONDS = 2.0


def kill_one(program: Program, directory: Path, seed: int) -> None:
    """Kill a rank at a random moment; the others must say so in time."""
    directory.mkdir()
    draw = random.Random(seed)
    size = 3
    victim = draw.randrange(size)
    with started(program, size, directory) as processes:
        for rank in range(size):
            wait_for(directory / f"ready {rank}")
        time.sleep(draw.uniform(0, 0.1))
        processes[victim].kill()
        killed = time.monotonic()
        assert processes[victim].pid is not None
        for rank, process in enumerate(processes):
            if rank == victim:
                continue
            kind, message, failed = result_of(process, rank, directory)
            assert kind in ("CommError", "RuntimeError"), (kind, message)
            named = rf"rank {victim} \(process {processes[victim].pid}\) ended or was killed while others were in "
            assert re.search(named + r"\w+(\(.*\))?, collective \d+ of group '0'", message), message
            assert failed - killed < NOTICE_SECONDS


@pytest.mark.parametrize("seed", quick(range(10), 0))
def test_a_killed_rank_is_named_in_time(seed: int, tmp_path: Path) -> None:
    kill_one(programs.mixed_until_failure, tmp_path / "ranks", seed)


@pytest.mark.parametrize("seed", quick(range(8), 0))
def test_a_killed_rank_fails_the_others_under_ddp(seed: int, tmp_path: Path) -> None:
    """PyTorch's own, unmodified: the failed future must raise there, and not crash."""
    kill_one(programs.ddp_until_failure, tmp_path / "ranks", seed)


def test_a_slow_rank_is_waited_for_and_then_named(tmp_path: Path) -> None:
    first, late, third = run_processes(programs.waits_for_a_slow_rank, 3, tmp_path)
    assert late == ["", ""]
    for now, later in first, third:
        for message in now, later:
            late = (
                r"timed out: it waited the whole timeout of 3 s for rank 1 \(process \d+\) in all_reduce\(4 float32, "
            )
            assert re.search(late, message)


def test_a_stopped_rank_is_waited_for(tmp_path: Path) -> None:
    with started(programs.mixed_until_failure, 2, tmp_path) as processes:
        for rank in range(2):
            wait_for(tmp_path / f"ready {rank}")
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(processes[1].pid, signal.SIGCONT)
        time.sleep(0.2)
        assert all(process.is_alive() for process in processes)


def shared_memory() -> set[str]:
    return {entry.name for entry in Path("/dev/shm").iterdir()}


def test_nothing_stays_behind(tmp_path: Path) -> None:
    before = shared_memory()
    for life in range(50):
        (tmp_path / str(life)).mkdir()
    for counts in run_processes(programs.many_lives, 2, tmp_path, 50):
        descriptors, threads, mappings = zip(*counts, strict=True)
        assert set(descriptors[1:]) == {descriptors[0]} and set(mappings) == {0}
        assert min(threads[-5:]) == 1  # the system may show one for a moment after its end
    kill_one(programs.mixed_until_failure, tmp_path / "killed", 99)
    left, end = shared_memory() - before, time.monotonic() + DEADLINE
    while left & shared_memory() and time.monotonic() < end:
        time.sleep(0.1)  # what other processes have made meanwhile goes when they go
    assert not left & shared_memory()
