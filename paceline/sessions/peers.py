"""The session of peers: every worker makes every update, on gradients or parameters that all have averaged."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.data.feed import make_feed
from paceline.delays.injected import InjectedDelays
from paceline.errors import UsageError
from paceline.interrupts import OF_SESSIONS, StopRequest
from paceline.launch.environment import read_rank_and_size
from paceline.launch.reports import report, supervised
from paceline.peers.connect import connect
from paceline.peers.exchange import BackwardPass, Exchange
from paceline.peers.reducer import Outcome
from paceline.policies import Policy, Progress
from paceline.record.run import Run
from paceline.seeding import derive_seed, seed_streams
from paceline.sessions.nan_guard import OnNaN, SkipUpdate
from paceline.sessions.request import JoinRequest
from paceline.sessions.run_state import Position, RunState, open_run
from paceline.sessions.session import Session, Step
from paceline.sessions.timing import StepClock
from paceline.train_state import TrainState

logger = logging.getLogger("paceline")


class PeersSession(Session):
    """One worker's part in a run without a server, or a run of one worker alone; made by ``join()``."""

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
        super().__init__(
            train_state,
            policy=policy,
            rank=exchange.rank,
            world_size=exchange.world_size,
            seed=exchange.share(torch.initial_seed() if seed is None else seed),
            run=run,
            clock=clock,
            on_nan=on_nan,
        )
        # Several workers always seed their steps: then worker 0's checkpoint need not hold the others' streams.
        self._seeded = seed is not None or exchange.world_size > 1
        # Worker 0 writes for all; where replicas differ, the others give it their states.
        self._saves: bool = exchange.share(run is not None) if exchange.replicas_differ else run is not None
        self._exchange = exchange
        self._nan_guard.each_skips = exchange.replicas_differ
        self._run_state = RunState(
            train_state,
            policy=policy,
            exchange=exchange,
            data=self._data,
            run=run,
            seeded=self._seeded,
            nan_guard=self._nan_guard,
        )
        self._save_every, self._log_every = save_every, log_every
        self._injected_delays: InjectedDelays | None = None  # computing time to inject
        self._num_bytes = 0  # exchanged in the steps since the last line of metrics
        self._num_bytes_before = 0  # of the update under way, in all
        self._request: StopRequest | None = None  # set where a signal is granted after the update under way
        self._asked_to_stop: Callable[[], bool] = lambda: False
        self._stopping = False  # a worker was asked to stop, and all know it
        self._highest_rate, self._decayed = 0.0, False  # of the learning rates so far

    def start(self, path: Path | None, resume: bool | str | Path, config: Mapping[str, Any]) -> None:
        """Load what is to be resumed, and open the run."""
        found = self._run_state.resume(path, resume)
        if found is not None:
            self.steps, self._blocks, self.seed, self._highest_rate, self._decayed = found
        self._exchange.started(self._progress())
        self._run_state.open(self.seed, config)

    def inject_delays(self, text: str, unit: float) -> None:
        """Lengthen every block by a time that is drawn from this distribution."""
        self._injected_delays = InjectedDelays(text, unit, seed=self.seed, worker=self.rank)

    # The loop ---------------------------------------------------------------------------------------------

    def minimize(self, closure: Callable[[], Tensor], *, examples: int | None = None) -> Tensor:
        step = Step(self, examples=examples)

        def evaluate() -> Tensor:
            self._train_state.clear_gradients()
            with torch.enable_grad():
                self._arm(step, self._examples, None)
                loss = closure()
                self._hear_others(self._exchange.finish())
                self._exchange.release()
                # Optimizers of replicas that differ may each evaluate another number of times.
                differ = self._exchange.replicas_differ
                loss = loss.detach() if differ else self.mean(loss, examples=self._examples)
            first = "loss" not in step.recorded
            step.recorded.setdefault("loss", loss)
            self._nan_guard.check_closure(float(loss), first=first)
            return loss

        step.closure = evaluate
        with step:
            pass
        return torch.as_tensor(step.recorded["loss"])

    def refresh(self) -> None:
        """All workers have the newest parameters after every step."""

    def averaged(self) -> contextlib.AbstractContextManager[object]:
        return self._exchange.averaged()

    def _batches(self, source: Any, epochs: int | None, **options: Any) -> Iterator[Any]:
        feed = make_feed(
            source,
            rank=self.rank,
            world_size=self.world_size,
            seed=self.seed,
            seeded_fetch=self._seeded,
            largest=self._exchange.largest,
            **options,
        )
        return self._data.batches(feed, epochs)

    def _mean(self, value: Tensor, weight: float) -> Tensor:
        return self._exchange.mean(value, weight)

    # Saving and telling -----------------------------------------------------------------------------------

    def save(self, path: str | Path | None = None) -> Path | None:
        if self._current is not None or self._accumulating:
            raise UsageError(
                f"step {self.steps}: save() was called inside a step or between accumulating ones; "
                "call it after the step that updates the parameters"
            )
        position = Position(self.steps, self._blocks, self.seed, self._highest_rate, self._decayed)
        return self._run_state.save(position, path)

    def _to_be_saved(self) -> bool:
        """Whether the run has no checkpoint of this step yet, and should have one."""
        return self._saves and self._run_state.saved_at != self.steps

    def _write(self, event: str, /, **values: Any) -> None:
        if self.run is not None and self.run.metrics is not None:
            self.run.metrics.write(event, worker=self.rank, step=self.steps, epoch=self.epoch, **values)

    def _release(self) -> None:
        try:
            self._run_state.close()
        finally:
            if self._request is not None:
                self._request.leave()
            self._exchange.close()

    def _end_well(self) -> None:
        if self._accumulating:
            self._accumulating = False
            logger.warning(
                "worker %d: what was accumulated since step %d was not used; end with a step without accumulate=True",
                self.rank,
                self.steps,
            )
        if self._to_be_saved():
            self.save()
        self._exchange.conclude()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self._request is not None and self._request.asked:
            raise KeyboardInterrupt("asked to stop after the last step")

    # One step ---------------------------------------------------------------------------------------------

    def _begin(self, step: Step) -> None:
        self._check_not_inside()
        if self._seeded:
            seed_streams(derive_seed(self.seed, self.rank, "step", self._blocks))
        self._blocks += 1
        fresh = not self._accumulating
        if fresh:
            self._begin_update(keep_buffers=False)
            self._num_bytes_before = self._exchange.num_bytes
        own, total = self._count_examples(step)
        if step.accumulate:
            self._exchange.accumulate(examples=own, total=total)
        elif step.closure is None:
            self._arm(step, own, total)
        self._enter(step, fresh=fresh)
        if self._injected_delays is not None:
            time.sleep(self._injected_delays.of_step(self._blocks))

    def _arm(self, step: Step, examples: int, total: int | None) -> None:
        # Blocks and updates together: a worker that has failed in a block, or skipped an update, is found out.
        tag = 37 * self._blocks + self.steps
        self._exchange.begin(BackwardPass(examples, total, lambda: self._loss_of(step), self._asked_to_stop, tag))

    def _end(self, step: Step, error: BaseException | None) -> bool:
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
            self._remember_bad_loss(step)
            self._data.use()
            return
        rate = self._run_state.rate() if self.run is not None else 0.0  # before a scheduler changes it
        told = outcome.loss if outcome is not None else None
        step.skipped = self._nan_guard.skips(self._loss_of(step), told)
        if step.skipped:
            self._nan_guard.restore_buffers(self._train_state.model)
        else:
            self._update(step)
        self.steps += 1
        self._stopping = self._exchange.updated(self._progress()) or self._stopping
        self._num_bytes += self._exchange.num_bytes - self._num_bytes_before
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

    def _progress(self) -> Progress:
        rate = self._run_state.rate()
        self._highest_rate = max(self._highest_rate, rate)
        self._decayed = self._decayed or rate < self._highest_rate
        return Progress(self.steps, self.epoch, rate, self._decayed)

    def _update(self, step: Step) -> None:
        try:
            self._train_state.update(step.closure)
        except SkipUpdate:
            step.skipped = True
            self._train_state.clear_gradients()
            self._nan_guard.restore_buffers(self._train_state.model)

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
                values["bytes"], self._num_bytes = self._num_bytes, 0
            self._write("step", lr=rate, **values)

    # Being asked to stop ----------------------------------------------------------------------------------

    def stop_when(self, asked: Callable[[], bool]) -> None:
        self._asked_to_stop = asked

    def hear_stops(self, request: StopRequest) -> None:
        """Stop after the update during which a signal comes."""
        request.hear()
        self._request = request
        self.stop_when(lambda: request.asked)

    def _hear_others(self, outcome: Outcome | None) -> None:
        """Several workers stop after the same update: that in whose exchange one of them has told of a signal."""
        self._stopping = self._stopping or (outcome is not None and outcome.stop)

    def _stop(self) -> NoReturn:
        if self._to_be_saved():
            self.save()
        number = self._request.number if self._request is not None else 0
        asked_by = (number or signal.SIGTERM) if self._asked_to_stop() else 0  # a handler of the caller's names none
        report("interrupted", step=self.steps, saved=None if self.run is None else str(self.run.path), signal=asked_by)
        raise KeyboardInterrupt(f"asked to stop after step {self.steps}")


def join_peers(request: JoinRequest, kind: type[PeersSession] = PeersSession) -> PeersSession:
    """Join as one of several equal workers, or alone, in a session of this ``kind``."""
    report("joined")  # before others are waited for: then one that never joins is found out
    train_state, run = request.train_state, request.run
    exchange = connect(train_state.model, request.policy, group=request.group, rank_and_size=read_rank_and_size())
    opened = session = None
    try:
        if run is not None and exchange.rank == 0:
            opened = open_run(run, request.resume, request.keep)
        session = kind(
            train_state,
            policy=request.policy,
            exchange=exchange,
            clock=StepClock(request.model) if run is not None or exchange.world_size > 1 else None,
            seed=request.seed,
            run=opened,
            save_every=request.save_every,
            log_every=request.log_every,
            on_nan=request.on_nan,
        )
        session.start(run, request.resume, request.config)
        if request.assignment is not None and request.assignment.delay is not None:
            session.inject_delays(*request.assignment.delay)
        if run is not None and supervised():
            session.hear_stops(OF_SESSIONS)
    except BaseException:
        for thing in (session,) if session is not None else (opened, exchange):
            if thing is not None:
                thing.close()
        raise
    return session
