"""How long an all-reduce takes between processes of this host: our native core, without torch.distributed around it.

    python benchmarks/collectives_core.py [--ranks 2 4] [--json] [--quick]

``ours_us`` is for buffers that the group allocated, ``any_us`` for any other memory, ``queued_us`` for any memory and
an asynchronous call that is waited for at once; ``gloo_us`` is what Gloo takes in the same run. Medians on rank 0, in
microseconds, float32 sums; a barrier before each call keeps waiting for a late rank out of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from measuring import Row, be_worker, print_table, run_workers

from paceline.collectives.core import SharedGroup

KB, MB = 1 << 10, 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to see that it works")
    parser.add_argument("--worker", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        be_worker(lambda: measure(arguments.quick), arguments.worker)
        return
    rows = [row for ranks in arguments.ranks for row in run_workers(ranks)]
    if arguments.json:
        print(json.dumps({"rows": rows}))
    else:
        times = dict.fromkeys(["ours_us", "any_us", "queued_us", "gloo_us"], ".1f")
        print_table(rows, {"ranks": "d", "bytes": "d", **times, "ours_ratio": ".1f", "any_ratio": ".1f"})


def measure(quick: bool) -> list[Row]:
    store = dist.distributed_c10d._get_default_store()
    sizes = [4 * KB, 1 * MB] if quick else [4 * KB, 64 * KB, 1 * MB, 25 * MB, 100 * MB]
    with SharedGroup(store, dist.get_rank(), dist.get_world_size(), timeout=60, name="benchmark") as group:
        return [measure_size(group, size, 5 if quick else repetitions(size)) for size in sizes]


def repetitions(size: int) -> int:
    return 300 if size <= MB else 30


def measure_size(group: SharedGroup, size: int, times: int) -> Row:
    count = size // 4
    region = group.allocate(size)
    ours = np.frombuffer(memoryview(region), dtype=np.float32)
    tensor = torch.zeros(count)

    def queued() -> None:
        ticket = group.all_reduce(tensor.data_ptr(), count, "float32", "sum", async_=True)
        assert ticket is not None and ticket.wait()

    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: group.all_reduce(ours.ctypes.data, count, "float32", "sum"),
        "any": lambda: group.all_reduce(tensor.data_ptr(), count, "float32", "sum"),
        "queued": queued,
        "gloo": lambda: dist.all_reduce(tensor),
    }
    medians = {f"{name}_us": median_us(group, way, times) for name, way in ways.items()}
    ratios = {f"{name}_ratio": medians["gloo_us"] / medians[f"{name}_us"] for name in ("ours", "any")}
    return {"ranks": group.size, "bytes": size, **medians, **ratios}


def median_us(group: SharedGroup, call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times + 3):
        group.barrier()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:]) * 1e6


if __name__ == "__main__":
    main()
