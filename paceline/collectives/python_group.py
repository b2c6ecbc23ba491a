"""The base of a process group written in Python: the methods that ``torch.distributed`` expects of a group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from paceline.collectives.register import NAME
from paceline.errors import UsageError

_CPU = torch.device("cpu")
# By torch's numbers: a lookup by its enumeration takes longer than a small reduction.
_REDUCTIONS = {
    int(getattr(dist.ReduceOp.RedOpType, name)): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def reduction_named(op: Any) -> str:
    """Our name of a reduction of torch."""
    kind = getattr(op, "op", op)
    name = _REDUCTIONS.get(int(kind))
    if name is None:
        raise UsageError(f"backend {NAME!r} has no reduction {kind}; known: {', '.join(_REDUCTIONS.values())}")
    return name


def nccl_backend(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(c10d.PrefixStore("cuda", store), rank, size, options)


# Backends for tensors of other devices; made only if the device exists.
OTHER_DEVICES: dict[str, tuple[Callable[[], bool], Callable[..., Any]]] = {
    "cuda": (lambda: torch.cuda.is_available() and dist.is_nccl_available(), nccl_backend),
}


# Not typed: its stubs list call forms that torch.distributed does not use, and mypy would reject every method here.
_TorchProcessGroup: Any = dist.ProcessGroup


class NoBackendError(UsageError, RuntimeError):
    """No backend for a device. It is a RuntimeError too, which torch expects when it tries several devices."""


class PythonGroup(_TorchProcessGroup):  # type: ignore[misc]
    """A named group that is its own backend for tensors in CPU memory.

    torch cannot combine a process group written in Python with another backend. So this one holds a group of torch for
    the other devices, ``_elsewhere``, and dispatches by device itself.
    """

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._name, self._description = name, ""
        self._elsewhere = dist.ProcessGroup(store, rank, size)
        for device, (is_here, make) in OTHER_DEVICES.items():
            if is_here():
                self._serve(device, make(store, rank, size, timeout))

    def _serve(self, device: str, backend: Any) -> None:
        self._elsewhere._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName
    group_name = property(getGroupName)

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_desc = setGroupDesc
    group_desc = property(getGroupDesc)

    def __repr__(self) -> str:
        return f"<{NAME} group {self._name!r}, rank {self._rank} of {self._size}>"

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU, *(device for device in self._elsewhere._device_types if device != _CPU)]

    def _get_backend(self, device: torch.device) -> Any:
        """The backend of a device; for the CPU this object itself."""
        if device.type == "cpu":
            return self
        if device.type not in {other.type for other in self._elsewhere._device_types}:
            raise NoBackendError(f"backend {NAME!r} has nothing for tensors on {device}; move them to the CPU")
        return self._elsewhere._get_backend(device)

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def shutdown(self) -> None:
        """Leave the groups of the other devices."""
        for device in self._elsewhere._device_types:
            self._elsewhere._get_backend(device).shutdown()
