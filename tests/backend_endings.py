"""Run by a test: fork two ranks for every way to end without ``destroy_process_group``, and print how they ended.

Rank 0 comes to the end of the interpreter with something under way; rank 1 outlives it, and does not join in.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend_processes import join_world
from torch import Tensor

import paceline.collectives.backend

DEADLINE = 100.0

kept: list[Any] = []


def thread(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()


def waiting_threads(tensor: Tensor) -> None:
    thread(lambda: dist.recv(tensor, 1))
    thread(lambda: dist.all_reduce(tensor.clone()))
    thread(lambda: dist.barrier())
    time.sleep(0.2)


def future(tensor: Tensor) -> Any:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


def receive(tensor: Tensor, tag: int = 0) -> Any:
    return dist.irecv(tensor, 1, tag=tag)


def allocate() -> None:
    world: Any = dist.group.WORLD
    kept.append(world.allocate(1000, torch.float32))


ENDINGS: dict[str, Callable[[Tensor], object]] = {
    "a collective": lambda tensor: kept.append(dist.all_reduce(tensor, async_op=True)),
    "a forgotten collective": lambda tensor: dist.all_reduce(tensor, async_op=True),
    "a callback": lambda tensor: future(tensor).then(lambda done: done.value()[0].sum()),
    "receives": lambda tensor: kept.extend(receive(tensor, tag) for tag in range(3)),
    "futures": lambda tensor: kept.extend([future(tensor), receive(tensor).get_future()]),
    "a send": lambda tensor: kept.append(dist.isend(tensor, 1)),
    "threads": waiting_threads,
    "memory": lambda tensor: allocate(),
    "nothing, by sys.exit": lambda tensor: sys.exit(0),
}


def be(rank: int, name: str, directory: Path, others: list[int]) -> None:
    join_world(directory, rank, 2)
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor)
    if rank == 0:
        ENDINGS[name](tensor)
        return
    if name == "memory":
        allocate()
    while any(Path("/proc", str(other)).exists() for other in others):
        time.sleep(0.005)
    os._exit(0)  # only the ending of rank 0 is looked at, and an interpreter takes long to end


def status_of(child: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -999


def fork_ranks(name: str, directory: Path) -> bool:
    """Whether this is the parent, which has seen the ranks end; a rank comes back to end by itself."""
    directory.mkdir()
    children: list[int] = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            be(rank, name, directory, children)
            return False
        children.append(child)
    deadline = time.monotonic() + DEADLINE
    print(name, [status_of(child, deadline) for child in children], flush=True)
    return True


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert paceline.collectives.backend is not None
    for number, name in enumerate(sys.argv[2:]):
        if not fork_ranks(name, Path(sys.argv[1]) / str(number)):
            break
