"""Random operations on overlapping groups; ``PACELINE_SOAK_ROUNDS=20000`` makes ``make soak`` longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_processes import run_processes
from backend_soak import soak
from quick import quick

ROUNDS = int(os.environ.get("PACELINE_SOAK_ROUNDS", "5000"))
DEADLINE = 200 + ROUNDS / 20


@pytest.mark.processes
@pytest.mark.timeout(2 * DEADLINE)
@pytest.mark.parametrize("rounds", quick([300, ROUNDS], 300))
def test_random_operations_on_overlapping_groups(rounds: int, tmp_path: Path) -> None:
    results = run_processes(soak, 4, tmp_path, rounds, 1, deadline=DEADLINE)
    assert all(done > rounds / 3 for done in results)
