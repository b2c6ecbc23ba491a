"""The environments that a supervisor gives to its processes: workers, workers of another host's server, the server."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from paceline.launch.environment import POLICY, SERVICE, SUPERVISOR, TORCHRUN, ServerPlace, server_variables


def worker_environment(
    *,
    rank: int,
    workers: int,
    port: int,
    policy: str | None = None,
    place: ServerPlace | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Make the environment of one local worker: ``base`` (or ours), torchrun's variables and our own.

    What the user has set of the number of threads, Gloo's interface and Python's buffering stays.
    """
    world = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the supervisor's: rank 0 must not open one
    }
    return _environment(workers, world, policy, place, base)


def joiner_environment(
    *, local_rank: int, workers: int, policy: str | None, place: ServerPlace, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Make the environment of a local worker of another host's server, which will give it its rank."""
    world = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": workers}
    return _environment(workers, world, policy, place, base)


def server_environment(
    *, workers: int, policy: str | None, place: ServerPlace, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Make the environment of the server of this many workers: it is none of them, and has no rank."""
    return _environment(workers, {"WORLD_SIZE": workers}, policy, place, base)


def _environment(
    workers: int,
    world: Mapping[str, object],
    policy: str | None,
    place: ServerPlace | None,
    base: Mapping[str, str] | None,
) -> dict[str, str]:
    outer = os.environ if base is None else base
    inherited = {name: value for name, value in outer.items() if name not in (*TORCHRUN, *SERVICE)}
    defaults = {
        "OMP_NUM_THREADS": str(threads_per_worker(workers)),
        "GLOO_SOCKET_IFNAME": _loopback_interface(),
        "PYTHONUNBUFFERED": "1",
    }
    fixed = {name: str(value) for name, value in world.items()}
    asked = {} if policy is None else {POLICY: policy}
    service = {} if place is None else server_variables(place)
    return {**defaults, **inherited, **fixed, **asked, **service, SUPERVISOR: str(os.getpid())}


def threads_per_worker(workers: int) -> int:
    """An equal share of the cores that this process may use, at least one."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // workers)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return "lo0" if "lo0" in names else "lo"
