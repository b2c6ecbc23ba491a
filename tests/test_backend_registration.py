"""``torch.distributed.init_process_group("paceline")``: the name, the functions, several groups, and the fallback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

import backend_programs as programs
from backend_processes import TESTS, run_processes

pytestmark = pytest.mark.processes


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    head = f"import sys; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent)!r}]\n"
    command = [sys.executable, "-W", "error", "-c", head + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ | environment)


FIRST = """
import paceline
assert not [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
assert not [name for name in sys.modules if name.startswith("paceline.native")]
import torch
assert torch.distributed.Backend.PACELINE == "paceline", dir(torch.distributed.Backend)
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("paceline")]
assert "paceline.collectives.backend" not in sys.modules
store = torch.distributed.HashStore()
torch.distributed.init_process_group("paceline", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
torch.distributed.all_reduce(tensor)
assert tensor.tolist() == [1, 1, 1]
print(torch.distributed.group.WORLD)
"""

LAST = """
sys.modules["paceline.native._core"] = None  # as where no compiler was to be had
import warnings
import torch
import paceline, importlib
importlib.reload(paceline)
store = torch.distributed.HashStore()
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    torch.distributed.init_process_group("paceline", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
torch.distributed.all_reduce(tensor)
torch.distributed.destroy_process_group()
for warning in told:
    print(warning.message)
"""

# A thread of Gloo that lets go of a tensor while the interpreter ends aborts the process.
LEFT = """
from pathlib import Path
from paceline.peers.group import leave_default_group, make_default_group
make_default_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
import torch.distributed.nn.functional  # as an optimizer does when it is made
torch.distributed.all_reduce(torch.ones(3))
kept = [torch.distributed.group.WORLD]
kept.append(kept)
del kept
leave_default_group()
names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in names if "gloo" in name], names
"""


NAMED = """
import torch
loaded = {name for name in sys.modules if name.partition(".")[0] == "paceline"}
wanted = {"paceline", "paceline.version", "paceline.collectives", "paceline.collectives.register"}
assert loaded == wanted, f"import torch loaded {sorted(loaded)} of paceline; reinstall it if that is nothing"
store = torch.distributed.HashStore()
torch.distributed.init_process_group("paceline", store=store, rank=0, world_size=1)
tensor = torch.ones(3)
torch.distributed.all_reduce(tensor)
print(torch.distributed.group.WORLD, tensor.tolist())
"""

NOT_NAMED = """
import torch
assert not [name for name in sys.modules if name.partition(".")[0] == "paceline"]
import paceline
assert torch.distributed.Backend.PACELINE == "paceline"
"""


def test_named_without_an_import() -> None:
    """As a program of ``torchrun`` that knows of this package by nothing but the backend's name."""
    ended = run(NAMED)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "<paceline group '0', rank 0 of 1> [1.0, 1.0, 1.0]\n"


def test_torch_can_be_told_to_load_no_backends() -> None:
    ended = run(NOT_NAMED, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_imported_before_torch() -> None:
    ended = run(FIRST)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "<paceline group '0', rank 0 of 1>\n"


def test_imported_after_torch_and_without_the_compiled_module() -> None:
    """Then it is Gloo, of which no thread outlives the default group."""
    ended = run(LAST + LEFT)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert re.fullmatch(r"backend 'paceline' uses Gloo: on rank 0, the compiled module is missing .*\n", ended.stdout)


def test_every_function_gives_what_gloo_gives(tmp_path: Path) -> None:
    results = []
    for name in "paceline", "gloo":
        (tmp_path / name).mkdir()
        results.append(run_processes(programs.every_function, 3, tmp_path / name, name))
    ours, theirs = results
    assert len(ours[0]["after it"]) >= 30
    assert ours == theirs


def test_coalescing_manager(tmp_path: Path) -> None:
    run_processes(programs.coalescing, 2, tmp_path)


def test_many_groups_and_worlds(tmp_path: Path) -> None:
    for turn in range(2):
        (tmp_path / str(turn)).mkdir()
    for before, after in run_processes(programs.many_groups, 4, tmp_path):
        assert before == after


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        ("no module", "on rank 1, the compiled module is missing (no compiler)"),
    ],
)
def test_all_ranks_use_gloo_if_one_must(obstacle: str, reason: str, tmp_path: Path) -> None:
    results: list[Any] = run_processes(programs.fallback, 2, tmp_path, obstacle)
    assert results == [[3, [f"backend 'paceline' uses Gloo: {reason}"]], [3, []]]  # rank 0 says so for all
