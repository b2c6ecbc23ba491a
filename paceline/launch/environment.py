"""What the environment says: which worker of which world this process is, and what its launcher asked for."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError

_MASTER = ("MASTER_ADDR", "MASTER_PORT")
REPORT_DESCRIPTOR = "PACELINE_REPORT_FD"
_SUPERVISOR = "PACELINE_SUPERVISOR_PID"
_POLICY = "PACELINE_POLICY"


@dataclass(frozen=True, kw_only=True)
class World:
    """A worker's place among all workers: its rank of ``size``, and on its host ``local_rank`` of ``local_size``."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    master_addr: str  # where the store of torch.distributed listens
    master_port: int

    @property
    def init_method(self) -> str:
        """The address for ``torch.distributed.init_process_group``, beside ``rank`` and ``world_size``."""
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


def read_world(environment: Mapping[str, str] | None = None) -> World | None:
    """Read the world that ``paceline run``, ``torchrun``, Slurm's ``srun`` or the like put into the environment.

    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` go together; without ``LOCAL_RANK`` and
    ``LOCAL_WORLD_SIZE`` the worker is taken to be alone on its host, as where each has a container of its own.
    Under ``srun`` only the last two of the four have to be set. Without any launcher there is no world: ``None``.
    """
    found = _Variables(os.environ if environment is None else environment)
    if found.any("RANK", "WORLD_SIZE"):
        return _torch_world(found)
    if found.any("SLURM_PROCID"):
        return _slurm_world(found)
    return None


def read_place() -> tuple[int, int] | None:
    """This process's rank and the number of workers, if a launcher started it."""
    world = read_world()
    return (world.rank, world.size) if world is not None else None


def asked_policy(environment: Mapping[str, str] | None = None) -> str | None:
    """The policy given to ``paceline run --policy``, if one was."""
    return (os.environ if environment is None else environment).get(_POLICY) or None


def take_supervisor() -> tuple[int, int] | None:
    """Take out of the environment the supervisor's process id and the descriptor of the line to it, if any.

    They are this process's alone: its children must not find them.
    """
    values = [os.environ.pop(name, "") for name in (_SUPERVISOR, REPORT_DESCRIPTOR)]
    if not all(value.isdecimal() for value in values):
        return None
    return int(values[0]), int(values[1])


def worker_environment(
    *,
    rank: int,
    workers: int,
    port: int,
    policy: str | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Make the environment of one local worker: ``base`` (or ours), torchrun's variables and our own.

    What the user has set of the number of threads, Gloo's interface and Python's buffering stays.
    """
    inherited = dict(os.environ if base is None else base)
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_worker(workers)),
        "GLOO_SOCKET_IFNAME": _loopback_interface(),
        "PYTHONUNBUFFERED": "1",
    }
    fixed = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the supervisor's: rank 0 must not open one
        _SUPERVISOR: str(os.getpid()),
    }
    asked = {} if policy is None else {_POLICY: policy}
    return {**defaults, **inherited, **fixed, **asked}


def threads_per_worker(workers: int) -> int:
    """An equal share of the cores that this process may use, at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // workers)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo0" if "lo0" in names else "lo"


class _Variables:
    """Environment variables that are read as numbers and complained about by name."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def any(self, *names: str) -> bool:
        return any(self._values.get(name) for name in names)

    def text(self, name: str, needed_for: str) -> str:
        value = self._values.get(name)
        if not value:
            raise UsageError(
                f"{name} is not set but wanted beside {needed_for}. Start workers with 'paceline run' or torchrun, "
                f"or set it; to run alone, unset {needed_for}."
            )
        return value

    def number(self, name: str, needed_for: str, *, least: int = 0, most: int | None = None) -> int:
        value = self.text(name, needed_for)
        number = int(value) if re.fullmatch(r"[0-9]{1,9}", value.strip()) else None
        if number is None or number < least or (most is not None and number > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise UsageError(f"{name} should be a whole number {limits}, found {value!r} in the environment")
        return number

    def master(self, needed_for: str) -> tuple[str, int]:
        return self.text(_MASTER[0], needed_for), self.number(_MASTER[1], needed_for, least=1, most=65535)


def _torch_world(found: _Variables) -> World:
    both = "RANK" if found.any("RANK") else "WORLD_SIZE"
    size = found.number("WORLD_SIZE", both, least=1)
    rank = found.number("RANK", both, most=size - 1)
    local_rank, local_size = 0, 1
    if found.any("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        given = "LOCAL_RANK" if found.any("LOCAL_RANK") else "LOCAL_WORLD_SIZE"
        local_size = found.number("LOCAL_WORLD_SIZE", given, least=1, most=size)
        local_rank = found.number("LOCAL_RANK", given, most=local_size - 1)
    addr, port = found.master("RANK and WORLD_SIZE")
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, master_addr=addr, master_port=port)


def _slurm_world(found: _Variables) -> World | None:
    if not found.any(*_MASTER, "SLURM_STEP_ID"):
        return None  # a batch script or an interactive shell of Slurm: not one of the tasks that srun starts
    size = found.number("SLURM_NTASKS", "SLURM_PROCID", least=1)
    if size == 1 and not found.any(*_MASTER):
        return None
    rank = found.number("SLURM_PROCID", "SLURM_NTASKS", most=size - 1)
    local_size = _slurm_tasks_on_this_node(found, size)
    local_rank = found.number("SLURM_LOCALID", "SLURM_PROCID", most=local_size - 1)
    addr, port = found.master("SLURM_PROCID and SLURM_NTASKS")
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, master_addr=addr, master_port=port)


def _slurm_tasks_on_this_node(found: _Variables, size: int) -> int:
    """Read Slurm's list of tasks per node, such as ``4(x2),3``; without one, all tasks are on this node."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if not found.any(name):
        return size
    text = found.text(name, "SLURM_PROCID")
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if not all(parts) or sum(counts) != size:
        raise UsageError(f"{name} should list {size} tasks like '4(x2),3', found {text!r} in the environment")
    return counts[found.number("SLURM_NODEID", name, most=len(counts) - 1)]
