"""The live page in a real browser: it moves with the run, shows deaths and the end, and takes texts as texts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from made_runs import make_run
from processes import MARK, living, started

from paceline.commands.watch import _make_report
from paceline.record.run import Run
from paceline.record.timeline import Kind, TimelineWriter, timeline_file
from paceline.report.live.server import PageServer
from paceline.report.live.watched import Watched

MARKUP = "<img src=x onerror=\"document.title='injected'\"><b>bold</b>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    profile = tmp_path_factory.mktemp("browser")
    browser = Browser(profile)
    yield browser
    browser.close()
    shutil.rmtree(profile, ignore_errors=True)


class Live:
    """A run that a test writes, and its page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.watched = Watched(path, make_report=_make_report)
        self.step = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._over.wait(0.1):
            self.watched.look()

    def __enter__(self) -> Live:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self, workers: int, text: str = "") -> None:
        self.run = Run(self.path)
        options = {"problem": f"digits{text}", "epochs": None, "max_steps": 100}
        self.run.write_config({"policy": f"sync{text}", "world_size": workers, "seed": 0, "train": options})
        self.metrics = self.run.open_metrics()
        self.timelines = [TimelineWriter(timeline_file(self.path, rank), every=0.0) for rank in range(workers)]
        for timeline in self.timelines:
            timeline.began(0, time.time())

    def steps(self, number: int, text: str = "") -> None:
        for _ in range(number):
            self.step += 1
            now = time.time()
            for timeline in self.timelines:
                timeline.span(Kind.COMPUTING, self.step, now - 0.03, 0.02)
                timeline.span(Kind.WAITING, self.step, now - 0.01, 0.01)
            values = {"loss": 1 / self.step, "examples": 32, "staleness": [0, 1], "rate": 0.1, "bytes": 1000}
            self.metrics.write("commit", step=self.step, epoch=0, **values)
            time.sleep(0.01)
        if text:
            self.metrics.write("evaluation", step=self.step, **{f"accuracy{text}": 0.5})
        self.metrics.flush()

    def end(self) -> None:
        for timeline in self.timelines:
            timeline.left(time.time())
        self.run.close()


def text_of(page: Page, name: str) -> str:
    return str(page.run(f"document.getElementById('{name}').textContent"))


def wait_for_text(page: Page, name: str, text: str) -> None:
    page.wait_for(f"document.getElementById('{name}').textContent.includes({json.dumps(text)})")


def painted(page: Page) -> list[int]:
    """How many pixels of each worker's strip are not empty."""
    script = """[...document.querySelectorAll('.strip canvas')].map((canvas) => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return pixels.filter((value, k) => k % 4 === 3 && value > 0).length;
    })"""
    found: list[int] = page.run(script)
    return found


def test_the_page_goes_with_the_run(browser: Browser, tmp_path: Path) -> None:
    """It is opened before the run, sees it begin, a death and the end, with texts that are markup in it."""
    with Live(tmp_path / "run") as live, PageServer(live.watched) as server, browser.page(server.url) as page:
        wait_for_text(page, "stage", "waiting for the run to begin")
        wait_for_text(page, "message", "There is no run in")
        live.begin(3, MARKUP)
        live.steps(20)
        wait_for_text(page, "stage", "going on")
        wait_for_text(page, "tiles", "20epoch 1")
        page.wait_for("document.querySelectorAll('#loss path.line').length === 1")
        live.steps(30, MARKUP)
        wait_for_text(page, "tiles", "50epoch 1")
        assert page.run("document.getElementById('progress').value") == 0.5
        wait_for_text(page, "counts", "3 workers:")
        page.wait_for("document.querySelectorAll('.strip canvas').length === 3")
        while not all(painted(page)):
            time.sleep(0.05)
        live.metrics.write("left", worker=1, incarnation=0, dead=True)
        live.metrics.flush()
        wait_for_text(page, "changes", "worker 1 died")
        wait_for_text(page, "counts", "1 dead")
        live.timelines[1].began(1, time.time())
        wait_for_text(page, "changes", "worker 1 joined, life 2")
        live.end()
        wait_for_text(page, "stage", "ended")
        page.wait_for("!document.getElementById('report').hidden && document.getElementById('live').hidden")
        wait_for_text(page, "ended-how", "The run has ended.")
        assert f"sync{MARKUP}" in text_of(page, "about")
        assert page.run("document.querySelectorAll('img, #live b, #about b').length") == 0
        assert "injected" not in page.run("document.title")
        assert page.complaints == []
        hosts = {re.match(r"https?://[^/]*|[a-z]+:", url) for url in page.requests}
        assert {found and found[0] for found in hosts} <= {server.url.partition("/?")[0], "blob:"}


@pytest.mark.soak
def test_a_resumed_run_comes_back_to_the_live_page(browser: Browser, tmp_path: Path) -> None:
    with Live(tmp_path / "run") as live, PageServer(live.watched) as server, browser.page(server.url) as page:
        live.begin(2)
        live.steps(10)
        live.end()
        page.wait_for("!document.getElementById('report').hidden")
        (tmp_path / "run" / "metrics.jsonl").write_bytes(b"")
        live.run = Run(live.path, resume=True)
        live.metrics, live.step = live.run.open_metrics(), 4
        live.steps(3)
        wait_for_text(page, "stage", "going on")
        page.wait_for("document.getElementById('report').hidden && !document.getElementById('live').hidden")
        wait_for_text(page, "tiles", "7epoch 1")
        live.run.close()
        assert page.complaints == []


@pytest.mark.soak
def test_many_workers_fit_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", workers=200, steps=4)
    watched = Watched(run)
    watched.look()
    with PageServer(watched) as server, browser.page(server.url, width=390, height=844, dark=True) as page:
        wait_for_text(page, "counts", "200 workers:")
        assert page.run("document.querySelectorAll('#map i').length") == 200
        assert page.run("document.querySelectorAll('#workers tr').length") == 32
        page.run(
            "const s = document.querySelector('#pages select'); s.value = 192; s.dispatchEvent(new Event('change'))"
        )
        page.wait_for("document.querySelector('#workers th').textContent === '192'")
        assert page.run("document.querySelectorAll('#workers tr').length") == 8
        assert page.run("document.documentElement.scrollWidth <= innerWidth")
        assert page.complaints == []


@pytest.mark.soak
def test_the_page_tells_that_the_watcher_has_gone(browser: Browser, tmp_path: Path) -> None:
    watched = Watched(make_run(tmp_path / "run"))
    watched.look()
    with contextlib.ExitStack() as watcher:
        server = watcher.enter_context(PageServer(watched))
        with browser.page(server.url) as page:
            wait_for_text(page, "stage", "ended")
            watcher.close()
            wait_for_text(page, "lost", "has it been ended?")


@pytest.mark.soak
@pytest.mark.processes
def test_a_real_run_whose_worker_is_killed(browser: Browser, tmp_path: Path) -> None:
    run, mark = tmp_path / "run", str(tmp_path)
    training = ["train", "--workers", "3", "--policy", "k-sync(k=2)", "--respawn", "--epochs", "12", "--run", str(run)]
    training += ["--delay", "1+exp(1)", "--delay-unit", "60ms"]
    with started(["watch", str(run), "--no-browser"]) as watcher:
        assert watcher.stdout is not None
        url = watcher.stdout.readline().split()[0]
        with browser.page(url) as page, started(training, mark=mark) as trainer:
            wait_for_text(page, "stage", "going on")
            page.wait_for("Number(document.querySelector('#tiles dd').firstChild.textContent) > 10")
            before = page.run("document.querySelector('#tiles dd').firstChild.textContent")
            os.kill(worker_of(mark, 1), signal.SIGKILL)
            wait_for_text(page, "changes", "worker 1 died")
            wait_for_text(page, "changes", "worker 1 joined, life 2")
            assert page.run("document.querySelector('#tiles dd').firstChild.textContent") != before
            trainer.communicate(timeout=200)
            page.wait_for("!document.getElementById('report').hidden")
            assert page.complaints == []
        watcher.send_signal(signal.SIGINT)
        watcher.communicate(timeout=60)
        assert watcher.returncode == 130


def worker_of(mark: str, rank: int) -> int:
    """The process of a worker."""
    for process in living(mark):
        environment: Any = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        assert f"{MARK}={mark}".encode() in environment
        if f"RANK={rank}".encode() in environment:
            return process
    raise AssertionError(f"worker {rank} is not there")
