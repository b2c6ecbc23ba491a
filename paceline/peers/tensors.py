"""Sends tensors and states from worker 0 to all workers, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.peers.group import Peers
from paceline.record.state_tree import pack, unpack


def averaged_dtype(value: Tensor) -> torch.dtype:
    """The dtype of an average: floating point, also for integers."""
    return value.dtype if value.is_floating_point() or value.is_complex() else torch.get_default_dtype()


def send_tensors(tensors: Sequence[Tensor], peers: Peers) -> None:
    """Copy worker 0's tensors to all workers, as bytes: process groups want dense tensors of few dtypes."""
    if not tensors:
        return
    tensors = [_without_repeats(tensor) for tensor in tensors]
    with torch.no_grad():
        parts = [_as_bytes(tensor) for tensor in tensors]
        payload = torch.cat([part.to(peers.device) for part in parts])
        peers.broadcast(payload)
        if peers.rank != 0:
            received = torch.split(payload, [len(part) for part in parts])
            for tensor, part in zip(tensors, received, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _without_repeats(tensor: Tensor) -> Tensor:
    """An expanded tensor without its repeated dimensions, which cannot be written."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return flat.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def share_state(state: Mapping[str, Any] | None, peers: Peers, root: int = 0) -> Any:
    """Send the root's state to all: its JSON part first, then the bytes of every tensor."""
    tree, tensors = pack(state)
    layout = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    tree, layout = peers.share([tree, layout], root)
    received = {}
    for name, (dtype, shape) in layout.items():
        if peers.rank == root:
            tensor = tensors[name]
        else:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        payload = _as_bytes(tensor).to(peers.device)
        peers.broadcast(payload, root)
        received[name] = payload.cpu().view(tensor.dtype).reshape(shape)
    return unpack(tree, received)
