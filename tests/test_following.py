"""Reading a run's files while they grow: in any pieces the same as at once; cut, replaced and late files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.record.following import EventTail, RecordTail, RunTail
from paceline.record.metrics import MetricsWriter
from paceline.record.timeline import MAGIC, RECORD, Kind, Records, TimelineError, TimelineWriter, timeline_file

EVENTS = st.lists(
    st.fixed_dictionaries({"event": st.text(max_size=20), "time": st.floats(0, 2e9), "loss": st.floats(-9, 9)}),
    max_size=12,
)
CUTS = st.lists(st.integers(0, 1500), max_size=8)


def as_lines(events: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


def make_records(number: int, *, begin: float = 1.8e9) -> Records:
    records = np.zeros(number, RECORD)
    records["kind"] = np.arange(number) % 4
    records["step"] = np.arange(number)
    records["start"] = begin + 0.01 * np.arange(number)
    records["duration"] = 0.01
    return records


@given(events=EVENTS, cuts=CUTS, most=st.integers(1, 400))
def test_events_in_any_pieces_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, events: list[dict[str, Any]], cuts: list[int], most: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    tail = EventTail(path, most=most)
    found = tail.events()  # before there is a file
    for piece in pieces(as_lines(events), cuts):
        with path.open("ab") as file:
            file.write(piece)
        found += tail.events()
    while tail.behind:
        found += tail.events()
    assert found == events
    assert (tail.restarts, tail.broken) == (0, 0)


def steps(*times: float) -> list[dict[str, Any]]:
    return [{"event": "step", "time": time} for time in times]


@given(before=st.integers(0, 12), kept=st.integers(0, 12), more=st.integers(0, 12))
def test_a_cut_file_is_read_from_its_beginning(
    tmp_path_factory: pytest.TempPathFactory, before: int, kept: int, more: int
) -> None:
    """As a resumed run cuts it and writes on, between two looks; it may be longer than before."""
    path = tmp_path_factory.mktemp("tail") / "metrics.jsonl"
    path.write_bytes(as_lines(steps(*range(before))))
    tail = EventTail(path)
    assert tail.events() == steps(*range(before))
    resumed = steps(*range(min(kept, before)), *(each + 0.5 for each in range(more)))
    path.write_bytes(as_lines(resumed))
    cut = kept < before
    assert tail.events() == (resumed if cut else resumed[before:])
    assert tail.restarts == int(cut)


def test_a_file_that_is_removed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(as_lines(steps(1, 2)))
    tail = EventTail(path)
    assert len(tail.events()) == 2
    path.unlink()
    assert tail.events() == []
    assert tail.restarts == 1
    path.write_bytes(as_lines(steps(3)))
    assert tail.events() == steps(3)


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = EventTail(path)
    path.write_bytes(b'{"event": "step", "ti')
    assert tail.events() == []
    with path.open("ab") as file:
        file.write(b'me": 1.0}\n{"ev')
    assert tail.events() == [{"event": "step", "time": 1.0}]


def test_broken_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b"\xff\xfe", b"[1]", b"{}", b'{"event": "step"}', b'{"time": 3, "test_loss": 1}', b"[" * 100_000]
    lines += [b'{"time": NaN}', b'{"time": 1e99}']
    path.write_bytes(b"\n".join(lines) + b"\n")
    tail = EventTail(path)
    assert tail.events() == [{"event": "evaluation", "time": 3, "test_loss": 1}]
    assert tail.broken == 7


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 28)
    tail = EventTail(path)
    with pytest.raises(PacelineError, match="without a line end"):
        for _ in range(20):
            tail.events()


@given(number=st.integers(0, 60), cuts=CUTS, most=st.integers(1, 300))
def test_records_in_any_pieces_are_those_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, number: int, cuts: list[int], most: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "worker-0.bin"
    records = make_records(number)
    tail = RecordTail(path, skip=False, most=most)
    found = [tail.records()]
    for piece in pieces(MAGIC + records.tobytes(), cuts):
        with path.open("ab") as file:
            file.write(piece)
        found.append(tail.records())
    while tail.behind:
        found.append(tail.records())
    assert np.concatenate(found).tolist() == records.tolist()
    assert tail.restarts == 0


@given(number=st.integers(0, 60), more=st.integers(0, 60), most=st.integers(1, 300))
def test_a_skipping_reader_gives_the_last_records(
    tmp_path_factory: pytest.TempPathFactory, number: int, more: int, most: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "worker-0.bin"
    records = make_records(number + more)
    tail = RecordTail(path, skip=True, most=most)
    for before, until in ((0, number), (number, number + more)):
        path.write_bytes(MAGIC + records[:until].tobytes() + b"\0" * 7)
        found = tail.records()
        assert not tail.behind
        assert found.tolist() == records[until - len(found) : until].tolist()
        assert min(until - before, most // RECORD.itemsize) <= len(found) <= until - before


def test_records_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.bin"
    records = make_records(6)
    records["kind"][0] = 200
    records["start"][1], records["start"][2] = np.nan, 1e300
    records["duration"][3], records["duration"][4] = np.inf, -1
    path.write_bytes(MAGIC + records.tobytes())
    assert RecordTail(path, skip=True).records()["step"].tolist() == [5]


def test_a_timeline_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.bin"
    path.write_bytes(b"PLTIME9\n" + b"\0" * 40)
    with pytest.raises(TimelineError, match="version"):
        RecordTail(path, skip=True).records()


def test_a_run_is_followed_through_late_files_and_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tail = RunTail(run)
    assert tail.read().events == []
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(as_lines([{"event": "step", "time": 1.0}, {"event": "step", "time": 2.0}]))
    assert len(tail.read().events) == 2
    writer = TimelineWriter(timeline_file(run, 3))
    writer.began(0, 1.0)
    writer.span(Kind.COMPUTING, 0, 1.0, 0.5)
    writer.flush()
    (run / "timeline" / "worker-x.bin").write_bytes(b"other")
    news = tail.read()
    assert (news.events, {rank: len(records) for rank, records in news.records.items()}) == ([], {3: 2})
    (run / "evaluations.jsonl").write_bytes(as_lines([{"time": 2.5, "accuracy": 0.5, "event": "evaluation"}]))
    assert [event["event"] for event in tail.read().events] == ["evaluation"]
    (run / "metrics.jsonl").write_bytes(as_lines([{"event": "step", "time": 1.0}]))
    news = tail.read()
    assert news.restarted
    assert [event["time"] for event in news.events] == [1.0, 2.5]
    assert len(news.records[3]) == 2
    assert tail.read().events == []


def test_lines_of_a_slow_run_are_written_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    tail = EventTail(tmp_path / "metrics.jsonl")
    writer.write("step", step=1)
    assert tail.events() == []
    now += 0.6
    writer.write("step", step=2)
    assert [event["step"] for event in tail.events()] == [1, 2]
    writer.close()
