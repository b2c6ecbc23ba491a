"""Replay a user's script: its workers are started again, and the server has them do what they did."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.environment import ReplayOrder
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.record.trace import Committed, Joined, Trace
from paceline.replay.outcome import Replayed


def replay_script(run: Path, trace: Trace, *, until: int | None, shell: bool) -> Replayed:
    """Start the script of a run again on as many workers, and give what the server of the replay reports."""
    command, about = trace.about.get("command"), trace.about
    if not command:
        raise UsageError(f"{run} was not made by paceline run: its trace does not say what command to start again")
    last = max((record.version for record in trace if isinstance(record, Committed)), default=0)
    if until is not None and not 0 <= until <= last:
        raise UsageError(f"the run has the versions 0 to {last}, and no version {until}")
    ranks = [record.rank for record in trace if isinstance(record, Joined)]
    told: list[dict[str, Any]] = []

    def hear(rank: int, report: dict[str, Any]) -> None:
        if report["event"] == "replayed":
            told.append(report["result"])

    with contextlib.ExitStack() as stack:
        descriptors = stack.enter_context(_own_terminal()) if shell else None
        order = ReplayOrder(trace=str((run / "trace.bin").absolute()), until=until, shell=descriptors)
        directory = Path(about["directory"])
        stack.enter_context(contextlib.chdir(directory) if directory.is_dir() else contextlib.nullcontext())
        code = supervise(
            command,
            workers=max([about["world_size"] - 1, *ranks]) + 1,
            policy=about["policy"],
            environment={**os.environ, "OMP_NUM_THREADS": str(about["threads"])},
            on_report=hear,
            server=ServerOptions(needed=True, respawn=True, replay=order),
        )
    if not told:
        raise PacelineError(f"the replay of {run} ended with code {code} before its end; see above for the reason")
    return Replayed(**told[0])


@contextlib.contextmanager
def _own_terminal() -> Iterator[tuple[int, int]]:
    """Our own input and output, for another process."""
    reading, writing = os.dup(0), os.dup(1)
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)
