"""The scripts in examples/ run as the README says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from processes import ENVIRONMENT

pytestmark = pytest.mark.processes

SCRIPT = str(REPOSITORY / "examples" / "digits.py")


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        pytest.param([SCRIPT], 230, marks=pytest.mark.soak),
        (["-m", "paceline", "run", "--workers", "2", SCRIPT], 120),
    ],
    ids=["alone", "two workers"],
)
def test_the_loop_of_the_readme_learns(command: list[str], steps: int) -> None:
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, check=False, env=ENVIRONMENT, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"(\d+) steps, last loss ([\d.]+)", ended.stdout)
    assert found is not None, ended.stdout
    assert int(found[1]) == steps
    assert float(found[2]) < 0.5  # ten classes start at 2.3
