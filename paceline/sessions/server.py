"""The server's role: ``join()`` serves the script's own model and optimizer, and ends the script with the run."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.launch.environment import ServerAssignment, launched_command
from paceline.launch.reports import report
from paceline.launch.service import read_gone
from paceline.peers.exchange import Alone
from paceline.policies.server import ServerPolicy
from paceline.record.fingerprints import hash_of, state_tensors
from paceline.record.run import Run
from paceline.record.trace import Ended, Hashed, TracePosition, TraceWriter
from paceline.server.live import CommitSummary, LiveServer
from paceline.server.shards import Shards
from paceline.server.work_queue import WorkQueue
from paceline.sessions.nan_guard import OnNaN
from paceline.sessions.session import Session
from paceline.sessions.shards import open_shards
from paceline.store.memory import mark_over
from paceline.train_state import TrainState
from paceline.transport.listening import Listener

logger = logging.getLogger("paceline")

_TIME_TO_COME = 60.0  # seconds that workers of other hosts have after the others are done


class ServerProgress(Alone):
    """What the server's session keeps in place of an exchange: which batches are used, and where its trace is."""

    def __init__(self, workers: int) -> None:
        self.rank, self.world_size = 0, workers
        self.queue = WorkQueue()
        self.traced: TracePosition | None = None  # how far the trace was when last saved

    def state_dict(self) -> dict[str, Any]:
        return {**self.queue.state_dict(), "traced": list(self.traced or ())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.queue.load_state_dict(state)
        self.traced = TracePosition(*state["traced"]) if state["traced"] else None


class ServerRun(Session):
    """The session of the server's process: it has the run's directory, and its ``steps`` are commits."""

    def __init__(
        self,
        train_state: TrainState,
        *,
        workers: int,
        policy: ServerPolicy,
        seed: int | None,
        run: Run | None,
        save_every: int | None,
        log_every: int,
        on_nan: OnNaN,
    ) -> None:
        self._progress = ServerProgress(workers)
        self._server_policy = policy
        self._trace: TraceWriter | None = None
        self._found: Mapping[str, Any] | None = None  # left behind by a server that was killed
        self._shards: Shards | None = None  # the other servers, if there are several
        super().__init__(
            train_state,
            policy=policy,
            exchange=self._progress,
            clock=None,
            seed=seed,
            run=run,
            save_every=save_every,
            log_every=log_every,
            on_nan=on_nan,
        )

    def take_over(self, found: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Begin in the place of a server that was killed, with what it has left in the shared memory."""
        self._found = found
        self._progress.queue.load_state_dict(found["queue"])
        self._progress.traced = TracePosition(*found["traced"]) if found["traced"] else None
        self.steps, self.seed = found["version"], found["seed"]
        self._data.epoch = self._progress.queue.epoch
        if self.run is not None and self.run.metrics_file.exists():
            self._metrics_bytes = self.run.metrics_file.stat().st_size
        self._start(None, False, config)
        self._write("restarted", lost_pushes=found["taken"])
        logger.warning("the server is back at version %d; %d pushes are lost", self.steps, found["taken"])

    def serve(self, assignment: ServerAssignment) -> NoReturn:
        """Serve until the workers have left or a signal comes; raises ``SystemExit`` in the end."""
        caught: list[int] = []
        listener = Listener(bytes.fromhex(assignment.token), trusted=assignment.trusted)
        with _caught_signals(caught), self:
            try:
                self._shards = open_shards(
                    self._train_state,
                    assignment,
                    workers=self.world_size,
                    version=self.steps,
                    adds_up=self._server_policy.adds_up,
                    found=self._found is not None,
                )
                self._trace = self._open_trace()
                server = LiveServer(
                    self._train_state,
                    self._server_policy,
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
                )
                if self._found is not None:
                    self._note_hash()  # a replay then tells whether what was found is what was lost
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
                for rank, figures in server.figures().items():
                    self._write("worker", worker=rank, **figures)
                self._write("strangers", refused=listener.strangers)
            finally:
                listener.close()
                if assignment.memory_fd is not None:
                    mark_over(assignment.memory_fd)
        if caught and self.run is not None:
            report("interrupted", step=self.steps, saved=str(self.run.path))
        raise SystemExit(128 + caught[0] if caught else 0)

    def _open_trace(self) -> TraceWriter | None:
        if self.run is None:
            return None
        about = {
            **self._describe(),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "command": launched_command(),
            "directory": str(Path.cwd()),
        }
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
        with self._whole_state():
            self._note_hash()
            return super().save(path)

    @contextlib.contextmanager
    def _whole_state(self) -> Iterator[None]:
        """Have here what the other servers have of the state, inside the block."""
        if self._shards is None:
            yield
            return
        self._shards.collect()
        try:
            yield
        finally:
            self._shards.drop_collected()

    def close(self) -> None:
        super().close()
        if self._shards is not None:
            self._shards.close()
            self._shards = None

    # What the server asks of its host ---------------------------------------------------------------------

    def rate(self) -> float:
        return self._rate()

    def committed(self, commit: CommitSummary) -> None:
        self.steps, self._data.epoch = commit.version, commit.epoch
        if self.steps % self._log_every == 0:
            values = {name: value for name, value in vars(commit).items() if name not in ("version", "epoch")}
            self._write("commit", **values)
        if self._save_every is not None and self.steps % self._save_every == 0:
            self.save()

    def write_down(self) -> None:
        """Have the commits that were told of in the metrics: a server may be killed."""
        if self.run is not None and self.run.metrics is not None:
            self.run.metrics.flush()

    def note(self, event: str, values: dict[str, Any]) -> None:
        self._write(event, **values)

    def _write(self, event: str, /, **values: Any) -> None:
        if self.run is not None and self.run.metrics is not None:
            self.run.metrics.write(event, **{"step": self.steps, "epoch": self.epoch, **values})


def _listen(listener: Listener, assignment: ServerAssignment) -> None:
    if assignment.memory_fd is not None:
        listener.bind(assignment.address)
    address = listener.bind(f"tcp://{assignment.bind}") if assignment.bind is not None else None
    report("serving", address=address)


@contextlib.contextmanager
def _caught_signals(caught: list[int]) -> Iterator[None]:
    """Collect the signals that ask us to stop: the server ends between two messages, and saves."""
    before = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
