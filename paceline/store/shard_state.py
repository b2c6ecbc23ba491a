"""What passes between servers that hold the parameters among them: state of optimizers and schedulers, norms, pairs."""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.record.state_tree import pack, unpack
from paceline.store.layout import ModelLayouts
from paceline.train_state import TrainState, parameters_of

_PLACE = 1 << 42  # in the memory that servers share: the file is sparse, and all that lasts comes long before it
_NO_GRADIENT = -1.0


def write_state(file: int, train_state: TrainState, layouts: ModelLayouts) -> int:
    """Write the optimizer and scheduler state of a server's part into that server's memory; return its length.

    The parameters are there already.
    """
    state = {
        "optimizers": [
            [[number, dict(optimizer.state[each])] for number, each in _numbered(optimizer, layouts)]
            for optimizer in train_state.holders
        ],
        "groups": [[{**group, "params": None} for group in each.param_groups] for each in train_state.holders],
        "schedulers": [scheduler.state_dict() for scheduler in train_state.schedulers],
    }
    tree, tensors = pack(state)
    stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(tree).encode()
    stored["state"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return _put(file, save(stored))


def _put(file: int, blob: bytes) -> int:
    """Put bytes into a server's memory, for the other end; return their number."""
    os.posix_fallocate(file, _PLACE, len(blob))
    with mmap.mmap(file, len(blob), offset=_PLACE) as memory:
        memory[:] = blob
    return len(blob)


def _take(file: int, length: int) -> bytes:
    with mmap.mmap(file, length, offset=_PLACE, access=mmap.ACCESS_READ) as memory:
        blob = memory[:]
    os.ftruncate(file, _PLACE)  # it is not needed any more
    return blob


def _read_state(file: int, length: int) -> dict[str, Any]:
    tensors = {name: tensor.clone() for name, tensor in load(_take(file, length)).items()}  # aligned as torch does it
    text = tensors.pop("state").numpy().tobytes()
    state: dict[str, Any] = unpack(json.loads(text), tensors)
    return state


def load_state(file: int, length: int, train_state: TrainState) -> None:
    """Load the state that the first server has written into the memory."""
    found = _read_state(file, length)
    for optimizer, groups, states in zip(train_state.holders, found["groups"], found["optimizers"], strict=True):
        own = optimizer.state_dict()
        merged = [{**new, "params": old["params"]} for new, old in zip(groups, own["param_groups"], strict=True)]
        optimizer.load_state_dict({"state": dict(states), "param_groups": merged})
    for scheduler, state in zip(train_state.schedulers, found["schedulers"], strict=True):
        scheduler.load_state_dict(state)


def collect_state(file: int, length: int, train_state: TrainState) -> None:
    """Add the optimizer state of another server to that of the first, for a checkpoint."""
    found = _read_state(file, length)
    for optimizer, states in zip(train_state.holders, found["optimizers"], strict=True):
        parameters = parameters_of(optimizer)
        for number, state in states:
            optimizer.state[parameters[number]] = state
        ordered = {each: optimizer.state[each] for each in parameters if each in optimizer.state}
        optimizer.state.clear()
        optimizer.state.update(ordered)


def drop_state(train_state: TrainState, layouts: ModelLayouts) -> None:
    """Remove the optimizer state of parameters that are not in a server's part."""
    ours = {id(parameter) for parameter in layouts.parameters}
    for optimizer in train_state.holders:
        for parameter in parameters_of(optimizer):
            if id(parameter) not in ours:
                optimizer.state.pop(parameter, None)


def _numbered(optimizer: Optimizer, layouts: ModelLayouts) -> Iterator[tuple[int, Tensor]]:
    """Number and parameter of each entry in an optimizer's state, of a part."""
    ours = {id(parameter) for parameter in layouts.parameters}
    for number, parameter in enumerate(parameters_of(optimizer)):
        if id(parameter) in ours and parameter in optimizer.state:
            yield number, parameter


# Pairs of pushes, which are compared over all servers ----------------------------------------------------------------


def write_rows(file: int, rows: Tensor) -> int:
    """Write the rows of a part, a number for each pair of pushes, into its server's memory; return their length."""
    return _put(file, rows.numpy().tobytes())


def read_rows(file: int, length: int, pairs: int) -> Tensor:
    """Read the rows that a server has written, for so many pairs."""
    return torch.frombuffer(bytearray(_take(file, length)), dtype=torch.float64).view(-1, pairs)


# Clipping, which needs the norm over all servers ---------------------------------------------------------------------


def norms_of(layouts: ModelLayouts) -> bytes:
    """The norm of each gradient of a part."""
    norms = [
        _NO_GRADIENT if each.grad is None else float(torch.linalg.vector_norm(each.grad)) for each in layouts.trained
    ]
    return struct.pack(f"<{len(norms)}d", *norms)


def total_norm(norms: Sequence[bytes], layouts: Sequence[ModelLayouts]) -> float:
    """The norm over all parts, added up in the order and precision in which torch adds them."""
    found = [
        torch.tensor(norm, dtype=parameter.dtype)
        for each, part in zip(norms, layouts, strict=True)
        for (norm,), parameter in zip(struct.iter_unpack("<d", each), part.trained, strict=True)
        if norm != _NO_GRADIENT
    ]
    return float(nn.utils.get_total_norm(found))


def clip(layouts: ModelLayouts, longest: float, norm: float) -> None:
    """Clip the gradients of a part; ``norm`` is that of all parts together."""
    clipped = [parameter for parameter in layouts.trained if parameter.grad is not None]
    if clipped:
        nn.utils.clip_grads_with_norm_(clipped, longest, torch.tensor(norm, dtype=clipped[0].dtype))
