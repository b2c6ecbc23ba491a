"""The session of peers: every worker makes every update, on gradients or parameters that all have averaged."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.codecs import Codec
from paceline.data.feed import Feed, make_feed
from paceline.delays.injected import InjectedDelays
from paceline.errors import LostContactError, UsageError
from paceline.interrupts import OF_SESSIONS, StopRequest
from paceline.launch.environment import read_rank_and_size, read_world
from paceline.launch.reports import report, supervised
from paceline.launch.roster import Member, Status
from paceline.peers.connect import begin_exchange, check_processes, device_of, find_peers
from paceline.peers.exchange import Alone, BackwardPass, Exchange
from paceline.peers.forming import Forming, RunOverError, take_seat
from paceline.peers.group import Peers
from paceline.peers.reducer import Outcome
from paceline.policies import PeersPolicy, Policy, Progress
from paceline.record.run import Run
from paceline.seeding import derive_seed, seed_streams
from paceline.sessions.nan_guard import OnNaN, SkipUpdate
from paceline.sessions.reforming import ReformingSession
from paceline.sessions.request import JoinRequest
from paceline.sessions.run_state import START, RunState, open_run
from paceline.sessions.session import Step
from paceline.sessions.thread_choice import ThreadChoice
from paceline.sessions.timing import StepClock, WorkerTimeline
from paceline.train_state import TrainState

logger = logging.getLogger("paceline")


class PeersSession(ReformingSession):
    """One worker's part in a run without a server, or a run of one worker alone; made by ``join()``."""

    def __init__(
        self,
        train_state: TrainState,
        *,
        policy: Policy,
        codec: Codec | None,
        exchange: Exchange,
        forming: Forming | None,
        clock: StepClock | None,
        seed: int | None,
        run: Run | None,
        save_every: int | None,
        keep: int,
        log_every: int,
        on_nan: OnNaN,
    ) -> None:
        super().__init__(
            train_state,
            policy=policy,
            rank=exchange.rank,
            world_size=exchange.world_size,
            seed=torch.initial_seed() if seed is None else seed,
            run=run,
            clock=clock,
            on_nan=on_nan,
            codec=codec,
            forming=forming,
            run_path=None if run is None else run.path.absolute(),
            keep=keep,
        )
        self._several = exchange.world_size > 1 or forming is not None  # at the start
        # Several workers always seed their steps: then worker 0's checkpoint need not hold the others' streams.
        self._seeded = seed is not None or self._several
        self._exchange = exchange
        self._run_state = RunState(
            train_state,
            policy=policy,
            codec=codec,
            exchange=exchange,
            data=self._data,
            run=run,
            seeded=self._seeded,
            nan_guard=self._nan_guard,
        )
        self._save_every, self._log_every = save_every, log_every
        self._injected_delays: InjectedDelays | None = None  # computing time to inject
        self._threads: ThreadChoice | None = None  # set where the launcher chose several
        self._undecided: ThreadChoice | None = None  # the same, until the first update is made
        self._num_bytes = 0  # that all workers have sent in the steps since the last line of metrics
        self._num_bytes_before = 0  # of the update under way, in all
        self._waited_before = 0.0  # seconds in exchanges, likewise
        self._request: StopRequest | None = None  # set where a signal is granted after the update under way
        self._asked_to_stop: Callable[[], bool] = lambda: False
        self._first_block = 0  # of the update under way
        self._kept: dict[str, Any] | None = None  # the exchange's state before it, where replicas differ
        self._before_closure: dict[str, Any] | None = None  # the train state before an optimizer evaluates a loss

    def start(self, path: Path | None, resume: bool | str | Path, config: Mapping[str, Any]) -> None:
        """Agree on the run with the others, load what is to be resumed, and open the run."""
        # Worker 0 writes for all; where replicas differ, the others give it their states.
        self._nan_guard.each_skips = self._exchange.replicas_differ
        self.seed, run_path = self._exchange.share([self.seed, self._run_path and str(self._run_path)])
        self._run_path = run_path and Path(run_path)
        found = self._run_state.resume(path, resume)
        if found is not None:
            self.steps, self._blocks, self.seed, self._highest_rate, self._decayed = found
        self._prepare_codec()
        self._exchange.started(self._progress())
        if self._forming is not None:
            members = self._forming.formation.members
            self._data.begin(members)
            self.generation = self._forming.formation.number
            self._exchange.confirm()
            self._forming.begun()
            if members != (wanted := tuple(map(Member, range(self._forming.workers)))):
                self._tell_supervisor(wanted, 0.0)
        self._run_state.open(self.seed, config)

    def record_run(self, replay: Path | None) -> None:
        """Record the run from here on, and what it begins with; or ``replay`` the one in that directory."""
        if self._run_path is None:
            raise UsageError(f"policy {self.policy} records into the run's directory: give one, as in run='runs/mine'")
        if replay is None:
            replicas = self._exchange.gather(self._run_state.replica(common=False))
            self._run_state.save_beside(self._position(), self._run_path / START, replicas)
        self._exchange.record(self._run_path, self._run_state.describe_fully(self.seed), replay)

    def start_late(self, peers: Peers) -> None:
        """Join a run under way: have the state of the furthest worker."""
        self._go_on_with(peers, {})
        self._run_state.warn_of_scheduler(self.steps)

    def keep_timeline(self) -> None:
        """Write down what this worker does from now on, if the run has a directory."""
        if self._run_path is not None:
            own = Member(self.rank) if self._forming is None else self._forming.member
            self._timeline = WorkerTimeline(self._run_path, own.worker, own.incarnation)
            if self.steps == 0:  # else the run goes on, and has lines of them
                self._write_lives("joined", self._members, dead=None)

    def abandon(self) -> None:
        """Let go of everything, without a word to the others: the session did not begin."""
        self._failed = True
        self._let_go()

    def inject_delays(self, text: str, unit: float) -> None:
        """Lengthen every block by a time that is drawn from this distribution."""
        self._injected_delays = InjectedDelays(text, unit, seed=self.seed, worker=self.rank)

    def choose_threads(self, threads: int) -> None:
        """Have one thread of torch in place of so many, if the run's first step is small."""
        self._threads = ThreadChoice(self._train_state.model, threads)
        if self._run_state.one_thread is None:
            self._undecided = self._threads
        elif self._run_state.one_thread:
            self._threads.apply()

    def _decide_on_threads(self, choice: ThreadChoice) -> None:
        self._undecided = None
        self._run_state.one_thread = self._together(lambda: choice.decide(self._exchange.share))
        if self._run_state.one_thread:
            choice.apply()
            self._write("threads", threads=1)

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
                loss = loss.detach() if differ else self._exchange.mean(loss.detach(), float(self._examples))
            first = "loss" not in step.recorded
            step.recorded.setdefault("loss", loss)
            self._nan_guard.check_closure(float(loss), first=first)
            return loss

        step.closure = evaluate
        with step:
            pass
        return torch.as_tensor(step.recorded.get("loss", math.nan))  # none if it was given up at once

    def refresh(self) -> None:
        """All workers have the newest parameters after every step."""

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            self._averaging.append(stack)
            try:
                if self._exchange.replicas_differ:
                    self._together(lambda: self._enter_averaged(stack))
                yield
            finally:
                self._averaging.remove(stack)

    def _enter_averaged(self, stack: contextlib.ExitStack) -> None:
        stack.close()  # an average with workers of which one has died
        stack.enter_context(self._exchange.averaged())

    def _batches(self, source: Any, epochs: int | None, **options: Any) -> Iterator[Any]:
        def feed() -> Feed:
            return make_feed(
                source,
                rank=self._part[0],
                world_size=self._part[1],
                several=self._several,
                seed=self.seed,
                seeded_fetch=self._seeded,
                largest=lambda number: self._together(lambda: self._exchange.largest(number)),
                **options,
            )

        return self._data.batches(feed, epochs)

    def _mean(self, value: Tensor, weight: float) -> Tensor:
        return self._together(lambda: self._exchange.mean(value, weight))

    # Saving and telling -----------------------------------------------------------------------------------

    def save(self, path: str | Path | None = None) -> Path | None:
        if self._current is not None or self._accumulating:
            raise UsageError(
                f"step {self.steps}: save() was called inside a step or between accumulating ones; "
                "call it after the step that updates the parameters"
            )
        self._check_own_parameters("save() was called")
        self._run_state.check_parameters()
        replicas: list[Any] = []
        if self._exchange.replicas_differ or self._codec is not None:
            replicas = self._together(lambda: self._exchange.gather(self._run_state.replica(common=False)))
        with self.averaged():
            return self._run_state.save(self._position(), path, replicas)

    @property
    def _saves(self) -> bool:
        """Whether the run has a directory, on worker 0."""
        return self._run_path is not None

    def _to_be_saved(self) -> bool:
        """Whether the run has no checkpoint of this step yet, and should have one."""
        return self._saves and self._run_state.saved_at != self.steps

    def _write(self, event: str, /, **values: Any) -> None:
        if self.run is not None and self.run.metrics is not None:
            values = {"worker": self.rank, "step": self.steps, "epoch": self.epoch, **values}
            self.run.metrics.write(event, **values)

    def _release(self) -> None:
        try:
            if not self._failed or self._asked_to_leave:
                self._write_lives("left", self._members, dead=False)
            self._run_state.close()
        finally:
            if self._request is not None:
                self._request.leave()
            if self._threads is not None:
                self._threads.close()
            self._exchange.close()
            if self._forming is not None:
                self._forming.leave(ended_well=not self._failed)

    def _end_well(self) -> None:
        if self._accumulating:
            self._accumulating = False
            logger.warning(
                "worker %d: what was accumulated since step %d was not used; end with a step without accumulate=True",
                self.rank,
                self.steps,
            )
        if self._data.owed and self.rank == 0:
            logger.warning(
                "%d samples that a worker had when it died were not used again: no epoch followed", len(self._data.owed)
            )
        if self._to_be_saved():
            self.save()
        self._conclude_exchange()
        while True:
            if self.run is not None and self._to_be_saved():  # worker 0 has died while it saved
                self._run_state.save(self._position())
            if self._confirm_end():
                return

    def _conclude_exchange(self) -> None:
        if not self._exchange.replicas_differ:
            return
        while True:
            try:
                self._exchange.conclude()
                self._operations += 1
                self._data.exchanged()
                return
            except LostContactError as lost:
                if self._recover(lost, "end") != "again":
                    return

    def _confirm_end(self) -> bool:
        """Wait until no worker needs this one any more; return False if one has died meanwhile."""
        if self._forming is None:
            return True
        try:
            self._exchange.confirm()
        except LostContactError as lost:
            if not self._forming.some_left():  # else all have come here
                return self._recover(lost, "other") != "again"
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self._request is not None and self._request.asked:
            raise KeyboardInterrupt("asked to stop after the last step")

    # One step ---------------------------------------------------------------------------------------------

    def _check_own_parameters(self, what: str) -> None:
        """Raise inside a block of ``averaged()``, where the model has not this worker's own parameters."""
        if self._averaging and self._exchange.replicas_differ:
            raise UsageError(
                f"step {self.steps}: {what} inside a block of session.averaged(), where the model has the parameters "
                "of all workers together; leave the block first"
            )

    def _begin(self, step: Step) -> None:
        self._check_not_inside()
        self._check_own_parameters("a step was opened")
        if not self._data.under_way:  # else they were let in before the batch
            self._let_others_in()
        if self._data.outdated:
            self._begin_in_vain(step)
        else:
            self._begin_block(step)
        if self._undecided is not None:
            self._undecided.begin()
        if self._injected_delays is not None:
            time.sleep(self._injected_delays.of_step(self._blocks))

    def _begin_in_vain(self, step: Step) -> None:
        """Begin a block on a batch that comes again, since a worker has died: nothing comes of it."""
        if self._accumulating:
            self._abandon_update()
        self._begin_update(keep_buffers=True)
        step.cancelled = True
        self._enter(step, fresh=True)

    def _begin_block(self, step: Step) -> None:
        fresh = not self._accumulating
        if fresh:
            self._first_block = self._blocks
            self._kept = self._exchange.kept_state() if self._exchange.replicas_differ else None
            self._data.begin_update()
        self._data.take()
        if self._seeded:
            seed_streams(derive_seed(self.seed, self.rank, "step", self._blocks))
        self._blocks += 1
        if fresh:
            self._begin_update(keep_buffers=self._forming is not None)
            self._num_bytes_before, self._waited_before = self._exchange.num_bytes, self._exchange.waited_seconds
        own, total = self._count_examples(step)
        try:
            if step.accumulate:
                self._exchange.accumulate(examples=own, total=total)
            elif step.closure is None:
                self._arm(step, own, total)
        except LostContactError as lost:
            self._give_up(step, lost)
            step.cancelled = True  # the block cannot be left out; what comes of it is not used
            self._nan_guard.remember_buffers(self._train_state.model, always=True)
        self._enter(step, fresh=fresh)

    def _arm(self, step: Step, examples: int, total: int | None) -> None:
        # Blocks and updates together: a worker that has failed in a block, or skipped an update, is found out.
        tag = 37 * self._blocks + self.steps
        self._exchange.begin(BackwardPass(examples, total, lambda: self._loss_of(step), self._asked_to_stop, tag))

    def _end(self, step: Step, error: BaseException | None) -> bool:
        self._current = None
        if self._undecided is not None:
            self._undecided.end(failed=error is not None)
        self._accumulating = step.accumulate and error is None and not step.cancelled
        if step.cancelled and (error is None or isinstance(error, LostContactError)):
            self._note_thrown_away()
            self._undo_block()
            return True
        if isinstance(error, LostContactError) and self._forming is not None:
            self._note_thrown_away()
            self._give_up(step, error)
            return True
        if error is not None:
            self._exchange.release(failed=True)
            return False
        self._conclude(step)
        return False

    def _conclude(self, step: Step) -> None:
        try:
            before = time.perf_counter()
            outcome = self._exchange.finish() if not step.accumulate and step.closure is None else None
            self._hear_others(outcome)
            if self._clock is not None:
                ended = outcome.backward_ended if outcome is not None else before
                self._clock.computed(ended=ended if self.world_size > 1 else None)
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
        except LostContactError as lost:
            self._note_thrown_away()
            self._give_up(step, lost)
            return
        if self._clock is not None:
            self._clock.optimized()
        self.steps += 1
        self._data.use()
        if not self._exchange_update():
            self._after_update()
            return
        self._num_bytes += self.world_size * (self._exchange.num_bytes - self._num_bytes_before)
        if self._clock is not None:
            self._take_times(self._clock, outcome)
        if self.run is not None:
            self._log(step, outcome, rate)
        self._after_update()

    def _take_times(self, clock: StepClock, outcome: Outcome | None) -> None:
        """Have the times of an update that is made and exchanged."""
        if self._exchange.replicas_differ:
            clock.exchanged()
        if outcome is not None:
            waited = outcome.waited_seconds[self.rank]
        else:
            waited = max(0.0, self._exchange.waited_seconds - self._waited_before)
        self.timing = clock.updated(waited)
        if self._timeline is not None:
            self._timeline.add(self.steps - 1, clock.spans(waited))

    def _exchange_update(self) -> bool:
        while True:
            kept = self._exchange.kept_state() if self._exchange.replicas_differ else None
            try:
                self._stopping = self._exchange.updated(self._progress()) or self._stopping
                break
            except LostContactError as lost:
                if self._recover(lost, "exchange", kept) == "copied":
                    return False
        if self._exchange.exchanges:
            self._operations += 1
            self._data.exchanged()
        elif (lag := self._exchange.lag()) is not None:
            self._data.exchanged(but=lag)
        return True

    def _after_update(self) -> None:
        self._exchange.release()  # a backward pass between steps is the user's own
        if self._take_part_after is not None:
            self._take_part()
        if self._undecided is not None:
            self._decide_on_threads(self._undecided)
        if self._saves and self._save_every is not None and self.steps % self._save_every == 0:
            self.save()
        if self._stopping or (self.world_size == 1 and self._asked_to_stop()):
            self._stop()

    def _give_up(self, step: Step, lost: LostContactError) -> None:
        """A worker has died in this step: go on from its start, or from its end if others have made the update."""
        if self._forming is None:
            raise lost
        self._abandon_update()
        after = self._recover(lost, "step", self._kept)
        step.cancelled = after == "again"
        if after == "exchange":
            self._exchange_update()
        if after != "again":
            self._after_update()

    def _note_thrown_away(self) -> None:
        if self._timeline is not None and self._clock is not None:
            self._timeline.add(self.steps, self._clock.thrown_away())

    def _abandon_update(self) -> None:
        self._exchange.release(failed=True)
        self._undo_block()
        self._accumulating = False
        self._blocks = self._first_block
        self._data.give_up()

    def _undo_block(self) -> None:
        """Leave the model as it was before the update."""
        self._train_state.clear_gradients()
        self._nan_guard.restore_buffers(self._train_state.model)
        if self._before_closure is not None:
            self._train_state.load_state_dict(self._before_closure)
            self._before_closure = None

    def _progress(self) -> Progress:
        rate = self._train_state.highest_rate()
        self._highest_rate = max(self._highest_rate, rate)
        self._decayed = self._decayed or rate < self._highest_rate
        return Progress(self.steps, self.epoch, rate, self._decayed)

    def _update(self, step: Step) -> None:
        if step.closure is not None and self._forming is not None:
            self._before_closure = copy.deepcopy(self._train_state.state_dict())
        try:
            self._train_state.update(step.closure, step=self._exchange.step)
            self._before_closure = None
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
                values["examples"] = self.world_size * self._examples  # of all workers, if theirs are as many
            values.update(self._exchange.counts())
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
    device = device_of(request.train_state.model)
    seat = None
    if request.group is None and isinstance(request.policy, PeersPolicy):
        seat = take_seat(read_world(), request.assignment, device)
    # Before others are waited for: then one that never joins is found out.
    report("joined", survives=seat is not None)
    if seat is None:
        peers = find_peers(device, request.policy, group=request.group, rank_and_size=read_rank_and_size())
        return _join(request, kind, peers, None)
    check_processes(request.policy, seat.workers)
    forming = Forming(seat, device)
    while True:
        try:
            return _join(request, kind, forming.form(Status()), forming)
        except LostContactError as lost:
            forming.await_death(lost)
        except RunOverError as error:
            report("left")
            raise SystemExit(0) from error


def _join(request: JoinRequest, kind: type[PeersSession], peers: Peers | None, forming: Forming | None) -> PeersSession:
    """Begin the run with all ``peers``, or join those of them that have begun it."""
    request, replay = _replayed(request)
    model, run = request.train_state.model, request.run
    late = forming is not None and forming.formation.source is not None
    exchange = Alone() if late else begin_exchange(model, request.policy, peers, request.codec)
    opened = session = None
    try:
        if run is not None and exchange.rank == 0 and not late:
            opened = open_run(run, request.resume, request.keep)
        session = kind(
            request.train_state,
            policy=request.policy,
            codec=request.codec,
            exchange=exchange,
            forming=forming,
            clock=StepClock(request.model) if run is not None or peers is not None else None,
            seed=request.seed,
            run=opened,
            save_every=request.save_every,
            keep=request.keep,
            log_every=request.log_every,
            on_nan=request.on_nan,
        )
        if late:
            assert peers is not None
            session.start_late(peers)
        else:
            session.start(run, request.resume, request.config)
            if exchange.records:
                session.record_run(replay)
        session.keep_timeline()
        if (assignment := request.assignment) is not None:
            if assignment.delay is not None:
                session.inject_delays(*assignment.delay)
            if assignment.threads is not None and assignment.threads > 1:
                session.choose_threads(assignment.threads)
        if run is not None and supervised():
            session.hear_stops(OF_SESSIONS)
    except BaseException:
        if session is not None:
            session.abandon()
        else:
            exchange.close()
            if opened is not None:
                opened.close()
        raise
    return session


def _replayed(request: JoinRequest) -> tuple[JoinRequest, Path | None]:
    """The request that replays a run, and the run's directory, if that is what the process was started for."""
    order = request.assignment.replay if request.assignment is not None else None
    if order is None or order.scratch is None or request.run is None:
        return request, None
    recorded = Path(order.trace).parent
    if request.run.absolute() != recorded:
        return request, None
    return replace(request, run=Path(order.scratch), resume=recorded / START), recorded
