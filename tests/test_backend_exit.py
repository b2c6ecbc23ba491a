"""Programs on the backend "paceline" that end without ``destroy_process_group``: no hang, no crash, no noise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_endings import ENDINGS
from backend_processes import TESTS

QUICK = ["a callback", "receives", "threads"]


@pytest.mark.processes
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in ENDINGS if name not in QUICK], marks=pytest.mark.soak)]
)
def test_a_program_may_end_without_destroying_its_groups(names: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(TESTS / "backend_endings.py"), str(tmp_path), *names]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert ended.stdout.splitlines() == [f"{name} [0, 0]" for name in names], ended.stderr
    assert ended.stderr == ""
