"""The server's process: ``join()`` serves the script's own model and optimizer, and ends the script with the run."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from paceline.codecs import Codec
from paceline.data.stream import BatchStream
from paceline.launch.environment import ServerAssignment
from paceline.launch.reports import report, report_failure
from paceline.launch.service import read_gone
from paceline.peers.exchange import Alone
from paceline.policies.server import ServerPolicy
from paceline.record.fingerprints import hash_of, state_tensors
from paceline.record.run import Run
from paceline.record.trace import Ended, Hashed, TracePosition, TraceWriter
from paceline.replay.serving import serve_replay
from paceline.server.live import CommitSummary, LiveServer
from paceline.server.shards import Shards
from paceline.server.work_queue import WorkQueue
from paceline.sessions.nan_guard import NaNGuard, OnNaN, Where
from paceline.sessions.request import JoinRequest
from paceline.sessions.run_state import Position, RunState, last_checkpoint, open_run
from paceline.sessions.shards import open_shards, serve_shard
from paceline.store.commit_rule import CommitRule
from paceline.store.double_buffer import read_note
from paceline.store.memory import mark_over
from paceline.train_state import TrainState
from paceline.transport.listening import Listener

logger = logging.getLogger("paceline")

_TIME_TO_COME = 60.0  # seconds for workers of other hosts to come, after the others have ended


class ServerProgress(Alone):
    """What the server saves in place of an exchange's state: the used batches, and the end of its trace."""

    def __init__(self, workers: int) -> None:
        self.rank, self.world_size = 0, workers
        self.queue = WorkQueue()
        self.traced: TracePosition | None = None  # the end of the trace at the last save
        self.codecs: Mapping[str, Any] | None = None  # what those of the workers remembered in the run that is resumed
        self.codecs_now: Callable[[], Mapping[str, Any]] = dict

    def state_dict(self) -> dict[str, Any]:
        return {**self.queue.state_dict(), "traced": list(self.traced or ()), "codecs": dict(self.codecs_now())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue.load_state_dict(state)
        self.traced = TracePosition(*state["traced"]) if state["traced"] else None
        self.codecs = state["codecs"]


class ServerRun:
    """The server's process: it owns the run's directory and state, and serves; its ``steps`` are commits."""

    def __init__(
        self,
        train_state: TrainState,
        *,
        workers: int,
        policy: ServerPolicy,
        codec: Codec | None,
        seed: int | None,
        run: Run | None,
        save_every: int | None,
        log_every: int,
        on_nan: OnNaN,
    ) -> None:
        self.policy, self.run, self.world_size = policy, run, workers
        self.seed = torch.initial_seed() if seed is None else seed
        self.steps = 0
        self._blocks = 0  # of a resumed run that had no server
        self._rule = CommitRule.of(policy, codec)
        self._train_state = train_state = self._rule.remembering(train_state)
        self._progress = ServerProgress(workers)
        self._data = BatchStream()
        self._run_state = RunState(
            train_state,
            policy=policy,
            codec=codec,
            exchange=self._progress,
            data=self._data,
            run=run,
            seeded=seed is not None or workers > 1,
            nan_guard=NaNGuard(on_nan, self._where),
        )
        self._save_every, self._log_every = save_every, log_every
        self._trace: TraceWriter | None = None
        self._found: Mapping[str, Any] | None = None  # the note of a killed server
        self._shards: Shards | None = None  # the other servers, if there are several
        self._num_bytes = 0  # moved since the last line of metrics
        self._closed = False

    def start(self, path: Path | None, resume: bool | str | Path, config: Mapping[str, Any]) -> None:
        """Load the checkpoint to resume from, and open the run."""
        found = self._run_state.resume(path, resume)
        if found is not None:
            self.stand_at(found)
        self._run_state.open(self.seed, config)

    def stand_at(self, position: Position) -> None:
        """Count on from there."""
        self.steps, self._blocks, self.seed = position[:3]

    def take_over(self, found: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Replace a killed server, from the state that is in the shared memory."""
        self._found = found
        self._progress.queue.load_state_dict(found["queue"])
        self._progress.traced = TracePosition(*found["traced"]) if found["traced"] else None
        self.steps, self.seed = found["version"], found["seed"]
        self._data.epoch = self._progress.queue.epoch
        self._run_state.keep_metrics()
        self._run_state.open(self.seed, config)
        self._write("restarted", lost_pushes=found["taken"])
        logger.warning("the server is back at version %d; %d pushes are lost", self.steps, found["taken"])
        if self._rule.codec_remembers:
            logger.warning("version %d: what codec %s had kept back is lost", self.steps, self._rule.codec)

    def serve(self, assignment: ServerAssignment) -> int:
        """Serve until the workers have left or a signal comes; return the exit code of the process."""
        caught: list[int] = []
        listener = Listener(bytes.fromhex(assignment.token), trusted=assignment.trusted)
        with _caught_signals(caught), self:
            try:
                self._shards = open_shards(
                    self._train_state,
                    assignment,
                    workers=self.world_size,
                    version=self.steps,
                    rule=self._rule,
                    found=self._found is not None,
                )
                self._trace = self._open_trace()
                server = LiveServer(
                    self._train_state,
                    self.policy,
                    workers=self.world_size,
                    patience=math.inf if assignment.bind is None else _TIME_TO_COME,
                    memory=os.memfd_create("paceline", os.MFD_CLOEXEC)
                    if assignment.memory_fd is None
                    else assignment.memory_fd,
                    queue=self._progress.queue,
                    version=self.steps,
                    seed=self.seed,
                    listener=listener,
                    host=self,
                    trace=self._trace,
                    found=self._found,
                    shards=self._shards,
                    codec=self._rule.codec,
                    codec_state=self._progress.codecs,
                )
                self._progress.codecs_now = server.codec_state
                if self._found is not None:
                    self._note_hash()  # for a replay to compare what was found with what was lost
                _listen(listener, assignment)
                gone: set[int] = set()

                def asked_to_stop() -> bool:
                    for rank in (
                        read_gone(assignment.memory_fd, self.world_size) if assignment.memory_fd is not None else ()
                    ):
                        if rank not in gone:
                            gone.add(rank)
                            server.worker_is_gone(rank)
                    return bool(caught)

                whole = server.serve(asked_to_stop)
                self._end_trace(whole)
                server.count_bytes_of_others()
                for rank, figures in server.figures().items():
                    self._write("worker", worker=rank, **figures)
                self._write("strangers", refused=listener.strangers)
            finally:
                listener.close()
                if assignment.memory_fd is not None:
                    mark_over(assignment.memory_fd)
        if caught and self.run is not None:
            report("interrupted", step=self.steps, saved=str(self.run.path))
        return 128 + caught[0] if caught else 0

    def _open_trace(self) -> TraceWriter | None:
        if self.run is None:
            return None
        servers = 1 + (0 if self._shards is None else len(self._shards.addresses))
        about = {**self._run_state.describe_fully(self.seed), "servers": servers}
        return TraceWriter(self.run.path / "trace.bin", about, after=self._progress.traced)

    def _end_trace(self, whole: bool) -> None:
        if self._trace is not None:
            with self._whole_state():
                self._note_hash()
            self._trace.append(Ended(whole))
            self._trace.close()
            self._trace = None

    def _note_hash(self) -> None:
        """Put a hash of the parameters into the trace, for a replay to compare."""
        if self._trace is not None:
            self._trace.append(Hashed(self.steps, hash_of(state_tensors(self._train_state.model))))
            self._progress.traced = self._trace.sync()

    def save(self, path: str | Path | None = None) -> Path | None:
        """Write a checkpoint: into the run's directory, or to ``path``."""
        with self._whole_state():
            self._note_hash()
            self._run_state.check_parameters()
            return self._run_state.save(Position(self.steps, self._blocks, self.seed), path)

    @contextlib.contextmanager
    def _whole_state(self) -> Iterator[None]:
        """Collect the other servers' state in this process, inside the block."""
        if self._shards is None:
            yield
            return
        self._shards.collect()
        try:
            yield
        finally:
            self._shards.drop_collected()

    def close(self) -> None:
        """Release the run's directory and the other servers; leaving the ``with`` block does it."""
        if self._closed:
            return
        self._closed = True
        self._run_state.close()
        report("left", step=self.steps)
        if self._shards is not None:
            self._shards.close()
            self._shards = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            report_failure(error)  # at once: the workers will soon fail because of it
        try:
            if kind is None and self.run is not None and self._run_state.saved_at != self.steps:
                self.save()
        finally:
            self.close()

    def _where(self) -> Where:
        return Where(0, self.world_size, self.steps, last_checkpoint(self.run))

    # Calls of the live server -----------------------------------------------------------------------------

    def rate(self) -> float:
        return self._run_state.rate()

    def committed(self, commit: CommitSummary) -> None:
        self.steps, self._data.epoch = commit.version, commit.epoch
        self._num_bytes += commit.bytes
        if self.steps % self._log_every == 0:
            values = {name: value for name, value in commit._asdict().items() if name not in ("version", "epoch")}
            self._write("commit", **{**values, "bytes": self._num_bytes})
            self._num_bytes = 0
        if self._save_every is not None and self.steps % self._save_every == 0:
            self.save()

    def write_down(self) -> None:
        """Flush the metrics, since a server may be killed."""
        if self.run is not None and self.run.metrics is not None:
            self.run.metrics.flush()

    def note(self, event: str, values: dict[str, Any]) -> None:
        self._write(event, **values)

    def _write(self, event: str, /, **values: Any) -> None:
        if self.run is not None and self.run.metrics is not None:
            self.run.metrics.write(event, **{"step": self.steps, "epoch": self._data.epoch, **values})


def host(request: JoinRequest, assignment: ServerAssignment) -> int:
    """Run the server, one of several, or that of a replay, until the run ends; return the exit code of the process."""
    if assignment.shard:
        return serve_shard(request.train_state, assignment)
    if assignment.replay is not None:
        return serve_replay(request.train_state, assignment, assignment.replay)
    return _open(request, assignment).serve(assignment)


def _open(request: JoinRequest, assignment: ServerAssignment) -> ServerRun:
    """Begin a run, or continue it from a checkpoint or from the memory of a killed server."""
    assert isinstance(request.policy, ServerPolicy)
    found = read_note(assignment.memory_fd) if assignment.memory_fd is not None else None
    again = assignment.incarnation > 0  # a server before was killed, so the directory is this run's
    opened = open_run(request.run, request.resume or again, request.keep) if request.run is not None else None
    try:
        run = ServerRun(
            request.train_state,
            workers=assignment.workers or 1,
            policy=request.policy,
            codec=request.codec,
            seed=request.seed,
            run=opened,
            save_every=request.save_every,
            log_every=request.log_every,
            on_nan=request.on_nan,
        )
        if found is not None:
            run.take_over(found, request.config)
        else:
            run.start(request.run, request.resume or (again and request.run is not None), request.config)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    return run


def _listen(listener: Listener, assignment: ServerAssignment) -> None:
    if assignment.memory_fd is not None:
        listener.bind(assignment.address)
    address = listener.bind(f"tcp://{assignment.bind}") if assignment.bind is not None else None
    report("serving", address=address)


@contextlib.contextmanager
def _caught_signals(caught: list[int]) -> Iterator[None]:
    """Collect the signals that request a stop: the server ends between two messages, and saves."""
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
