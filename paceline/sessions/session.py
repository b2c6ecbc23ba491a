"""The front door: ``join()`` gives a ``Session``, whose ``step()`` is the one line a training loop gains."""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.data.feed import make_feed
from paceline.data.sampler import Last
from paceline.data.stream import BatchStream
from paceline.delays.injected import InjectedDelays
from paceline.errors import CheckpointError, UsageError, check_whole, unknown_name
from paceline.interrupts import OF_SESSIONS, StopRequest
from paceline.launch.environment import ServerAssignment, asked_policy, read_rank_and_size, take_server_assignment
from paceline.launch.reports import report, report_failure, supervised
from paceline.peers.connect import connect
from paceline.peers.exchange import Exchange
from paceline.peers.reducer import Outcome
from paceline.peers.tensors import average_into
from paceline.policies import Policy, parse_policy
from paceline.policies.server import ServerPolicy
from paceline.record.checkpoint import read_checkpoint, write_checkpoint
from paceline.record.metrics import as_number
from paceline.record.run import Run
from paceline.seeding import capture_streams, derive_seed, restore_streams, seed_streams
from paceline.sessions.nan_guard import NaNGuard, OnNaN, SkipUpdate, Where
from paceline.sessions.timing import StepClock, Timing
from paceline.store.partition import check_dealt
from paceline.train_state import Stateful, TrainState
from paceline.version import __version__

logger = logging.getLogger("paceline")

_EVENT_NAMES = frozenset({"event", "time", "worker", "step", "epoch"})  # in every line of metrics
_STEP_NAMES = frozenset({"lr", "examples", "seconds", "skipped", "workers_waited", "bytes"})  # in every step's


def join(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    policy: str | Policy | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] = (),
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    seed: int | None = None,
    run: str | Path | None = None,
    resume: bool | str | Path = False,
    save_every: int | None = None,
    keep: int = 3,
    log_every: int = 1,
    on_nan: OnNaN = "stop",
    stateful: Mapping[str, Stateful] | None = None,
    config: Mapping[str, Any] | None = None,
    group: Any = None,
) -> Session:
    """Join the training of ``model`` as one of its workers; alone, unless a launcher started several.

    Under ``paceline run`` a session with a ``run`` ends well by Ctrl-C or SIGTERM: the update under way is made on all
    workers, a checkpoint is written, and then the end of the ``step()`` block (or ``minimize``) raises
    ``KeyboardInterrupt``. A second Ctrl-C ends the run at once. Signals for which the script has a handler are left to
    it. In plain ``python script.py`` Ctrl-C raises where the script is, and the last checkpoint is the one before.

    >>> model = torch.nn.Linear(4, 1)
    >>> with join(model, torch.optim.SGD(model.parameters(), lr=0.1)) as session:
    ...     for x in session.batches([torch.ones(4)] * 10, batch_size=5, epochs=2):
    ...         with session.step():
    ...             model(x).mean().backward()
    >>> session.steps
    4

    Args:
        policy: how the workers keep pace, such as ``"all-reduce"`` or ``paceline.AllReduce()``; one that was given on
            the launcher's command line goes before it.
        scheduler: stepped once after every update. One that is stepped otherwise (per epoch, on a metric) is yours
            to step; put it into ``stateful`` to have it saved, or a resumed run starts it anew.
        scaler: steps the optimizers; call ``scaler.scale(loss).backward()`` yourself.
        clip_norm: clip the gradients to this norm before every update. Clipping them yourself, after
            ``backward()`` and inside the step, works too.
        seed: seeds every step's random streams from (seed, worker, step). Without it ``torch.initial_seed()`` of
            worker 0 is taken, and a worker that is alone has its streams left alone, as in a plain loop.
        run: directory for ``config.json``, ``metrics.jsonl`` and checkpoints; nothing is written without one.
        resume: go on from the newest good checkpoint of ``run`` if it has one, or from the checkpoint file named.
        save_every: updates between checkpoints; one is always written when the session ends well.
        keep: how many checkpoints stay.
        log_every: updates between lines of metrics.
        on_nan: what to do when a loss given to ``step.record(loss=...)`` is NaN or infinite.
        stateful: more objects with ``state_dict`` and ``load_state_dict`` to save and resume.
        config: what to put into ``config.json`` beside what the session knows.
        group: the ``torch.distributed`` process group to join; by default the one that the launcher's variables name.
    """
    if on_nan not in get_args(OnNaN):
        raise unknown_name("on_nan choice", str(on_nan), get_args(OnNaN))
    for name, value in (("save_every", save_every), ("keep", keep), ("log_every", log_every)):
        if value is not None:
            check_whole(name, value)
    if seed is not None and not isinstance(seed, int):
        raise UsageError(f"seed must be a whole number, got {seed!r}")
    train_state = TrainState(
        # torch.compile wraps the module; names and state are those of the module inside.
        model=getattr(model, "_orig_mod", model),
        optimizers=_as_tuple("optimizer", optimizer, Optimizer),
        schedulers=_as_tuple("scheduler", scheduler, LRScheduler),
        scaler=scaler,
        clip_norm=clip_norm,
        stateful=dict(stateful or {}),
    )
    _check(train_state)
    policy = parse_policy(asked_policy() or policy or "all-reduce")
    assignment = take_server_assignment()
    if assignment is not None and (assignment.role == "server" or assignment.joining):
        _check_served(policy, assignment)
    served = isinstance(policy, ServerPolicy) and assignment is not None and group is None
    if served:
        report("needs server")  # started with us, or now
    report("joined")  # before others are waited for: then one that never joins is found out
    if served and isinstance(policy, ServerPolicy) and assignment is not None:
        _check_for_server(train_state, policy)
        check_dealt(train_state.model, 1 + len(assignment.shard_fds))  # by whoever comes first
        settings: dict[str, Any] = {"policy": policy, "on_nan": on_nan}
        if assignment.role == "worker":
            return _join_as_worker(train_state, model, assignment, settings)
        settings |= {"seed": seed, "save_every": save_every, "log_every": log_every}
        _host(train_state, assignment, settings, run=run, resume=resume, keep=keep, config=dict(config or {}))
    exchange = connect(train_state.model, policy, group=group, rank_and_size=read_rank_and_size())
    opened = session = None
    try:
        if run is not None and exchange.rank == 0:
            opened = _open_run(run, resume, keep)
        session = Session(
            train_state,
            policy=policy,
            exchange=exchange,
            clock=StepClock(model) if run is not None or exchange.world_size > 1 else None,
            seed=seed,
            run=opened,
            save_every=save_every,
            log_every=log_every,
            on_nan=on_nan,
        )
        session._start(Path(run) if run is not None else None, resume, dict(config or {}))
        if assignment is not None and assignment.delay is not None:
            session._injected_delays = InjectedDelays(*assignment.delay, seed=session.seed, worker=session.rank)
        if run is not None and supervised():
            session._hear_stops(OF_SESSIONS)
    except BaseException:
        for thing in (session,) if session is not None else (opened, exchange):
            if thing is not None:
                thing.close()
        raise
    return session


def _check_served(policy: Policy, assignment: ServerAssignment) -> None:
    """Raise if a process that was started to be a server, or the worker of one elsewhere, would train by itself."""
    if not isinstance(policy, ServerPolicy):
        what = (
            "the server of this run"
            if assignment.role == "server"
            else f"a worker of the server at {assignment.address}"
        )
        raise UsageError(
            f"this process was started as {what}, which needs a policy with a server, and found {policy}; give one to "
            "join(policy=...), or to the command, on all hosts the same: --policy async"
        )


def _check_for_server(train_state: TrainState, policy: Policy) -> None:
    """Raise if a server cannot make the updates."""
    if any(isinstance(each, torch.optim.LBFGS) for each in train_state.optimizers):
        raise UsageError(f"LBFGS evaluates a loss several times an update, and under {policy} the server updates")
    if any(isinstance(each, torch.optim.SparseAdam) for each in train_state.optimizers):
        raise UsageError(
            f"SparseAdam wants sparse gradients, and under {policy} gradients travel dense; use another optimizer, "
            "such as Adam or SGD, or --policy all-reduce"
        )


def _join_as_worker(
    train_state: TrainState, model: nn.Module, assignment: ServerAssignment, settings: Mapping[str, Any]
) -> Session:
    """Join as a worker of the server that the launcher knows of."""
    from paceline.sessions.worker import join_as_worker  # which is built on this module

    return join_as_worker(train_state, model, assignment, **settings)


def _host(
    train_state: TrainState,
    assignment: ServerAssignment,
    settings: Mapping[str, Any],
    *,
    run: str | Path | None,
    resume: bool | str | Path,
    keep: int,
    config: Mapping[str, Any],
) -> NoReturn:
    """Be the server, or one of several: serve until the run ends, then end the script."""
    if assignment.shard:
        from paceline.sessions.shards import serve_shard

        serve_shard(train_state, assignment)
    from paceline.replay.serving import serve_replay
    from paceline.sessions.server import ServerRun
    from paceline.store.double_buffer import read_note

    if assignment.replay is not None:
        serve_replay(train_state, assignment, assignment.replay)

    found = read_note(assignment.memory_fd) if assignment.memory_fd is not None else None
    again = assignment.incarnation > 0  # one before was killed; what is in the directory is this run's
    opened = _open_run(run, resume or again, keep) if run is not None else None
    try:
        session = ServerRun(train_state, workers=assignment.workers or 1, run=opened, **settings)
        if found is not None:
            session.take_over(found, config)
        else:
            session._start(Path(run) if run is not None else None, resume or (again and run is not None), config)
    except BaseException:
        if opened is not None:
            opened.close()
        raise
    session.serve(assignment)


def _open_run(path: str | Path, resume: bool | str | Path, keep: int) -> Run:
    """Open the run's directory; one that holds a run already only to go on with it, not from another's checkpoint."""
    run_checkpoints = Path(path) / "checkpoints"
    goes_on = resume if isinstance(resume, bool) else Path(resume).absolute().parent == run_checkpoints.absolute()
    return Run(path, resume=goes_on, keep=keep)


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
        self.closure: Callable[[], Tensor] | None = None  # set by minimize(): where the gradients come from
        self.recorded: dict[str, Any] = {}
        self.skipped = False  # its loss was not finite, and the session was told to skip such steps
        self.cancelled = False  # the server went on without it: the block was left early, and nothing came of it

    def record(self, **values: Any) -> None:
        """Put ``values`` in this step's line of the metrics; a ``loss`` among them is also checked for NaN.

        A loss recorded before ``backward()`` is averaged over all workers on the way, at no cost.
        """
        _refuse_names(values, _EVENT_NAMES | _STEP_NAMES)
        self.recorded.update(
            {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        )

    def loss(self) -> float | None:
        """The loss as recorded so far."""
        return float(self.recorded["loss"]) if "loss" in self.recorded else None

    def __enter__(self) -> Self:
        self._session._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._session._end(self, error)


class Session:
    """One worker's part in the training of one model; made by ``join()``.

    ``steps`` counts the updates made, ``rank`` and ``world_size`` say which worker this is and of how many.
    """

    in_step = True  # between steps all workers have made the same updates, and have the same parameters

    def __init__(
        self,
        train_state: TrainState,
        *,
        policy: Policy,
        exchange: Exchange,
        clock: StepClock | None,
        seed: int | None,
        run: Run | None,
        save_every: int | None,
        log_every: int,
        on_nan: OnNaN,
    ) -> None:
        self.policy = policy
        self.rank, self.world_size = exchange.rank, exchange.world_size
        # Several workers always seed their steps: then worker 0's checkpoint need not hold the others' streams.
        self._seeded = seed is not None or exchange.world_size > 1
        self.seed: int = exchange.share(torch.initial_seed() if seed is None else seed)
        self.run = run
        # Worker 0 writes for all; where replicas differ, the others give it their states.
        self._saves: bool = exchange.share(run is not None) if exchange.replicas_differ else run is not None
        self.steps = 0
        self.timing = Timing()
        self._clock = clock
        self._train_state = train_state
        self._exchange = exchange
        self._data = BatchStream()
        self._save_every = save_every
        self._log_every = log_every
        self._nan_guard = NaNGuard(on_nan, self._where)
        self._blocks = 0  # step blocks entered, accumulating ones too
        self._current: Step | None = None
        self._accumulating = False
        self._saved_at: int | None = None
        self._closed = False
        self._metrics_bytes = 0
        self._examples = 0  # of this worker in the update under way
        self._injected_delays: InjectedDelays | None = None  # computing time to inject
        self._bytes_told = 0  # of those exchanged
        self._bad_loss: float | None = None  # found in an accumulating block of the update under way
        self._request: StopRequest | None = None  # set where a signal is granted after the update under way
        self._asked_to_stop: Callable[[], bool] = lambda: False
        self._stopping = False  # a worker was asked to stop, and all know it
        self._opened = False  # a step, in this process
        self._hooks = [optimizer.register_step_pre_hook(self._foresee_twice) for optimizer in train_state.optimizers]

    # The loop ---------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._data.epoch

    @property
    def consumed(self) -> int:
        """How much of the epoch under way is used: samples of all workers together, or batches of a loader."""
        return self._data.consumed

    def step(self, *, accumulate: bool = False, examples: int | None = None) -> Step:
        """Open one step of the loop: compute a loss and call ``backward()`` inside the block.

        Gradients are cleared on entry, and on leaving the optimizer and scheduler step. With
        ``accumulate=True`` the gradients stay and are added to those of the next block instead.
        ``examples`` tells how many there are in the batch, where it does not come from ``session.batches``.
        """
        return Step(self, accumulate, examples)

    def minimize(self, closure: Callable[[], Tensor], *, examples: int | None = None) -> Tensor:
        """Make one update with an optimizer that evaluates the loss as often as it likes, such as LBFGS.

        ``closure`` computes the loss, calls ``backward()`` on it and returns it. Gives the first loss.
        """
        step = Step(self, examples=examples)

        def evaluate() -> Tensor:
            self._train_state.clear_gradients()
            with torch.enable_grad():
                self._arm(step, self._examples, None)
                loss = closure()
                self._hear_others(self._exchange.finish())
                self._exchange.release()
                loss = self.mean(loss, examples=self._examples)
            first = "loss" not in step.recorded
            step.recorded.setdefault("loss", loss)
            self._nan_guard.check_closure(float(loss), first=first)
            return loss

        step.closure = evaluate
        with step:
            pass
        return torch.as_tensor(step.recorded["loss"])

    def refresh(self) -> None:
        """Have the newest parameters in the model, for an evaluation: under a server policy those of the server's.

        Where workers are in step with each other, all have them after every step.
        """

    def averaged(self) -> contextlib.AbstractContextManager[object]:
        """Have the average of all workers' parameters in the model inside the block, as for an evaluation.

        Under a policy that lets them differ all workers must enter it; under the others the model is as it is.
        """
        return self._exchange.averaged()

    def epochs(self, count: int) -> Iterator[int]:
        """Go through the epochs up to ``count`` that are not done yet, for loops that do something after each."""
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
        """Give this worker's batches, from wherever the session stands.

        From a map-style data set with a ``batch_size`` (per worker): sharded over the workers, shuffled anew each
        epoch, every sample exactly once; ``last`` says what becomes of an incomplete last batch, and
        ``loader_options`` (``num_workers``, ``collate_fn``, ...) go to a ``DataLoader``. From a loader or any
        iterable of batches: as it gives them. With ``epochs`` all epochs up to that one are gone through, without
        it only what is left of the present one (for use inside ``session.epochs``).
        """
        if epochs is not None:
            check_whole("epochs", epochs, least=0)
        feed = make_feed(
            source,
            batch_size=batch_size,
            shuffle=shuffle,
            last=last,
            loader_options=loader_options,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            seeded_fetch=self._seeded,
            largest=self._exchange.largest,
        )
        return self._data.batches(feed, epochs)

    def mean(self, value: Tensor | float, *, examples: float | None = None) -> Tensor:
        """Average a number or tensor over all workers, weighted by ``examples`` if given."""
        weight = 1.0 if examples is None else float(examples)
        return self._exchange.mean(torch.as_tensor(value).detach(), weight)

    # Saving -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path | None = None) -> Path | None:
        """Write a checkpoint of everything: into the run's directory, or to ``path``.

        Worker 0 writes, and the others return ``None``. Under a policy that lets the workers' parameters differ, such
        as local-sgd, all must call it, since worker 0 collects their states.
        """
        if self._current is not None or self._accumulating:
            raise UsageError(
                f"step {self.steps}: save() was called inside a step or between accumulating ones; "
                "call it after the step that updates the parameters"
            )
        replicas = self._exchange.gather(self._replica()) if self._exchange.replicas_differ else []
        if self.rank != 0:
            self._saved_at = self.steps
            return None
        self._nan_guard.check_parameters(self._train_state.model)
        state = {**self._state(), "replicas": replicas}
        if path is not None:
            write_checkpoint(Path(path), state)
            return Path(path)
        if self._closed:
            raise UsageError("save() after the session's end: its directory may be another's by now; give a path")
        if self.run is None:
            raise UsageError("save() needs a path, or a run directory: join(..., run='runs/mine')")
        file = self.run.checkpoints.write(self.steps, state)
        self._saved_at = self.steps
        return file

    def record(self, event: str, /, **values: Any) -> None:
        """Add a line to the run's metrics, for what belongs to no single step (an evaluation, say)."""
        _refuse_names(values, _EVENT_NAMES)
        self._write(event, **values)

    def _write(self, event: str, /, **values: Any) -> None:
        if self.run is not None and self.run.metrics is not None:
            self.run.metrics.write(event, worker=self.rank, step=self.steps, epoch=self.epoch, **values)

    def close(self) -> None:
        """Release the run's directory, the model and the other workers; leaving the ``with`` block does it."""
        if self._closed:
            return
        self._closed = True
        try:
            if self.run is not None:
                self.run.close()
        finally:
            if self._request is not None:
                self._request.leave()
            self._remove_hooks()
            if self._clock is not None:
                self._clock.close()
            self._exchange.close()
        report("left", step=self.steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            report_failure(error)  # before anything that takes time: neighbours will soon fail because of it
        try:
            # Only what ended well: after an exception the step under way has moved streams, buffers and data already,
            # and the checkpoint before it is the one from which a resumed run is exact.
            if kind is None:
                if self._saves and self._saved_at != self.steps:
                    self._accumulating = False  # gradients of an update that will not be are let go
                    self.save()
                self._exchange.conclude()
        finally:
            self.close()
        if kind is None and self._data.handed_out and not self._opened and self.rank == 0:
            logger.warning(
                "the loop took batches and opened no step, so the session has updated nothing: put the forward and "
                "backward pass of each batch into 'with session.step():', without an optimizer.step() of your own"
            )
        if kind is None and self._request is not None and self._request.asked:
            raise KeyboardInterrupt("asked to stop after the last step")

    # One step ---------------------------------------------------------------------------------------------

    def _foresee_twice(self, *_: object) -> None:
        """Tell once of an update that the script makes inside a block, at whose end the session makes it."""
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

    def _begin(self, step: Step) -> None:
        self._opened = True
        if self._current is not None:
            raise UsageError(f"step {self.steps}: a step was opened inside another; leave the first block before")
        if self._seeded:
            seed_streams(derive_seed(self.seed, self.rank, "step", self._blocks))
        self._blocks += 1
        fresh = not self._accumulating
        if fresh:
            self._train_state.clear_gradients()
            self._examples, self._bad_loss = 0, None
            self._nan_guard.remember_buffers(self._train_state.model)
        own, total = self._count_examples(step)
        if step.accumulate:
            self._exchange.accumulate(examples=own, total=total)
        elif step.closure is None:
            self._arm(step, own, total)
        self._current = step
        if self._clock is not None:
            self._clock.start(fresh=fresh)
        if self._injected_delays is not None:
            time.sleep(self._injected_delays.of_step(self._blocks))

    def _count_examples(self, step: Step) -> tuple[int, int | None]:
        """The examples of this block, here and of all workers; the latter is None where nobody knows it."""
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

    def _arm(self, step: Step, examples: int, total: int | None) -> None:
        # Blocks and updates together: a worker that has failed in a block, or skipped an update, is found out.
        tag = 37 * self._blocks + self.steps
        self._exchange.begin(
            examples=examples, total=total, loss=lambda: self._loss_of(step), stop=self._asked_to_stop, tag=tag
        )

    def _loss_of(self, step: Step) -> float | None:
        """The update's loss: that of its last block, unless one before it was bad; none of borrowed data."""
        if self._bad_loss is not None:
            return self._bad_loss
        return step.loss() if step.examples != 0 else None

    def _end(self, step: Step, error: BaseException | None) -> bool:
        """End a block; True if its exception was our own and goes no further."""
        self._current = None
        self._accumulating = step.accumulate and error is None
        if error is not None:
            self._exchange.release(failed=True)
            return False
        self._conclude(step)
        return False

    def _conclude(self, step: Step) -> None:
        outcome = self._exchange.finish() if not step.accumulate and step.closure is None else None
        self._hear_others(outcome)
        if self._clock is not None:
            self._clock.computed(outcome)
        if step.accumulate:
            loss = self._loss_of(step)
            self._bad_loss = loss if loss is not None and not math.isfinite(loss) else None
            self._data.use()
            return
        rate = self._rate() if self.run is not None else 0.0  # before a scheduler changes it
        told = outcome.loss if outcome is not None else None
        step.skipped = self._nan_guard.skips(self._loss_of(step), told)
        if step.skipped:
            self._nan_guard.restore_buffers(self._train_state.model)
        else:
            self._update(step)
        self.steps += 1
        self._stopping = self._exchange.updated(self.steps) or self._stopping
        self._data.use()
        self._exchange.release()  # a backward pass between steps is the user's own
        if self._clock is not None:
            self.timing = self._clock.updated(outcome, self.rank)
        if self.run is not None:
            self._log(step, outcome, rate)
        if self._saves and self._save_every is not None and self.steps % self._save_every == 0:
            self.save()
        if self._stopping or (self.world_size == 1 and self._asked_to_stop()):
            self._stop()

    # Being asked to stop ----------------------------------------------------------------------------------

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """End the run after the first update at whose end ``asked`` is true on any worker.

        A checkpoint is written if the session has a ``run``; then the step raises ``KeyboardInterrupt`` on all workers.
        """
        self._asked_to_stop = asked

    def _hear_stops(self, request: StopRequest) -> None:
        """Stop after the update during which a signal comes."""
        request.hear()
        self._request = request
        self.stop_when(lambda: request.asked)

    def _hear_others(self, outcome: Outcome | None) -> None:
        """Several workers stop after the same update: that in whose exchange one of them has told of a signal."""
        self._stopping = self._stopping or (outcome is not None and outcome.stop)

    def _stop(self) -> NoReturn:
        if self._saved_at != self.steps and self._saves:
            self.save()
        report("interrupted", step=self.steps, saved=None if self.run is None else str(self.run.path))
        raise KeyboardInterrupt(f"asked to stop after step {self.steps}")

    def _rate(self) -> float:
        return float(as_number(self._train_state.optimizers[0].param_groups[0]["lr"]))

    def _update(self, step: Step) -> None:
        try:
            self._train_state.update(step.closure)
        except SkipUpdate:
            step.skipped = True
            self._train_state.clear_gradients()
            self._nan_guard.restore_buffers(self._train_state.model)

    def _where(self) -> Where:
        saved = self.run.checkpoints.files() if self.run is not None else []
        return Where(self.rank, self.world_size, self.steps, saved[-1] if saved else None)

    def _log(self, step: Step, outcome: Outcome | None, rate: float) -> None:
        if self.steps % self._log_every == 0:
            # Numbers are read from tensors when lines are flushed, so a GPU is not waited for here.
            values = dict(step.recorded)
            if step.skipped:
                values["skipped"] = True
            if outcome is not None:
                values.update(examples=outcome.examples, workers_waited=outcome.waited_seconds)
                values.update({} if outcome.loss is None else {"loss": outcome.loss})
            else:
                values["examples"] = self._examples
            values["seconds"] = asdict(self.timing)
            if self.world_size > 1:
                told, self._bytes_told = self._bytes_told, self._exchange.num_bytes
                values["bytes"] = self._bytes_told - told
            self._write("step", lr=rate, **values)

    # State ------------------------------------------------------------------------------------------------

    def _start(self, path: Path | None, resume: bool | str | Path, config: Mapping[str, Any]) -> None:
        """Load what is to be resumed (worker 0 reads, the others get it from there) and open the run."""
        if resume is True and path is None:
            raise UsageError("resume=True needs a run directory: join(..., run='runs/mine', resume=True)")
        if resume:
            found = self._find_checkpoint(Path(resume) if not isinstance(resume, bool) else None)
            state = self._exchange.share(found)
            if state is not None:
                self._load(state)
            self._saved_at = self._exchange.share(self._saved_at)
        if self.run is not None:
            self.run.write_config({**self._describe(), **config})
            self.run.open_metrics(self._metrics_bytes)

    def _find_checkpoint(self, file: Path | None) -> dict[str, Any] | None:
        """The checkpoint to go on from: the file named, or the run's newest that can be used."""
        if self.rank != 0:
            return None
        if file is not None:
            found = self._checked(file, read_checkpoint(file))
            if self.run is not None and file.absolute().parent == self.run.checkpoints.path.absolute():
                self._metrics_bytes = found["session"]["metrics_bytes"]
                self.run.checkpoints.drop_after(file)
            return found
        assert self.run is not None, "worker 0 has the run"
        refused: dict[str, list[Path]] = {}  # by the reason
        for candidate, state in self.run.checkpoints.newest():
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
            self._saved_at = found["session"]["steps"]
            self._metrics_bytes = found["session"]["metrics_bytes"]
            return found
        if refused:
            reasons = [f"{', '.join(file.name for file in files)} {reason}" for reason, files in refused.items()]
            raise CheckpointError(f"no usable checkpoint in {self.run.checkpoints.path}: {'; '.join(reasons)}")
        return None

    def _checked(self, file: Path, state: dict[str, Any]) -> dict[str, Any]:
        try:
            mismatch = self._train_state.mismatch(state["trainee"])
            parts = [state[part] for part in ("data", "session", "streams", "exchange")]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{file} does not hold the state of a session: {error!r}") from error
        if mismatch is not None or not all(isinstance(part, dict) for part in parts):
            raise CheckpointError(
                f"{file} belongs to something else: {mismatch or 'its parts are no session'}; give join() what the run "
                "was begun with, or start a new run in another directory"
            )
        return state

    def _load(self, state: Mapping[str, Any]) -> None:
        self._load_replica(state)
        self._data.load_state_dict(state["data"])
        session = state["session"]
        self.steps, self._blocks, self.seed = session["steps"], session["blocks"], session["seed"]
        restore_streams(state["streams"])
        if self.rank == 0 and self._train_state.has_unsaved_scheduler():
            logger.warning(
                "the run goes on at step %d, but a scheduler of its optimizer starts anew: it was not saved. Pass it "
                "as join(scheduler=...), or as stateful={'scheduler': ...} if you step it yourself",
                self.steps,
            )

    def _load_replica(self, state: Mapping[str, Any]) -> None:
        """Load this worker's own replica, or, if there were another number of them, their average."""
        replicas = state.get("replicas") or []
        own = replicas[self.rank] if len(replicas) == self.world_size else state
        self._train_state.load_state_dict(own["trainee"])
        if not replicas or own is not state:
            self._exchange.load_state_dict(own["exchange"])
        else:
            average_into(self._train_state.model, [replica["trainee"]["model"] for replica in replicas])

    def _replica(self) -> dict[str, object]:
        """What of the state may differ from worker to worker."""
        return {"trainee": self._train_state.state_dict(), "exchange": self._exchange.state_dict()}

    def _state(self) -> dict[str, object]:
        metrics = self.run.metrics if self.run is not None else None
        return {
            **self._replica(),
            "data": self._data.state_dict(),
            "session": {
                "steps": self.steps,
                "blocks": self._blocks,
                "seed": self.seed,
                "policy": str(self.policy),
                "metrics_bytes": metrics.sync() if metrics is not None else 0,
            },
            "streams": capture_streams(),
        }

    def _describe(self) -> dict[str, Any]:
        return {
            "paceline": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "policy": str(self.policy),
            "seed": self.seed,
            "seeded_steps": self._seeded,
            "world_size": self.world_size,
            "threads": torch.get_num_threads(),
            "model": type(self._train_state.model).__name__,
            "optimizers": [type(optimizer).__name__ for optimizer in self._train_state.optimizers],
        }


def _refuse_names(values: Mapping[str, Any], taken: frozenset[str]) -> None:
    clash = sorted(values.keys() & taken)
    if clash:
        raise UsageError(f"the metrics have a {clash[0]!r} of their own; record yours under another name")


def _as_tuple(what: str, given: Any, kind: type) -> tuple[Any, ...]:
    if isinstance(given, kind):
        return (given,)
    if isinstance(given, Iterable):
        items = tuple(given)
        if all(isinstance(item, kind) for item in items):
            return items
    raise UsageError(f"{what} must be a torch {kind.__name__} or several, got {type(given).__name__}")


def _check(train_state: TrainState) -> None:
    if not isinstance(train_state.model, nn.Module):
        raise UsageError(f"model must be a torch module, got {type(train_state.model).__name__}")
    inside = {id(parameter) for parameter in train_state.model.parameters()}
    for optimizer in train_state.optimizers:
        groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in inside for parameter in groups):
            raise UsageError(
                "the optimizer has parameters that are not in the model, so they would be neither saved nor averaged; "
                "join one module that holds them all, such as nn.ModuleList([model, other])"
            )
    if train_state.clip_norm is not None and not train_state.clip_norm > 0:
        raise UsageError(f"clip_norm must be above 0, got {train_state.clip_norm}")
    if train_state.scaler is not None and not isinstance(train_state.scaler, torch.amp.GradScaler):
        raise UsageError(f"scaler must be a torch.amp.GradScaler, got {type(train_state.scaler).__name__}")
    for name, thing in train_state.stateful.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(f"stateful {name!r} needs the methods state_dict and load_state_dict")
    if not train_state.optimizers:
        raise UsageError("join() needs at least one optimizer")
    for scheduler in train_state.schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UsageError(
                "ReduceLROnPlateau needs a metric: step it yourself with scheduler.step(value), and pass it as "
                "stateful={'scheduler': scheduler} to have it saved"
            )
