"""The command ``watch``: one line for what it cannot show, the view in a terminal, Ctrl-C, and what it prints."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from made_runs import make_comparison, make_run
from processes import started
from rich.console import Console

from paceline.commands import watch as command
from paceline.report.live.terminal import duration, quantity, render, sparkline, watch_in_terminal
from paceline.report.live.watched import Watched


def shown(path: Path, width: int = 80) -> str:
    """What the terminal shows of a run."""
    screen = io.StringIO()
    watched = Watched(path)
    watched.look()
    Console(file=screen, width=width, force_terminal=False).print(render(watched.view(), width))
    return screen.getvalue()


def test_the_view_fits_into_80_columns(tmp_path: Path) -> None:
    text = shown(make_run(tmp_path / "run", dies=True, steps=200))
    assert max(len(line) for line in text.splitlines()) <= 80
    for wanted in (
        "k-sync(k=3)",
        "ended",
        "loss",
        "examples/s",
        "staleness",
        "4 workers: 4 left",
        "1 died",
        "accuracy",
    ):
        assert wanted in text
    assert re.search(r"[▁▂▃▄▅▆▇█]{10}", text)
    assert len(re.findall(r"^ +\d +left", text, re.MULTILINE)) == 4


def test_of_many_workers_the_slowest_are_listed(tmp_path: Path) -> None:
    text = shown(make_run(tmp_path / "run", workers=300, steps=3))
    assert "300 workers: 300 left" in text
    assert len(text.splitlines()) < 40


def test_a_comparison_tells_which_run_goes_on(tmp_path: Path) -> None:
    path = make_comparison(tmp_path / "comparison", seeds=(0,))
    header = json.loads((path / "comparison.json").read_text())
    for number, status in ((2, "running"), (3, "waiting"), (4, "waiting")):
        header["runs"][number]["status"] = status
    (path / "comparison.json").write_text(json.dumps(header))
    assert "run 3 of 5: k-sync(k=3), seed 0" in shown(path)


def test_the_terminal_view_follows_the_looks(tmp_path: Path) -> None:
    screen = io.StringIO()
    watched = Watched(tmp_path / "run")

    def looks() -> Any:
        watched.look()
        yield
        make_run(tmp_path / "run")
        watched.look()
        yield

    watch_in_terminal(watched, Console(file=screen, width=80, height=60, force_terminal=True), looks())
    assert "waiting for it to begin" in screen.getvalue()
    assert "update 60" in screen.getvalue()


def test_short_forms() -> None:
    assert [duration(each) for each in (0, 59.4, 185, 7380)] == ["0 s", "59 s", "3:05 min", "2:03 h"]
    assert [quantity(each) for each in (0.01234, 12.3456, 1234, 34_000_000)] == ["0.01234", "12.35", "1234", "34 M"]
    assert sparkline([], 5) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0] * 100, 10) == "▁" * 10


def test_what_is_known_now_as_json(tmp_path: Path, paceline: Any) -> None:
    make_run(tmp_path / "run")
    ended = paceline("watch", "run", "--json")
    view = json.loads(ended.out)
    assert (ended.code, view["stage"], view["run"]["progress"]["step"]) == (0, "ended", 60)
    assert view["run"]["counts"]["left"] == 4


def test_the_terminal_view_ends_with_the_run(tmp_path: Path, paceline: Any) -> None:
    make_run(tmp_path / "run")
    ended = paceline("watch", "run", "--terminal")
    assert (ended.code, ended.err) == (0, "")
    assert "4 workers: 4 left" in ended.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--json"], "there is no directory nothing"),
        (["file"], "file is a file"),
        (["empty"], "empty is empty"),
        (["other"], "other holds no run"),
        (["newer"], "install the newer version"),
        (["broken"], "no JSON"),
        (["run", "--terminal", "--json"], "give one of them"),
        (["run", "--port", "70000"], "0 to 65535"),
        (["run", "--port", "-1"], "0 to 65535"),
        ([], "Missing argument 'RUN'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, paceline: Any, arguments: list[str], message: str) -> None:
    make_run(tmp_path / "run", steps=2)
    (tmp_path / "file").touch()
    for name, text in (("empty", None), ("other", "x"), ("newer", '{"format": 2}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / ("notes" if name == "other" else "config.json")).write_text(text)
    ended = paceline("watch", *arguments)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


def test_the_browser_is_led_by_a_file_of_the_owner() -> None:
    """The token is not among the arguments of a process, which all users of the host see."""
    with command._way_in("http://127.0.0.1:1/?token=secret") as address:
        file = Path(address.removeprefix("file://"))
        assert "token" not in address
        assert "token=secret" in file.read_text()
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert not file.parent.exists()


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_signal_ends_the_watcher_and_closes_its_port(tmp_path: Path, number: signal.Signals) -> None:
    """It is started before the run."""
    path = tmp_path / "run"
    with started(["watch", str(path), "--no-browser"]) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[0]
        port = int(re.findall(r":(\d+)/", url)[0])
        assert ask(url)["stage"] == "waiting"
        make_run(path)
        while ask(url)["stage"] != "ended":
            time.sleep(0.05)
        while not ask(url)["report"]:
            time.sleep(0.05)
        report = urllib.request.urlopen(url.replace("/?", "/report?")).read()
        assert report.startswith(b"<!DOCTYPE html>")
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert err.splitlines()[-1] == "paceline: interrupted"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "metrics.jsonl", "timeline"]


def ask(url: str) -> dict[str, Any]:
    view: dict[str, Any] = json.load(urllib.request.urlopen(url.replace("/?", "/data?")))
    return view
