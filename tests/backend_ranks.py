"""Ranks of the backend "paceline" as threads of this process, and tensors for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from shared_ranks import DEADLINE, Array, numbers
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from paceline.collectives.backend import ProcessGroup
from paceline.collectives.core import DTYPES
from paceline.errors import CommError

T = TypeVar("T")

KNOWN = {name: getattr(torch, name) for name in DTYPES}
COMPLEX = {"complex64": torch.complex64, "complex128": torch.complex128}
ONLY_MOVED = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
LAYOUTS = ("dense", "offset", "strided", "column")


def outcomes_of(
    work: Callable[[Any], T], size: int, *, timeout: float = 60.0, name: str = "g", store: Any = None
) -> list[T | BaseException]:
    """Run ``work(group)`` on every rank, and give what each returned or raised."""
    store = store or dist.HashStore()  # type: ignore[attr-defined]
    results: dict[int, T | BaseException] = {}

    def be(rank: int) -> None:
        group = None
        try:
            group = ProcessGroup(store, rank, size, timedelta(seconds=timeout), name)
            results[rank] = work(group)
        except BaseException as error:
            results[rank] = error
        finally:
            if group is not None:
                group.shutdown()

    threads = [threading.Thread(target=be, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert len(results) == size, f"ranks {sorted(set(range(size)) - set(results))} are still running"
    return [results[rank] for rank in range(size)]


def run_groups(work: Callable[[Any], T], size: int, **options: Any) -> list[T]:
    """Run ``work(group)`` on every rank and give their results; if one fails, raise its error, not a neighbour's."""
    results = outcomes_of(work, size, **options)
    failures = [outcome for outcome in results if isinstance(outcome, BaseException)]
    if failures:
        raise next((error for error in failures if not isinstance(error, CommError)), failures[0])
    return [outcome for outcome in results if not isinstance(outcome, BaseException)]


def options(kind: str, *, later: bool = False, op: Any = dist.ReduceOp.SUM, root: int = 0) -> Any:
    """The options object of a call, as ``torch.distributed`` fills it in."""
    made = getattr(c10d, kind + "Options")()
    made.asyncOp = later
    if hasattr(made, "reduceOp"):
        made.reduceOp = op
    if hasattr(made, "rootRank"):
        made.rootRank = root
    return made


def elements(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Random elements of a type; of the rare ones, random bytes."""
    if count == 0:
        return torch.empty(0, dtype=dtype)  # a view of an empty array would have odd strides
    if dtype.is_complex:
        part = "float32" if dtype == torch.complex64 else "float64"
        return torch.from_numpy(numbers(part, 2 * count, seed)).view(dtype)
    name = str(dtype).removeprefix("torch.")
    if name in KNOWN:
        return torch.from_numpy(numbers(name, count, seed)).view(dtype)
    return torch.from_numpy(numbers("uint8", count * dtype.itemsize, seed)).view(dtype)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same elements, somewhere else in memory."""
    count = tensor.numel()
    if layout == "dense":
        return tensor.clone()
    if layout == "offset":
        place = tensor.new_zeros(count + 1)[1:]
    elif layout == "strided":
        place = tensor.new_zeros(2 * count + 1)[1::2]
    else:
        place = tensor.new_zeros(count, 3)[:, 1]
    return place.copy_(tensor)


def bits(tensor: Tensor) -> bytes:
    """The elements' bytes, in order: equal only if all bits are."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return dense.view(-1).view(torch.uint8).numpy().tobytes()


def array_of(tensor: Tensor) -> Array:
    """A tensor as numpy has it; ``bfloat16`` as the 16-bit patterns."""
    return tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
