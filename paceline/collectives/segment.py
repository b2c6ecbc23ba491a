"""Connects the ranks of a group on one host: rank 0 makes an anonymous memory file and sends it to the others.

Rank 0 listens on an abstract Unix socket, whose name the others read from the store. Each rank sends a descriptor of
its process (pidfd), by which the others notice its death. Rank 0 sends the file and all these descriptors to each.
Nothing has a name in any file system, so nothing is left behind, however the ranks end.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from paceline.errors import CommError, UsageError
from paceline.native import _core

# The kernel refuses more in one message.
_DESCRIPTORS_PER_MESSAGE = 200
_HELLO_BYTES = 256
_LONGEST = 1e9  # seconds, 30 years; sockets and stores refuse much longer timeouts
_LOOK = 0.1  # seconds between two calls of a watch
_SHORT_LOOK = 0.002  # the same, where a look is cheap
_TIME_TO_START_AGAIN = 60.0  # seconds for rank 0 to come after another one, if all were started again


class Store(Protocol):
    """The used part of a ``torch.distributed.Store``; ``wait`` raises a ``RuntimeError`` on a timeout."""

    def set(self, key: str, value: str, /) -> object: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...


@dataclass(frozen=True)
class Meeting:
    """A rank's view of the group: its file, one process descriptor per rank, and the cores they share."""

    file: int
    life: list[int]
    cores: int


def host_identity() -> str:
    """The identity of this host: equal in two processes if they can share a group.

    It includes the network namespace, to which the socket's name belongs, and the user.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/net:{Path('/proc/self/ns/net').stat().st_ino}/user:{os.getuid()}"


def watch_nothing() -> None:
    """The watch of ranks that wait for the others until the timeout."""


Watch = Callable[[], None]  # called now and then while ranks are waited for; it raises to give up


def meet(store: Store, rank: int, size: int, *, timeout: float, name: str, watch: Watch = watch_nothing) -> Meeting:
    """Wait for all ranks and connect them. Keys in the store start with the group's name."""
    with contextlib.ExitStack() as undo:
        try:
            own = os.pidfd_open(os.getpid())
        except OSError as error:
            raise CommError(f"this host cannot be used: no descriptors of processes here ({error})") from error
        undo.callback(os.close, own)
        deadline = time.monotonic() + min(timeout, _LONGEST)
        if rank == 0:
            meeting = _host(store, size, own, deadline, name, watch)
        else:
            meeting = _visit(store, rank, size, own, deadline, name, watch)
    return meeting


def _host(store: Store, size: int, own: int, deadline: float, name: str, watch: Watch) -> Meeting:
    address, token = f"\0paceline-{secrets.token_hex(16)}", secrets.token_hex(16)
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as on_failure, _listening(address, size) as listener:
        life = {0: os.dup(own)}
        on_failure.callback(lambda: _close(life.values()))
        file = _new_file(_core.segment_bytes(size), name)
        on_failure.callback(os.close, file)
        with contextlib.ExitStack() as connections:
            store.set(f"{name}/address", json.dumps({"address": address, "token": token, "host": host_identity()}))
            visitors: dict[int, socket.socket] = {}
            while len(visitors) < size - 1:
                missing = sorted(set(range(1, size)) - set(visitors))
                connection = _accept(
                    listener, deadline, f"group {name!r}: rank 0 timed out waiting for ranks {missing}", watch
                )
                connections.enter_context(connection)
                _receive_hello(connection, token, visitors, life, size)
            order = [life[rank] for rank in range(size)]
            for connection in visitors.values():
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                _send_descriptors(connection, [file, *order], cores)
        on_failure.pop_all()
    return Meeting(file, order, cores)


def _visit(store: Store, rank: int, size: int, own: int, deadline: float, name: str, watch: Watch) -> Meeting:
    lateness = f"group {name!r}: rank {rank} timed out waiting for rank 0"
    patience = time.monotonic() + _TIME_TO_START_AGAIN
    while True:
        greeting = json.loads(_told(store, f"{name}/address", deadline, lateness, watch))
        if greeting["host"] != host_identity():
            raise CommError(
                f"group {name!r}: rank {rank} has another host, network namespace or user than rank 0; "
                f"wanted {greeting['host']}, found {host_identity()}. Use another backend between hosts."
            )
        try:
            return _meet_rank_0(greeting, rank, size, own, deadline, name)
        except OSError as error:
            # After a restart by torchrun the store still has the address of a rank 0 that is gone.
            if not isinstance(error, ConnectionRefusedError) or time.monotonic() > min(deadline, patience):
                raise CommError(f"group {name!r}: rank {rank} cannot reach rank 0 on this host: {error}") from error
            time.sleep(_LOOK)


def _meet_rank_0(greeting: Mapping[str, str], rank: int, size: int, own: int, deadline: float, name: str) -> Meeting:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        _connect(connection, greeting["address"], deadline)
        if _user_of(connection) != os.getuid():
            raise CommError(f"group {name!r}: the process that says it is rank 0 belongs to another user")
        hello = json.dumps({"token": greeting["token"], "rank": rank}).encode().ljust(_HELLO_BYTES)
        socket.send_fds(connection, [hello], [own])
        descriptors, cores = _receive_descriptors(connection, size + 1)
    return Meeting(descriptors[0], descriptors[1:], cores)


def _told(store: Store, key: str, deadline: float, lateness: str, watch: Watch) -> bytes:
    # Looks, where there is something to watch: torch prints a warning of each wait that ends without the key.
    while watch is not watch_nothing and time.monotonic() < deadline and not store.check([key]):
        watch()
        time.sleep(_SHORT_LOOK)
    try:
        store.wait([key], timedelta(seconds=_until(deadline, watch_nothing)))
    except RuntimeError as error:
        raise CommError(f"{lateness}, whose address is not in the store; is it running? ({error})") from error
    return store.get(key)


def _until(deadline: float, watch: Watch) -> float:
    """Seconds to wait before the next look: to the deadline, if there is nothing to watch."""
    left = max(0.001, deadline - time.monotonic())
    return left if watch is watch_nothing else min(left, _LOOK)


def _connect(connection: socket.socket, address: str, deadline: float) -> None:
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:  # the listener's backlog is full
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.002)


def _new_file(size: int, name: str) -> int:
    try:
        file = os.memfd_create(f"paceline {name}"[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size)
        # It may grow, for buffers allocated later; if it could shrink, access could raise SIGBUS.
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except OSError as error:
        raise CommError(f"cannot make {size} bytes of memory to share: {error}") from error
    return file


@contextlib.contextmanager
def _listening(address: str, size: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(size)
        yield listener


def _accept(listener: socket.socket, deadline: float, lateness: str, watch: Watch) -> socket.socket:
    while True:
        watch()
        listener.settimeout(_until(deadline, watch))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            if time.monotonic() >= deadline:
                raise CommError(f"{lateness}; are they running?") from error
        else:
            connection.settimeout(5)
            return connection


def _receive_hello(
    connection: socket.socket, token: str, visitors: dict[int, socket.socket], life: dict[int, int], size: int
) -> None:
    """Accept a connection if it is of this group: any process of the host may connect."""
    if _user_of(connection) != os.getuid():
        return
    try:
        message, descriptors, _, _ = socket.recv_fds(connection, _HELLO_BYTES, 1)
        hello = json.loads(message)
        rank = int(hello["rank"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    known = secrets.compare_digest(str(hello.get("token")), token) and 0 < rank < size and rank not in visitors
    if not known or len(descriptors) != 1:
        _close(descriptors)
        return
    visitors[rank], life[rank] = connection, descriptors[0]


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return int(user)


def _send_descriptors(connection: socket.socket, descriptors: list[int], cores: int) -> None:
    for start in range(0, len(descriptors), _DESCRIPTORS_PER_MESSAGE):
        part = descriptors[start : start + _DESCRIPTORS_PER_MESSAGE]
        socket.send_fds(connection, [struct.pack("<I", cores)], part)


def _receive_descriptors(connection: socket.socket, wanted: int) -> tuple[list[int], int]:
    descriptors: list[int] = []
    cores = 0
    while len(descriptors) < wanted:
        message, part, _, _ = socket.recv_fds(connection, 4, min(wanted - len(descriptors), _DESCRIPTORS_PER_MESSAGE))
        descriptors += part
        if not part:
            _close(descriptors)
            raise ConnectionError(
                "rank 0 closed the connection; it may have died, or this process has too many files open"
            )
        (cores,) = struct.unpack("<I", message)
    return descriptors, cores


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def memory_objection(size: int, nbytes: int) -> str:
    """Why this host cannot give ``nbytes`` to each of ``size`` ranks; empty if it seems to have enough."""
    wanted, free = size * nbytes, _free_memory()
    if free is None or wanted <= free:
        return ""
    return f"{size} ranks want {wanted / 1e9:.1f} GB together, but {free / 1e9:.1f} GB of memory are free"


def _free_memory() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, _free_in_container())
    return None


def _free_in_container() -> int:
    """Free memory within the control group's limit, if that can be read."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62


def check_ranks(rank: int, size: int) -> None:
    """Raise if the rank is not below the size, or the size is not supported."""
    if not 1 <= size <= _core.MAX_RANKS or not 0 <= rank < size:
        raise UsageError(f"wanted 1 to {_core.MAX_RANKS} ranks and a rank below that, got rank {rank} of {size}")
