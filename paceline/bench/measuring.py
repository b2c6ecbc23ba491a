"""Code shared by ``paceline bench`` and the scripts in ``benchmarks/``: arguments, workers, results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.workloads import WORKLOADS
from paceline.launch.supervisor import supervise
from paceline.peers.group import leave_default_group, make_default_group

Row = dict[str, Any]


def arguments_of(document: str, models: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the arguments that all benchmarks have."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(WORKLOADS), default=list(models), metavar="MODEL")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # this process is a worker
    return parser


def run_workers(count: int) -> list[Row]:
    """Run this script, with its own arguments, on local workers; return the rows of worker 0."""
    with result_file() as file:
        code = supervise([*sys.argv, "--worker", str(file)], workers=count)
        if code != 0:
            sys.exit(code)
        return read_rows(file)


@contextlib.contextmanager
def result_file() -> Iterator[Path]:
    """A temporary file for the rows of worker 0."""
    with tempfile.TemporaryDirectory(prefix="paceline-benchmark-") as directory:
        yield Path(directory) / "rows.json"


def read_rows(file: Path) -> list[Row]:
    rows: list[Row] = json.loads(file.read_text())
    return rows


def be_worker(measure: Callable[[], list[Row]], file: str | Path, backend: str = "gloo") -> None:
    """Run one of the workers: measure with the others; worker 0 writes the rows."""
    torch.set_num_threads(1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Gloo prints to stdout, which is for results
    make_default_group(backend, timeout=timedelta(minutes=5))
    rows = measure()
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(rows))
    dist.barrier()
    leave_default_group()


def median_seconds(step: Callable[[int], None], steps: int) -> float:
    """Make ``steps`` steps, each called with its number, and return the median of their times."""
    seconds = []
    for number in range(steps):
        start = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median of the ratios of times of the same round."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))
