"""The virtual cluster: a discrete-event simulation that drives server policies."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.delays.delay import Changed, Delay
from paceline.errors import UsageError
from paceline.policies import Policy, ServerPolicy
from paceline.policies.messages import (
    EXAMPLES,
    Actions,
    Cancel,
    Commit,
    Continue,
    Drop,
    Push,
    Send,
    Work,
    pushes_of,
)
from paceline.record.timeline import Kind
from paceline.seeding import derive_seed
from paceline.virtual.agenda import Agenda, Event, Numbers, StepEnds, Times
from paceline.virtual.network import Instant, Network
from paceline.virtual.tally import Tally

if TYPE_CHECKING:
    from paceline.virtual.recording import RunRecord

_DRAWN_AT_ONCE = 1024


class Workload(Protocol):
    """The computation of virtual workers, for simulations with real gradients."""

    def begin(self, workers: Sequence[int], version: int | None, work: Sequence[Work] = ()) -> None:
        """The workers begin a step on the newest parameters, of that version; None: on those they already have.

        ``work`` is that of each worker, if the policy has rounds of parts.
        """
        ...

    def end(self, worker: int, step: int) -> tuple[float, int]:
        """A worker's step has ended; return its loss and number of examples."""
        ...

    def pushed_bytes(self, worker: int) -> float | None:
        """The bytes of the worker's last push; None: those of every push."""
        ...

    def sent_bytes(self, workers: Sequence[int]) -> Times | None:
        """The bytes that each of the workers is sent with the step that it begins; None: all parameters."""
        ...

    def take(self, push: Push) -> None:
        """A push has come and is not dropped."""
        ...

    def cancel(self, workers: Sequence[int]) -> None:
        """The workers' steps are cancelled."""
        ...

    def commit(self, commit: Commit, at: float) -> int:
        """Update the parameters; return how many examples are in the commit."""
        ...

    def drop(self, push: Push) -> None:
        """A push is dropped."""
        ...


class Cluster:
    """Run a policy on virtual workers; ``delay`` gives the compute times, ``network`` those of messages.

    Cancels take effect at once. The policy hears of a failed worker ``notice`` seconds after the failure, as of one
    that left. The same seed gives the same run, bit for bit.
    """

    def __init__(
        self,
        policy: ServerPolicy,
        workers: int,
        delay: Delay,
        *,
        network: Network | None = None,
        work: Workload | None = None,
        examples: int = 1,
        notice: float = 10.0,
        seed: int = 0,
    ) -> None:
        self._policy, self._delay, self._work = policy, delay, work
        self.workers = workers
        self.network = network or Instant(0.0)
        self.tally = Tally()
        self.now = 0.0
        self.version = 0
        self.state = policy.begin(workers)
        delay.check_workers(workers)
        self.examples, self._notice = examples, notice  # of a mini-batch
        self._push_examples = examples * policy.local_steps
        self._round_parts = 0  # of the present round, if the policy has such
        self._random = np.random.Generator(np.random.PCG64(derive_seed(seed, "delays")))
        self._agenda = Agenda(workers)
        self._events: Iterator[Event] = iter(self._agenda)
        self._versions = np.zeros(workers, dtype=np.int64)
        self._began = np.zeros(workers)
        self._ends = np.zeros(workers)
        self._failed: dict[int, float] = {}  # since when
        self.record: RunRecord | None = None  # where to write what the workers do, if anybody asks
        self._drawn: list[float] = []
        self._start()

    def run(self, *, commits: int | None = None, seconds: float = math.inf, stop: Sequence[object] = ()) -> None:
        """Run the clock until it has made ``commits``, reached ``seconds``, or ``stop`` is not empty."""
        with _collector_paused() if self._work is None else contextlib.nullcontext():
            self._run(math.inf if commits is None else commits, seconds, stop)

    def _run(self, commits: float, seconds: float, stop: Sequence[object]) -> None:
        together = self._work is None and isinstance(self.network, Instant) and seconds == math.inf
        patience = math.inf if commits < math.inf else 1000 + 100 * self.workers  # events at one time
        still = 0
        while event := next(self._events, None):
            at, worker, batch = event
            if at > seconds:
                self.now = max(self.now, seconds)
                self._events = itertools.chain([event], self._events)  # for the next call of run
                return
            still = 0 if at > self.now else still + 1
            if still > patience:
                raise standing_still(self._policy, self._delay, at)
            self.now = at
            if batch.call is not None:
                batch.call(at)
            elif not (together and batch.alive and self._end_together(worker, batch)):
                self._end(worker, batch.step, batch.version, at)
            if self.version >= commits or stop:
                return
        raise UsageError(self._stalled())

    @property
    def computed(self) -> float:
        """Seconds that workers have computed, up to now."""
        return self.tally.computed - float(np.maximum(0.0, self._ends - self.now).sum())

    def mean_times(self) -> list[float]:
        """The mean compute time of a mini-batch on each worker."""
        return [self._delay.mean(worker) for worker in range(self.workers)]

    @property
    def dead(self) -> list[int]:
        """The workers that have failed."""
        return list(self._failed)

    @property
    def failed(self) -> float:
        """Seconds since their failure, summed over the failed workers."""
        return sum(self.now - at for at in self._failed.values())

    def _start(self) -> None:
        for worker in range(self.workers):
            self._policy.joined(self.state, worker, 0, 0.0)
        for worker in range(self.workers):
            self._carry_out(self._policy.asked(self.state, worker, 0.0), 0.0)

    def _end(self, worker: int, step: int, version: int, at: float) -> None:
        """A worker has ended its step and sends its gradient."""
        if self.record is not None:
            self.record.span(worker, Kind.COMPUTING, version, float(self._began[worker]), at)
        loss, examples = (None, self._push_examples) if self._work is None else self._work.end(worker, step)
        push = Push(worker, 0, step, version, examples, loss)
        arrives = self.network.push(at, None if self._work is None else self._work.pushed_bytes(worker))
        if arrives > at:
            seconds = float(self._ends[worker] - self._began[worker])
            self._agenda.call(arrives, functools.partial(self._arrive, push, seconds))
        else:
            self._carry_out(self._hear(push, at), at)

    def _hear(self, push: Push, at: float) -> Actions:
        actions = self._policy.pushed(self.state, push, at)
        if self._work is not None and not any(isinstance(action, Drop) for action in actions):
            self._work.take(push)
        return actions

    def _end_together(self, worker: int, batch: StepEnds) -> bool:
        """Pass the pushes of this worker and the next ones to the policy at once, as many as it takes unanswered."""
        room = self._policy.room(self.state)
        others = self._agenda.take(batch, room - 1) if room > 1 else []
        if others:
            pushes = pushes_of([worker, *others], batch.step, batch.version, self._push_examples)
            self.now = batch.times[batch.given - 1]
            self.network.bytes_in += len(pushes) * self.network.pushed
            self._carry_out(self._policy.pushed_together(self.state, pushes, self.now), self.now)
        return bool(others)

    def _arrive(self, push: Push, seconds: float, at: float) -> None:
        actions = self._hear(push, at)
        if any(isinstance(action, Drop) for action in actions):
            self.tally.thrown_away += seconds
        self._carry_out(actions, at)

    def _leave(self, worker: int, at: float) -> None:
        self._carry_out(self._policy.left(self.state, worker, at), at)

    def _carry_out(self, actions: Actions, at: float) -> None:
        for action in actions:
            if isinstance(action, Commit):
                self._commit(action, at)
            elif isinstance(action, Send):
                self._send(action, at)
            elif isinstance(action, Continue):
                self._continue(action.worker, action.step, at)
            elif isinstance(action, Cancel):
                self._cancel(action.workers, at)
            else:
                self.tally.dropped += 1
                if self._work is not None:
                    self._work.drop(action.push)

    def _commit(self, commit: Commit, at: float) -> None:
        before, self.version = self.version, self.version + 1
        if self._work is not None:
            examples = self._work.commit(commit, at)
        elif self._policy.coded:
            examples = self._round_parts * self.examples
        else:
            examples = sum(map(EXAMPLES, commit.pushes))
        self.tally.commit(commit.pushes, examples, before, at)
        if self.record is not None:
            self._tell(self.record, commit, examples, before, at)

    def _tell(self, record: RunRecord, commit: Commit, examples: int, before: int, at: float) -> None:
        losses = [(push.loss, push.examples) for push in commit.pushes if push.loss is not None]
        weight = sum(count for _, count in losses)
        record.committed(
            "commit",
            at,
            self.network.bytes_in + self.network.bytes_out,
            examples,
            workers=[push.worker for push in commit.pushes],
            staleness=[before - push.version for push in commit.pushes],
            loss=sum(loss * count for loss, count in losses) / weight if weight else None,
        )

    def _send(self, send: Send, at: float) -> None:
        workers, step, work = send
        if self._work is not None:
            # The batch of each depends on its rank alone, as on the live server.
            self._work.begin(sorted(workers) if self._policy.needs_all else workers, self.version, work)
        begin = self.network.send(at, len(workers), None if self._work is None else self._work.sent_bytes(workers))
        batches: int | Numbers = self._policy.local_steps
        if work:
            self._round_parts = work[0].num_parts
            batches = np.fromiter((len(each.parts) for each in work), np.int64, len(work))
        if len(workers) == 1:
            self._begin_one(workers[0], step, float(begin[0]), self.version, batches=int(np.max(batches)))
        else:
            self._begin(np.fromiter(workers, np.int64, len(workers)), step, begin, batches)

    def _continue(self, worker: int, step: int, at: float) -> None:
        if self._work is not None:
            self._work.begin((worker,), None)
        self._begin_one(worker, step, at, int(self._versions[worker]), batches=self._policy.local_steps)

    def _begin(self, workers: Numbers, step: int, begin: Times, batches: int | Numbers) -> None:
        """Begin the workers' step on the newest parameters, each at its own time and with so many batches."""
        ends = begin
        for batch in range(int(np.max(batches))):
            longer = ends + self._delay.sample(self._random, workers, ends)
            ends = longer if isinstance(batches, int) else np.where(batches > batch, longer, ends)
        self._versions[workers] = self.version
        self._began[workers] = begin
        self._ends[workers] = ends
        fine = np.isfinite(ends)
        if not fine.all():
            for worker in workers[~fine].tolist():
                self._fail(worker)
            workers, begin, ends = workers[fine], begin[fine], ends[fine]
        self.tally.computed += float((ends - begin).sum())
        if len(workers):
            self._agenda.begin(ends, workers, step, self.version)

    def _begin_one(self, worker: int, step: int, begin: float, version: int, *, batches: int) -> None:
        """The same for one worker, without the cost of arrays."""
        end = begin
        for _ in range(batches):
            end += self._draw_one(worker, end)
        self._versions[worker] = version
        self._began[worker] = begin
        self._ends[worker] = end
        if end < math.inf:
            self.tally.computed += end - begin
            self._agenda.begin_one(end, worker, step, version)
        else:
            self._fail(worker)

    def _draw_one(self, worker: int, at: float) -> float:
        if isinstance(self._delay, Changed):
            return float(self._delay.sample(self._random, np.array([worker]), at)[0])
        if not self._drawn:  # the distribution is the same for all workers and times, so draw many at once
            self._drawn = self._delay.sample(self._random, np.zeros(_DRAWN_AT_ONCE, dtype=np.int64)).tolist()
        return self._drawn.pop()

    def _fail(self, worker: int) -> None:
        """Record that a worker never ends the step that it begins; the policy hears of it later."""
        began = float(self._began[worker])
        self._ends[worker] = began
        if self._work is not None:
            self._work.cancel([worker])
        if worker not in self._failed:
            self._failed[worker] = at = max(self._delay.fails_at(worker), began)
            self.tally.computed += at - began
            self._agenda.call(at + self._notice, functools.partial(self._leave, worker))

    def _cancel(self, workers: tuple[int, ...], at: float) -> None:
        # Workers whose steps have ended are left out: their pushes are on the way, and will be dropped.
        running = self._agenda.cancel(np.fromiter(workers, np.int64, len(workers)))
        spent = np.maximum(0.0, at - self._began[running])
        self.tally.thrown_away += float(spent.sum())
        self.tally.computed -= float((self._ends[running] - self._began[running] - spent).sum())
        self.tally.cancelled += len(running)
        for worker in running.tolist() if self.record is not None else ():
            assert self.record is not None
            self.record.span(worker, Kind.CANCELLED, self.version, min(at, float(self._began[worker])), at)
        self._ends[running] = at
        if self._work is not None:
            self._work.cancel(running.tolist())

    def _stalled(self) -> str:
        waiting = f"{len(self.state.waiting)} of {self.workers} workers wait"
        return f"policy {self._policy} came to a standstill at {self.now:g} s, after {self.version} commits: {waiting}"


def standing_still(policy: Policy, delay: Delay, at: float) -> UsageError:
    """The error of a clock that no step moves."""
    return UsageError(
        f"policy {policy}: the clock stands still at {at:g} s, since steps under {delay} are too short to move it; "
        "give longer ones, as in --delays 1"
    )


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's cycle collector: pushes make no cycles, and it took a third of the time of large clusters."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
