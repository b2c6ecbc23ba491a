"""A worker that was interrupted has left, and a replay must not wait for it to leave by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from led_by_hand import Hand
from live import Cluster

from paceline.record.trace import Left, Trace, TraceWriter
from paceline.transport.messages import Leave


@pytest.mark.parametrize("failed", [True, False])
def test_a_worker_that_left_by_an_exception_is_recorded_as_dead(failed: bool, tmp_path: Path) -> None:
    """Ctrl-C comes at no point of the script that a replay could find again, so there the worker is killed."""
    file = tmp_path / "trace.bin"
    writer = TraceWriter(file, {})
    with Cluster("async", workers=2, trace=writer) as cluster:
        Hand(cluster, 0)
        Hand(cluster, 1).say(Leave(failed=failed, version=0))
        cluster.until(lambda: 1 not in cluster.server._members)
    writer.close()
    assert [record.dead for record in Trace(file) if isinstance(record, Left) and record.rank == 1] == [failed]
