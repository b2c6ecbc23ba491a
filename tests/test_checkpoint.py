"""A checkpoint is whole or refused by name and reason, whatever happened to its file or its disk."""

from __future__ import annotations

import errno
import os
import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from same_bits import assert_same

import paceline
from paceline.errors import CheckpointError
from paceline.record import checkpoint
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint, write_checkpoint

STATE = {
    "trainee": {"model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)}},
    "session": {"steps": 3, "rate": 0.1, "betas": (0.9, 0.999)},
    "text": "a \N{GREEK SMALL LETTER ALPHA} \N{GRINNING FACE}",
}
on_one_file = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "step.safetensors"
    write_checkpoint(path, STATE)
    return path


def assert_refused(path: Path, reason: str | None = None) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)


@on_one_file
@given(data=st.data())
def test_a_truncated_file_is_refused(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    torn = file.with_name("torn.safetensors")
    torn.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert_refused(torn)


def test_every_flipped_byte_is_refused_or_harmless(file: Path) -> None:
    whole = bytearray(file.read_bytes())
    flipped = file.with_name("flipped.safetensors")
    dice = random.Random(0)
    refused = 0
    for place in range(len(whole)):
        mask = dice.choice([1, 0x20, dice.randrange(1, 256)])
        whole[place] ^= mask
        flipped.write_bytes(whole)
        try:
            found = read_checkpoint(flipped)
        except CheckpointError as error:
            refused += 1
            assert str(flipped) in str(error)
        else:  # a space of padding that became a tab, say
            assert_same(found, STATE)
        whole[place] ^= mask
    assert refused > 0.95 * len(whole)


@on_one_file
@given(data=st.data())
def test_bytes_put_in_or_taken_out_are_refused(file: Path, data: st.DataObject) -> None:
    whole = file.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(start + 40, len(whole))))
    changed = whole[:start] + data.draw(st.binary(max_size=20)) + whole[stop:]
    other = file.with_name("changed.safetensors")
    other.write_bytes(changed)
    try:
        assert_same(read_checkpoint(other), STATE)
    except CheckpointError as error:
        assert str(other) in str(error)


@on_one_file
@given(content=st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "noise.safetensors"
    path.write_bytes(content)
    assert_refused(path)


class Bomb:
    """Tells on whoever unpickles it."""

    went_off = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Bomb, "went_off", True)


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb()))


def write_torch(path: Path) -> None:
    torch.save({"model": torch.ones(2), "bomb": Bomb()}, path)


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data.pkl", pickle.dumps(Bomb()))


@pytest.mark.parametrize(
    "write",
    [
        write_pickle,
        write_torch,
        write_zip,
        lambda path: path.write_bytes(b""),
        lambda path: path.mkdir(),
        lambda path: path.symlink_to(path.with_name("nowhere")),
        lambda path: path.symlink_to(path),
        lambda path: save_file({"weight": torch.ones(2)}, path),
        lambda path: save_file({"weight": torch.ones(2)}, path, {"format": "pt"}),
        lambda path: save_file({}, path, {"format": checkpoint.FORMAT}),
        lambda path: save_file({}, path, {"format": checkpoint.FORMAT, "state": "{", "sha256": ""}),
        lambda path: path.write_bytes(b"\xff" * 8 + b"{}"),
        lambda path: None,
    ],
    ids=[
        "pickle",
        "torch.save",
        "zip",
        "empty",
        "directory",
        "dangling link",
        "link to itself",
        "foreign",
        "foreign with metadata",
        "no state",
        "wrong sum",
        "endless header",
        "missing",
    ],
)
def test_foreign_files_are_refused_and_never_unpickled(write: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    write(path)
    assert_refused(path)
    assert not Bomb.went_off


def test_a_file_that_cannot_be_opened_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(checkpoint, "safe_open", refuse)
    assert_refused(file, "Permission denied")


def full_disk(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("where", "name"), [(checkpoint, "save_file"), (os, "fsync"), (os, "rename"), (Path, "rename"), (Path, "mkdir")]
)
@pytest.mark.parametrize("folder_exists", [True, False])
def test_a_full_disk_leaves_what_was_there(
    where: Any, name: str, folder_exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    path = folder / "step.safetensors"
    if folder_exists:
        write_checkpoint(path, STATE)
    with monkeypatch.context() as patch:
        patch.setattr(where, name, full_disk)
        try:
            write_checkpoint(path, {"other": torch.ones(1000)})
        except CheckpointError as error:
            assert str(path) in str(error)
            assert "full" in str(error)
        else:
            assert name in ("rename", "mkdir")  # not used on this way of writing
            return
    assert [entry.name for entry in folder.glob("*")] == (["step.safetensors"] if folder_exists else [])
    if folder_exists:
        assert_same(read_checkpoint(path), STATE)


def test_any_other_failure_to_write_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file/step\.safetensors"):
        write_checkpoint(tmp_path / "file" / "step.safetensors", STATE)


REALLY_FULL = """
import subprocess, sys, torch
from pathlib import Path
from paceline.errors import CheckpointError
from paceline.record.checkpoint import read_checkpoint, write_checkpoint
folder = Path(sys.argv[1])
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)], capture_output=True).returncode:
    sys.exit(77)
first = {"x": torch.ones(100_000)}
write_checkpoint(folder / "a.safetensors", first)
for number in range(2, 5):
    try:
        write_checkpoint(folder / "a.safetensors", {"x": torch.full((number * 100_000,), number)})
    except CheckpointError as error:
        print(error)
assert torch.equal(read_checkpoint(folder / "a.safetensors")["x"], first["x"])
print([entry.name for entry in folder.iterdir()])
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="needs a mount of its own")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    found = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", REALLY_FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent.parent)},
    )
    if found.returncode == 77 or "unshare" in found.stderr:
        pytest.skip("mounting is not allowed here")
    assert found.returncode == 0, found.stderr
    *errors, names = found.stdout.splitlines()
    assert len(errors) == 3
    assert all("the disk is full" in error and "a.safetensors" in error for error in errors), errors
    assert names == "['a.safetensors']"


def test_a_folder_keeps_the_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints", keep=2)
    assert folder.files() == []
    for step in (1, 5, 30, 200):
        written = folder.write(step, {"step": step})
        assert read_checkpoint(written) == {"step": step}
        assert folder.files()[-1] == written
    assert [state["step"] for _, state in folder.newest() if isinstance(state, dict)] == [200, 30]


def test_a_folder_looks_at_nothing_else(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, keep=1)
    for name in ("step-1.safetensors", "step-0000000003.safetensors.bak", "mine.txt"):
        (tmp_path / name).write_text("mine")
    folder.write(1, {})
    folder.write(2, {})
    assert folder.files() == [tmp_path / "step-0000000002.safetensors"]
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    written = folder.write(1, {})
    (tmp_path / ".step-0000000002.safetensors.77.partial").write_text("half")
    folder.clear_leftovers()
    assert list(tmp_path.iterdir()) == [written]


def test_the_newest_are_given_with_what_is_wrong_with_them(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2, 3):
        folder.write(step, {"step": step})
    folder.file(3).write_bytes(b"torn")
    (first, error), (second, state) = list(folder.newest())[:2]
    assert first == folder.file(3)
    assert isinstance(error, CheckpointError)
    assert str(first) in str(error)
    assert (second, state) == (folder.file(2), {"step": 2})


def test_an_ordinary_tool_can_open_it(file: Path) -> None:
    from safetensors.torch import load_file

    assert_same(load_file(file)["trainee.model.weight"], torch.arange(6.0).reshape(2, 3))
