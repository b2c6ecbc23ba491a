"""Makes the environments of the processes that a supervisor starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.launch.environment import CODEC, POLICY, SERVICE, SUPERVISOR, TORCHRUN, ServerAssignment, server_variables


@dataclass(frozen=True, kw_only=True)
class ProcessEnvironment:
    """Makes the environments of one run's processes: ``base`` (or ours), torchrun's variables and Paceline's.

    The user's own settings stay: number of threads, how they wait, Gloo's interface, Python's buffering.
    """

    workers: int  # on this host; for a server all expected ones
    port: int | None = None  # of the store of torch.distributed; None if the workers have none
    assignment: ServerAssignment | None = None
    policy: str | None = None
    codec: str | None = None
    per_device: int = 1  # workers that share a device, and so a local rank
    base: Mapping[str, str] | None = None

    def worker(self, rank: int, *, incarnation: int = 0) -> dict[str, str]:
        """The environment of a worker; without a store, it joins a server on another host and gets its rank there."""
        world: dict[str, object] = {
            "LOCAL_RANK": rank // self.per_device,
            "LOCAL_WORLD_SIZE": -(-self.workers // self.per_device),
        }
        if self.port is not None:
            world |= {
                "RANK": rank,
                "WORLD_SIZE": self.workers,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the supervisor's: rank 0 must not open one
            }
        return self._environment(world, self.assignment and self._assignment_of_worker(self.assignment, incarnation))

    def _assignment_of_worker(self, assignment: ServerAssignment, incarnation: int) -> ServerAssignment:
        threads = None if has_users_threads(self._outer) else threads_per_worker(self.workers)
        return replace(assignment, incarnation=incarnation, threads=threads)

    def server(self, *, bind: str | None = None, incarnation: int = 0, shard: int = 0) -> dict[str, str]:
        """The environment of the server, or of one of several; a server has no rank."""
        assert self.assignment is not None
        assignment = replace(
            self.assignment, role="server", bind=bind, incarnation=incarnation, shard=shard, log_fd=None
        )
        return self._environment({"WORLD_SIZE": self.workers}, assignment)

    def _environment(self, world: Mapping[str, object], assignment: ServerAssignment | None) -> dict[str, str]:
        inherited = {name: value for name, value in self._outer.items() if name not in (*TORCHRUN, *SERVICE)}
        defaults = {
            "OMP_NUM_THREADS": str(threads_per_worker(self.workers)),
            "GLOO_SOCKET_IFNAME": _loopback_interface(),
            **brief_spinning(self._outer),
        }
        fixed = {name: str(value) for name, value in world.items()}
        options = {POLICY: self.policy, CODEC: self.codec}
        asked = {name: text for name, text in options.items() if text is not None}
        service = {} if assignment is None else server_variables(assignment)
        return {**defaults, **inherited, **fixed, **asked, **service, SUPERVISOR: str(os.getpid())}

    @property
    def _outer(self) -> Mapping[str, str]:
        return os.environ if self.base is None else self.base


def has_users_threads(environment: Mapping[str, str]) -> bool:
    """Whether the user has set the number of threads there."""
    return any(environment.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))


def threads_per_worker(workers: int) -> int:
    """An equal share of the cores that this process may use, at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // workers)


def brief_spinning(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let waiting OpenMP threads sleep after some microseconds, unless the user has set how they wait.

    libgomp, which torch uses on Linux, spins for milliseconds by default. On a busy machine, spinning threads keep
    the thread that they wait for off its core. libgomp reads its environment when torch is imported.
    """
    set_by_user = any(environment.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    return {} if set_by_user else {"GOMP_SPINCOUNT": "1000"}  # as measured by benchmarks/threads.py


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo0" if "lo0" in names else "lo"
