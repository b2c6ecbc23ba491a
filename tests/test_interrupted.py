"""A run may be killed, or interrupted by Ctrl-C, at any line of ours: resumed, it ends with the same bits."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import loops
import pytest
from loops import Parts, train_by_session
from quick import quick
from same_bits import assert_same, difference, metrics_of
from torch import nn
from torch.utils.data import DataLoader
from training_cases import DATASET, classifier, mlp, momentum

import paceline
from paceline.seeding import seed_streams

OUR_CODE = (str(Path(paceline.__file__).parent), loops.__file__)
EPOCHS = 2


@contextlib.contextmanager
def at_every_line(act: Callable[[int, FrameType], None]) -> Iterator[None]:
    """Call ``act`` with the number and the frame of each line of ours that is about to run."""
    count = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            act(count, frame)
        return local

    def enter(frame: FrameType, _: str, __: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(OUR_CODE) else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def fragile(accumulate: int) -> Parts:
    """Everything that a step may leave half done: random streams, buffers, momentum, gradients."""
    model = mlp(nn.Dropout(0.2), nn.BatchNorm1d(12))
    return classifier(model, momentum(model), source=DataLoader(DATASET, 8, shuffle=True), accumulate=accumulate)


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {"save_every": 3}),
    "seeded": (1, {"save_every": 3, "seed": 5}),
    "accumulating": (2, {"save_every": 2}),
}


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def whole_run(case: str, run: Path) -> tuple[Any, int]:
    """The state that a run ends with, and how many lines of ours it takes."""
    accumulate, options = CASES[case]
    seed_streams(0)
    parts = fragile(accumulate)
    lines = 0

    def count(line: int, _: FrameType) -> None:
        nonlocal lines
        lines = line

    with at_every_line(count):
        train_by_session(parts, EPOCHS, run=run, **options)
    return parts.state(), lines


def resumed(case: str, run: Path) -> Any:
    accumulate, options = CASES[case]
    # A run that was killed before its first checkpoint starts again, from the weights that the script makes.
    seed_streams(9 if list((run / "checkpoints").glob("*.safetensors")) else 0)
    parts = fragile(accumulate)
    train_by_session(parts, EPOCHS, run=run, resume=True, **options)
    return parts.state()


@pytest.mark.parametrize("lines", quick([6, 40], 6))
@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_at_any_line_ends_with_the_same_bits(case: str, lines: int, tmp_path: Path) -> None:
    """A copy of the directory at a moment is what a kill at that moment leaves."""
    accumulate, options = CASES[case]
    expected, num_lines = whole_run(case, tmp_path / "whole")
    chosen = set(random.Random(1).sample(range(1, num_lines), lines))
    run = tmp_path / "run"

    def copy(line: int, _: FrameType) -> None:
        if line in chosen and run.exists():
            shutil.copytree(run, tmp_path / str(line))

    seed_streams(0)
    with at_every_line(copy):
        train_by_session(fragile(accumulate), EPOCHS, run=run, **options)
    for line in chosen:
        killed = tmp_path / str(line)
        assert_same(resumed(case, killed), expected)
        assert metrics_of(killed) == metrics_of(tmp_path / "whole")


def test_a_killed_run_can_always_be_told_how_it_was_started(tmp_path: Path) -> None:
    """Once a directory counts as holding a run, its configuration is there to go on with."""
    seed_streams(0)
    looked = 0

    def look(*_: object) -> None:
        nonlocal looked
        if (tmp_path / "metrics.jsonl").exists():
            looked += 1
            assert (tmp_path / "config.json").exists(), "killed now, this run could not be resumed by the command"

    with at_every_line(look):
        train_by_session(fragile(1), 1, run=tmp_path)
    assert looked > 100


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # interrupted while closing a file
@pytest.mark.parametrize("lines", quick([12, 80], 12))
@pytest.mark.parametrize("case", CASES)
def test_a_run_interrupted_at_any_line_ends_with_the_same_bits(case: str, lines: int, tmp_path: Path) -> None:
    accumulate, options = CASES[case]
    expected, num_lines = whole_run(case, tmp_path / "whole")
    gc.collect()
    gc.freeze()  # all that this run has imported: each collection below looks at what came after
    wrong = {}
    for line in random.Random(2).sample(range(1, num_lines), lines):
        run = tmp_path / str(line)
        where = [""]

        def interrupt(count: int, frame: FrameType, line: int = line, where: list[str] = where) -> None:
            if count == line:
                where[0] = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt

        seed_streams(0)
        try:
            with at_every_line(interrupt):
                train_by_session(fragile(accumulate), EPOCHS, run=run, resume=True, **options)
        except KeyboardInterrupt:
            pass
        except paceline.PacelineError as error:
            wrong[where[0]] = f"{error!r} instead of KeyboardInterrupt"
            continue
        gc.collect()  # an interrupt inside close() leaves the run's lock to whoever frees it; an ended process has none
        found = resumed(case, run)
        bits = difference(found, expected)
        if bits is not None or metrics_of(run) != metrics_of(tmp_path / "whole"):
            wrong[where[0]] = bits or "metrics differ"
    assert wrong == {}, f"{len(wrong)} of {lines}"
