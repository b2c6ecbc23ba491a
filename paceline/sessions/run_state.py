"""A run's state on disk: how the peers' session and the server find, check, load and write it."""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from paceline.codecs import Codec
from paceline.data.stream import BatchStream
from paceline.errors import CheckpointError, UsageError
from paceline.launch.environment import launched_command
from paceline.peers.exchange import Exchange
from paceline.policies import Policy, ServerPolicy, parse_policy
from paceline.record.checkpoint import read_checkpoint, write_checkpoint
from paceline.record.metrics import as_number, length_up_to
from paceline.record.run import Run
from paceline.seeding import capture_streams, restore_streams
from paceline.sessions.nan_guard import NaNGuard
from paceline.train_state import TrainState
from paceline.version import __version__

logger = logging.getLogger("paceline")

START = "start.safetensors"  # what a recorded run of peers begins with


class Position(NamedTuple):
    """How far a run has come, beside its data."""

    steps: int  # updates made
    blocks: int  # step blocks entered, accumulating ones too
    seed: int
    highest_rate: float = 0.0  # learning rate so far; a server does not look at rates
    decayed: bool = False  # whether a later rate was lower


class RunState:
    """Keep a run's state: resume it from a checkpoint, write checkpoints, describe the run in ``config.json``.

    Worker 0 has the ``run``, and reads and writes for all; ``exchange`` passes the others' parts.
    """

    def __init__(
        self,
        train_state: TrainState,
        *,
        policy: Policy,
        codec: Codec | None,
        exchange: Exchange,
        data: BatchStream,
        run: Run | None,
        seeded: bool,
        nan_guard: NaNGuard,
    ) -> None:
        self._train_state, self._exchange = train_state, exchange
        self._policy, self._codec = policy, None if codec is None else str(codec)
        self._data, self._run, self._seeded, self._nan_guard = data, run, seeded, nan_guard
        self.saved_at: int | None = None  # the step of the run's newest checkpoint, as far as it is of this state
        self.one_thread: bool | None = None  # whether the first step was found small; None if nobody counted
        self._metrics_bytes = 0  # how much of the metrics is of this run
        self._closed = False

    # Loading ----------------------------------------------------------------------------------------------

    def resume(self, path: Path | None, resume: bool | str | Path) -> Position | None:
        """Load the checkpoint to resume from, which worker 0 reads for all; None if there is none.

        ``path`` is the run's directory; all workers know it, and worker 0 has opened it.
        """
        if resume is True and path is None:
            raise UsageError("resume=True needs a run directory: join(..., run='runs/mine', resume=True)")
        if not resume:
            return None
        found = self._find(Path(resume) if not isinstance(resume, bool) else None)
        state = self._exchange.share(found)
        position = self.load(state) if state is not None else None
        if position is not None:
            self.warn_of_scheduler(position.steps)
        self.saved_at = self._exchange.share(self.saved_at)
        return position

    def open(self, seed: int, config: Mapping[str, Any]) -> None:
        """Write the configuration and open the metrics, behind what of them is this run's."""
        if self._run is not None:
            self._run.write_config({**self.describe(seed), **config})
            self._run.open_metrics(self._metrics_bytes)

    def keep_metrics(self) -> None:
        """Take all lines of metrics for this run's own."""
        if self._run is not None and self._run.metrics_file.exists():
            self._metrics_bytes = self._run.metrics_file.stat().st_size

    def _find(self, file: Path | None) -> dict[str, Any] | None:
        """The checkpoint to go on from: the file named, or the run's newest that can be used."""
        if self._exchange.rank != 0:
            return None
        if file is not None:
            found = self._checked(file, read_checkpoint(file))
            if self._run is not None and file.absolute().parent == self._run.checkpoints.path.absolute():
                self._metrics_bytes = found["session"]["metrics_bytes"]
                self._run.checkpoints.drop_after(file)
            return found
        assert self._run is not None, "worker 0 has the run"
        refused: dict[str, list[Path]] = {}  # reason -> files
        for candidate, state in self._run.checkpoints.newest():
            try:
                if isinstance(state, CheckpointError):
                    raise state
                found = self._checked(candidate, state)
            except CheckpointError as error:
                refused.setdefault(str(error).removeprefix(f"{candidate} "), []).append(candidate)
                continue
            for reason, files in refused.items():
                for bad in files:
                    logger.warning("%s %s; going back to the checkpoint before it", bad, reason)
            self.saved_at = found["session"]["steps"]
            self._metrics_bytes = found["session"]["metrics_bytes"]
            return found
        if refused:
            reasons = [f"{', '.join(file.name for file in files)} {reason}" for reason, files in refused.items()]
            raise CheckpointError(f"no usable checkpoint in {self._run.checkpoints.path}: {'; '.join(reasons)}")
        return None

    def _checked(self, file: Path, state: dict[str, Any]) -> dict[str, Any]:
        try:
            mismatch = self._train_state.mismatch(state["trainee"])
            parts = [state[part] for part in ("data", "session", "streams", "exchange")]
            before, codec = parse_policy(state["session"]["policy"]), state["session"]["codec"]
        except (KeyError, TypeError, AttributeError, UsageError) as error:
            raise CheckpointError(f"{file} does not hold the state of a session: {error!r}") from error
        if isinstance(before, ServerPolicy) != isinstance(self._policy, ServerPolicy):
            raise CheckpointError(
                f"{file} was made under {before}, and the run is to go on under {self._policy}: only one of them has a "
                "server, which keeps other state; go on under a policy of the same kind, or begin a new run"
            )
        if codec != self._codec:
            raise CheckpointError(
                f"{file} was made with {_named(codec)}, and the run is to go on with {_named(self._codec)}, which "
                f"remembers other things; go on with the same: codec={codec or 'none'!r}, or begin a new run"
            )
        if mismatch is not None or not all(isinstance(part, dict) for part in parts):
            raise CheckpointError(
                f"{file} belongs to something else: {mismatch or 'its parts are no session'}; give join() what the run "
                "was begun with, or start a new run in another directory"
            )
        return state

    def load(self, state: Mapping[str, Any]) -> Position:
        """Load the state of a checkpoint."""
        as_before = self._load_replica(state)
        position = self._load_position(state)
        if not as_before:
            self._data.exchanged()
        return position

    def _load_position(self, state: Mapping[str, Any]) -> Position:
        self._data.load_state_dict(state["data"])
        session = state["session"]
        position = Position(*(session[name] for name in Position._fields))
        self.one_thread = session["one_thread"]
        restore_streams(state["streams"])
        return position

    def warn_of_scheduler(self, steps: int) -> None:
        """Warn of a scheduler that is not in the state that was loaded."""
        if self._exchange.rank == 0 and self._train_state.has_unsaved_scheduler():
            logger.warning(
                "the run goes on at step %d, but a scheduler of its optimizer starts anew: it was not saved. Pass it "
                "as join(scheduler=...), or as stateful={'scheduler': ...} if you step it yourself",
                steps,
            )

    def _load_replica(self, state: Mapping[str, Any]) -> bool:
        """Load this worker's own replica; or the run's answer, if there were more or fewer, or another policy.

        Return whether it was its own.

        What the exchanges of all workers have in common is in that of worker 0.
        """
        replicas, exchange = state["replicas"], self._exchange
        before = parse_policy(state["session"]["policy"])
        same_policy = type(before) is type(self._policy)
        same_exchange = same_policy or isinstance(before, ServerPolicy)  # a server has the same under all of its own
        as_many = same_policy and len(replicas) == exchange.world_size
        own = {**state, **replicas[exchange.rank]} if as_many else state
        model = {**state["trainee"]["model"], **own["trainee"]["model"]}  # parameters that all share are there once
        self._train_state.load_state_dict({**own["trainee"], "model": model})
        exchange.load_state_dict({**state["exchange"], **own["exchange"]} if same_exchange else {})
        if not as_many:
            exchange.agreed()
        elif exchange.coding is not None:
            exchange.coding.load_state_dict(own["codec"])
        return as_many

    # Going on with other workers --------------------------------------------------------------------------

    def go_on(self, exchange: Exchange) -> None:
        """Reach the other workers by another exchange from now on."""
        self._exchange = exchange

    def copy(self, state: Mapping[str, Any]) -> Position:
        """Have the state of another worker of this run, as it was sent."""
        self._train_state.load_state_dict(state["trainee"])
        if self._exchange.replicas_differ:  # else all workers have loaded it together
            self._exchange.load_state_dict(state["exchange"])
        return self._load_position(state)

    def take_over(self, run: Run, steps: int) -> None:
        """Read and write for all from now on, in the place of a worker 0 that has died after so many steps."""
        self._run = run
        run.open_metrics(length_up_to(run.metrics_file, steps))

    # Saving -----------------------------------------------------------------------------------------------

    def save(self, position: Position, path: str | Path | None = None, replicas: Sequence[object] = ()) -> Path | None:
        """Write a checkpoint: into the run's directory, or to ``path``; None on all workers but the first.

        Where replicas differ, ``replicas`` has those of all workers, and the model holds the run's answer.
        """
        file = (
            self._write({**self.state(position), "replicas": list(replicas)}, path)
            if self._exchange.rank == 0
            else None
        )
        if path is None:
            self.saved_at = position.steps
        return file

    def save_beside(self, position: Position, path: Path, replicas: Sequence[object]) -> None:
        """Write a file like a checkpoint that is none of the run's; on worker 0."""
        if self._exchange.rank == 0:
            write_checkpoint(path, {**self.state(position), "replicas": list(replicas)})

    def check_parameters(self) -> None:
        """Raise if the parameters of this worker are not fit to be saved."""
        if self._exchange.rank == 0 or self._exchange.replicas_differ:
            self._nan_guard.check_parameters(self._train_state.model)

    def _write(self, state: Mapping[str, Any], path: str | Path | None) -> Path:
        if path is not None:
            write_checkpoint(Path(path), state)
            return Path(path)
        if self._closed:
            raise UsageError("save() after the session's end: its directory may be another's by now; give a path")
        if self._run is None:
            raise UsageError("save() needs a path, or a run directory: join(..., run='runs/mine')")
        return self._run.checkpoints.write(state["session"]["steps"], state)

    def close(self) -> None:
        """Release the run's directory."""
        self._closed = True
        if self._run is not None:
            self._run.close()

    def replica(self, *, common: bool) -> dict[str, object]:
        """What of the state may differ from worker to worker; or all of it, with what they have in ``common``."""
        exchange = self._exchange.state_dict()
        if not common:
            exchange = {name: value for name, value in exchange.items() if name not in self._exchange.common_state}
        replica: dict[str, object] = {"exchange": exchange}
        if common or self._exchange.replicas_differ:
            trainee = self._train_state.state_dict()
            if not common and self._exchange.shares_parameters:
                shared = {name for name, _ in self._train_state.model.named_parameters(remove_duplicate=False)}
                trainee["model"] = {name: value for name, value in trainee["model"].items() if name not in shared}
            replica["trainee"] = trainee
        if not common and self._exchange.coding is not None:
            replica["codec"] = self._exchange.coding.state_dict()
        return replica

    def state(self, position: Position) -> dict[str, object]:
        """What a checkpoint holds, beside the replicas of the others."""
        metrics = self._run.metrics if self._run is not None else None
        return {
            **self.replica(common=True),
            "data": self._data.state_dict(),
            "session": {
                **position._asdict(),
                "policy": str(self._policy),
                "codec": self._codec,
                "one_thread": self.one_thread,
                "metrics_bytes": metrics.sync() if metrics is not None else 0,
            },
            "streams": capture_streams(),
        }

    # Description ------------------------------------------------------------------------------------------

    def describe(self, seed: int) -> dict[str, Any]:
        """A description of the run, for its configuration and its trace."""
        return {
            "paceline": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "policy": str(self._policy),
            "codec": self._codec,
            "seed": seed,
            "seeded_steps": self._seeded,
            "world_size": self._exchange.world_size,
            "threads": torch.get_num_threads(),
            "model": type(self._train_state.model).__name__,
            "optimizers": [type(optimizer).__name__ for optimizer in self._train_state.optimizers],
        }

    def describe_fully(self, seed: int) -> dict[str, Any]:
        """The same with what a replay needs, beside the options of the run."""
        return {
            **self.describe(seed),
            "processor": torch.backends.cpu.get_cpu_capability(),
            "command": launched_command(),
            "directory": str(Path.cwd()),
        }

    def rate(self) -> float:
        """The learning rate, for the metrics."""
        return float(as_number(self._train_state.optimizers[0].param_groups[0]["lr"]))


def _named(codec: str | None) -> str:
    return "no codec" if codec is None else f"codec {codec}"


def open_run(path: Path, resume: bool | str | Path, keep: int) -> Run:
    """Open the run's directory; if it holds a run, only to resume that run, not another's checkpoint."""
    run_checkpoints = path / "checkpoints"
    goes_on = resume if isinstance(resume, bool) else Path(resume).absolute().parent == run_checkpoints.absolute()
    return Run(path, resume=goes_on, keep=keep)


def last_checkpoint(run: Run | None) -> Path | None:
    """The newest checkpoint, if there is one."""
    files = run.checkpoints.files() if run is not None else []
    return files[-1] if files else None
