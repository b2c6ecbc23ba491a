"""Reads the standard files of public data sets; errors name the file, the reason and what to do."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import UsageError

Examples = tuple[Tensor, Tensor]
"""Images and labels, both uint8, the examples along dim 0."""

_NUM_CLASSES = 10
_GZIP_MAGIC = b"\x1f\x8b"
_CIFAR_RECORD = 1 + 3 * 32 * 32  # a label byte, then the red, green and blue planes


def read_mnist(data: Path | None, part: str) -> Examples:
    """Read the ``train`` or the ``t10k`` part of MNIST from its two idx files."""
    images_path = find_file(data, "mnist", f"{part}-images-idx3-ubyte")
    labels_path = find_file(data, "mnist", f"{part}-labels-idx1-ubyte")
    images = read_idx(images_path, num_dims=3)
    labels = read_idx(labels_path, num_dims=1)
    if images.shape[1:] != (28, 28):
        raise UsageError(f"{images_path}: wanted images of 28x28, found {images.shape[1]}x{images.shape[2]}")
    if len(labels) != len(images):
        raise UsageError(f"{labels_path}: holds {len(labels)} labels for {len(images)} images in {images_path}")
    _check_labels(labels_path, labels)
    return images, labels


def read_cifar10_train(data: Path | None) -> Examples:
    """Read all existing ones of CIFAR-10's five training files (binary version) as one set."""
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    paths = [path for name in names if (path := _look_for(data, "cifar10", name)) is not None]
    if not paths:
        raise _not_found(data, "cifar10", names)
    images, labels = zip(*(read_cifar10_file(path) for path in paths), strict=True)
    return torch.cat(images), torch.cat(labels)


def read_cifar10_test(data: Path | None) -> Examples:
    """Read CIFAR-10's test file (binary version)."""
    return read_cifar10_file(find_file(data, "cifar10", "test_batch.bin"))


def read_cifar10_file(path: Path) -> Examples:
    """Read one file of CIFAR-10's binary version: images of 3x32x32 and their labels."""
    content = read_bytes(path)
    if not content or len(content) % _CIFAR_RECORD:
        raise UsageError(
            f"{path}: wanted records of {_CIFAR_RECORD} bytes, found {len(content)} bytes; "
            "it is cut short or not the binary version of CIFAR-10"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, _CIFAR_RECORD)
    labels = _tensor(records[:, 0])
    _check_labels(path, labels)
    return _tensor(records[:, 1:]).reshape(-1, 3, 32, 32), labels


def read_idx(path: Path, *, num_dims: int) -> Tensor:
    """Read an idx file of unsigned bytes, plain or gzipped."""
    content = read_bytes(path)
    header = 4 + 4 * num_dims
    magic = bytes((0, 0, 8, num_dims))
    if content[:4] != magic:
        raise UsageError(
            f"{path}: an idx file of bytes in {num_dims} dimension(s) starts with {magic.hex()}, "
            f"this one with {content[:4].hex() or 'nothing'}; is it the right file?"
        )
    if len(content) < header:
        raise UsageError(f"{path}: cut short inside its header of {header} bytes; fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=num_dims, offset=4))
    wanted = header + math.prod(shape)
    if len(content) != wanted:
        raise UsageError(
            f"{path}: its header promises {wanted} bytes for the shape {shape}, found {len(content)}; fetch it again"
        )
    if not math.prod(shape):
        raise UsageError(f"{path}: holds no examples, its shape is {shape}")
    return _tensor(np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape))


def read_digits(path: Path) -> Examples:
    """Read the UCI digits: lines of 64 values from 0 to 16 and a label, as images of 8x8."""
    text = read_text(path)
    if not text.strip():
        raise UsageError(f"{path}: holds no examples")
    try:
        rows = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.int64, comments=None, ndmin=2)
    except ValueError as error:
        raise UsageError(f"{path}: wanted lines of 65 integers: {error}") from error
    if rows.shape[1] != 65:
        raise UsageError(f"{path}: wanted 65 integers a line, found {rows.shape[1]}")
    pixels, labels = torch.from_numpy(rows[:, :64]), torch.from_numpy(rows[:, 64])
    if pixels.min() < 0 or pixels.max() > 16:
        raise UsageError(f"{path}: wanted pixels from 0 to 16, found {pixels.min()} to {pixels.max()}")
    _check_labels(path, labels)
    return pixels.to(torch.uint8).reshape(-1, 8, 8), labels.to(torch.uint8)


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, plain or gzipped, its line ends unchanged."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_bytes(path: Path) -> bytes:
    """Read a file, and unpack it if its content is gzip; its name does not tell, since browsers may unpack it."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read: {error}; is it complete?") from error


def find_file(data: Path | None, folder: str, name: str) -> Path:
    """Find ``name`` or ``name.gz`` in the directory ``data`` or in its ``folder``."""
    path = _look_for(data, folder, name)
    if path is None:
        raise _not_found(data, folder, [name])
    return path


def _look_for(data: Path | None, folder: str, name: str) -> Path | None:
    if data is None:
        return None
    candidates = (parent / spelling for parent in (data, data / folder) for spelling in (name, f"{name}.gz"))
    return next((path for path in candidates if path.is_file()), None)


def _not_found(data: Path | None, folder: str, names: list[str]) -> UsageError:
    wanted = " or ".join(f"{name} or {name}.gz" for name in names)
    if data is None:
        reason = "no data directory was given"
    elif not data.exists():
        reason = f"{data} does not exist"
    elif not data.is_dir():
        reason = f"{data} is not a directory"
    else:
        reason = f"it is neither in {data} nor in {data / folder}"
    return UsageError(f"looked for {wanted}, but {reason}; name the directory with --data DIR or PACELINE_DATA")


def _check_labels(path: Path, labels: Tensor) -> None:
    wrong = (labels < 0) | (labels >= _NUM_CLASSES)
    if wrong.any():
        index = int(wrong.int().argmax())
        raise UsageError(
            f"{path}: wanted labels from 0 to {_NUM_CLASSES - 1}, found {int(labels[index])} at example {index}"
        )


def _tensor(values: npt.NDArray[np.uint8]) -> Tensor:
    """Copy into a tensor: a view of the bytes would be read-only, which torch does not support."""
    return torch.from_numpy(values.copy())
