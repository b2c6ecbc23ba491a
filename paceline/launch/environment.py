"""Reads the environment: this process's rank, the number of workers, and the launcher's options."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from paceline.errors import UsageError

_MASTER = ("MASTER_ADDR", "MASTER_PORT")
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *_MASTER, "TORCHELASTIC_USE_AGENT_STORE")
REPORT_DESCRIPTOR = "PACELINE_REPORT_FD"
SUPERVISOR = "PACELINE_SUPERVISOR_PID"
POLICY = "PACELINE_POLICY"
CODEC = "PACELINE_CODEC"
PROBE = "PACELINE_PROBE"
_SERVER = "PACELINE_SERVER"
TOKEN = "PACELINE_TOKEN"
_ROLE = "PACELINE_ROLE"
_MEMORY_DESCRIPTOR = "PACELINE_MEMORY_FD"
_INCARNATION = "PACELINE_INCARNATION"
_DELAY = "PACELINE_DELAY"
_BIND = "PACELINE_BIND"
_TRUSTED = "PACELINE_TRUSTED"
_REPLAY = "PACELINE_REPLAY"
_SHARD = "PACELINE_SHARD"
_THREADS = "PACELINE_THREADS"
_LOG_DESCRIPTOR = "PACELINE_LOG_FD"
SERVICE = (
    _SERVER,
    TOKEN,
    _ROLE,
    _MEMORY_DESCRIPTOR,
    _INCARNATION,
    _DELAY,
    _BIND,
    _TRUSTED,
    _REPLAY,
    _SHARD,
    _THREADS,
    _LOG_DESCRIPTOR,
)


@dataclass(frozen=True, kw_only=True)
class World:
    """A worker's rank among ``size`` workers, and its ``local_rank`` among the ``local_size`` of its host."""

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


@dataclass(frozen=True, kw_only=True)
class ReplayOrder:
    """The trace that a server replays, or the workers of a run without one, and how far."""

    trace: str  # the path of the file
    until: int | None = None  # the version to stop at
    shell: tuple[int, int] | None = None  # open a Python shell there, on these two descriptors
    lives: tuple[int, ...] = ()  # how many processes each rank had
    scratch: str | None = None  # if the workers replay it themselves: the run's directory during the replay


@dataclass(frozen=True, kw_only=True)
class ServerAssignment:
    """A process's role under a parameter server, and what it needs to connect to the server or to be it.

    Every worker that ``paceline run`` starts has one, even if no server is needed.
    """

    address: str  # the server binds it and workers connect to it: ipc://@name or tcp://host:port
    token: str  # in hexadecimal digits; every process that has it may join
    role: Literal["worker", "server"] = "worker"
    workers: int | None = None  # expected from the start; None under a server on another host
    memory_fd: int | None = None  # memory shared by the server and the workers of its host; None on other hosts
    incarnation: int = 0  # the number of earlier processes of this rank
    delay: tuple[str, float] | None = None  # compute time to inject: its text, and the length of its unit in seconds
    bind: str | None = None  # for the server: host:port for workers of other hosts; port 0 is any
    trusted: bool = False  # whether nothing is encrypted between hosts
    replay: ReplayOrder | None = None  # replay a recorded run: the server does it, or workers without one
    shard_fds: tuple[int, ...] = ()  # the shared memory of each further server
    shard: int = 0  # for a server: its number among the servers
    threads: int | None = None  # for a worker: those of torch that the launcher chose; None if the user set them
    log_fd: int | None = None  # for a worker: the log from which groups of workers follow (``roster.RunLog``)

    @property
    def joining(self) -> bool:
        """Whether this is a worker that joins a server over TCP."""
        return self.role == "worker" and self.address.startswith("tcp://")

    def shard_address(self, shard: int) -> str:
        """The address of a further server (1 and up) on this host."""
        return f"{self.address}-{shard}"

    def described(self) -> dict[str, Any]:
        """What ``config.json`` tells of how the run was started, beside its policy, codec and workers."""
        text, unit = self.delay or (None, None)
        script = launched_command()
        return {
            "script": None if script[:2] == ["-m", "paceline"] else script,  # else its options are in "train"
            "servers": 1 + len(self.shard_fds),
            "delay": text,
            "delay_unit": None if unit is None else f"{1000 * unit:.9g}ms",
        }

    def shard_bind(self, shard: int) -> str | None:
        """The host:port of a further server, for workers of other hosts; the ports are consecutive."""
        if self.bind is None:
            return None
        host, _, port = self.bind.rpartition(":")
        return f"{host}:{int(port) + shard if int(port) else 0}"


_assignment: ServerAssignment | None = None  # as taken from the environment


def read_world(environment: Mapping[str, str] | None = None) -> World | None:
    """Read the world that ``paceline run``, ``torchrun``, Slurm's ``srun`` or the like put into the environment.

    ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` go together. Without ``LOCAL_RANK`` and
    ``LOCAL_WORLD_SIZE`` the worker counts as the only one of its host. Under ``srun`` only the two ``MASTER_``
    variables have to be set. The result is ``None`` without a launcher, for a server, and for a worker whose rank
    comes from the server.
    """
    variables = _Variables(os.environ if environment is None else environment)
    at_server = variables.any(_SERVER) or (environment is None and _assignment is not None)
    if at_server and not variables.any("RANK"):
        return None
    if variables.any("RANK", "WORLD_SIZE"):
        return _torch_world(variables)
    if variables.any("SLURM_PROCID"):
        return _slurm_world(variables)
    return None


def read_rank_and_size() -> tuple[int, int] | None:
    """This process's rank and the number of workers, if a launcher started it."""
    world = read_world()
    return (world.rank, world.size) if world is not None else None


def asked_policy(environment: Mapping[str, str] | None = None) -> str | None:
    """The policy given by ``paceline run --policy``, if any."""
    return (os.environ if environment is None else environment).get(POLICY) or None


def asked_codec() -> str | None:
    """The codec given by ``paceline run --codec``, if any."""
    return os.environ.get(CODEC) or None


def asked_probe() -> float | None:
    """For how many seconds this process is to measure its throughput, if it is started for that alone."""
    return float(os.environ[PROBE]) if os.environ.get(PROBE) else None


def asked_token() -> str | None:
    """The join token that the user put into the environment, if any."""
    return os.environ.get(TOKEN) or None


def launched_command() -> list[str]:
    """The script or ``-m module`` that a supervisor started in this process, with its arguments; else empty."""
    ours = ["-m", "paceline.launch.worker"]
    return sys.orig_argv[3:] if sys.orig_argv[1:3] == ours else []


def take_supervisor() -> tuple[int, int] | None:
    """Take the supervisor's process id and the descriptor of the report pipe out of the environment, if set.

    Children of this process must not find them.
    """
    values = [os.environ.pop(name, "") for name in (SUPERVISOR, REPORT_DESCRIPTOR)]
    if not all(value.isdecimal() for value in values):
        return None
    return int(values[0]), int(values[1])


def take_server_assignment() -> ServerAssignment | None:
    """Take this process's assignment out of the environment; later calls return the same one.

    Children of this process find neither the token nor the memory.
    """
    global _assignment
    if os.environ.get(_SERVER):
        _assignment = _read_server_assignment(os.environ)
        for name in SERVICE:
            os.environ.pop(name, None)
    return _assignment


def _read_server_assignment(environment: Mapping[str, str]) -> ServerAssignment:
    variables = _Variables(environment)
    role = variables.text(_ROLE, _SERVER) if variables.any(_ROLE) else "worker"
    if role not in ("worker", "server"):
        raise UsageError(f"{_ROLE} should be server, or not set, found {role!r} in the environment")
    memory, *others = _own_descriptors(variables, _MEMORY_DESCRIPTOR)
    log, *_ = _own_descriptors(variables, _LOG_DESCRIPTOR)
    return ServerAssignment(
        address=variables.text(_SERVER, _SERVER),
        token=variables.text(TOKEN, _SERVER),
        role="server" if role == "server" else "worker",
        workers=variables.number("WORLD_SIZE", _SERVER, least=1) if variables.any("WORLD_SIZE") else None,
        memory_fd=memory,
        incarnation=variables.number(_INCARNATION, _SERVER) if variables.any(_INCARNATION) else 0,
        delay=_read_delay(variables.text(_DELAY, _SERVER)) if variables.any(_DELAY) else None,
        bind=variables.text(_BIND, _SERVER) if variables.any(_BIND) else None,
        trusted=variables.any(_TRUSTED) and variables.text(_TRUSTED, _SERVER) == "1",
        replay=_read_replay(variables.text(_REPLAY, _SERVER)) if variables.any(_REPLAY) else None,
        shard_fds=tuple(number for number in others if number is not None),
        shard=variables.number(_SHARD, _SERVER) if variables.any(_SHARD) else 0,
        threads=variables.number(_THREADS, _SERVER) if variables.any(_THREADS) else None,
        log_fd=log,
    )


def _own_descriptors(variables: _Variables, name: str) -> list[int | None]:
    """The inherited descriptors that a variable names, no longer inheritable; ``[None]`` without any."""
    if not variables.any(name):
        return [None]
    descriptors = variables.numbers(name, _SERVER)
    with contextlib.suppress(OSError):  # the variable was inherited, and the descriptors are closed
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return [*descriptors]
    return [None]


def _read_delay(text: str) -> tuple[str, float]:
    try:
        fields = json.loads(text)
        return str(fields["text"]), float(fields["unit"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f'{_DELAY} should be like {{"text": "1+exp(0.5)", "unit": 0.04}}, found {text!r} in the environment'
        ) from error


def _read_replay(text: str) -> ReplayOrder:
    fields = json.loads(text)
    return ReplayOrder(
        trace=fields["trace"],
        until=fields["until"],
        shell=tuple(fields["shell"]) if fields["shell"] else None,
        lives=tuple(fields["lives"]),
        scratch=fields["scratch"],
    )


def server_variables(assignment: ServerAssignment) -> dict[str, str]:
    """The environment variables that hold this assignment, without the number of workers."""
    values = {
        _SERVER: assignment.address,
        TOKEN: assignment.token,
        _ROLE: "server" if assignment.role == "server" else None,
        _MEMORY_DESCRIPTOR: None
        if assignment.memory_fd is None
        else ",".join(map(str, (assignment.memory_fd, *assignment.shard_fds))),
        _INCARNATION: assignment.incarnation,
        _DELAY: assignment.delay and json.dumps({"text": assignment.delay[0], "unit": assignment.delay[1]}),
        _BIND: assignment.bind,
        _TRUSTED: "1" if assignment.trusted else None,
        _REPLAY: assignment.replay and json.dumps(asdict(assignment.replay)),
        _SHARD: assignment.shard or None,
        _THREADS: assignment.threads,
        _LOG_DESCRIPTOR: assignment.log_fd,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


class _Variables:
    """Reads environment variables as text or numbers; errors name the variable."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def any(self, *names: str) -> bool:
        return any(self._values.get(name) for name in names)

    def text(self, name: str, needed_for: str) -> str:
        value = self._values.get(name)
        if not value:
            raise UsageError(
                f"{name} is not set, but {needed_for} needs it. Start workers with 'paceline run' or torchrun, "
                f"or set it; to run alone, unset {needed_for}."
            )
        return value

    def numbers(self, name: str, needed_for: str) -> list[int]:
        """Read several numbers, separated by commas."""
        return [
            _Variables({name: part or "nothing"}).number(name, needed_for)
            for part in self.text(name, needed_for).split(",")
        ]

    def number(self, name: str, needed_for: str, *, least: int = 0, most: int | None = None) -> int:
        value = self.text(name, needed_for)
        number = int(value) if re.fullmatch(r"[0-9]{1,9}", value.strip()) else None
        if number is None or number < least or (most is not None and number > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise UsageError(f"{name} should be a whole number {limits}, found {value!r} in the environment")
        return number

    def master(self, needed_for: str) -> tuple[str, int]:
        return self.text(_MASTER[0], needed_for), self.number(_MASTER[1], needed_for, least=1, most=65535)


def _torch_world(variables: _Variables) -> World:
    both = "RANK" if variables.any("RANK") else "WORLD_SIZE"
    size = variables.number("WORLD_SIZE", both, least=1)
    rank = variables.number("RANK", both, most=size - 1)
    local_rank, local_size = 0, 1
    if variables.any("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        given = "LOCAL_RANK" if variables.any("LOCAL_RANK") else "LOCAL_WORLD_SIZE"
        local_size = variables.number("LOCAL_WORLD_SIZE", given, least=1, most=size)
        local_rank = variables.number("LOCAL_RANK", given, most=local_size - 1)
    addr, port = variables.master("RANK and WORLD_SIZE")
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, master_addr=addr, master_port=port)


def _slurm_world(variables: _Variables) -> World | None:
    if not variables.any(*_MASTER, "SLURM_STEP_ID"):
        return None  # a batch script or an interactive shell of Slurm, not a task of srun
    size = variables.number("SLURM_NTASKS", "SLURM_PROCID", least=1)
    if size == 1 and not variables.any(*_MASTER):
        return None
    rank = variables.number("SLURM_PROCID", "SLURM_NTASKS", most=size - 1)
    local_size = _slurm_tasks_on_this_node(variables, size)
    local_rank = variables.number("SLURM_LOCALID", "SLURM_PROCID", most=local_size - 1)
    addr, port = variables.master("SLURM_PROCID and SLURM_NTASKS")
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size, master_addr=addr, master_port=port)


def _slurm_tasks_on_this_node(variables: _Variables, size: int) -> int:
    """Read Slurm's list of tasks per node, such as ``4(x2),3``; without one, all tasks are on this node."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if not variables.any(name):
        return size
    text = variables.text(name, "SLURM_PROCID")
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    counts = [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
    if not all(parts) or sum(counts) != size:
        raise UsageError(f"{name} should list {size} tasks like '4(x2),3', found {text!r} in the environment")
    return counts[variables.number("SLURM_NODEID", name, most=len(counts) - 1)]
