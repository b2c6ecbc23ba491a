"""Codecs over a slow link: the time of a step of all-reduce, and the bytes that the network interface has counted.

    python benchmarks/codecs_link.py [--codecs qsgd sign] [--rate 100mbit] [--rounds 3]

Two workers of one thread each, in two network namespaces; the link between them has the rate of a slow network. It
needs root, Linux and iproute2; where that is not possible, the script says so and ends well. The model is the 23 MB
MLP, on random images. The codecs take turns. Bytes are those of one step that worker 0 sends: as Paceline counts them,
and as the interface does, with the headers of TCP and IP and the answers to what it receives.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bucket_sweep import rate
from two_hosts import NotPossibleError, run_on, two_hosts

import paceline
from paceline.bench.measuring import Row, be_worker, median_ratio, read_rows, result_file
from paceline.problems.models import MODELS
from paceline.report.table import print_table
from paceline.sessions.peers import PeersSession

BATCH = 64  # of each worker
CODECS = (
    "cast(to=bf16)",
    "qsgd(levels=7)",
    "sign",
    "top-k(density=0.001)",
    "threshold(tau=0.001, adaptive=0.001)",
    "power-sgd(rank=2)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", nargs="+", default=CODECS, metavar="CODEC")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--rate", type=rate, default="100mbit", help="of the link (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works; measures nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.rounds = "net1", 1
    if arguments.worker is not None:
        be_worker(lambda: measure(arguments), arguments.worker)
        return
    try:
        with two_hosts(arguments.rate) as hosts, result_file() as file:
            code = run_on(hosts, [*sys.argv, "--worker", str(file)])
            if code != 0:
                sys.exit(code)
            rows = read_rows(file)
    except NotPossibleError as error:
        print(json.dumps({"skipped": str(error)}) if arguments.json else f"skipped: {error}")
        return
    if arguments.json:
        print(json.dumps({"rate": arguments.rate, "rows": rows}))
        return
    print_table(rows, {"codec": "", "ms": ".0f", "faster": ".1f", "bytes": "d", "interface_bytes": "d", "fewer": ".1f"})


# A worker's part ----------------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> list[Row]:
    with contextlib.ExitStack() as stack:
        trainings = [Training(arguments.model, codec, stack) for codec in (None, *arguments.codecs)]
        for training in trainings:
            for _ in range(2):  # buffers are made in the first, and buckets planned anew in the second
                training.step()
        for _ in range(arguments.rounds):
            for training in trainings:
                training.measure()
        return [training.row(trainings[0]) for training in trainings]


class Training:
    """A model in training under one codec."""

    def __init__(self, model: str, codec: str | None, stack: contextlib.ExitStack) -> None:
        torch.manual_seed(0)
        self._codec = codec
        self._model = MODELS[model]((1, 28, 28), 10)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=0.05)
        session = stack.enter_context(paceline.join(self._model, optimizer, codec=codec, seed=0))
        assert isinstance(session, PeersSession)
        self._session = session
        self._inputs, self._targets = torch.rand(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self.interface: list[int] = []

    def step(self) -> None:
        with self._session.step():
            torch.nn.functional.cross_entropy(self._model(self._inputs), self._targets).backward()  # type: ignore[no-untyped-call]

    def measure(self) -> None:
        """Make a step: its seconds and its bytes."""
        dist.barrier()
        counted, sent, start = self._session._exchange.num_bytes, interface_bytes(), time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - start)
        dist.barrier()
        self.bytes.append(self._session._exchange.num_bytes - counted)
        self.interface.append(interface_bytes() - sent)

    def row(self, base: Training) -> Row:
        interface = statistics.median(self.interface)
        return {
            "codec": self._codec or "none",
            "ms": 1e3 * statistics.median(self.seconds),
            "faster": median_ratio(base.seconds, self.seconds),
            "bytes": int(statistics.median(self.bytes)),
            "interface_bytes": int(interface),
            "fewer": statistics.median(base.interface) / interface,
        }


def interface_bytes() -> int:
    """The bytes that this host's interface has sent."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


if __name__ == "__main__":
    main()
