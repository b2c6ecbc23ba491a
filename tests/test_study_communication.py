"""The study of communication: its table and curves against the link model, and what bad options are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.cli import main
from paceline.studies import CommunicationStudy, StudyContext
from paceline.virtual.links import parse_link, ring_seconds, server_bytes, server_seconds, tree_seconds


def test_rows_are_the_link_model() -> None:
    link = parse_link("1ms 1MB/s")
    result = CommunicationStudy(workers=(8, 2), messages=("1kB", "1MB"), link="1ms 1MB/s").run(StudyContext())
    assert [row[:2] for row in result.rows] == [("1kB", 2), ("1kB", 8), ("1MB", 2), ("1MB", 8)]
    for message, workers, server, ring, tree, fastest, megabytes in result.rows:
        nbytes = {"1kB": 1e3, "1MB": 1e6}[str(message)]
        assert isinstance(workers, int)
        wanted = [seconds(link, nbytes, workers) for seconds in (server_seconds, ring_seconds, tree_seconds)]
        assert [server, ring, tree] == pytest.approx([1e3 * seconds for seconds in wanted])
        assert fastest in ("server", "ring", "tree")
        assert min(wanted) == wanted[("server", "ring", "tree").index(fastest)]
        assert megabytes == pytest.approx(server_bytes(nbytes, workers) / 1e6)


def test_ways_that_are_equally_fast_are_all_named() -> None:
    (row,) = CommunicationStudy(workers=(2,), messages=("1B",), link="1s 1B/s").run(StudyContext()).rows
    assert row[2:6] == (4e3, 3e3, 4e3, "ring")
    (row,) = CommunicationStudy(workers=(3,), messages=("1B",), link="1TB/s").run(StudyContext()).rows
    assert row[5] == "ring"
    (row,) = CommunicationStudy(workers=(4,), messages=("1B",), link="1s 1e30B/s").run(StudyContext()).rows
    assert row[5] == "server"
    (row,) = CommunicationStudy(workers=(2,), messages=("1B",), link="1s 1e30B/s").run(StudyContext()).rows
    assert row[5] == "server = ring = tree"


def test_the_default_shows_both_sides_of_the_crossing() -> None:
    rows = CommunicationStudy().run(StudyContext()).rows
    assert {row[5] for row in rows} == {"server", "ring", "tree"}
    for row in rows:
        server, ring = row[2], row[3]
        assert isinstance(server, float) and isinstance(ring, float)
        if row[1] != 2:
            assert (ring < server) == (row[0] != "10kB")


def test_curves_are_times_of_one_message() -> None:
    result = CommunicationStudy(workers=(64, 2, 8), messages=("1GB",), link="1us 1GB/s").run(StudyContext())
    curves = {series.label: series for series in result.series}
    assert list(curves["server"].x) == [2, 8, 64]
    assert curves["server"].y == pytest.approx((2, 14, 126), rel=1e-3)
    assert curves["ring"].y == pytest.approx((1, 7 / 4, 63 / 32), rel=1e-3)
    assert curves["tree"].y == pytest.approx((2, 6, 12), rel=1e-3)
    assert "for 64 workers is 1kB" in result.notes[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link", "fast"], "cannot read the link 'fast'"),
        (["--link", "10us"], "needs a link with a bandwidth"),
        (["--workers", "1,2"], "workers are at least 2, got 1"),
        (["--workers", ""], "needs workers and messages"),
        (["--workers", "2,2"], "the same number of workers was named twice"),
        (["--messages", "25"], "25 has no unit"),
        (["--messages", "0B"], "at least 1 byte"),
        (["--messages", "25MB,big"], "such as 25MB, found 'big'"),
        (["--messages", "1MB,1000kB"], "the same message was named twice"),
    ],
)
def test_a_mistake_exits_2_with_one_line(arguments: list[str], message: str, paceline: Any, tmp_path: Path) -> None:
    ended = paceline("study", "communication", *arguments)
    assert ended.code == 2 and message in ended.err and ended.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_the_same_for_every_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["study", "communication", "--workers", "2,8", "--messages", "1MB", "--json"]
    printed = []
    for seed in ("0", "1"):
        with pytest.raises(SystemExit) as exit:
            main([*arguments, "--seed", seed, "--out", str(tmp_path / seed)])
        assert exit.value.code == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0].pop("seed") != printed[1].pop("seed")
    assert printed[0] == printed[1]
    assert (tmp_path / "0" / "plot.png").stat().st_size > 0
