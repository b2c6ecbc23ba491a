"""Readers of data files: what was written is read, and what is broken is named."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline.errors import UsageError
from paceline.problems.readers import (
    find_file,
    read_cifar10_file,
    read_cifar10_test,
    read_cifar10_train,
    read_digits,
    read_idx,
    read_mnist,
    read_text,
)

Bytes = npt.NDArray[np.uint8]


def idx_bytes(values: Bytes) -> bytes:
    return bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes() + values.tobytes()


def cifar_bytes(labels: list[int], seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), 3072), dtype=np.uint8)
    return np.concatenate([np.array(labels, dtype=np.uint8)[:, None], pixels], axis=1).tobytes()


def write_mnist(folder: Path, *, part: str = "train", count: int = 3, size: int = 28, labels: int = 3) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.zeros((count, size, size), dtype=np.uint8)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(np.arange(labels, dtype=np.uint8)))


@given(
    values=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=6)),
    packed=st.booleans(),
)
def test_idx_round_trip(values: Bytes, packed: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("idx") / "values"
    content = idx_bytes(values)
    path.write_bytes(gzip.compress(content) if packed else content)
    read = read_idx(path, num_dims=values.ndim)
    assert read.dtype == torch.uint8
    assert np.array_equal(read.numpy(), values)


@given(labels=st.lists(st.integers(0, 9), min_size=1, max_size=4), packed=st.booleans())
def test_cifar_round_trip(labels: list[int], packed: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cifar") / "batch.bin"
    content = cifar_bytes(labels)
    path.write_bytes(gzip.compress(content) if packed else content)
    images, read_labels = read_cifar10_file(path)
    assert images.dtype == read_labels.dtype == torch.uint8
    assert read_labels.tolist() == labels
    assert images.shape == (len(labels), 3, 32, 32)
    again = torch.cat([read_labels[:, None], images.flatten(1)], dim=1)
    assert again.numpy().tobytes() == content


def test_what_was_read_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(idx_bytes(np.zeros(4, dtype=np.uint8)))
    values = read_idx(tmp_path / "values", num_dims=1)
    values += 1
    assert values.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("folder", ["", "mnist"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_files_are_found_in_both_places_under_both_names(tmp_path: Path, folder: str, suffix: str) -> None:
    path = tmp_path / folder / f"name{suffix}"
    path.parent.mkdir(exist_ok=True)
    path.touch()
    assert find_file(tmp_path, "mnist", "name") == path


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_mnist(tmp_path, "train")
    message = str(caught.value)
    for part in ("train-images-idx3-ubyte or train-images-idx3-ubyte.gz", str(tmp_path), str(tmp_path / "mnist")):
        assert part in message
    assert "--data DIR or PACELINE_DATA" in message


@pytest.mark.parametrize(
    ("make_data", "reason"),
    [
        (lambda folder: None, "no data directory was given"),
        (lambda folder: folder / "nowhere", "nowhere does not exist"),
        (lambda folder: folder / "file", "file is not a directory"),
    ],
)
def test_no_usable_directory(tmp_path: Path, make_data: Callable[[Path], Path | None], reason: str) -> None:
    (tmp_path / "file").touch()
    for read in (lambda data: read_mnist(data, "t10k"), read_cifar10_train, read_cifar10_test):
        with pytest.raises(UsageError, match=rf"looked for .*{reason}; .*--data DIR"):
            read(make_data(tmp_path))


GOOD_IDX = idx_bytes(np.arange(12, dtype=np.uint8).reshape(3, 4))


BROKEN_IDX = {
    "empty": (b"", "this one with nothing"),
    "one dimension": (b"\x00\x00\x08\x01" + GOOD_IDX[4:], "starts with 00000802, this one with 00000801"),
    "floats": (b"\x00\x00\x0d\x02" + GOOD_IDX[4:], "this one with 00000d02"),
    "a web page": (b"<html>not found</html>", "starts with 00000802"),
    "cut in the header": (GOOD_IDX[:9], "cut short inside its header of 12 bytes"),
    "one byte short": (GOOD_IDX[:-1], r"promises 24 bytes for the shape \(3, 4\), found 23"),
    "one byte long": (GOOD_IDX + b"\x00", r"promises 24 bytes .* found 25"),
    "no examples": (idx_bytes(np.zeros((0, 4), dtype=np.uint8)), r"holds no examples, its shape is \(0, 4\)"),
    "gzip cut short": (gzip.compress(GOOD_IDX)[:-3], "cannot be read"),
    "gzip of a short file": (gzip.compress(GOOD_IDX[:-1]), "found 23"),
}


@pytest.mark.parametrize("case", BROKEN_IDX)
def test_broken_idx_files(tmp_path: Path, case: str) -> None:
    content, reason = BROKEN_IDX[case]
    path = tmp_path / "values-idx2-ubyte"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=f"values-idx2-ubyte: .*{reason}"):
        read_idx(path, num_dims=2)


@given(position=st.integers(0, len(gzip.compress(GOOD_IDX)) - 1), flip=st.integers(1, 255))
def test_a_damaged_gzip_is_never_read_as_something_else(
    position: int, flip: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(gzip.compress(GOOD_IDX))
    content[position] ^= flip
    path = tmp_path_factory.mktemp("damaged") / "values.gz"
    path.write_bytes(content)
    try:
        values = read_idx(path, num_dims=2)
    except UsageError as error:
        assert "values.gz: " in str(error)
    else:  # the time stamp and the padding bits carry no data
        assert values.flatten().tolist() == list(range(12))


def test_mnist_parts_must_fit_together(tmp_path: Path) -> None:
    write_mnist(tmp_path / "good")
    images, labels = read_mnist(tmp_path / "good", "train")
    assert (tuple(images.shape), labels.tolist()) == ((3, 28, 28), [0, 1, 2])
    write_mnist(tmp_path / "count", labels=4)
    with pytest.raises(UsageError, match="train-labels-idx1-ubyte: holds 4 labels for 3 images"):
        read_mnist(tmp_path / "count", "train")
    write_mnist(tmp_path / "size", size=27)
    with pytest.raises(UsageError, match="train-images-idx3-ubyte: wanted images of 28x28, found 27x27"):
        read_mnist(tmp_path / "size", "train")
    write_mnist(tmp_path / "range", count=11, labels=11)
    with pytest.raises(UsageError, match="labels-idx1-ubyte: wanted labels from 0 to 9, found 10 at example 10"):
        read_mnist(tmp_path / "range", "train")


BROKEN_CIFAR = {
    "empty": (b"", "found 0 bytes"),
    "one byte short": (
        cifar_bytes([1, 2])[:-1],
        "wanted records of 3073 bytes, found 6145 bytes; it is cut short",
    ),
    "label out of range": (cifar_bytes([1, 10, 2]), "wanted labels from 0 to 9, found 10 at example 1"),
    "gzip cut short": (gzip.compress(cifar_bytes([1]))[:50], "cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN_CIFAR)
def test_broken_cifar_files(tmp_path: Path, case: str) -> None:
    content, reason = BROKEN_CIFAR[case]
    (tmp_path / "test_batch.bin").write_bytes(content)
    with pytest.raises(UsageError, match=rf"test_batch\.bin: .*{reason}"):
        read_cifar10_test(tmp_path)


def test_cifar_takes_the_training_files_there_are_in_order(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "data_batch_4.bin").write_bytes(cifar_bytes([4, 5]))
    (tmp_path / "cifar10" / "data_batch_2.bin.gz").write_bytes(gzip.compress(cifar_bytes([1, 2, 3])))
    images, labels = read_cifar10_train(tmp_path)
    assert labels.tolist() == [1, 2, 3, 4, 5]
    assert images.shape == (5, 3, 32, 32)


def test_cifar_names_every_training_file_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_cifar10_train(tmp_path)
    for number in range(1, 6):
        assert f"data_batch_{number}.bin or data_batch_{number}.bin.gz" in str(caught.value)


GOOD_LINE = ",".join(["16"] * 64 + ["9"])


def test_digits_round_trip(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 10, (7, 65))
    path = tmp_path / "digits.csv.gz"
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))
    images, labels = read_digits(path)
    assert images.dtype == labels.dtype == torch.uint8
    assert np.array_equal(images.flatten(1).numpy(), rows[:, :64])
    assert np.array_equal(labels.numpy(), rows[:, 64])


BROKEN_DIGITS = {
    "empty": ("", "holds no examples"),
    "blank": ("\n\n", "holds no examples"),
    "one column short": (GOOD_LINE[:-2], "wanted 65 integers a line, found 64"),
    "ragged": (f"{GOOD_LINE}\n{GOOD_LINE[:-2]}", "wanted lines of 65 integers"),
    "a word": (f"{GOOD_LINE}\n" + GOOD_LINE.replace("9", "nine"), "wanted lines of 65 integers"),
    "pixel too large": (GOOD_LINE.replace("16", "17"), "wanted pixels from 0 to 16, found 17 to 17"),
    "pixel negative": (GOOD_LINE.replace("16", "-1"), "wanted pixels from 0 to 16, found -1 to -1"),
    "label too large": (GOOD_LINE[:-1] + "12", "wanted labels from 0 to 9, found 12 at example 0"),
    "label beyond a byte": (GOOD_LINE[:-1] + "256", "wanted labels from 0 to 9, found 256 at example 0"),
    "label negative": (GOOD_LINE[:-1] + "-1", "wanted labels from 0 to 9, found -1 at example 0"),
}


@pytest.mark.parametrize("case", BROKEN_DIGITS)
def test_broken_digits(tmp_path: Path, case: str) -> None:
    content, reason = BROKEN_DIGITS[case]
    (tmp_path / "digits.csv").write_text(content)
    with pytest.raises(UsageError, match=rf"digits\.csv: {reason}"):
        read_digits(tmp_path / "digits.csv")


@given(text=st.text(st.characters(codec="utf-8")), packed=st.booleans())
def test_text_round_trip(text: str, packed: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("text") / "input.txt"
    content = text.encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    assert read_text(path) == text


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(UsageError, match=r"input\.txt: not UTF-8 text \(.* at byte 2\)"):
        read_text(tmp_path / "input.txt")


def test_a_directory_is_not_a_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_text(tmp_path)


@pytest.mark.data
def test_real_mnist(data_dir: Path) -> None:
    images, labels = read_mnist(data_dir, "train")
    assert images.shape == (60000, 28, 28)
    histogram = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert labels.bincount().tolist() == histogram
    images, labels = read_mnist(data_dir / "mnist", "t10k")
    assert images.shape == (10000, 28, 28)
    assert labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.data
def test_real_cifar10(data_dir: Path) -> None:
    images, labels = read_cifar10_train(data_dir)
    assert images.shape == (20000, 3, 32, 32)
    assert labels.bincount().tolist() == [1989, 1981, 2042, 2011, 2009, 1925, 2038, 2027, 2012, 1966]
    images, labels = read_cifar10_test(data_dir)
    assert images.shape == (10000, 3, 32, 32)
    assert labels.bincount().tolist() == [1000] * 10


@pytest.mark.data
def test_real_text(data_dir: Path) -> None:
    text = read_text(find_file(data_dir, "tinyshakespeare", "input.txt"))
    assert (len(text), len(set(text))) == (1115394, 65)
