"""Tensors of other devices go to the backend of their device: here a stand-in, since test machines have one device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_ranks import options, run_groups

from paceline.collectives import python_group, work
from paceline.errors import UsageError


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Serve device "meta" by torch's fake group, which does nothing; gives who asked for one."""
    made: list[tuple[int, int]] = []

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        made.append((rank, size))
        store.set(f"stand-in/{rank}", "here")
        return FakeProcessGroup._create_internal(rank, size)

    monkeypatch.setattr(python_group, "OTHER_DEVICES", {"meta": (lambda: True, make)})
    return made


def calls(group: Any, device: str) -> list[Callable[[], Any]]:
    """Every operation that takes tensors, on some of this device."""

    def one(count: int = 4) -> Tensor:
        return torch.ones(count, device=device)

    def two() -> list[Tensor]:
        return [one(), one()]

    reduce, gather, scatter = options("Allreduce"), options("Allgather"), options("ReduceScatter")
    root, other = group.rank() == 0, 1 - group.rank()
    return [
        lambda: group.allreduce([one()], reduce),
        lambda: group.allreduce_coalesced(two(), options("AllreduceCoalesced")),
        lambda: group.reduce([one()], options("Reduce")),
        lambda: group.broadcast([one()], options("Broadcast")),
        lambda: group.allgather([two()], [one()], gather),
        lambda: group.allgather_coalesced([two(), two()], two(), gather),
        lambda: group.all_gather_single(one(8), one(), gather),
        lambda: group._allgather_base(one(8), one(), gather),
        lambda: group.all_gather_single_coalesced([one(8)], [one()], gather),
        lambda: group.allgather_into_tensor_coalesced([one(8)], [one()], gather),
        lambda: group.reduce_scatter([one()], [two()], scatter),
        lambda: group.reduce_scatter_single(one(), one(8), scatter),
        lambda: group._reduce_scatter_base(one(), one(8), scatter),
        lambda: group.reduce_scatter_single_coalesced([one()], [one(8)], scatter),
        lambda: group.reduce_scatter_tensor_coalesced([one()], [one(8)], scatter),
        lambda: group.gather([two()] if root else [], [one()], options("Gather")),
        lambda: group.scatter([one()], [two()] if root else [], options("Scatter")),
        lambda: group.alltoall(two(), two(), options("AllToAll")),
        lambda: group.all_to_all_single(one(), one(), [], [], options("AllToAll")),
        lambda: group.alltoall_base(one(), one(), [], [], options("AllToAll")),
        lambda: group.send([one()], other, 0),
        lambda: group.recv([one()], other, 0),
        lambda: group.send([one()], other, 0),
        lambda: group.recv_anysource([one()], 0),
    ]


def test_every_operation_goes_by_device(stand_in: list[tuple[int, int]]) -> None:
    def run(group: Any) -> None:
        for call in calls(group, "cpu"):
            started = call()
            assert isinstance(started, work.Work)
            started.wait()
        elsewhere = 0
        for call in calls(group, "meta"):
            try:
                started = call()
            except NotImplementedError as error:  # torch has no kernel of this operation for this device
                assert "c10d::" in str(error)
            else:
                assert not isinstance(started, work.Work)
                elsewhere += 1
        assert elsewhere > 8
        for device in "meta", "cpu":
            barrier = options("Barrier")
            barrier.device = torch.device(device)
            assert isinstance(group.barrier(barrier), work.Work) == (device == "cpu")

    run_groups(run, 2)
    assert sorted(stand_in) == [(0, 2), (1, 2)]


def test_the_devices_are_known(stand_in: list[tuple[int, int]]) -> None:
    def run(group: Any) -> None:
        assert [device.type for device in group._device_types] == ["cpu", "meta"]
        assert group._get_backend(torch.device("cpu")) is group
        assert isinstance(group._get_backend(torch.device("meta")), FakeProcessGroup)
        assert group.name() == group._get_backend_name() == "paceline"
        for error in UsageError, RuntimeError:  # torch looks for the latter where it tries devices
            with pytest.raises(error, match="nothing for tensors on cuda; move them to the CPU"):
                group._get_backend(torch.device("cuda"))
        with pytest.raises(UsageError, match="CPU memory"):
            group.allgather([[torch.ones(2), torch.ones(2)]], [torch.ones(2, device="meta")], options("Allgather"))

    run_groups(run, 2)


def test_without_the_device_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("asked for a device that is not there")

    monkeypatch.setattr(python_group, "OTHER_DEVICES", {"meta": (lambda: False, refuse)})

    def run(group: Any) -> None:
        assert [device.type for device in group._device_types] == ["cpu"]
        for call in calls(group, "meta"):
            with pytest.raises(UsageError, match="nothing for tensors on meta"):
                call()
        barrier = options("Barrier")
        barrier.device = torch.device("meta")
        with pytest.raises(UsageError, match="nothing for tensors on meta"):
            group.barrier(barrier)

    run_groups(run, 2)
