"""What the live view knows of a run: its history, its workers' last seconds, births and deaths, its stages."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.record.run import Run, take_lock
from paceline.record.timeline import RECORD, Kind, Records, TimelineWriter, timeline_file
from paceline.report.live.history import SPANS, History, Update
from paceline.report.live.run import ROWS, LiveRun
from paceline.report.live.strips import CELL, CELLS, KINDS, Strip
from paceline.report.live.watched import Watched
from paceline.report.live.workers import Workers
from paceline.report.material import gather

NOW = 1.8e9


def records_of(*spans: tuple[Kind, int, float, float]) -> Records:
    """Records of (kind, step, start after NOW, seconds)."""
    records = np.zeros(len(spans), RECORD)
    for row, (kind, step, start, seconds) in zip(records, spans, strict=True):
        row["kind"], row["step"], row["start"], row["duration"] = kind, step, NOW + start, seconds
    return records


# The history -------------------------------------------------------------------------------------------------------


@given(gaps=st.lists(st.floats(0, 5000), min_size=1, max_size=60), losses=st.floats(-5, 5))
def test_a_history_keeps_all_sums_in_few_spans(gaps: list[float], losses: float) -> None:
    history = History()
    times = NOW + np.cumsum(gaps)
    for at in times:
        history.add(Update(float(at), losses, 32.0, (1.0, 3.0), 100.0))
    spans = history.spans()
    assert 0 < len(spans) <= min(SPANS, len(gaps))
    assert [span.number for span in spans] == sorted({span.number for span in spans})
    assert all(span.loss == pytest.approx(losses) and span.staleness == 2.0 for span in spans)
    assert (spans[-1].number + 1) * history.width >= times[-1] - times[0]
    known = [span for span in spans if span.examples_per_second is not None]
    assert len(known) >= len(spans) - 1 or len(set(times)) < len(times)


def test_a_reader_gets_the_spans_that_changed_since_its_turn() -> None:
    history = History()
    for turn, at in ((1, 0.0), (2, 10.0), (3, 10.1)):
        history.turn = turn
        history.add(Update(NOW + at, 1.0))
    numbers = [span.number for span in history.spans()]
    assert [span.number for span in history.spans(since=0)] == numbers
    assert numbers[-1] in [span.number for span in history.spans(since=2)]
    assert history.spans(since=3) == []
    history.turn = 4
    history.add(Update(NOW + 1e5, 1.0))
    assert history.reshaped == 4  # numbers mean other times now: a reader begins anew


def test_rates_of_steps_that_are_longer_than_a_span() -> None:
    history = History()
    for number in range(5):
        history.add(Update(NOW + 3.0 * number, examples=30.0))
    assert [span.examples_per_second for span in history.spans()] == [None, 10.0, 10.0, 10.0, 10.0]


# Strips ------------------------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.001, 3.0)), min_size=1, max_size=40),
    pieces=st.integers(1, 5),
)
def test_cells_hold_all_seconds_of_the_last_records(lengths: list[tuple[Kind, float]], pieces: int) -> None:
    starts = np.concatenate([[0.0], np.cumsum([length for _, length in lengths])])
    spans = [(kind, 0, float(start), length) for (kind, length), start in zip(lengths, starts[:-1], strict=True)]
    strip = Strip()
    for part in np.array_split(records_of(*spans), pieces):
        strip.add(part, turn=1)
    first, shares = strip.cells()
    begin = (strip.newest - CELLS + 1) * CELL
    for column, kind in enumerate(KINDS):
        ends = [(max(NOW + start, begin), NOW + start + length) for of, _, start, length in spans if of is kind]
        wanted = sum(max(0.0, end - start) for start, end in ends)
        assert strip.seconds()[kind] == pytest.approx(wanted, abs=1e-4)
        found = np.frombuffer(shares, np.uint8).reshape(-1, len(KINDS))[:, column].astype(float)
        assert found.sum() / 255 * CELL == pytest.approx(wanted, abs=0.6 / 255 * CELL * CELLS + 1e-4)
    assert first >= strip.newest - CELLS + 1
    assert strip.cells(since=1) == (strip.newest + 1, b"")


# Workers -----------------------------------------------------------------------------------------------------------


def happenings(workers: Workers) -> list[tuple[int, str, int]]:
    return [(change.worker, change.happening, change.incarnation) for change in workers.changes]


def test_metrics_and_timeline_tell_of_the_same_lives_in_any_order() -> None:
    told: list[Callable[[Workers], None]] = [
        lambda workers: workers.joined(0, NOW, 0),
        lambda workers: workers.ended(0, NOW + 5, dead=True),
        lambda workers: workers.joined(0, NOW + 7, 1),
    ]
    records = [
        records_of((Kind.BEGAN, 0, 0, 0), (Kind.COMPUTING, 1, 0, 4.9)),
        records_of((Kind.BEGAN, 1, 7, 0), (Kind.COMPUTING, 2, 7, 1)),
    ]
    wanted = [(0, "joined", 0), (0, "died", 0), (0, "joined", 1)]
    for metrics_first in (True, False):
        workers = Workers()
        for tell in told if metrics_first else ():
            tell(workers)
        for part in records:
            workers.take(0, part, 1)
        for tell in () if metrics_first else told:
            tell(workers)
        assert happenings(workers) == wanted
        (worker,) = workers.listed()
        assert worker.state(NOW + 8.1) == "computing"
        [(begin, end)] = worker.dead_times(NOW + 8.1)
        assert begin == pytest.approx(NOW + 5, abs=0.2)
        assert end == NOW + 7


def test_who_leaves_by_itself_is_not_dead() -> None:
    workers = Workers()
    workers.take(2, records_of((Kind.BEGAN, 0, 0, 0), (Kind.COMPUTING, 1, 0, 1), (Kind.LEFT, 0, 1, 0)), 1)
    workers.ended(2, NOW + 1.1, dead=False)
    assert happenings(workers) == [(2, "joined", 0), (2, "left", 0)]
    assert workers.listed()[0].state(NOW + 100, over=True) == "left"


def test_a_resumed_run_is_another_life_of_the_same_incarnation() -> None:
    workers = Workers()
    for begin in (0.0, 60.0):
        workers.take(0, records_of((Kind.BEGAN, 0, begin, 0), (Kind.COMPUTING, 1, begin, 2)), 1)
    assert happenings(workers) == [(0, "joined", 0), (0, "died", 0), (0, "joined", 0)]
    assert workers.listed()[0].dead_times(NOW + 62.1) == [(NOW + 2, NOW + 60)]


@pytest.mark.parametrize(
    ("last", "after", "state"),
    [
        (Kind.WAITING, 0.3, "waiting"),
        (Kind.COMPUTING, 0.3, "computing"),
        (Kind.WAITING, 20.0, "computing"),  # the wait has ended when it is written: a straggler computes since
        (Kind.EXCHANGING, 20.0, "computing"),
        (Kind.COMPUTING, 20.0, "waiting"),
        (Kind.CANCELLED, 0.3, "computing"),
        (Kind.EXCHANGING, 0.3, "exchanging"),
    ],
)
def test_the_state_of_now_follows_from_the_last_record(last: Kind, after: float, state: str) -> None:
    workers = Workers()
    workers.take(0, records_of((Kind.BEGAN, 0, 0, 0), (last, 1, 0, 1)), 1)
    assert workers.listed()[0].state(NOW + 1 + after, served=True) == state
    assert workers.listed()[0].state(NOW + 1 + after, over=True) == "dead"


@pytest.mark.parametrize(("served", "state"), [(False, "computing"), (True, "waiting")])
def test_after_a_push_a_worker_waits_and_after_an_update_a_peer_computes(served: bool, state: str) -> None:
    workers = Workers()
    workers.take(0, records_of((Kind.WAITING, 0, 0, 1), (Kind.COMPUTING, 1, 1, 1), (Kind.EXCHANGING, 1, 2, 0.1)), 1)
    assert workers.listed()[0].state(NOW + 9, served=served) == state


def test_the_slowest_are_those_that_compute_longest_for_a_step() -> None:
    workers = Workers()
    workers.expect(5)
    for rank, seconds in ((0, 0.1), (1, 0.5), (2, 0.2)):
        workers.take(rank, records_of((Kind.COMPUTING, 1, 0, seconds), (Kind.COMPUTING, 1, 0.5, seconds)), 1)
    assert [worker.rank for worker in workers.slowest(2)] == [1, 2]
    assert workers.slowest(9)[0].seconds_per_step == pytest.approx(1.0)
    assert [worker.state(NOW) for worker in workers.listed()[3:]] == ["expected", "expected"]


# Runs --------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Writing:
    """A run that a test writes."""

    def __init__(self, path: Path, workers: int = 2, **config: Any) -> None:
        self.run = Run(path, resume=True)
        self.path = path
        self.run.write_config({"policy": "sync", "world_size": workers, **config})
        self.timelines = {rank: TimelineWriter(timeline_file(path, rank), every=0.0) for rank in range(workers)}

    def event(self, name: str, at: float, **values: Any) -> None:
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"event": name, "time": NOW + at, **values}) + "\n")

    def commits(self, *times: float) -> None:
        for step, at in enumerate(times, 1):
            values = {"loss": 1.0 / step, "rate": 0.1, "examples": 32, "staleness": [0, 2], "bytes": 1000}
            self.event("commit", at, step=step, epoch=0, **values)

    def leave(self, at: float) -> None:
        for timeline in self.timelines.values():
            timeline.left(NOW + at)


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    writing = Writing(tmp_path / "run")
    yield writing
    writing.run.close()


def test_a_run_as_numbers(writing: Writing) -> None:
    clock = Clock()
    live = LiveRun(writing.path, clock=clock)
    live.expect({"policy": "sync", "world_size": 2, "train": {"problem": "digits", "max_steps": 10, "epochs": None}})
    writing.commits(0, 1, 2, 3)
    writing.event("evaluation", 3, step=4, test_loss=0.5, accuracy=0.75)
    writing.timelines[0].began(0, NOW)
    writing.timelines[0].span(Kind.COMPUTING, 1, NOW, 1.5)
    writing.timelines[0].span(Kind.WAITING, 1, NOW + 1.5, 0.5)
    clock.now = NOW + 3.5
    live.look(1)
    view = live.view()
    assert view["whole"]
    assert view["progress"]["step"] == 4
    assert view["progress"]["share"] == 0.4
    assert view["progress"]["seconds"] == 3.5
    assert view["figures"]["examples_per_second"] == 32.0
    assert view["figures"]["staleness"] == 1.0
    assert view["figures"]["bytes"] == 4000
    assert view["evaluations"] == [{"time": NOW + 3, "step": 4, "test_loss": 0.5, "accuracy": 0.75}]
    assert view["states"] == "c?"
    assert view["workers"][0]["waiting"] == pytest.approx(0.25)
    assert view["staleness"] == [(0, 4), (2, 4)]
    json.dumps(view, allow_nan=False)
    live.look(2)
    later = live.view(since=1)
    assert not later["whole"]
    assert (later["history"]["spans"], later["workers"][0]["shares"]) == ([], "")


def test_progress_by_epochs_once_one_has_ended(writing: Writing) -> None:
    live = LiveRun(writing.path, clock=Clock())
    live.expect({"train": {"epochs": 4, "max_steps": None}})
    for step in range(1, 12):
        writing.event("step", step, step=step, epoch=(step - 1) // 5, loss=1.0, examples=8)
        live.look(step)
        share = live.view()["progress"]["share"]
        assert share == (None if step <= 5 else step / 20)


def test_many_workers_and_events_make_a_bounded_view(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, clock=Clock())
    live.expect({"world_size": 3000})
    for rank in range(0, 3000, 7):
        live.workers.joined(rank, NOW, 0)
    for number in range(20_000):
        live.history.add(Update(NOW + number, 1.0, 1.0))
    view = live.view()
    assert len(view["workers"]) == ROWS
    assert len(view["states"]) == 3000
    assert len(json.dumps(view)) < 100_000
    assert live.view(first=2990)["workers"][-1]["rank"] == 2999


def test_cells_come_as_shares_of_the_last_seconds(writing: Writing) -> None:
    live = LiveRun(writing.path, clock=Clock())
    writing.timelines[1].span(Kind.COMPUTING, 1, NOW, 1.0)
    live.look(1)
    row = live.view()["workers"][-1]
    shares = np.frombuffer(base64.b64decode(row["shares"]), np.uint8).reshape(-1, len(KINDS))
    assert shares[:, 0].sum() / 255 * CELL == pytest.approx(1.0, abs=0.01)
    assert row["first"] * CELL == pytest.approx(NOW, abs=CELL)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e400, "x", None, [1], True])
def test_numbers_that_are_none_are_left_out(writing: Writing, value: Any) -> None:
    live = LiveRun(writing.path, clock=Clock())
    writing.event("commit", 1, step=value, epoch=value, loss=value, examples=value, bytes=value, staleness=[value])
    writing.event("step", 2, step=value, epoch=value, loss=value, lr=value)
    writing.event("evaluation", 3, step=value, accuracy=value)
    writing.event("joined", 4, worker=value, incarnation=value)
    writing.event("left", 5, worker=value)
    writing.event("epoch", 6, epoch=value, updates=value, objective=value)
    live.look(1)
    json.dumps(live.view(), allow_nan=False)


# Stages ------------------------------------------------------------------------------------------------------------


def test_a_run_that_is_waited_for_goes_on_ends_and_is_resumed(tmp_path: Path) -> None:
    clock, made = Clock(), []

    def make_report(path: Path) -> bytes:
        made.append(path)
        return b"report"

    path = tmp_path / "run"
    watched = Watched(path, make_report=make_report, clock=clock)
    watched.check()
    watched.look()
    assert watched.stage == "waiting"
    writing = Writing(path)
    writing.commits(0, 1)
    watched.look()
    assert (watched.stage, watched.report) == ("running", None)
    writing.leave(1)
    watched.look()
    writing.run.close()
    watched.look()
    assert (watched.stage, watched.report, made) == ("ended", b"report", [path])
    assert watched.view()["run"]["counts"]["left"] == 2
    resumed = Writing(path)
    watched.look()
    assert (watched.stage, watched.report) == ("running", None)
    resumed.run.close()


def test_a_run_without_an_owner_has_ended_after_a_pause(tmp_path: Path) -> None:
    """A server that is killed is replaced: no process has the directory for a moment."""
    clock = Clock()
    writing = Writing(tmp_path / "run")
    writing.commits(0, 1)
    watched = Watched(tmp_path / "run", clock=clock)
    watched.look()
    writing.run.close()
    clock.now += 1
    watched.look()
    stages = [watched.stage]
    clock.now += 10
    watched.look()
    assert [*stages, watched.stage] == ["running", "ended"]


def test_a_comparison_shows_the_run_that_goes_on(tmp_path: Path) -> None:
    def write(*statuses: str, **more: Any) -> None:
        runs = [
            {"policy": f"p{k}", "seed": 0, "run": f"p{k}/seed-0", "status": status, "error": None}
            for k, status in enumerate(statuses)
        ]
        (tmp_path / "comparison.json").write_text(json.dumps({"format": 1, "problem": "digits", "runs": runs, **more}))
        os.utime(tmp_path / "comparison.json", (clock.now, clock.now))

    clock = Clock()

    write("waiting", "waiting")
    watched = Watched(tmp_path, clock=clock, make_report=lambda _: b"all")
    watched.check()
    watched.look()
    assert watched.stage == "running"
    for number, statuses in enumerate([("running", "waiting"), ("done", "running")]):
        writing = Writing(tmp_path / f"p{number}" / "seed-0")
        writing.commits(*range(number + 2))
        write(*statuses)
        watched.look()
        view = watched.view()
        assert (view["run"]["progress"]["step"], view["run"]["whole"]) == (number + 2, True)
        assert view["comparison"]["done"] == number
        writing.run.close()
    write("done", "waiting")
    clock.now += 100
    watched.look()
    assert "1 of 2 trainings are left" in (watched.message or "")
    write("done", "done")
    watched.look()
    assert (watched.stage, watched.report) == ("ended", b"all")
    assert watched.run.path == tmp_path / "p1" / "seed-0"
    write("done", "done", runs=[{"run": "../..", "status": "running"}])
    watched.look()
    assert watched.run.path == tmp_path  # nothing outside is read


@pytest.mark.parametrize("virtual", [False, True])
def test_a_comparison_whose_process_is_gone_has_ended_at_once(virtual: bool, tmp_path: Path) -> None:
    runs = [{"policy": "async", "seed": 0, "run": "async/seed-0", "status": "running", "error": None}]
    header = {"format": 1, "problem": "digits", "runs": runs, "virtual": virtual}
    (tmp_path / "comparison.json").write_text(json.dumps(header))
    watched = Watched(tmp_path)
    lock = take_lock(tmp_path)
    watched.look()
    stages, told = [watched.stage], gather(tmp_path).status
    lock.close()  # as the kernel does when the process is killed
    watched.look()
    assert [*stages, watched.stage] == ["running", "ended"]
    assert "1 of 1 trainings are left" in (watched.message or "")
    assert told is not None and told.endswith("0 of 1 runs are made, 1 running.")
    assert f"1 interrupted. Go on with: paceline compare --resume {tmp_path}" in (gather(tmp_path).status or "")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is empty"),
        ({"notes.txt": "x"}, "holds no run"),
        ({"config.json": "{"}, "no JSON"),
        ({"config.json": '{"format": 99, "paceline": "9.0"}'}, "format 99"),
        ({"comparison.json": "[]"}, "JSON object"),
        ({"config.json": "{}", "timeline/worker-0.bin": "PLTIME9\n"}, "version"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        Watched(tmp_path).check()
    watched = Watched(tmp_path)
    watched.look()  # later it is a message
    assert message in (watched.view()["message"] or "is empty holds no run")


def test_broken_lines_are_told(writing: Writing) -> None:
    writing.commits(0)
    with (writing.path / "metrics.jsonl").open("a") as file:
        file.write("}{\n")
    watched = Watched(writing.path, clock=Clock())
    watched.look()
    assert watched.message == "Lines of its metrics that are broken and left out: 1."


def test_looking_leaves_no_file_open(writing: Writing) -> None:
    writing.commits(0)
    watched = Watched(writing.path, clock=Clock())
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        watched.look()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
