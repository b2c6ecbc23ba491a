"""The ``Session`` that ``join()`` returns; a training loop needs its ``step()``."""

from __future__ import annotations

import contextlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from paceline.data.sampler import Last
from paceline.data.stream import BatchStream
from paceline.errors import UsageError, check_whole
from paceline.launch.reports import report, report_failure
from paceline.policies import Policy
from paceline.record.run import Run
from paceline.sessions.checks import as_tensor, as_weight
from paceline.sessions.nan_guard import NaNGuard, OnNaN, Where
from paceline.sessions.run_state import last_checkpoint
from paceline.sessions.timing import StepClock, Timing, WorkerTimeline
from paceline.train_state import TrainState

logger = logging.getLogger("paceline")

_EVENT_NAMES = frozenset({"event", "time", "worker", "step", "epoch"})  # fields of every line of metrics
_STEP_NAMES = frozenset({"lr", "examples", "seconds", "skipped", "workers_waited", "bytes"})  # of every step's line


class Step:
    """One step of the loop, as ``with session.step() as step``.

    Leaving the block updates the parameters; an exception inside it passes through and updates nothing. Under a policy
    that cancels late work a block may end early, at any call of a module; ``cancelled`` tells.
    """

    __slots__ = ("_session", "accumulate", "cancelled", "closure", "examples", "recorded", "skipped")

    def __init__(
        self,
        session: Session,
        accumulate: bool = False,
        examples: int | None = None,
    ) -> None:
        self._session = session
        self.accumulate = accumulate
        self.examples = examples
        self.closure: Callable[[], Tensor] | None = None  # set by minimize(); it computes the gradients
        self.recorded: dict[str, Any] = {}
        self.skipped = False  # its loss was not finite, and the session was told to skip such steps
        self.cancelled = False  # the others went on without it, or one of them died: nothing came of it

    def record(self, **values: Any) -> None:
        """Put ``values`` into this step's line of the metrics; a ``loss`` among them is also checked for NaN.

        A loss that is recorded before ``backward()`` is averaged over all workers with the gradients, at no cost.
        """
        _refuse_names(values, _EVENT_NAMES | _STEP_NAMES)
        self.recorded.update(
            {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        )

    def loss(self) -> float | None:
        """The recorded loss."""
        return float(self.recorded["loss"]) if "loss" in self.recorded else None

    def __enter__(self) -> Self:
        self._session._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._session._end(self, error)


class Session(ABC):
    """One worker's part in the training of one model; made by ``join()``.

    ``steps`` counts the updates made, ``rank`` and ``world_size`` say which worker this is and of how many. Under
    ``paceline run`` and a policy without a server both may change with a step, or with anything else that all workers
    do together: when a worker dies or joins. ``generation`` grows with each such change.
    """

    in_step = True  # whether all workers have the same parameters between steps

    def __init__(
        self,
        train_state: TrainState,
        *,
        policy: Policy,
        rank: int,
        world_size: int,
        seed: int,
        run: Run | None,
        clock: StepClock | None,
        on_nan: OnNaN,
    ) -> None:
        self.policy, self.rank, self.world_size, self.seed, self.run = policy, rank, world_size, seed, run
        self.steps = 0
        self.generation = 0
        self.timing = Timing()
        self._train_state = train_state
        self._clock = clock
        self._timeline: WorkerTimeline | None = None  # set where the run has a directory
        self._nan_guard = NaNGuard(on_nan, self._where)
        self._data = BatchStream()
        self._current: Step | None = None
        self._accumulating = False
        self._blocks = 0  # step blocks entered, accumulating ones too
        self._examples = 0  # of this worker in the present update
        self._bad_loss: float | None = None  # of an accumulating block of the present update
        self._opened = False  # whether this process has opened a step
        self._failed = False  # the session's block was left by an exception
        self._asked_to_leave = False  # and that was a request to stop
        self._closed = False
        self._hooks = [optimizer.register_step_pre_hook(self._foresee_twice) for optimizer in train_state.optimizers]

    # The loop ---------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The present epoch, from 0."""
        return self._data.epoch

    @property
    def consumed(self) -> int:
        """The used part of the present epoch: samples of all workers together, or batches of a loader."""
        return self._data.consumed

    def step(self, *, accumulate: bool = False, examples: int | None = None) -> Step:
        """Open one step of the loop: compute a loss and call ``backward()`` inside the block.

        Gradients are cleared on entry, and on leaving the optimizer and scheduler step. With
        ``accumulate=True`` the gradients stay and are added to those of the next block instead.
        ``examples`` is the size of the batch, if the batch does not come from ``session.batches``.
        """
        return Step(self, accumulate, examples)

    @abstractmethod
    def minimize(self, closure: Callable[[], Tensor], *, examples: int | None = None) -> Tensor:
        """Make one update with an optimizer that evaluates the loss as often as it likes, such as LBFGS.

        ``closure`` computes the loss, calls ``backward()`` on it and returns it. Returns the first loss.
        """

    @abstractmethod
    def refresh(self) -> None:
        """Load the newest parameters into the model, for an evaluation; under a server policy those of the server.

        Under other policies it does nothing: the model has them after every step.
        """

    @abstractmethod
    def averaged(self) -> contextlib.AbstractContextManager[object]:
        """Put the average of all workers' parameters into the model inside the block, for an evaluation.

        Under a policy that lets parameters differ, all workers must enter the block; under others nothing changes.
        """

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs up to ``count`` that are not done yet, for loops that do something after each."""
        check_whole("the number of epochs", count, least=0)
        return self._data.epochs(count)

    def batches(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        epochs: int | None = None,
        shuffle: bool = True,
        last: Last = "short",
        **loader_options: Any,
    ) -> Iterator[Any]:
        """Iterate over this worker's batches, from the present position.

        A map-style data set with a ``batch_size`` (per worker) is sharded over the workers and shuffled in each epoch;
        every sample is used exactly once. ``last`` says what to do with an incomplete last batch, and
        ``loader_options`` (``num_workers``, ``collate_fn``, ...) go to a ``DataLoader``. The batches of a loader or any
        other iterable are used as they come. With ``epochs`` the iteration covers all epochs up to that one, without it
        the rest of the present epoch (for use inside ``session.epochs``).

        Under a server policy the server hands out the batches of a data set, and hands out again those of cancelled
        steps and of workers that have died. The iteration ends when all batches of the last epoch are committed; then
        the model has the newest parameters. Every worker iterates over a loader or iterable that is no plain data set
        by itself; a batch whose step was cancelled comes again. Gradients accumulated at the end are pushed.
        """
        if epochs is not None:
            check_whole("epochs", epochs, least=0)
        return self._batches(
            source, epochs, batch_size=batch_size, shuffle=shuffle, last=last, loader_options=loader_options
        )

    @abstractmethod
    def _batches(self, source: Any, epochs: int | None, **options: Any) -> Iterator[Any]:
        """Iterate over the batches; the options are those of ``feed.resolve``."""

    def mean(self, value: Tensor | float, *, examples: float | None = None) -> Tensor:
        """Average a number or tensor over all workers, weighted by ``examples`` if given.

        All workers must call it, under a server policy equally often in an epoch.
        """
        where = f"step {self.steps}"
        return self._mean(as_tensor(where, value), as_weight(where, examples))

    @abstractmethod
    def _mean(self, value: Tensor, weight: float) -> Tensor:
        """Average a tensor over all workers by their weights."""

    # Checkpoints and metrics ------------------------------------------------------------------------------

    @abstractmethod
    def save(self, path: str | Path | None = None) -> Path | None:
        """Write a checkpoint of everything: into the run's directory, or to ``path``.

        Worker 0 writes, and the others return ``None``. Under a policy that lets the workers' parameters differ, such
        as local-sgd, all must call it, since worker 0 collects their states. Under a server policy worker 0 has the
        server write it, on the server's host.
        """

    def record(self, event: str, /, **values: Any) -> None:
        """Add a line to the run's metrics that belongs to no single step, such as an evaluation."""
        _refuse_names(values, _EVENT_NAMES)
        self._write(event, **values)

    @abstractmethod
    def _write(self, event: str, /, **values: Any) -> None:
        """Write a line to the run's metrics."""

    @abstractmethod
    def stop_when(self, asked: Callable[[], bool]) -> None:
        """End the run after the first update at the end of which ``asked()`` is true on any worker.

        A checkpoint is written if the session has a ``run``; then the step raises ``KeyboardInterrupt`` on all workers.
        Under a server policy ``asked`` is not called: a signal ends the server, which saves.
        """

    # The end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the run's directory, the model and the other workers; leaving the ``with`` block does it."""
        if not self._closed:
            self._let_go()
            report("left", step=self.steps)

    def _let_go(self) -> None:
        self._closed = True
        if self._timeline is not None:
            self._timeline.close(left=not self._failed or self._asked_to_leave)
        try:
            self._release()
        finally:
            self._remove_hooks()
            if self._clock is not None:
                self._clock.close()

    @abstractmethod
    def _release(self) -> None:
        """Release the resources of this kind of session."""

    @abstractmethod
    def _end_well(self) -> None:
        """Finish a session whose block ends without an exception."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = kind is not None
        self._asked_to_leave = isinstance(error, KeyboardInterrupt | SystemExit)
        if isinstance(error, Exception):
            report_failure(error)  # at once: other workers will soon fail because of it
        try:
            # Only without an exception: the failed step has already changed random streams, buffers and data position,
            # and only the checkpoint before it resumes exactly.
            if not self._failed:
                self._end_well()
        except BaseException:
            self._failed = True
            raise
        finally:
            self.close()
        if not self._failed and self._data.handed_out and not self._opened and self.rank == 0:
            logger.warning(
                "the loop took batches and opened no step, so the session has updated nothing: put the forward and "
                "backward pass of each batch into 'with session.step():', without an optimizer.step() of your own"
            )

    # One step ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, step: Step) -> None:
        """Begin a block."""

    @abstractmethod
    def _end(self, step: Step, error: BaseException | None) -> bool:
        """End a block; True if its exception was our own and goes no further."""

    def _check_not_inside(self) -> None:
        """Raise if a step is open already."""
        self._opened = True
        if self._current is not None:
            raise UsageError(f"step {self.steps}: a step was opened inside another; leave the first block before")

    def _begin_update(self, *, keep_buffers: bool) -> None:
        """Begin an update with its first block."""
        self._train_state.clear_gradients()
        self._examples, self._bad_loss = 0, None
        self._nan_guard.remember_buffers(self._train_state.model, always=keep_buffers)

    def _enter(self, step: Step, *, fresh: bool) -> None:
        """Enter the block, before the user's code; ``fresh`` if it is the first of its update."""
        self._current = step
        if self._clock is not None:
            self._clock.start(fresh=fresh)

    def _count_examples(self, step: Step) -> tuple[int, int | None]:
        """The examples of this block on this worker and on all workers; the latter is None if unknown."""
        batch, total = self._data.batch, None
        if step.examples is None and batch is not None and batch.examples is not None:
            step.examples, total = batch.examples, batch.total
        elif step.examples is not None and not (isinstance(step.examples, int) and step.examples >= 0):
            raise UsageError(f"step {self.steps}: examples must be a whole number of at least 0, got {step.examples}")
        elif batch is not None and step.examples is None and self.world_size > 1:
            raise UsageError(
                f"step {self.steps}: cannot tell how many examples are in a batch of {type(batch.data).__name__}, "
                "by which the workers' gradients are weighted; say it: session.step(examples=n)"
            )
        own = 1 if step.examples is None else step.examples
        self._examples += own
        return own, total

    def _loss_of(self, step: Step) -> float | None:
        """The update's loss: that of its last block, or a bad one before it; None for borrowed data."""
        if self._bad_loss is not None:
            return self._bad_loss
        return step.loss() if step.examples != 0 else None

    def _remember_bad_loss(self, step: Step) -> None:
        """Keep the loss of an accumulating block, or an earlier one, if it is not finite."""
        loss = self._loss_of(step)
        self._bad_loss = loss if loss is not None and not math.isfinite(loss) else None

    def _foresee_twice(self, *_: object) -> None:
        """Warn once if the script itself updates inside a block: the session updates again at its end."""
        if self._current is not None:
            self._remove_hooks()
            if self.rank == 0:
                logger.warning(
                    "step %d: optimizer.step() was called inside the block, and leaving the block steps the optimizer "
                    "too, so the parameters are updated twice; leave out your own call (and that of a GradScaler: "
                    "join(..., scaler=...) makes it)",
                    self.steps,
                )

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _where(self) -> Where:
        return Where(self.rank, self.world_size, self.steps, last_checkpoint(self.run))


def _refuse_names(values: Mapping[str, Any], taken: frozenset[str]) -> None:
    clash = sorted(values.keys() & taken)
    if clash:
        raise UsageError(f"the metrics have a {clash[0]!r} of their own; record yours under another name")
