"""Mistakes in groups over several hosts: named on all ranks alike, and never a wrong sum."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_ranks import KNOWN, array_of, bits, elements, options
from host_ranks import on_hosts, outcomes_on
from shared_ranks import DEADLINE, folded

from paceline.collectives import core
from paceline.errors import CommError, UsageError

OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")
WHOLE = sorted(set(KNOWN) - {"float32", "float64", "float16", "bfloat16"})


def asked_for(op: str, *, later: bool = False) -> Any:
    return options("Allreduce", op=getattr(dist.ReduceOp, op.upper()), later=later)


def serves(op: str, dtype: str) -> bool:
    try:
        core.check_reduction(op, dtype)
    except UsageError:
        return False
    return True


@pytest.mark.parametrize(
    "ours",
    [
        lambda first: (torch.ones(10, dtype=torch.float32 if first else torch.int32), "sum"),
        lambda first: (torch.ones(10), "sum" if first else "product"),
        lambda first: (torch.ones(10 if first else 11), "sum"),
        lambda first: (torch.ones(10), "sum" if first else "avg"),
    ],
    ids=["type", "reduction", "count", "average"],
)
@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_hosts_that_differ_are_named_on_all_ranks(hosts: str, ours: Any) -> None:
    def work(group: Any) -> None:
        tensor, op = ours(group.rank() < 2)
        group.allreduce([tensor], asked_for(op)).wait()

    outcomes = outcomes_on(hosts, work)
    assert all(isinstance(outcome, CommError) for outcome in outcomes), outcomes
    reasons = {str(outcome).partition("in all_reduce: ")[2] for outcome in outcomes}
    assert len(reasons) == 1
    assert "rank 0 is in all_reduce(10 float32, sum), rank 2 in all_reduce(" in reasons.pop()


def test_every_type_and_reduction_as_on_one_host() -> None:
    hosts = "aab"

    def work(group: Any) -> None:
        for dtype in WHOLE:
            for op in filter(lambda op: serves(op, dtype), OPS):
                inputs = [elements(KNOWN[dtype], 40, seed) for seed in range(len(hosts))]
                tensor = inputs[group.rank()].clone()
                group.allreduce([tensor], asked_for(op)).wait()
                if dtype == "bool":
                    wanted = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}.get(op, op)
                else:
                    wanted = op
                found = folded([array_of(part) for part in inputs], dtype, wanted)
                assert bits(tensor) == found.tobytes(), (dtype, op)

    on_hosts(hosts, work)


@pytest.mark.parametrize("hosts", ["aab", "aabb"])
def test_what_cannot_be_reduced_is_refused_by_all_and_leaves_the_group_as_it_was(hosts: str) -> None:
    refused = [(op, dtype) for op in OPS for dtype in KNOWN if not serves(op, dtype)]

    def work(group: Any) -> list[float]:
        for op, dtype in [*refused, ("sum", "float8_e5m2")]:
            with pytest.raises(UsageError):
                group.allreduce([torch.ones(3).to(getattr(torch, dtype))], asked_for(op))
        after = torch.ones(2)
        group.allreduce([after]).wait()
        return after.tolist()

    assert refused
    assert on_hosts(hosts, work) == [[len(hosts)] * 2] * len(hosts)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("later", [False, True])
def test_whatever_mode_the_caller_is_in(op: str, later: bool) -> None:
    def work(group: Any) -> None:
        wanted = 1.0 if op == "avg" else 3.0
        parameter = torch.nn.Parameter(torch.ones(6))
        with torch.no_grad():
            group.allreduce([parameter], asked_for(op, later=later)).wait()
        assert parameter.tolist() == [wanted] * 6 and parameter.requires_grad and parameter.is_leaf
        with torch.inference_mode():
            whole, strided = torch.ones(6), torch.ones(6, 2)[:, 0]
            first = group.allreduce([whole], asked_for(op, later=later))
            second = group.allreduce([strided], asked_for(op, later=later))
        first.wait()
        second.wait()
        assert whole.tolist() == strided.tolist() == [wanted] * 6
        (gradient,) = torch.autograd.grad((parameter * 2).sum(), parameter)  # still fit for gradients
        assert gradient.tolist() == [2.0] * 6

    on_hosts("aab", work)


@pytest.mark.parametrize("gone", [1, 3])
def test_who_left_is_named_by_its_own_number_on_all_hosts(gone: int) -> None:
    def work(group: Any) -> None:
        group.allreduce([torch.ones(5)]).wait()
        if group.rank() != gone:
            for _ in range(2):  # and again, by whoever calls later
                with pytest.raises(CommError, match=rf"in all_reduce: rank {gone} .*left the group"):
                    group.allreduce([torch.ones(5)]).wait()

    on_hosts("aabb", work, timeout=300.0)


def test_leaving_does_not_wait_for_calls_of_other_hosts() -> None:
    left = threading.Barrier(3)

    def work(group: Any) -> float:
        if group.rank() == 2:
            left.wait(DEADLINE)
            return 0.0
        call = group.allreduce([torch.ones(5)], asked_for("sum", later=True))
        future = call.get_future()
        time.sleep(0.2)  # until it waits for the network
        start = time.monotonic()
        group.shutdown()
        took = time.monotonic() - start
        with pytest.raises(CommError, match=r"closed|left the group"):
            call.wait()
        with pytest.raises(RuntimeError, match=r"closed|left the group"):
            future.wait()
        left.wait(DEADLINE)
        return took

    assert max(on_hosts("aab", work, timeout=40.0)) < 10
