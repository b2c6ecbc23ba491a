"""Random streams: seeds derived from names and numbers, and the state of torch, ``random`` and numpy.

Seeds are for supervisors and simulations too, which start without torch's seconds: what needs torch imports it.
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Mapping
from typing import Any

import numpy


def derive_seed(*parts: int | str) -> int:
    """Make one 63-bit seed from numbers and words, the same on every machine and in every run.

    >>> derive_seed(0, "epoch", 3) == derive_seed(0, "epoch", 3) != derive_seed(0, "epoch", 4)
    True
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        tag, payload = ("s", part) if isinstance(part, str) else ("i", str(operator.index(part)))
        data = payload.encode()
        digest.update(f"{tag}{len(data)}:".encode() + data)  # the length keeps "ab","c" apart from "a","bc"
    return int.from_bytes(digest.digest(), "big") >> 1


def seed_streams(seed: int) -> None:
    """Seed torch on every device in use, ``random`` and numpy's global stream.

    Generators are seeded directly: ``torch.manual_seed`` looks for devices first, at 250 us against 1.
    """
    import torch

    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def capture_streams() -> dict[str, Any]:
    """Take the state of all streams as tensors, numbers and lists, fit for safetensors and JSON.

    A ``gauss`` list holds the second of a pair of normals that is drawn but not given out yet, or nothing.
    """
    import torch

    version, words, gauss = random.getstate()
    _, keys, position, has_cached, cached = numpy.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "random_version": version,
        "random_words": torch.tensor(words, device="cpu"),
        "random_gauss": [] if gauss is None else [gauss],
        "numpy_words": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
        "numpy_position": int(position),
        "numpy_gauss": [float(cached)] if has_cached else [],
    }
    if _cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_streams(state: Mapping[str, Any]) -> None:
    """Put all streams back to where ``capture_streams`` found them, leaving out devices not found here."""
    import torch

    torch.default_generator.set_state(state["torch"])
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    for device, device_state in zip(devices, state.get("cuda", ()), strict=False):
        torch.cuda.set_rng_state(device_state, device)
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
    (gauss,) = state["random_gauss"] or [None]
    random.setstate((state["random_version"], tuple(state["random_words"].tolist()), gauss))
    (cached,) = state["numpy_gauss"] or [0.0]
    keys = state["numpy_words"].numpy().astype(numpy.uint32)
    numpy.random.set_state(("MT19937", keys, state["numpy_position"], len(state["numpy_gauss"]), cached))


def _cuda_in_use() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
