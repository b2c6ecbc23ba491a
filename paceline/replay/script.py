"""Replay a user's script: its workers are started again, and the server makes them repeat the recorded order."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, UsageError
from paceline.launch.environment import ReplayOrder
from paceline.launch.service import ServerOptions
from paceline.launch.supervisor import supervise
from paceline.peers.block_trace import read_block_traces
from paceline.record.trace import Began, Committed, Joined, Left, Trace
from paceline.replay.outcome import Replayed, Tell


def replay_script(
    run: Path, trace: Trace, *, until: int | None, shell: bool, tell: Tell = lambda done, total: None
) -> Replayed:
    """Start the script of a run again on as many workers; return the result that the server of the replay reports."""
    about = trace.about
    last = max((record.version for record in trace if isinstance(record, Committed)), default=0)
    if until is not None and not 0 <= until <= last:
        raise UsageError(f"the run has the versions 0 to {last}, and no version {until}")
    lives = _lives(trace, about["world_size"])
    with contextlib.ExitStack() as stack:
        descriptors = stack.enter_context(_own_terminal()) if shell else None
        order = ReplayOrder(trace=_file(run), until=until, shell=descriptors, lives=lives)
        options = ServerOptions(needed=True, replay=order)
        return _start_again(run, about, len(lives), options, lambda done: tell(done, last if until is None else until))


def replay_without_server(run: Path, trace: Trace) -> Replayed:
    """Start the script of a run again whose workers replay it by themselves; in a directory that is then removed."""
    read_block_traces(run, trace.about["world_size"])  # one that is damaged or has no end is refused here
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as scratch:
        order = ReplayOrder(
            trace=_file(run), scratch=str(Path(scratch) / "run"), lives=(1,) * trace.about["world_size"]
        )
        return _start_again(run, trace.about, len(order.lives), ServerOptions(replay=order), lambda _: None)


def _file(run: Path) -> str:
    return str((run / "trace.bin").absolute())


def _start_again(
    run: Path, about: Mapping[str, Any], workers: int, options: ServerOptions, tell: Callable[[int], None]
) -> Replayed:
    if not about.get("command"):
        raise UsageError(f"{run} was not made by paceline run: its trace does not say what command to start again")
    told: list[dict[str, Any]] = []

    def hear(rank: int, report: dict[str, Any]) -> None:
        if report["event"] == "replayed":
            told.append(report["result"])
        elif report["event"] == "replaying":
            tell(report["version"])

    directory = Path(about["directory"])
    with contextlib.chdir(directory) if directory.is_dir() else contextlib.nullcontext():
        code = supervise(
            about["command"],
            workers=workers,
            policy=about["policy"],
            environment={**os.environ, "OMP_NUM_THREADS": str(about["threads"])},
            on_report=hear,
            server=options,
        )
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        raise KeyboardInterrupt
    if not told:
        raise PacelineError(f"the replay of {run} ended with code {code} before its end; see above for the reason")
    return Replayed(**told[0])


def _lives(trace: Trace, workers: int) -> tuple[int, ...]:
    """The number of processes that each rank had: one more after each death, and after each resume."""
    lives = dict.fromkeys(range(workers), 0)
    known: set[int] = set()  # ranks whose process is running
    for record in trace:
        match record:
            case Joined() if record.rank not in known:
                lives[record.rank] = lives.get(record.rank, 0) + 1
                known.add(record.rank)
            case Left(dead=True):
                known.discard(record.rank)
            case Began(replaced=False):
                known.clear()
            case _:
                pass
    return tuple(max(1, lives.get(rank, 1)) for rank in range(max(lives) + 1))


@contextlib.contextmanager
def _own_terminal() -> Iterator[tuple[int, int]]:
    """This process's input and output, to be inherited by another process."""
    reading, writing = os.dup(0), os.dup(1)
    try:
        yield reading, writing
    finally:
        os.close(reading)
        os.close(writing)
