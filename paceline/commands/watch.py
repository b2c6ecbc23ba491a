"""The command ``watch``: a live page of a run, or a view of it in the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.commands.options import PathType
from paceline.errors import UsageError
from paceline.interrupts import answered

if TYPE_CHECKING:
    from paceline.report.live.watched import Watched
    from paceline.report.tensorboard import TensorBoardExport

_EVERY = 1.0  # seconds between two looks at the run


@click.command()
@click.argument("run", type=PathType(path_type=Path))
@click.option("--port", type=int, default=0, help="Of the page, on 127.0.0.1.  [default: any free one]")
@click.option("--terminal", is_flag=True, help="Show it here, not on a page; ends with the run.")
@click.option("--no-browser", is_flag=True, help="Only print the address of the page.")
@click.option("--tensorboard", type=PathType(path_type=Path), metavar="DIR", help="Also write it for TensorBoard.")
@click.option("--json", "as_json", is_flag=True, help="Print what is known now as one JSON object, and end.")
def watch(run: Path, port: int, terminal: bool, no_browser: bool, tensorboard: Path | None, as_json: bool) -> None:
    """Watch a RUN or a comparison that goes on, is about to begin, or has ended: on a live page, until Ctrl-C."""
    from paceline.report.live.watched import Watched

    if terminal and as_json:
        raise UsageError("--terminal is for people and --json for machines; give one of them")
    export = _open_export(run, tensorboard)
    watched = Watched(run, make_report=None if terminal or as_json else _make_report)
    watched.check()
    with answered(_interrupt, signal.SIGTERM), export as written:
        if as_json:
            _print_once(watched, written)
        elif terminal:
            _show_here(watched, written)
        else:
            _serve(watched, written, port, browser=not no_browser)


def _interrupt(*_: object) -> None:
    """End as Ctrl-C does: files that lead a browser are removed, and points for TensorBoard written."""
    raise KeyboardInterrupt


def _open_export(run: Path, folder: Path | None) -> contextlib.AbstractContextManager[TensorBoardExport | None]:
    if folder is None:
        return contextlib.nullcontext()
    from paceline.report.tensorboard import TensorBoardExport

    return TensorBoardExport(run, folder)


def _make_report(run: Path) -> bytes:
    """The report of the run, which is not written into its directory: that may be someone else's."""
    from paceline.report.page import write_report

    with tempfile.TemporaryDirectory(prefix="paceline-watch-") as folder:
        return write_report(run, Path(folder) / "report.html").read_bytes()


def _looks(watched: Watched, export: TensorBoardExport | None, ended: Callable[[], bool]) -> Iterator[None]:
    """Look at the run about once a second, at once if there is more to read, until it has ``ended``."""
    while True:
        began = time.monotonic()
        news = watched.look()
        behind = (export is not None and export.look()) or news.behind
        yield
        if not behind:
            if ended():
                return
            time.sleep(max(0.05, _EVERY - (time.monotonic() - began)))


def _print_once(watched: Watched, export: TensorBoardExport | None) -> None:
    if not watched.path.exists():
        raise UsageError(f"there is no directory {watched.path}; name that of a run, such as runs/digits-1")
    for _ in _looks(watched, export, lambda: True):
        pass
    print(json.dumps(watched.view(first=0), allow_nan=False))


def _show_here(watched: Watched, export: TensorBoardExport | None) -> None:
    from rich.console import Console

    from paceline.report.live.terminal import watch_in_terminal

    console = Console()
    if not watched.path.exists():
        console.out(f"there is no {watched.path} yet; waiting for the run to begin (Ctrl-C ends)", highlight=False)
    watch_in_terminal(watched, console, _looks(watched, export, lambda: watched.stage == "ended"))


def _serve(watched: Watched, export: TensorBoardExport | None, port: int, *, browser: bool) -> None:
    from paceline.report.live.server import PageServer

    with PageServer(watched, port) as server, contextlib.ExitStack() as stack:
        print(f"{server.url}  (Ctrl-C ends)", flush=True)
        if not watched.path.exists():
            print(f"paceline: there is no {watched.path} yet; waiting for the run to begin", file=sys.stderr)
        if browser and _has_display():
            webbrowser.open(stack.enter_context(_way_in(server.url)))
        for _ in _looks(watched, export, lambda: False):
            pass


def _has_display() -> bool:
    """Whether a browser can open a window; one in the terminal would take the command's place."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextlib.contextmanager
def _way_in(url: str) -> Iterator[str]:
    """A file, readable by its owner alone, that leads to the page: other users see the arguments of a browser."""
    with tempfile.TemporaryDirectory(prefix="paceline-watch-") as folder:
        file = Path(folder) / "watch.html"
        file.touch(mode=0o600)
        file.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><a href="{url}">watch</a>')
        yield file.as_uri()
