"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# Times are noisy on shared machines, so no example has a deadline.
hypothesis.settings.register_profile("paceline", deadline=None)
hypothesis.settings.load_profile("paceline")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seed() -> None:
    """Bits depend on the thread count, so every test runs with one; streams start from a known seed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The directory of real data sets, or a skip: a user's machine has none."""
    path = Path(os.environ.get("PACELINE_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (path / "mnist").is_dir():
        pytest.skip(f"no real data in {path}; set PACELINE_TEST_DATA")
    return path
