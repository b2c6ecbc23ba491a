"""Two hosts on one machine: network namespaces joined by a veth pair, with a token bucket in each direction.

Making them takes Linux, root and iproute2. Each namespace has a loopback and one end of the pair, and no way out. All
of it is gone when the `with` block is left, after Ctrl-C and SIGTERM too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PORT = 29500  # of torch.distributed's store; nobody else lives in the namespace
BURST, LATENCY = "256kb", "50ms"  # the bucket must hold a segment of 64 KB several times over


class NotPossibleError(Exception):
    """This machine or user cannot make network namespaces."""


@dataclass(frozen=True)
class Host:
    """One of the two."""

    namespace: str
    interface: str
    address: str

    def run(self, *command: str) -> None:
        """Run a command in its namespace."""
        run("ip", "netns", "exec", self.namespace, *command)


def limit_rate(interface: str, rate: str) -> None:
    """Let an interface of this namespace send at most so much, such as ``1gbit``."""
    run(*_limit(interface, rate))


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[list[Host]]:
    """Make two hosts with a link of this rate between them, such as ``1gbit``."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NotPossibleError(f"there is no '{tool}' command; install iproute2")
    hosts = [Host(f"paceline-{os.getpid()}-{i}", f"pl{os.getpid()}v{i}", f"10.77.0.{i + 1}") for i in range(2)]
    with _terminating_raises():
        try:
            _connect(hosts, rate)
            yield hosts
        finally:
            ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)  # by the commands too: this must be done
            for host in hosts:
                subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)
            signal.signal(signal.SIGINT, ignored)


def run_on(hosts: Sequence[Host], command: Sequence[str], *, each: int = 1) -> int:
    """Run a command on every host at once, as so many workers each; give the first exit code that is not 0."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(host for host in hosts for _ in range(each)):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(each * len(hosts)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": host.interface,
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns that nobody there can tell it hosts' names
            }
            inside = ["ip", "netns", "exec", host.namespace, sys.executable, *command]
            processes.append(subprocess.Popen(inside, env={**os.environ, **variables}))
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
        return next((code for code in codes if code), 0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NotPossibleError(f"'{' '.join(command)}' says: {done.stderr.strip() or done.returncode}")


def _connect(hosts: Sequence[Host], rate: str) -> None:
    first, second = hosts
    for host in hosts:
        run("ip", "netns", "add", host.namespace)
    ends = [[host.interface, "netns", host.namespace] for host in (first, second)]
    run("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    for host in hosts:
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
        host.run("ip", "link", "set", host.interface, "up")
        host.run(*_limit(host.interface, rate))


def _limit(interface: str, rate: str) -> list[str]:
    bucket = ["tbf", "rate", rate, "burst", BURST, "latency", LATENCY]
    return ["tc", "qdisc", "replace", "dev", interface, "root", *bucket]


@contextlib.contextmanager
def _terminating_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception, as Ctrl-C is one, so that what is made gets unmade."""
    previous = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
