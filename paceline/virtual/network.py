"""Times and bytes of messages between virtual workers and their server, or of an exchange between peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from paceline.virtual.agenda import Times
from paceline.virtual.links import Link, parse_link, ring_bytes


class Network(ABC):
    """Times and counts messages; ``nbytes`` is the size of the parameters, and of a push unless ``pushed`` is."""

    def __init__(self, nbytes: float, pushed: float | None = None) -> None:
        self.nbytes, self.pushed = nbytes, nbytes if pushed is None else pushed
        self.bytes_in = 0.0  # to the server
        self.bytes_out = 0.0  # from the server, or between peers; each byte on the wire counts once

    @abstractmethod
    def push(self, at: float, nbytes: float | None = None) -> float:
        """The arrival time of a push sent at ``at``, of so many bytes; calls must come in the order of time."""

    @abstractmethod
    def send(self, at: float, workers: int, nbytes: Times | None = None) -> Times:
        """The times at which the workers receive parameters that the server sends at ``at``, one after the other.

        Each is sent so many bytes.
        """


class Instant(Network):
    """Messages take no time; bytes are counted."""

    def push(self, at: float, nbytes: float | None = None) -> float:
        self.bytes_in += self.pushed if nbytes is None else nbytes
        return at

    def send(self, at: float, workers: int, nbytes: Times | None = None) -> Times:
        self.bytes_out += workers * self.nbytes if nbytes is None else float(nbytes.sum())
        return np.full(workers, at)


class ServerLink(Network):
    """All messages pass the server's link, which carries one at a time in each direction, in order of arrival."""

    def __init__(self, link: Link, nbytes: float, pushed: float | None = None) -> None:
        super().__init__(nbytes, pushed)
        self._latency, self._bandwidth = link.latency, link.bandwidth
        self._transfer = nbytes / link.bandwidth
        self._in_free = self._out_free = 0.0

    def push(self, at: float, nbytes: float | None = None) -> float:
        nbytes = self.pushed if nbytes is None else nbytes
        self.bytes_in += nbytes
        self._in_free = max(at + self._latency, self._in_free) + nbytes / self._bandwidth
        return self._in_free

    def send(self, at: float, workers: int, nbytes: Times | None = None) -> Times:
        if nbytes is None:
            self.bytes_out += workers * self.nbytes
            leaves = max(at, self._out_free) + self._transfer * np.arange(1, workers + 1)
        else:
            self.bytes_out += float(nbytes.sum())
            leaves = max(at, self._out_free) + np.cumsum(nbytes) / self._bandwidth
        self._out_free = float(leaves[-1])
        return np.asarray(leaves + self._latency, dtype=np.float64)


class Collective(Network):
    """Peers exchange gradients when all have theirs; each sends ``worker_bytes``.

    ``exposed`` takes the slowest worker's compute time and gives the seconds of the exchange that its backward pass
    does not hide.
    """

    def __init__(self, exposed: Callable[[float], float], worker_bytes: float) -> None:
        super().__init__(worker_bytes)
        self._exposed = exposed
        self._began = 0.0

    def push(self, at: float, nbytes: float | None = None) -> float:
        return at

    def send(self, at: float, workers: int, nbytes: Times | None = None) -> Times:
        if at > 0:  # at the start all workers have the parameters
            self.bytes_out += workers * self.nbytes
            at += self._exposed(at - self._began)
        self._began = at
        return np.full(workers, at)


class PeersNetwork:
    """The clocks of the workers, and what their messages cost.

    ``all_reduce_seconds`` gives the time of an all-reduce of that many bytes. Collectives go over the links one after
    the other. A broadcast is half of an all-reduce, and so is an all-gather of as many bytes in all (Thakur et al.,
    2005). Messages between two workers leave the sender one after the other. Every byte counts ``scale`` times.
    """

    def __init__(
        self, workers: int, link: str | Link, all_reduce_seconds: Callable[[float], float], *, scale: float = 1.0
    ) -> None:
        self.clocks = np.zeros(workers)
        self.bytes_in = 0.0  # of a server, which peers have not
        self.bytes_out = 0.0
        self._link, self._all_reduce_seconds, self._scale = parse_link(link), all_reduce_seconds, scale
        self._busy_until = 0.0  # with collectives
        self._leaves = np.zeros(workers)  # when each worker's last message has left

    def collective(self, ready: float, nbytes: float, share: float) -> float:
        """When a collective ends whose last worker came at ``ready``; it is this share of an all-reduce."""
        nbytes *= self._scale
        self.bytes_out += len(self.clocks) * share * ring_bytes(nbytes, len(self.clocks))
        self._busy_until = max(ready, self._busy_until) + share * self._all_reduce_seconds(nbytes)
        return self._busy_until

    def message(self, sender: int, nbytes: float) -> float:
        """When a message arrives that the sender sends now."""
        nbytes *= self._scale
        self.bytes_out += nbytes
        self._leaves[sender] = max(self.clocks[sender], self._leaves[sender]) + nbytes / self._link.bandwidth
        return float(self._leaves[sender] + self._link.latency)

    def advance(self, worker: int, to: float) -> None:
        """Let a worker's clock be at least at this time."""
        self.clocks[worker] = max(self.clocks[worker], to)
