"""Timelines: what is written is read again, wherever the file ends, and deaths are found."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.record.timeline import (
    MAGIC,
    RECORD,
    Kind,
    Records,
    TimelineError,
    TimelineWriter,
    read_timeline,
    timeline_file,
)


class Span(NamedTuple):
    kind: Kind
    step: int
    start: float
    duration: float


KINDS = st.sampled_from([Kind.COMPUTING, Kind.WAITING, Kind.EXCHANGING, Kind.CANCELLED])
SPANS = st.builds(
    Span, KINDS, st.integers(0, 2**32 - 1), st.floats(0, 1e10), st.floats(0, 1000, width=32, allow_subnormal=False)
)


def write(file: Path, spans: Sequence[Span], *, every: float = 0.1) -> None:
    """Write spans as one process does that begins and is killed."""
    writer = TimelineWriter(file, every=every)
    for span in spans:
        writer.span(*span)
    writer.flush()


def alive(records: Records) -> list[Span]:
    """The records without those that the reader has made."""
    return [Span(Kind(kind), *rest) for kind, *rest in records.tolist() if kind != Kind.DEAD]


def in_order(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.start)


def dead(run: Path, rank: int = 0, until: float | None = None) -> list[tuple[float, float]]:
    """When a worker was dead: from, to."""
    records = read_timeline(run, until=until)[rank]
    gone = records[records["kind"] == Kind.DEAD]
    return [(start, start + duration) for start, duration in gone[["start", "duration"]].tolist()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all examples."""
    return tmp_path_factory.mktemp("run")


@given(spans=st.lists(SPANS, min_size=1, max_size=8), cut=st.data())
def test_a_file_cut_anywhere_reads_as_its_whole_records(run: Path, spans: list[Span], cut: st.DataObject) -> None:
    file = timeline_file(run, 0)
    file.unlink(missing_ok=True)
    write(file, spans, every=0.0)
    whole = file.read_bytes()
    assert len(whole) == len(MAGIC) + RECORD.itemsize * len(spans)
    length = cut.draw(st.integers(0, len(whole)))
    file.write_bytes(whole[:length])
    kept = max(0, length - len(MAGIC)) // RECORD.itemsize
    assert alive(read_timeline(run)[0]) == in_order(spans[:kept])


@given(first=st.lists(SPANS, max_size=4), second=st.lists(SPANS, min_size=1, max_size=4), cut=st.data())
def test_a_second_process_goes_on_behind_the_whole_records_of_the_first(
    run: Path, first: list[Span], second: list[Span], cut: st.DataObject
) -> None:
    file = timeline_file(run, 0)
    file.unlink(missing_ok=True)
    write(file, first)
    if first:
        data = file.read_bytes()
        length = cut.draw(st.integers(0, len(data)))
        file.write_bytes(data[:length])
        first = first[: max(0, length - len(MAGIC)) // RECORD.itemsize]
    write(file, second)
    assert alive(read_timeline(run)[0]) == in_order([*first, *second])


@given(lives=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=5))
def test_a_worker_is_dead_between_lives_that_it_did_not_leave(run: Path, lives: list[tuple[int, bool]]) -> None:
    file = timeline_file(run, 0)
    file.unlink(missing_ok=True)
    at = 0.0
    ended: float | None = None
    gaps: list[tuple[float, float]] = []
    for incarnation, (spans, leaves) in enumerate(lives):
        if ended is not None:
            gaps.append((ended, at))
        writer = TimelineWriter(file)
        writer.began(incarnation, at)
        for step in range(spans):
            writer.span(Kind.COMPUTING, step, at, 1.0)
            at += 1.0
        if leaves:
            writer.left(at)
        writer.close()
        ended = None if leaves else at
        at += 2.0
    if ended is not None:
        gaps.append((ended, at))
    assert dead(run, until=at) == gaps


def test_the_run_ends_with_the_last_record_of_all_workers(tmp_path: Path) -> None:
    for rank, seconds in enumerate((1.0, 5.0)):
        writer = TimelineWriter(timeline_file(tmp_path, rank))
        writer.began(0, 10.0)
        writer.span(Kind.COMPUTING, 0, 10.0, seconds)
        writer.close()
    assert dead(tmp_path, 0) == [(11.0, 15.0)]
    assert dead(tmp_path, 1) == []
    assert dead(tmp_path, 0, until=0.0) == []


def test_spans_are_written_as_they_come_and_a_killed_process_loses_few(tmp_path: Path) -> None:
    writer = TimelineWriter(timeline_file(tmp_path, 3), every=0.0)
    writer.began(2, 1.5)
    writer.span(Kind.WAITING, 7, 2.5, 0.25)
    read = read_timeline(tmp_path, until=0.0)
    assert list(read) == [3]
    assert alive(read[3]) == [Span(Kind.BEGAN, 2, 1.5, 0.0), Span(Kind.WAITING, 7, 2.5, 0.25)]


def test_a_directory_without_a_timeline_has_no_workers(tmp_path: Path) -> None:
    assert read_timeline(tmp_path) == {}
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "worker-0.bin").write_bytes(MAGIC[:3])
    (tmp_path / "timeline" / "worker-x.bin").write_bytes(b"")
    assert read_timeline(tmp_path)[0].dtype == RECORD
    assert len(read_timeline(tmp_path)[0]) == 0


def test_the_file_of_another_version_is_refused_and_not_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = timeline_file(tmp_path, 0)
    file.parent.mkdir()
    file.write_bytes(b"PLTIME9\nand more")
    with pytest.raises(TimelineError, match=r"worker-0\.bin is no timeline of a version that is known"):
        read_timeline(tmp_path)
    with caplog.at_level(logging.WARNING, "paceline"):
        write(file, [Span(Kind.COMPUTING, 0, 0.0, 1.0)] * 3)
    assert file.read_bytes() == b"PLTIME9\nand more"
    assert [record.message for record in caplog.records] == [
        f"could not write the timeline {file}: it is the file of another version, or no timeline; the run goes on "
        "without it"
    ]


def test_a_full_disk_is_told_once_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "timeline").mkdir()
    timeline_file(tmp_path, 0).symlink_to("/dev/full")
    writer = TimelineWriter(timeline_file(tmp_path, 0), every=0.0)
    with caplog.at_level(logging.WARNING, "paceline"):
        for step in range(3):
            writer.span(Kind.COMPUTING, step, float(step), 1.0)
        writer.close()
    assert [record.message.split(": ")[1] for record in caplog.records] == [
        "No space left on device; the run goes on without it"
    ]


def test_a_path_that_cannot_be_made_is_told_once_and_raises_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "timeline").write_text("no directory")
    with caplog.at_level(logging.WARNING, "paceline"):
        write(timeline_file(tmp_path, 0), [Span(Kind.COMPUTING, 0, 0.0, 1.0)] * 3, every=0.0)
    assert len(caplog.records) == 1


def test_the_dtype_is_that_of_the_packed_records(tmp_path: Path) -> None:
    write(timeline_file(tmp_path, 0), [Span(Kind.CANCELLED, 258, 1.0, 0.5)])
    assert timeline_file(tmp_path, 0).read_bytes() == MAGIC + bytes.fromhex("0300000002010000000000000000f03f0000003f")
    assert np.dtype(RECORD).itemsize == 20
