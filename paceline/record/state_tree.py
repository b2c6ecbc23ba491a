"""Turns any training state into JSON and named tensors, and back, without pickle.

A state is the result of a ``state_dict()``: nested dicts, lists, tuples, numbers, strings, ``None`` and tensors.
Values that JSON lacks (tensors, tuples, dicts whose keys are not strings) are written as a one-key dict whose key
starts with ``$``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.errors import CheckpointError

Tree = Any  # any value that json.dumps takes


def pack(state: object) -> tuple[Tree, dict[str, Tensor]]:
    """Split ``state`` into a JSON tree and its tensors by name."""
    tensors: dict[str, Tensor] = {}
    return _pack(state, "", tensors), tensors


def unpack(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild a state from the results of ``pack``."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        (tag, value), *_ = tree.items()
        if tag == "$tensor":
            return tensors[value]
        if tag == "$array":
            return tensors[value].numpy()
        if tag == "$tuple":
            return tuple(unpack(item, tensors) for item in value)
        if tag == "$dict":
            return {_key(unpack(key, tensors)): unpack(item, tensors) for key, item in value}
        if tag == "$counter":
            return Counter({_key(unpack(key, tensors)): unpack(item, tensors) for key, item in value})
    return {key: unpack(item, tensors) for key, item in tree.items()}


def _pack(value: object, path: str, tensors: dict[str, Tensor]) -> Tree:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"$tensor": _add_tensor(value, path, tensors)}
    if isinstance(value, np.ndarray):
        return {"$array": _add_tensor(_from_numpy(value, path), path, tensors)}
    if isinstance(value, Mapping):
        return _pack_mapping(value, path, tensors)
    if isinstance(value, list | tuple):
        items = [_pack(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    raise _cannot_save(path, f"{type(value).__module__}.{type(value).__qualname__}")


def _cannot_save(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"cannot save {path.lstrip('.') or 'the state'}: a checkpoint holds tensors, numbers, strings and containers "
        f"of them, not {what}; leave it out of state_dict() or turn it into one of those"
    )


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise _cannot_save(path, f"a numpy array of {array.dtype}") from error


def _pack_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> Tree:
    plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
    if plain and not isinstance(value, Counter):
        return {key: _pack(item, f"{path}.{key}", tensors) for key, item in value.items()}
    pairs = [[_pack(key, f"{path}.key", tensors), _pack(item, f"{path}.{key}", tensors)] for key, item in value.items()]
    return {"$counter" if isinstance(value, Counter) else "$dict": pairs}


def _add_tensor(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized or tensor.dtype == torch.complex128:
        kind = "a tensor without data" if tensor.is_meta else f"a {tensor.layout} tensor of {tensor.dtype}"
        raise _cannot_save(path, kind)
    base = _file_name(path.lstrip("."))
    name, suffix = base, 1
    while name in tensors:  # {"a.b": x} and {"a": {"b": y}} have the same path
        suffix += 1
        name = f"{base}~{suffix}"
    tensors[name] = tensor.detach()
    return name


def _file_name(path: str) -> str:
    """The name of a tensor in the file: its path, unless safetensors does not allow that name."""
    encodable = path.encode("utf-8", "ignore").decode() == path
    return path if path and encodable and path != "__metadata__" else f"tensor:{path!a}"


def _key(value: Any) -> Any:
    """A hashable form of a key: lists become tuples."""
    return tuple(value) if isinstance(value, list) else value
