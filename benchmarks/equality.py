"""Whether several workers compute what one would: the parameters after 20 steps, compared.

    python benchmarks/equality.py [--workers 2 4] [--json]

Models without BatchNorm or dropout against one worker on the joined batch: through a session, with equal parts and
with parts of different sizes, and through our DistributedDataParallel. The others, whose steps do not split like
that, against PyTorch's DDP on the same parts and random streams; their buffers are compared too.

`difference` is the norm of the difference over the norm of the reference; `moved` is how far the reference went from
where it started, in the same measure. `allowed` is the bound; BatchNorm makes rounding grow by itself, so where
PyTorch's DDP is the reference it is ten times what that one differs from itself with other buckets, if that is more.
`ranks_agree` says that all workers' parameters have the same SHA-256. The exit code is 1 if a difference is above what
is allowed, or workers disagree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.bench.measuring import Row, arguments_of, be_worker, run_workers
from paceline.bench.workloads import EXACT, INEXACT, WORKLOADS, Batch, Workload, optimizer_for
from paceline.report.table import print_table
from paceline.seeding import derive_seed, seed_streams

SEED = 0

# Trains on the parts of this worker, one per step.
Training = Callable[[Workload, Sequence[Batch]], nn.Module]


def main() -> None:
    parser = arguments_of(__doc__, [*EXACT, *INEXACT])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bound", type=float, default=1e-5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.steps, arguments.models = [2], 3, ["net2", "resnet20"]
    if arguments.worker is not None:
        be_worker(lambda: measure(arguments), arguments.worker)
        return
    rows = [row for workers in arguments.workers for row in run_workers(workers)]
    equal = all(row["difference"] <= row["allowed"] and row["ranks_agree"] for row in rows)
    if arguments.json:
        print(json.dumps({"steps": arguments.steps, "bound": arguments.bound, "equal": equal, "rows": rows}))
    else:
        texts = {"model": "", "way": "", "reference": ""}
        figures = {"difference": ".1e", "allowed": ".1e", "moved": ".1e"}
        print_table(rows, {**texts, "workers": "d", **figures, "ranks_agree": ""})
        print(f"after {arguments.steps} steps: {'all equal' if equal else 'NOT all equal'}")
    sys.exit(0 if equal else 1)


def measure(arguments: argparse.Namespace) -> list[Row]:
    rows = []
    for name in arguments.models:
        if name in INEXACT:
            rows.append(against_torch(name, arguments.steps, arguments.bound))
        else:
            rows.extend(against_one_worker(name, arguments.steps, arguments.bound))
    return rows


def against_one_worker(name: str, steps: int, bound: float) -> list[Row]:
    """Compare with plain training on the joined batch, as worker 0 does it beside."""
    workload, workers = WORKLOADS[name], dist.get_world_size()
    even = [workload.batch] * workers
    uneven = [workload.batch // (rank + 1) for rank in range(workers)]
    ways: list[tuple[str, Training, list[int]]] = [
        ("session", with_session, even),
        ("session, uneven parts", with_session, uneven),
        ("paceline ddp", with_our_wrapper, even),
    ]
    rows = []
    for way, train, sizes in ways:
        joined = [workload.examples(sum(sizes), seed=step) for step in range(steps)]
        model = train(workload, own_parts(joined, sizes))
        reference = by_hand(workload, workload.model(), joined) if dist.get_rank() == 0 else workload.model()
        row = {"model": name, "way": way, "reference": "one worker", "allowed": bound}
        rows.append({**row, **compare(workload, model, reference)})
    return rows


def against_torch(name: str, steps: int, bound: float) -> Row:
    """Compare with PyTorch's DDP."""
    workload, workers = WORKLOADS[name], dist.get_world_size()
    sizes = [workload.batch] * workers
    parts = own_parts([workload.examples(sum(sizes), seed=step) for step in range(steps)], sizes)
    model, reference = with_session(workload, parts), with_torch_wrapper(workload, parts)
    rounding = distance(with_torch_wrapper(workload, parts, bucket_cap_mb=0.1), reference)
    row = {"model": name, "way": "session", "reference": "torch ddp", "allowed": max(bound, 10 * rounding)}
    return {**row, **compare(workload, model, reference)}


def own_parts(joined: Sequence[Batch], sizes: Sequence[int]) -> list[Batch]:
    """This worker's part of every joined batch."""
    start, end = list(pairwise(accumulate(sizes, initial=0)))[dist.get_rank()]
    return [(inputs[start:end], labels[start:end]) for inputs, labels in joined]


# Ways to train ------------------------------------------------------------------------------------------------


def with_session(workload: Workload, parts: Sequence[Batch]) -> nn.Module:
    model = workload.model()
    with paceline.join(model, optimizer_for(model), policy="all-reduce", seed=SEED) as session:
        for batch in parts:
            with session.step(examples=len(batch[0])):
                workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return model


def with_our_wrapper(workload: Workload, parts: Sequence[Batch]) -> nn.Module:
    model = paceline.DistributedDataParallel(workload.model())
    return by_hand(workload, model, parts).get_submodule("module")


def with_torch_wrapper(workload: Workload, parts: Sequence[Batch], bucket_cap_mb: float = 25) -> nn.Module:
    model = DistributedDataParallel(workload.model(), bucket_cap_mb=bucket_cap_mb)
    return by_hand(workload, model, parts).get_submodule("module")


def by_hand(workload: Workload, model: nn.Module, batches: Sequence[Batch]) -> nn.Module:
    """Train with a plain loop, whose random streams in every step are those of a session."""
    optimizer = optimizer_for(model)
    for step, batch in enumerate(batches):
        seed_streams(derive_seed(SEED, dist.get_rank(), "step", step))
        optimizer.zero_grad()
        workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


# Comparing ----------------------------------------------------------------------------------------------------


def compare(workload: Workload, model: nn.Module, reference: nn.Module) -> Row:
    """How far ``model`` is from ``reference`` on this worker, and whether all workers' parameters are the same."""
    return {
        "workers": dist.get_world_size(),
        "difference": distance(model, reference),
        "moved": distance(workload.model(), reference),
        "ranks_agree": same_everywhere(digest(model)),
    }


def distance(model: nn.Module, reference: nn.Module) -> float:
    found, wanted = numbers(model), numbers(reference)
    return float((found - wanted).norm() / wanted.norm())


def numbers(model: nn.Module) -> Tensor:
    """All parameters and floating-point buffers, one behind the other."""
    tensors = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    return torch.cat([tensor.reshape(-1).double() for tensor in tensors])


def digest(model: nn.Module) -> bytes:
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().contiguous().numpy().data)
    return hashed.digest()


def same_everywhere(own: bytes) -> bool:
    """Whether all workers have the same bytes."""
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    return all(torch.equal(mine, other) for other in everybodys)


if __name__ == "__main__":
    main()
