"""The export for TensorBoard, read by TensorBoard's own reader."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_comparison, make_run, write_timeline

from paceline.record.timeline import Kind

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that TensorBoard imports
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not installed"
    )

from paceline.report.tensorboard import TensorBoardExport

KINDS = {f"time/{kind}" for kind in ("computing", "waiting", "exchanging", "cancelled")}


def read(folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    """The time, step and value of all points by tags."""
    accumulator = accumulators.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(point.wall_time, point.step, point.value) for point in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def export(run: Path, folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    with TensorBoardExport(run, folder):
        pass
    return read(folder / run.name)


def test_a_run_under_a_server(tmp_path: Path) -> None:
    run = make_run(tmp_path / "night", steps=60, pace=0.1)
    found = export(run, tmp_path / "board")
    wanted = {"loss/train", "loss/test", "metric/accuracy", "throughput", "staleness/mean", "bytes", *KINDS}
    assert set(found) == wanted
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    commits = [line for line in lines if line["event"] == "commit"]
    assert [point[:2] for point in found["loss/train"]] == [(line["time"], line["step"]) for line in commits]
    assert [loss for _, _, loss in found["loss/train"]] == pytest.approx([line["loss"] for line in commits])
    assert [step for _, step, _ in found["metric/accuracy"]] == [line["step"] for line in lines if "accuracy" in line]
    assert found["bytes"][-1][2] == pytest.approx(sum(line["bytes"] for line in commits))
    assert [value for _, _, value in found["throughput"]] == pytest.approx([1280.0] * len(found["throughput"]))
    assert len(found["throughput"]) == 5
    shares = zip(*(found[tag] for tag in KINDS), strict=True)
    assert all(sum(value for _, _, value in each) == pytest.approx(1.0) for each in shares)
    assert 50 < max(step for _, step, _ in found["time/computing"]) <= 60


def test_peers_have_a_rate_and_no_staleness(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", policy="all-reduce", steps=3)
    (run / "metrics.jsonl").write_text('{"event": "step", "time": 1.0, "step": 1, "loss": null, "lr": 0.5}\n')
    found = export(run, tmp_path / "board")
    assert found["lr"] == [(1.0, 1, 0.5)]
    assert "staleness/mean" not in found
    assert "loss/train" not in found


def test_a_run_that_goes_on_is_followed(tmp_path: Path) -> None:
    """In any looks the same points as at once."""
    whole = make_run(tmp_path / "whole" / "run", steps=40)
    part = tmp_path / "part" / "run"
    part.mkdir(parents=True)
    lines = (whole / "metrics.jsonl").read_bytes()
    with TensorBoardExport(part, tmp_path / "board") as following:
        assert not following.look()
        assert not (tmp_path / "board").exists()
        for end in (100, 1000, 1001, len(lines)):
            (part / "metrics.jsonl").write_bytes(lines[:end])
            following.look()
        for file in sorted((whole / "timeline").iterdir()):
            (part / "timeline").mkdir(exist_ok=True)
            (part / "timeline" / file.name).write_bytes(file.read_bytes())
    assert read(tmp_path / "board" / "run") == export(whole, tmp_path / "other")


def test_a_resumed_run_and_a_second_export_replace_what_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=40)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    with TensorBoardExport(run, tmp_path / "board") as following:
        following.look()
        later = [line.replace(b'"loss": 0', b'"loss": 5').replace(b'"loss": 1', b'"loss": 5') for line in lines[10:20]]
        (run / "metrics.jsonl").write_bytes(b"".join(lines[:10] + later))
        following.look()
    first = read(tmp_path / "board" / "run")
    assert max(step for _, step, _ in first["loss/train"]) < 20
    assert export(run, tmp_path / "board") == first


def test_all_runs_of_a_comparison(tmp_path: Path) -> None:
    path = make_comparison(tmp_path / "all", seeds=(0,))
    with TensorBoardExport(path, tmp_path / "board"):
        pass
    found = {str(file.parent.relative_to(tmp_path / "board")) for file in (tmp_path / "board").rglob("events.*")}
    assert found == {f"policy-{number}/seed-0" for number in range(5)}


def test_times_of_a_virtual_cluster(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, started=0.0)
    write_timeline(run, 0, [(Kind.COMPUTING, 1, 0.0, 0.5), (Kind.WAITING, 1, 0.5, 0.4)], started=0.0)
    assert [at for at, _, _ in export(run, tmp_path / "board")["time/computing"]] == [1.0]


@pytest.mark.parametrize("command", ["watch", "report"])
def test_the_commands_write_it(tmp_path: Path, paceline: Any, command: str) -> None:
    make_run(tmp_path / "run")
    ended = paceline(command, "run", "--tensorboard", "board", "--json")
    assert ended.code == 0, ended.err
    assert "loss/train" in read(tmp_path / "board" / "run")


@pytest.mark.parametrize("command", ["watch", "report"])
def test_without_tensorboard_one_line_tells_how_to_install_it(
    tmp_path: Path, paceline: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    make_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    ended = paceline(command, "run", "--tensorboard", "board", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert "pip install 'paceline[tensorboard]'" in ended.err
    assert not (tmp_path / "run" / "report.html").exists()
