"""Ranks of ``torch.distributed`` on the backend "paceline" as real processes, forked from one that has torch loaded."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

DEADLINE = 200.0
TESTS = Path(__file__).parent

Program = Callable[..., Any]


def _processes() -> Any:
    context = multiprocessing.get_context("forkserver")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    # The last one takes seconds, and optimizers and functional collectives load it when they are first used.
    context.set_forkserver_preload(["backend_programs", "backend_soak", "torch._dynamo"])
    return context


def join_world(directory: Path, rank: int, size: int, *, backend: str = "paceline", timeout: float = 100.0) -> None:
    """Call ``init_process_group``, with a file as the store."""
    import torch.distributed as dist

    store = dist.FileStore(str(directory / "store"), size)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


def _be(program: Program, rank: int, size: int, directory: Path, arguments: tuple[Any, ...]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = {"result": program(directory, rank, size, *arguments)}
    except BaseException:
        result = {"error": traceback.format_exc()}
    (directory / f"{rank}.json").write_text(json.dumps(result))


@contextlib.contextmanager
def started(program: Program, size: int, directory: Path, *arguments: Any) -> Iterator[list[BaseProcess]]:
    """Run ``program(directory, rank, size, ...)`` on every rank; the processes are dead at the end of the block."""
    context = _processes()
    processes = [
        context.Process(target=_be, args=(program, rank, size, directory, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def result_of(process: BaseProcess, rank: int, directory: Path, deadline: float = DEADLINE) -> Any:
    """Wait for a rank, and give what it returned."""
    process.join(deadline)
    assert process.exitcode is not None, f"rank {rank} is still running"
    assert process.exitcode == 0, f"rank {rank} ended with {process.exitcode}"
    outcome = json.loads((directory / f"{rank}.json").read_text())
    assert "error" not in outcome, outcome["error"]
    return outcome["result"]


def run_processes(
    program: Program, size: int, directory: Path, *arguments: Any, deadline: float = DEADLINE
) -> list[Any]:
    """Run a program to its end on every rank, and give the results."""
    with started(program, size, directory, *arguments) as processes:
        return [result_of(process, rank, directory, deadline) for rank, process in enumerate(processes)]


def wait_for(file: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not file.exists():
        assert time.monotonic() < end, f"no {file.name}"
        time.sleep(0.001)
