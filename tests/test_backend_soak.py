"""Random operations on overlapping groups, for a few seconds; ``PACELINE_SOAK_ROUNDS=20000`` makes it long."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_processes import run_processes
from backend_soak import soak

ROUNDS = int(os.environ.get("PACELINE_SOAK_ROUNDS", "1500"))
DEADLINE = 200 + ROUNDS / 20


@pytest.mark.processes
@pytest.mark.timeout(2 * DEADLINE)
def test_random_operations_on_overlapping_groups(tmp_path: Path) -> None:
    results = run_processes(soak, 4, tmp_path, ROUNDS, 1, deadline=DEADLINE)
    assert all(done > ROUNDS / 3 for done in results)
