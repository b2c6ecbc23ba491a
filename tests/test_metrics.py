"""What a run's metrics hold: every line once, with the numbers of its moment, as JSON that anyone can read."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError, UsageError
from paceline.record.metrics import MetricsWriter, read_metrics
from paceline.record.run import Run


def test_metrics_are_cut_where_a_checkpoint_says(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(file)
    writer.write("step", step=1, loss=torch.tensor(0.5))
    length = writer.sync()
    writer.write("step", step=2)
    writer.close()
    with file.open("ab") as torn:
        torn.write(b'{"event": "st')
    assert [line["step"] for line in read_metrics(file)] == [1, 2]
    again = MetricsWriter(file, length=length)
    again.write("step", step=2, loss=0.25)
    again.close()
    assert [line["loss"] for line in read_metrics(file)] == [0.5, 0.25]


def test_metrics_shorter_than_a_checkpoint_says_are_not_filled_up(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"event": "a"}\n')
    MetricsWriter(file, length=999).close()
    assert file.read_text() == '{"event": "a"}\n'


def test_metrics_keep_the_numbers_of_their_moment(tmp_path: Path) -> None:
    """A tensor that changes later, as a running mean does, is written as it was when it was recorded."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    mean = torch.zeros(())
    for _ in range(3):
        mean += 1
        writer.write("step", mean=mean)
    writer.close()
    assert [line["mean"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (torch.tensor([2.5]), 2.5),
        (torch.tensor(2, dtype=torch.int32), 2),
        (torch.tensor(1.5, dtype=torch.bfloat16, requires_grad=True), 1.5),
        (np.float32(1.5), 1.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        ("text \N{GREEK SMALL LETTER ALPHA}", "text \N{GREEK SMALL LETTER ALPHA}"),
        (None, None),
    ],
    ids=str,
)
def test_metrics_take_any_number(value: Any, written: Any, tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write("step", value=value)
    writer.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["value"] == written


@pytest.mark.parametrize("value", [torch.zeros(2), object()], ids=["vector", "object"])
def test_a_value_that_is_no_number_is_refused_at_once_and_spoils_nothing(value: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    writer = run.open_metrics()
    writer.write("step", good=1)
    with pytest.raises(UsageError, match="wrong"):
        writer.write("step", wrong=value)
    writer.write("step", good=2)
    run.close()
    assert [line["good"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), torch.tensor(-float("inf"))], ids=str)
def test_metrics_are_json_that_every_reader_takes(value: Any, tmp_path: Path) -> None:
    """JSON has no NaN: a strict reader (a browser, jq) would stop at the first one."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write("step", loss=value)
    writer.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)


class TightDisk:
    """A file on a disk that has room for so many bytes more."""

    def __init__(self, file: Any, room: float) -> None:
        self.file, self.room = file, room

    def write(self, content: bytes) -> int:
        if len(content) > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(content)
        return int(self.file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_does_not_write_lines_twice(tmp_path: Path) -> None:
    """Writing fails in the middle; once there is room, what is written in the end is every line, once."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for step in range(5):
        writer.write("step", step=step)
    disk = TightDisk(writer._file, room=150)
    writer._file = disk  # type: ignore[assignment]
    with pytest.raises((OSError, PacelineError), match=r"No space|full"):
        writer.flush()
    disk.room = 10_000
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_a_full_disk_frees_the_run(tmp_path: Path) -> None:
    """Closing fails when the last lines cannot be written; the lock and the file are let go all the same."""
    run = Run(tmp_path)
    writer = run.open_metrics()
    writer.write("step", step=1)
    file = writer._file
    writer._file = TightDisk(file, room=0)  # type: ignore[assignment]
    with pytest.raises((OSError, PacelineError), match=r"No space|full"):
        run.close()
    try:
        assert file.closed
        Run(tmp_path, resume=True).close()
    finally:
        file.close()
