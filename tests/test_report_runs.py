"""Runs and comparisons as numbers: what is read, what is told of broken ones, and how runs are summed up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import EPOCH, make_comparison, make_run, write_timeline

from paceline.commands.cli import cli
from paceline.errors import UsageError
from paceline.record.run import Run
from paceline.record.timeline import Kind, timeline_file
from paceline.report.events import RunEvents, _take
from paceline.report.groups import group, mean_curve, smooth, summarise, thin_places
from paceline.report.material import gather
from paceline.report.rerun import _DEFAULTS, command_again
from paceline.report.runs import is_being_written, read_comparison, read_run
from paceline.report.view import view_of


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_run_as_numbers(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one", workers=3, steps=60, pace=0.05))
    assert (run.policy, run.seed, run.workers, run.problem, run.metric) == ("k-sync(k=3)", 0, 3, "digits", "accuracy")
    assert run.started == EPOCH and run.seconds == pytest.approx(3.001, abs=1e-3)
    assert len(run.points.error) == 10 and run.points.seconds[0] == pytest.approx(0.3, abs=1e-6)
    assert run.points.error == pytest.approx(1 - run.points.value)
    assert run.points.examples[-1] == run.examples == 60 * 32 * 3
    assert run.bytes == 60 * 40_000 * 3
    assert run.mean_staleness == pytest.approx(1.0, abs=0.2)
    assert sum(run.seconds_by_kind.values()) == pytest.approx(3 * 3.0, rel=1e-3)
    assert run.thrown_away_seconds > 0
    assert [change.what for change in run.changes].count("joined") == 3
    assert run.command is not None and run.command.startswith(
        "paceline train digits --workers 3 --policy 'k-sync(k=3)'"
    )
    assert run.notes == ()


def test_lines_of_some_steps_alone_count_the_others_too(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one", steps=60)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["step"] % 6 == 0) + "\n")
    assert read_run(path).examples == 60 * 32 * 4


def test_lines_without_averaged_gradients_tell_the_examples_of_all_workers_too(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", policy="local-sgd(every=8)")
    before = read_run(path).examples
    text = (path / "metrics.jsonl").read_text().replace('"workers_waited"', '"other"')
    (path / "metrics.jsonl").write_text(text)
    assert read_run(path).examples == before


def test_evaluations_that_were_made_later_count_as_well(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one")
    late = {"time": EPOCH + 1.0, "step": 20, "examples": 7.0, "bytes": 9.0, "test_loss": 0.5, "accuracy": 0.75}
    (path / "evaluations.jsonl").write_text(json.dumps(late) + "\n")
    points = read_run(path).points
    (place,) = np.flatnonzero(points.error == 0.25)
    assert (points.seconds[place], points.examples[place], points.bytes[place]) == (pytest.approx(1.0, abs=1e-6), 7, 9)


@pytest.mark.parametrize(
    ("metric", "higher", "error_is", "error"),
    [("accuracy", True, "test error", 0.25), ("excess", False, "excess", 0.75), ("f1", True, "test loss", 0.5)],
)
def test_an_error_is_what_the_metric_makes_it(
    metric: str, higher: bool, error_is: str, error: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    line = {"event": "evaluation", "time": 1.0, "step": 1, "test_loss": 0.5, metric: 0.75}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for run in (read_run(tmp_path), read_run(tmp_path, metric=metric, higher_is_better=higher)):
        assert (run.error_is, run.higher_is_better, run.points.error.tolist()) == (error_is, higher, [error])


def test_a_worker_that_died_is_told(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "one", dies=True))
    assert [(change.worker, change.what, change.incarnation) for change in run.changes if change.what == "died"] == [
        (3, "died", None)
    ]
    assert (3, 1) in [(change.worker, change.incarnation) for change in run.changes if change.what == "joined"]
    assert run.seconds_by_kind["dead"] == pytest.approx(0.5, rel=0.02)


# Broken ones ------------------------------------------------------------------------------------------------------


def newer_timeline(path: Path) -> None:
    timeline_file(path, 0).write_bytes(b"PLTIME9\n" + bytes(40))


def half_lines(path: Path) -> None:
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b'not json\n[1, 2]\n{"event": 7}\n{"event": "step", "time": "now"}\n{"event": "st')
    with timeline_file(path, 0).open("ab") as records:
        records.write(b"\0\0\0half")


def impossible_records(path: Path) -> None:
    write_timeline(path, 0, [(0, 1, 0.0, 0.5), (9, 1, 1.0, 0.5), (0, 1, math.nan, 0.5), (1, 1, 2.0, -1.0)])


@pytest.mark.parametrize(
    ("damage", "note"),
    [
        (
            lambda path: (path / "config.json").unlink(),
            "It has no config.json, so its policy and options are not known.",
        ),
        (
            lambda path: (path / "config.json").write_text("{"),
            "config.json is broken: it is no JSON",
        ),
        (
            lambda path: (path / "config.json").write_text("[]"),
            "wanted a JSON object, found list; so its policy and options are not known.",
        ),
        (lambda path: (path / "metrics.jsonl").unlink(), "It ended before anything was measured."),
        (lambda path: (path / "metrics.jsonl").write_text(""), "It ended before anything was measured."),
        (lambda path: [file.unlink() for file in (path / "timeline").iterdir()], "It has no timeline of its workers."),
        (newer_timeline, "a newer Paceline may have made it."),
        (half_lines, "Lines of metrics.jsonl that are broken and left out: 4."),
        (impossible_records, "Records of its timeline that are broken and left out: 3."),
        (lambda path: rewrite(path / "config.json", paceline="99.1"), "It was written by Paceline 99.1; this is"),
        (lambda path: rewrite(path / "config.json", train=[3], seed="x", world_size=None, policy={}), ""),
    ],
)
def test_what_is_broken_in_a_run_is_told(damage: Callable[[Path], object], note: str, tmp_path: Path) -> None:
    path = make_run(tmp_path / "one")
    damage(path)
    run = read_run(path)
    assert note in " ".join(run.notes)
    json.dumps(view_of(gather([run])), allow_nan=False)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.rename(path.with_name("gone")), "there is no directory"),
        (lambda path: [path.rename(path.with_name("gone")), path.write_text("")], "is a file"),
        (lambda path: [path.rename(path.with_name("gone")), path.mkdir()], "is empty: wanted config.json or"),
        (
            lambda path: [path.rename(path.with_name("gone")), path.mkdir(), (path / "note.txt").touch()],
            "holds no run: wanted config.json or",
        ),
        (lambda path: rewrite(path / "config.json", format=2, paceline="9.0"), "has the format 2 of Paceline 9.0"),
    ],
)
def test_a_directory_that_is_no_run_is_told_in_one_line(
    damage: Callable[[Path], object], message: str, tmp_path: Path, paceline: Any
) -> None:
    path = make_run(tmp_path / "one")
    damage(path)
    ended = paceline("report", str(path))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert message in ended.err
    assert not (path / "report.html").exists()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["time", "step", "examples", "bytes", "loss", "seconds", "staleness", "worker", "accuracy"])
events = st.sampled_from(["step", "commit", "evaluation", "epoch", "worker", "joined", "left", "other"])


@given(st.lists(st.builds(lambda event, line: {**line, "event": event}, events, st.dictionaries(names, values))))
def test_no_line_of_metrics_breaks_the_reader(lines: list[dict[str, Any]]) -> None:
    read = RunEvents()
    for line in lines:
        _take(read, line)
    points, progress = read.since(0.0)
    assert np.isfinite(points.error).all() and np.isfinite(progress.seconds).all()
    assert (read.staleness >= 0).all()


def test_a_run_is_being_written_as_long_as_its_owner_has_it_open(tmp_path: Path) -> None:
    run = Run(tmp_path / "one")
    run.write_config({"policy": "async"})
    assert is_being_written(run.path)
    assert read_run(run.path).ended is None and "Nothing has been measured yet." in read_run(run.path).notes
    run.close()
    assert not is_being_written(run.path)
    assert read_run(run.path).ended is not None


# Comparisons ------------------------------------------------------------------------------------------------------


def test_a_comparison_and_its_summary(tmp_path: Path) -> None:
    comparison = read_comparison(make_comparison(tmp_path / "four"))
    assert (comparison.target, comparison.seeds, len(comparison.runs)) == (0.9, (0, 1), 10)
    rows = {row.label: row for row in summarise(group(comparison.runs))}
    assert list(rows) == ["one worker", "all-reduce", "k-sync(k=3)", "async", "local-sgd(every=8)"]
    assert all((row.seeds, row.reached) == (2, 2) for row in rows.values())
    assert rows["one worker"].speed_up == pytest.approx(1.0)
    assert rows["async"].speed_up == pytest.approx(0.08 / 0.03, rel=0.15)
    assert rows["async"].efficiency == pytest.approx(0.08 / 0.03, rel=0.05)
    assert math.isnan(rows["all-reduce"].mean_staleness)
    assert rows["k-sync(k=3)"].thrown_away > 0 == rows["async"].thrown_away


def test_a_partial_comparison_tells_what_is_missing(tmp_path: Path) -> None:
    path = make_comparison(tmp_path / "four", seeds=[0])
    header = json.loads((path / "comparison.json").read_text())
    header["runs"][1] |= {"status": "failed", "error": "worker 2 was killed"}
    header["runs"][2] |= {"status": "running"}
    header["runs"][3] |= {"status": "waiting"}
    header["runs"][4] |= {"run": "not-there"}
    header["runs"] += [None, {}]
    (path / "comparison.json").write_text(json.dumps(header))
    material = gather(path)
    assert material.status == "The comparison is not finished: 3 of 7 runs are made, 1 running and 1 waiting."
    assert material.failures[0] == "all-reduce, seed 0, failed: worker 2 was killed"
    assert "cannot be read: there is no directory" in material.failures[1]
    assert [run.ended is None for run in material.runs] == [False, False, True]


def test_a_comparison_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = make_comparison(tmp_path / "four", seeds=[0], format=2, paceline="3.0")
    with pytest.raises(UsageError, match=r"has the format 2 of Paceline 3\.0; this is Paceline"):
        gather(path)


def test_runs_that_differ_in_more_than_the_seed_are_told_apart(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "a", seed=0),
        make_run(tmp_path / "b", seed=1),
        make_run(tmp_path / "c", workers=8),
        make_run(tmp_path / "d", policy="async"),
        make_run(tmp_path / "e", policy="async"),
    ]
    groups = group(map(read_run, runs))
    assert [(each.label, len(each.runs)) for each in groups] == [
        ("k-sync(k=3), 4 workers", 2),
        ("k-sync(k=3), 8 workers", 1),
        ("async (d)", 1),
        ("async (e)", 1),
    ]


@given(st.lists(st.lists(st.tuples(st.floats(0, 9), st.floats(-9, 9)), min_size=1), min_size=1, max_size=4))
def test_a_mean_lies_between_its_seeds(curves: list[list[tuple[float, float]]]) -> None:
    arrays = [(np.array(x), np.array(y)) for x, y in (zip(*sorted(curve), strict=True) for curve in curves)]
    mean = mean_curve(arrays)
    assert mean is not None and (np.diff(mean.x) > 0).all()
    assert (mean.low <= mean.mean + 1e-9).all() and (mean.mean <= mean.high + 1e-9).all()
    least, most = min(y.min() for _, y in arrays), max(y.max() for _, y in arrays)
    assert mean.low.min() >= least - 1e-9 and mean.high.max() <= most + 1e-9


def test_curves_are_thinned() -> None:
    places = np.arange(100_000.0)
    thin = thin_places(places)
    assert (len(thin), thin[0], thin[-1]) == (500, 0.0, 99_999.0)
    x, y = smooth(places, places)
    assert len(x) == 500 and y == pytest.approx(x)


def test_the_command_to_run_again_leaves_out_what_the_command_does_anyway() -> None:
    options = {option.name: option for option in cli.commands["train"].params}
    for name, default in _DEFAULTS.items():
        assert options[name].default == default, name
    train = {"problem": "digits", "policy": "async", "seed": 3, "run": "runs/1", "on_nan": "stop", "normalise": True}
    schedule = {"warmup": "gradual", "decay_epochs": [30.0, 60.0, 80.0]}
    config = {"world_size": 2, "train": {**train, "schedule": schedule, "evaluate": False, "model": None}}
    wanted = "paceline train digits --workers 2 --policy async --seed 3 --normalise --warmup gradual"
    assert command_again(config) == wanted
    assert command_again({**config, "virtual": True}) is None
    assert command_again({"train": {"problem": 3}}) is None


def test_the_command_to_run_again_has_the_delay_the_servers_and_the_script() -> None:
    launch = {"world_size": 4, "delay": "1+exp(0.5)", "delay_unit": "8ms"}
    options = "--workers 4 --servers 2 --delay '1+exp(0.5)' --delay-unit 8ms"
    train = {"problem": "digits", "policy": "async", "keep": 3}
    assert command_again({**launch, "servers": 2, "train": train}) == f"paceline train digits {options} --policy async"
    script = {"script": ["my script.py", "--lr", "1"], "policy": "async", "codec": "sign", "servers": 1}
    options = options.replace(" --servers 2", "")
    assert command_again({**launch, **script}) == (
        f"paceline run {options} --policy async --codec sign 'my script.py' --lr 1"
    )
    learners = {"world_size": 6, "policy": "sma(learners=3)", "script": ["a.py"]}
    assert command_again(learners) == "paceline run --workers 2 --policy 'sma(learners=3)' a.py"
    assert command_again({"policy": "of another version", "script": ["a.py"]}) is not None


def test_kinds_of_a_timeline_that_is_read_twice_stay_the_same(tmp_path: Path) -> None:
    path = make_run(tmp_path / "one")
    first, second = read_run(path), read_run(path)
    assert first.timeline[0]["start"].tolist() == second.timeline[0]["start"].tolist()
    assert first.timeline[0]["kind"][0] == Kind.BEGAN and first.timeline[0]["start"][0] == 0
