"""Atomic checkpoints: one safetensors file each, with a checksum, renamed into place.

Any safetensors tool can open the file. Its metadata holds the rest of the state as JSON, and a SHA-256 over
everything. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import CheckpointError
from paceline.record.state_tree import pack, unpack

FORMAT = "paceline-checkpoint-1"
_NAME = re.compile(r"step-(\d{10})\.safetensors")


def write_checkpoint(path: Path, state: Mapping[str, object]) -> None:
    """Write ``state`` to ``path`` atomically: after any crash the file is either complete or as it was before."""
    tree, tensors = pack(dict(state))
    stored = {name: _for_storage(tensor) for name, tensor in tensors.items()}
    text = json.dumps(tree)
    metadata = {"format": FORMAT, "state": text, "sha256": _digest(text, stored)}
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(stored, aside, metadata)
        _sync(aside)
        aside.rename(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(_write_failure(path, stored, error)) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read the state in ``path``, or raise a ``CheckpointError`` that says what is wrong with the file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} is not a Paceline checkpoint: its format is {metadata.get('format')!r}, wanted {FORMAT!r}"
                )
            # Copies: the tensors of safe_open are mapped from a file that may be removed.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is torn or not a safetensors file: {error}") from error
    text = metadata.get("state", "")
    if _digest(text, tensors) != metadata.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its bytes do not match their SHA-256")
    state = unpack(json.loads(text), tensors)
    assert isinstance(state, dict), "write_checkpoint packs a dict"
    return state


@dataclass(frozen=True)
class CheckpointFolder:
    """The numbered checkpoints of one run, the newest ``keep`` of them."""

    path: Path
    keep: int = 3

    def file(self, step: int) -> Path:
        """The path of the checkpoint after ``step`` steps."""
        return self.path / f"step-{step:010d}.safetensors"

    def files(self) -> list[Path]:
        """List the checkpoints, oldest first."""
        if not self.path.is_dir():
            return []
        return sorted(entry for entry in self.path.iterdir() if _NAME.fullmatch(entry.name))

    def write(self, step: int, state: Mapping[str, object]) -> Path:
        """Write the checkpoint of ``step``, then remove all but the newest."""
        file = self.file(step)
        write_checkpoint(file, state)
        for old in self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return file

    def drop_after(self, file: Path) -> None:
        """Remove the checkpoints newer than ``file``: a run resumed from it makes its own."""
        for newer in self.files():
            if newer.name > file.name:
                newer.unlink(missing_ok=True)

    def clear_leftovers(self) -> None:
        """Remove the unfinished files of a killed writer."""
        if self.path.is_dir():
            for partial in self.path.glob(".*.partial"):
                partial.unlink(missing_ok=True)

    def newest(self) -> Iterator[tuple[Path, dict[str, Any] | CheckpointError]]:
        """Iterate over the checkpoints from the newest back: each file with its state, or the error of reading it."""
        for file in reversed(self.files()):
            try:
                yield file, read_checkpoint(file)
            except CheckpointError as error:
                yield file, error


def _for_storage(tensor: Tensor) -> Tensor:
    """A copy with its own memory: safetensors refuses tensors that share memory, such as tied weights."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(memoryview(_as_bytes(tensor)))
    return digest.hexdigest()


def _as_bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_failure(path: Path, tensors: Mapping[str, Tensor], error: Exception) -> str:
    wanted = sum(tensor.nbytes for tensor in tensors.values())
    full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
    if not full:
        return f"could not write the checkpoint {path}: {error}"
    there = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    return (
        f"could not write the checkpoint {path}: the disk is full ({wanted / 1e6:.1f} MB wanted, "
        f"{free / 1e6:.1f} MB free); the checkpoints before it are untouched; free some space and resume"
    )
