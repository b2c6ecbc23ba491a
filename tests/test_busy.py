"""The busy loops beside a benchmark run while it does, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.bench.busy import LOOP, busy_loops
from paceline.errors import UsageError

DEADLINE = 60.0  # seconds; against hangs alone

pytestmark = pytest.mark.processes


def test_loops_run_inside_the_block_alone() -> None:
    with busy_loops(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert all(loop.returncode is not None for loop in loops)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_loops_end_with_an_error(error: type[BaseException]) -> None:
    with pytest.raises(error), busy_loops(1) as loops:
        raise error
    assert loops[0].returncode is not None


def test_a_loop_ends_with_its_parent() -> None:
    """A process that was killed cannot end its loops: they see that they have another parent."""
    command = [sys.executable, "-c", LOOP, str(os.getppid())]
    assert subprocess.run(command, timeout=DEADLINE).returncode == 0


def test_fewer_than_none_are_refused() -> None:
    with pytest.raises(UsageError, match="--busy must be at least 0, got -1"), busy_loops(-1):
        pass
