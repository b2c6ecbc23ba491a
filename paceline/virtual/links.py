"""The cost of messages: a link with latency and bandwidth, and the times of servers, rings and trees on it.

>>> link = parse_link("10us 1Gbit/s")
>>> round(link.seconds(25e6), 6)
0.20001
>>> ring_seconds(link, 25e6, workers=4) < server_seconds(link, 25e6, workers=4)
True

The formulas use a for the latency in seconds, b for the seconds of one byte, N for the bytes of a message and P for the
number of workers (Hockney's model: a message takes a + N b).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.quantities import BANDWIDTHS, TIMES, print_quantity, read_quantities
from paceline.spec import check_types

EXAMPLES = '"10us 1Gbit/s", "25MB/s", "instant"'


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link: the first byte arrives after ``latency`` seconds, the others at ``bandwidth`` bytes a second.

    As text: ``10us 1Gbit/s``. A part that is left out costs nothing; ``instant`` leaves out both.
    """

    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_types("link", "link", self)
        if not 0 <= self.latency < math.inf:
            raise UsageError(f"a link's latency is a time of 0 or more seconds, got {self.latency:g}; e.g. 10us")
        if not self.bandwidth > 0:
            raise UsageError(f"a link's bandwidth must be above 0 bytes a second, got {self.bandwidth:g}; e.g. 25MB/s")

    def __str__(self) -> str:
        """The text form, which ``parse_link`` reads back to an equal link."""
        parts = [print_quantity(self.latency, TIMES)] if self.latency else []
        parts += [print_quantity(self.bandwidth, BANDWIDTHS)] if self.bandwidth < math.inf else []
        return " ".join(parts) or "instant"

    def seconds(self, nbytes: float) -> float:
        """The time of one message alone on the link: a + N b."""
        _check(nbytes)
        return self.latency + nbytes / self.bandwidth


def parse_link(text: str | Link) -> Link:
    """Read a link from text, such as ``"10us 1Gbit/s"``; a ``Link`` is returned as it is."""
    if isinstance(text, Link):
        return text
    if not isinstance(text, str):
        raise UsageError(f"wanted a link or its text form, got {text!r}. Examples: {EXAMPLES}")
    if text.strip() == "instant":
        return Link()
    try:
        found = read_quantities(text, {"latency": TIMES, "bandwidth": BANDWIDTHS})
        return Link(**found)
    except UsageError as error:
        raise UsageError(f"cannot read the link {text[:80]!r}: {error}. Examples: {EXAMPLES}") from None


def server_seconds(link: Link, nbytes: float, workers: int) -> float:
    """All workers push N bytes to a server and pull N back: 2 a + 2 (P-1) N b.

    One of the P processes is the server, and its link is the bottleneck: 2 N (P-1) bytes pass it (deck DS-UA 301,
    lecture 10, "Parameter Server vs Ring All-Reduce"). Latencies of different workers overlap, so only two count. A
    separate server counts as one more process.
    """
    _check(nbytes, workers)
    return 2 * link.latency + server_bytes(nbytes, workers) / link.bandwidth if workers > 1 else 0.0


def ring_seconds(link: Link, nbytes: float, workers: int) -> float:
    """A ring of P workers all-reduces N bytes: 2 (P-1) a + 2 (P-1)/P N b.

    P-1 steps of scatter-reduce and P-1 of all-gather, each with N/P bytes (Patarasuk and Yuan, 2009).
    """
    _check(nbytes, workers)
    return 2 * (workers - 1) * link.latency + ring_bytes(nbytes, workers) / link.bandwidth


def tree_seconds(link: Link, nbytes: float, workers: int) -> float:
    """A binomial tree reduces N bytes to its root and broadcasts them: 2 ceil(log2 P) (a + N b).

    (Thakur, Rabenseifner and Gropp, 2005, the reduce and the broadcast for short messages.)
    """
    _check(nbytes, workers)
    return 2 * _levels(workers) * link.seconds(nbytes)


def two_level_seconds(inside: Link, between: Link, nbytes: float, hosts: int, host_workers: int) -> float:
    """Rings in and between hosts: 2 (G-1) a' + 2 (G-1)/G N b' + 2 (H-1) a + 2 (H-1)/H N b.

    A scatter-reduce over the ``inside`` link gives each of a host's G workers N/G bytes of its sum; the H hosts
    all-reduce these over the link ``between`` them; an all-gather inside each host follows (Mikami et al., 2018,
    "2D-torus"). The G rings between hosts share each host's one link, so together they cost one ring of N bytes.
    """
    return ring_seconds(inside, nbytes, host_workers) + ring_seconds(between, nbytes, hosts)


def server_bytes(nbytes: float, workers: int) -> float:
    """Bytes that pass the server's link, in and out: 2 N (P-1)."""
    return 2 * nbytes * (workers - 1)


def ring_bytes(nbytes: float, workers: int) -> float:
    """Bytes that each worker of a ring sends: 2 N (P-1)/P."""
    return 2 * nbytes * (workers - 1) / workers


def exchange_end(ready: Sequence[float], costs: Sequence[float]) -> float:
    """The time at which the last bucket is exchanged, one after the other: C_i = max(C_{i-1}, R_i) + cost_i.

    ``ready`` has the times R_i at which backward fills the buckets, ``costs`` the seconds of each on the link
    (Li et al., VLDB 2020: buckets are exchanged in order, while backward runs).
    """
    if len(ready) != len(costs):
        raise UsageError(f"each bucket has a time and a cost, got {len(ready)} times and {len(costs)} costs")
    end = 0.0
    for filled, cost in zip(ready, costs, strict=True):
        end = max(end, filled) + cost
    return end


def exposed_seconds(backward: float, ready: Sequence[float], costs: Sequence[float]) -> float:
    """The part of the exchange that backward does not hide: max(0, C_last - backward)."""
    return max(0.0, exchange_end(ready, costs) - backward)


def _levels(workers: int) -> int:
    return (workers - 1).bit_length()  # ceil(log2 P), exactly


def _check(nbytes: float, workers: int = 1) -> None:
    if not 0 <= nbytes < math.inf:
        raise UsageError(f"a message has 0 or more bytes, got {nbytes:g}")
    if workers < 1:
        raise UsageError(f"there must be at least 1 worker, got {workers}")
