"""Should a bucket's views stay in the parameters during backward, or be filled by copying? One process, no exchange.

    python benchmarks/views_or_copy.py [--json] [--quick]

`copy` starts backward without gradients: autograd hands over the tensor it has just made, and a hook multiplies it
into its place in the bucket. `views` leaves the places in `p.grad`, cleared: autograd adds into them, and a hook scales
them. The figure is the median over the rounds of the ratio of the times of forward, backward and filling the buckets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from paceline.bench.workloads import EXACT, Workload
from paceline.peers.buckets import aligned_offsets

SCALE = 0.5
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names, rounds = (["net1"], 2) if arguments.quick else (["net3", "mlp", "cnn", "gpt"], 15)
    rows = [measure(name, EXACT[name], rounds) for name in names]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'model':8} {'copy':>10} {'views':>10} {'views/copy':>11}")
    for row in rows:
        print(f"{row['model']:8} {row['copy_ms']:7.2f} ms {row['views_ms']:7.2f} ms {row['ratio']:11.3f}")


def measure(name: str, workload: Workload, rounds: int) -> dict[str, float | str]:
    copy, views = stepper(workload, keep_views=False), stepper(workload, keep_views=True)
    copy()
    views()
    times = [(seconds(copy), seconds(views)) for _ in range(rounds)]
    return {
        "model": name,
        "copy_ms": statistics.median(t[0] for t in times) / STEPS * 1e3,
        "views_ms": statistics.median(t[1] for t in times) / STEPS * 1e3,
        "ratio": statistics.median(t[1] / t[0] for t in times),
        "rounds": rounds,
    }


def stepper(workload: Workload, *, keep_views: bool) -> Callable[[], None]:
    model = workload.model()
    batch = workload.examples(workload.batch, seed=1)
    flat, views = places(model)

    def fill(parameter: nn.Parameter, view: Tensor) -> None:
        if keep_views:
            view.mul_(SCALE)
        else:
            assert parameter.grad is not None
            torch.mul(parameter.grad, SCALE, out=view)
            parameter.grad = view

    for parameter, view in zip(model.parameters(), views, strict=True):
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda parameter, view=view: fill(parameter, view)
        )

    def steps() -> None:
        for _ in range(STEPS):
            if keep_views:
                flat.zero_()
            for parameter, view in zip(model.parameters(), views, strict=True):
                parameter.grad = view if keep_views else None
            torch.autograd.backward(workload.loss(model, batch))

    return steps


def places(model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    parameters = list(model.parameters())
    offsets, length = aligned_offsets([p.numel() for p in parameters], 4)
    flat = torch.zeros(length)
    return flat, [flat[o : o + p.numel()].view_as(p) for o, p in zip(offsets, parameters, strict=True)]


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
