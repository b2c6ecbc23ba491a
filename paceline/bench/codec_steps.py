"""Times whole steps of all-reduce under every codec, on this host and over links, and tells where a codec pays.

Two workers train a model with each codec in turn. Over a link they run in two network namespaces, whose interfaces send
at the rate of that link; this needs root, Linux and iproute2. Elsewhere a step over a link is taken to last as on this
host, and for the time of its bytes on the link beside that: the link model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from paceline.bench.measuring import Row, read_rows, result_file
from paceline.bench.two_hosts import NotPossibleError, limit_rate, run_on, two_hosts
from paceline.bench.workloads import WORKLOADS, optimizer_for
from paceline.quantities import BANDWIDTHS, read_quantity
from paceline.sessions.join import join
from paceline.sessions.peers import PeersSession

NONE = "none"
HOST = "this host"
LINKS = ("10Gbit/s", "1Gbit/s", "100Mbit/s", "10Mbit/s")
_FASTEST = "100gbit"  # while the workers warm up
_SLOW = 12.5e6  # bytes a second; over slower links each step is made once
_WARM_UPS = 2  # buffers are made in the first step, and buckets planned anew in the second


def measure(models: Sequence[str], codecs: Sequence[str], links: Sequence[str], rounds: int) -> list[Row]:
    """Measure a step of every model with every codec; called on both workers. Without links it is measured as it is."""
    return [row for model in models for row in _measure_model(model, codecs, links, rounds)]


def _measure_model(model: str, codecs: Sequence[str], links: Sequence[str], rounds: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        if links:
            limit_rate(_interface(), _FASTEST)
        trainings = [_Training(model, codec, stack) for codec in (NONE, *codecs)]
        for training in trainings:
            for _ in range(_WARM_UPS):
                training.step()
        rows = []
        for link in links or [HOST]:
            slow = link != HOST and read_quantity(link, BANDWIDTHS) < _SLOW
            if link != HOST:
                limit_rate(_interface(), f"{round(8 * read_quantity(link, BANDWIDTHS))}bit")
            for _ in range(1 if slow else rounds):
                for training in trainings:
                    training.measure()
            rows += [training.take_row(link) for training in trainings]
        return rows


class _Training:
    """A model in training under one codec."""

    def __init__(self, model: str, codec: str, stack: contextlib.ExitStack) -> None:
        workload = WORKLOADS[model]
        self._name, self._codec, self._workload = model, codec, workload
        self._model, self._batch = workload.model(), workload.examples(workload.batch, seed=dist.get_rank())
        optimizer = optimizer_for(self._model)
        session = stack.enter_context(join(self._model, optimizer, codec=None if codec == NONE else codec, seed=0))
        assert isinstance(session, PeersSession)
        self._session = session
        self._seconds: list[float] = []
        self._bytes: list[int] = []
        self._interface: list[int] = []

    def step(self) -> None:
        with self._session.step():
            self._workload.loss(self._model, self._batch).backward()  # type: ignore[no-untyped-call]

    def measure(self) -> None:
        """Make a step, and note its seconds and the bytes that left."""
        dist.barrier()
        counted, sent, start = self._session._exchange.num_bytes, _interface_bytes(), time.perf_counter()
        self.step()
        self._seconds.append(time.perf_counter() - start)
        dist.barrier()
        self._bytes.append(self._session._exchange.num_bytes - counted)
        self._interface.append(_interface_bytes() - sent)

    def take_row(self, link: str) -> Row:
        """The medians since the last row."""
        row = {
            "model": self._name,
            "way": self._codec,
            "link": link,
            "step_ms": 1e3 * statistics.median(self._seconds),
            "bytes": int(statistics.median(self._bytes)),
            "interface_bytes": int(statistics.median(self._interface)),
        }
        self._seconds, self._bytes, self._interface = [], [], []
        return row


def _interface() -> str:
    return os.environ["GLOO_SOCKET_IFNAME"]


def _interface_bytes() -> int:
    """The bytes that the interface between the hosts has sent, with headers and acknowledgements; 0 on one host."""
    counter = Path(f"/sys/class/net/{os.environ.get('GLOO_SOCKET_IFNAME', '')}/statistics/tx_bytes")
    return int(counter.read_text()) if "GLOO_SOCKET_IFNAME" in os.environ else 0


# Where a codec pays --------------------------------------------------------------------------------------------


class Steps(NamedTuple):
    """A row for every model and codec; ``modelled`` is why links were not measured, or None."""

    rows: list[Row]
    modelled: str | None


def over_links(on_host: Sequence[Row], links: Sequence[str], **options: Any) -> Steps:
    """Add the time of a step over each link to the rows of this host, and the bandwidth below which a codec pays."""
    reason = None
    try:
        measured = _run_on_two_hosts({**options, "links": links, "backend": "gloo"})
    except NotPossibleError as error:
        reason, measured = str(error), [_modelled(row, link) for link in links for row in on_host]
    found = {(row["model"], row["way"], row["link"]): row for row in measured}
    rows = []
    for row in on_host:
        times = {link: found[row["model"], row["way"], link]["step_ms"] for link in links}
        without = {link: found[row["model"], NONE, link]["step_ms"] for link in links}
        pays = None if row["way"] == NONE else pays_below(times, without)
        rows.append({**row, "links": times, "pays_below": pays})
    return Steps(rows, reason)


def _run_on_two_hosts(options: dict[str, Any]) -> list[Row]:
    with two_hosts(_FASTEST) as hosts, result_file() as file:
        code = run_on(hosts, ["-m", "paceline", "bench-worker", "codec-steps", json.dumps(options), str(file)])
        if code != 0:
            raise SystemExit(code)
        return read_rows(file)


def _modelled(row: Row, link: str) -> Row:
    seconds = row["bytes"] / read_quantity(link, BANDWIDTHS)
    return {**row, "link": link, "step_ms": row["step_ms"] + 1e3 * seconds}


def pays_below(times: dict[str, float], without: dict[str, float]) -> str:
    """The bandwidth below which steps with a codec are shorter, from their times over some links, in any unit.

    Between two links a time is taken to be linear in the seconds of a byte, as it is if bytes take turns with the rest.

    >>> pays_below({"1Gbit/s": 30.0, "100Mbit/s": 60.0}, {"1Gbit/s": 20.0, "100Mbit/s": 200.0})
    '625Mbit/s'
    >>> pays_below({"1Gbit/s": 10.0, "100Mbit/s": 60.0}, {"1Gbit/s": 20.0, "100Mbit/s": 200.0})
    '> 1Gbit/s'
    >>> pays_below({"1Gbit/s": 30.0, "100Mbit/s": 60.0}, {"1Gbit/s": 20.0, "100Mbit/s": 50.0})
    '< 100Mbit/s'
    """
    slowest_first = sorted(times, key=lambda link: read_quantity(link, BANDWIDTHS))
    points = [(1 / read_quantity(link, BANDWIDTHS), times[link] - without[link]) for link in slowest_first]
    if points[0][1] >= 0:
        return f"< {slowest_first[0]}"
    for (slow, gained), (fast, lost) in itertools.pairwise(points):
        if lost >= 0:
            crossing = slow + (fast - slow) * gained / (gained - lost)
            return _rounded(1 / crossing)
    return f"> {slowest_first[-1]}"


def _rounded(bandwidth: float) -> str:
    """A bandwidth in bits a second, with three digits."""
    bits = 8 * bandwidth
    return f"{bits / 1e9:.3g}Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g}Mbit/s"
