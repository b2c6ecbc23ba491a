"""What cannot be resumed is refused with name and reason, and the checkpoint before it is used."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Crash, Parts, train_by_session
from same_bits import assert_same, metrics_of
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR
from training_cases import autocast, classifier, dropout, mlp, momentum

import paceline
from paceline.errors import CheckpointError, UsageError
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint
from paceline.seeding import seed_streams


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


def train(run: Path, seed: int = 0, build: Callable[[], Parts] = dropout, **options: Any) -> Parts:
    seed_streams(seed)
    parts = build()
    with contextlib.suppress(Crash):
        train_by_session(parts, run=run, **{"save_every": 3, **options})
    return parts


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A run that ended after 10 of 20 updates, with checkpoints of 3, 6 and 9."""
    train(tmp_path / "crashed", crash_at=10)
    return tmp_path / "crashed"


def checkpoints(run: Path) -> list[Path]:
    return CheckpointFolder(run / "checkpoints").files()


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.lock"
    }


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("num_torn", [1, 2])
@pytest.mark.parametrize("tear", [cut, flip, empty])
def test_a_torn_checkpoint_is_told_and_the_one_before_is_used(
    tear: Callable[[Path], None], num_torn: int, crashed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = train(tmp_path / "whole").state()
    torn = checkpoints(crashed)[-num_torn:]
    for file in torn:
        tear(file)
    with caplog.at_level(logging.WARNING, "paceline"):
        parts = train(crashed, seed=9, resume=True)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == num_torn
    for file, warning in zip(reversed(torn), warnings, strict=True):
        assert str(file) in warning
        assert "torn" in warning or "damaged" in warning
    assert_same(parts.state(), expected)
    assert metrics_of(crashed) == metrics_of(tmp_path / "whole")


def test_when_all_are_torn_nothing_is_touched(crashed: Path) -> None:
    torn = checkpoints(crashed)
    for file in torn:
        cut(file)
    before = contents(crashed)
    with pytest.raises(CheckpointError) as caught:
        train(crashed, resume=True)
    assert all(file.name in str(caught.value) for file in torn)
    assert str(crashed) in str(caught.value)
    assert contents(crashed) == before
    with pytest.raises(CheckpointError):  # the directory is free again
        train(crashed, resume=True)


def other_shape() -> Parts:
    model = nn.Sequential(nn.Linear(6, 11), nn.Dropout(0.3), nn.Tanh(), nn.Linear(11, 3))
    return classifier(model, momentum(model))


def other_names() -> Parts:
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3), nn.Linear(3, 3))
    return classifier(model, momentum(model))


def other_optimizer() -> Parts:
    model = mlp(nn.Dropout(0.3))
    return classifier(model, Adam(model.parameters()))


def two_groups() -> Parts:
    model = mlp(nn.Dropout(0.3))
    return classifier(
        model, SGD([{"params": model[0].parameters()}, {"params": model[3].parameters()}], lr=0.1, momentum=0.9)
    )


def two_optimizers() -> Parts:
    model = mlp(nn.Dropout(0.3))
    return classifier(model, momentum(model[0]), momentum(model[3]))


def with_scheduler() -> Parts:
    parts = dropout()
    parts.schedulers = [ExponentialLR(parts.optimizers[0], 0.9)]
    return parts


def with_scaler() -> Parts:
    parts = dropout()
    parts.scaler = torch.amp.GradScaler("cpu")
    return parts


def with_stateful() -> Parts:
    parts = dropout()
    parts.stateful = {"mine": nn.Linear(1, 1)}
    return parts


def double() -> Parts:
    parts = dropout()
    parts.model.double()
    return parts


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (other_shape, "0.weight"),
        (other_names, "3.weight|2.weight"),
        (other_optimizer, "(?i)adam"),
        (two_groups, "groups"),
        (two_optimizers, "optimizers"),
        (with_scheduler, "schedulers"),
        (with_scaler, "GradScaler"),
        (with_stateful, "mine"),
        (double, "float64"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(build: Callable[[], Parts], reason: str, crashed: Path) -> None:
    before = contents(crashed)
    for resume, run in ((True, crashed), (checkpoints(crashed)[-1], crashed.with_name("new"))):
        seed_streams(4)
        parts = build()
        untouched = build_copy(parts)
        with pytest.raises(CheckpointError, match=reason) as caught:
            train_by_session(parts, run=run, resume=resume)
        assert checkpoints(crashed)[-1].name in str(caught.value)
        assert_same(build_copy(parts), untouched)
    assert contents(crashed) == before


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_scheduler_more_or_less_is_told_once_with_what_to_do(
    forgotten: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, now = (with_scheduler, dropout) if forgotten else (dropout, with_scheduler)
    train(tmp_path, build=before, crash_at=10)
    with pytest.raises(CheckpointError, match=r"scheduler= of join\(\).*give join\(\) what the run") as caught:
        train(tmp_path, build=now, resume=True)
    assert all(file.name in str(caught.value) for file in checkpoints(tmp_path))
    assert str(caught.value).count("schedulers") == 1
    assert caplog.records == []


def build_copy(parts: Parts) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in parts.model.parameters()]


@pytest.mark.parametrize("state", [{}, {"trainee": {}}, {"trainee": 3, "data": 1}, {"step": torch.ones(2)}])
def test_a_whole_checkpoint_that_holds_no_session_is_refused(state: dict[str, Any], crashed: Path) -> None:
    """Of another version of ours, say: passed over as a torn one would be."""
    file = checkpoints(crashed)[-1]
    write_checkpoint(file, state)
    with pytest.raises(CheckpointError) as caught:
        train(crashed.with_name("new"), resume=file)
    assert str(file) in str(caught.value)
    train(crashed, resume=True)
    assert len(metrics_of(crashed)) == 20


def test_a_scaled_run_is_not_resumed_without_its_scaler(tmp_path: Path) -> None:
    train(tmp_path, build=lambda: autocast(torch.float16), crash_at=5)

    def unscaled() -> Parts:
        parts = autocast(torch.float16)
        parts.scaler = None
        return parts

    with pytest.raises(CheckpointError, match="GradScaler"):
        train(tmp_path, build=unscaled, resume=True)


@pytest.mark.parametrize("exists", [True, False])
def test_resuming_a_new_directory_starts_a_run(exists: bool, tmp_path: Path) -> None:
    run = tmp_path / "new"
    if exists:
        run.mkdir()
    expected = train(tmp_path / "other").state()
    assert_same(train(run, resume=True).state(), expected)
    assert metrics_of(run) == metrics_of(tmp_path / "other")


def test_a_run_that_has_no_checkpoint_yet_starts_again(tmp_path: Path) -> None:
    train(tmp_path / "run", crash_at=2)
    assert len(metrics_of(tmp_path / "run")) == 2
    expected = train(tmp_path / "whole").state()
    assert_same(train(tmp_path / "run", resume=True).state(), expected)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_an_old_run_is_not_written_over(crashed: Path) -> None:
    before = contents(crashed)
    with pytest.raises(UsageError, match="already holds a run") as caught:
        train(crashed)
    assert str(crashed) in str(caught.value)
    assert contents(crashed) == before


def test_resuming_needs_a_directory() -> None:
    model = mlp()
    with pytest.raises(UsageError, match="run directory"):
        paceline.join(model, momentum(model), resume=True)


def test_a_checkpoint_may_be_named_by_its_file(crashed: Path, tmp_path: Path) -> None:
    """In another run, which gets the lines from there on."""
    expected = train(tmp_path / "whole").state()
    parts = train(tmp_path / "new", seed=9, resume=str(checkpoints(crashed)[0]))
    assert_same(parts.state(), expected)
    assert metrics_of(tmp_path / "new") == metrics_of(tmp_path / "whole")[3:]


def test_a_checkpoint_may_be_named_without_a_run(crashed: Path, tmp_path: Path) -> None:
    expected = train(tmp_path / "whole").state()
    seed_streams(9)
    parts = dropout()
    train_by_session(parts, resume=checkpoints(crashed)[0])
    assert_same(parts.state(), expected)


def test_a_run_may_go_back_to_an_earlier_checkpoint_of_its_own(crashed: Path, tmp_path: Path) -> None:
    """Its metrics go back with it, and what it writes from there on is what counts later."""
    expected = train(tmp_path / "whole").state()
    train(crashed, seed=9, resume=checkpoints(crashed)[0], save_every=1, keep=3, crash_at=5)
    assert read_checkpoint(checkpoints(crashed)[-1])["session"]["steps"] == 5
    assert metrics_of(crashed) == metrics_of(tmp_path / "whole")[:5]
    assert_same(train(crashed, seed=9, resume=True).state(), expected)
    assert metrics_of(crashed) == metrics_of(tmp_path / "whole")


def test_a_foreign_checkpoint_does_not_wipe_out_an_old_run(crashed: Path, tmp_path: Path) -> None:
    """Naming a checkpoint of one run and the directory of another must not lose the other's metrics."""
    other = tmp_path / "other"
    train(other)
    before = contents(other)
    with pytest.raises(UsageError, match="already holds a run"):
        train(other, resume=checkpoints(crashed)[-1])
    assert contents(other) == before


@pytest.mark.parametrize("name", ["nowhere.safetensors", "."])
def test_a_file_that_is_not_there_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        train(tmp_path / "run", resume=tmp_path / name)


def test_a_run_can_be_moved(crashed: Path, tmp_path: Path) -> None:
    expected = train(tmp_path / "whole").state()
    shutil.move(crashed, tmp_path / "moved")
    assert_same(train(tmp_path / "moved", seed=9, resume=True).state(), expected)


def test_a_checkpoint_made_under_a_server_is_refused_without_one(crashed: Path) -> None:
    """A server keeps other state: which batches are out, and how far its trace is."""
    for file in checkpoints(crashed):
        state = read_checkpoint(file)
        write_checkpoint(file, {**state, "session": {**state["session"], "policy": "async"}})
    with pytest.raises(CheckpointError, match=r"made under async, and the run is to go on under all-reduce: only one"):
        train(crashed, resume=True)


@pytest.mark.parametrize(("before", "after"), [(None, "sign"), ("sign", None), ("sign", "cast(to=fp16)")])
def test_another_codec_is_refused(before: str | None, after: str | None, tmp_path: Path) -> None:
    train(tmp_path, crash_at=10, codec=before)
    with pytest.raises(CheckpointError, match=rf"go on with the same: codec='{before or 'none'}'"):
        train(tmp_path, resume=True, codec=after)
    train(tmp_path, resume=True, codec=before)
