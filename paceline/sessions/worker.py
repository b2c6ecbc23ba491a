"""A worker's session under a server policy: the server hands out steps, and the worker pushes their gradients."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.feed import Fetched, Indexed, count_examples, resolve
from paceline.data.numbered import NumberedBatches
from paceline.data.sampler import ShardedSampler
from paceline.delays.injected import InjectedDelays
from paceline.errors import UsageError
from paceline.launch.environment import ServerAssignment, read_world
from paceline.peers.tensors import averaged_dtype
from paceline.policies import Policy
from paceline.policies.messages import PushKind
from paceline.record.fingerprints import checksum_of
from paceline.record.metrics import as_number
from paceline.record.timeline import Kind
from paceline.seeding import derive_seed, seed_streams
from paceline.server.cancellation import Cancellation, StepCancelled
from paceline.server.client import Client
from paceline.server.demand import NEWEST_PARAMETERS, OWN_DATA, Demand
from paceline.server.local_steps import make_local_steps
from paceline.server.part_sum import PartSum
from paceline.sessions.nan_guard import OnNaN
from paceline.sessions.session import Session, Step
from paceline.sessions.timing import Span, StepClock, WorkerTimeline
from paceline.train_state import TrainState
from paceline.transport.listening import sealed_to
from paceline.transport.messages import BatchMessage, Finished, Go

logger = logging.getLogger("paceline")


class _Phase(Enum):
    """What this worker expects of the server."""

    NOTHING_ASKED = auto()
    STEP_COMES = auto()  # after a request, a push, a skip or a cancel: the server will send one
    STEP_HELD = auto()  # the server has sent one, which is not done yet


class WorkerSession(Session):
    """One worker's part in a run with a server; made by ``join()``.

    ``steps`` is the version of the parameters, the number of commits in them. A cancelled step ends its block early and
    changes nothing; ``step.cancelled`` is true then.
    """

    in_step = False
    _clock: StepClock
    _go: Go  # the last step received; valid in the phase STEP_HELD only

    def __init__(
        self,
        train_state: TrainState,
        *,
        model: nn.Module,
        policy: Policy,
        client: Client,
        injected_delays: InjectedDelays | None,
        on_nan: OnNaN,
        timeline: WorkerTimeline | None = None,
    ) -> None:
        welcome = client.welcome
        super().__init__(
            train_state,
            policy=policy,
            rank=client.rank,
            world_size=welcome.world_size,
            seed=welcome.seed,
            run=None,
            clock=StepClock(model),
            on_nan=on_nan,
        )
        self._client, self._injected_delays, self._timeline = client, injected_delays, timeline
        self._cancellation = Cancellation(model, client.cancelled)
        self._data.epoch = welcome.epoch
        self._phase = _Phase.NOTHING_ASKED
        self._demand = OWN_DATA  # what steps are for
        self._asked: Demand | None = None  # what a step was asked for last
        self._num_cancelled = 0  # steps of this worker
        self._waited = self._copied = 0.0  # seconds before the present step: for the server, and to have the parameters
        self._last_block: Step | None = None  # of those that were not cancelled
        self._welcome = welcome  # another one comes when the worker joins again
        self._local = make_local_steps(PushKind(welcome.kind), train_state, momentum=welcome.local_momentum)
        self._parts = PartSum(train_state.model) if welcome.coded else None
        self._part: Go | BatchMessage | None = None  # the batch of the next block, if there are several of a round
        self._means = 0  # in this epoch
        self._sampler: ShardedSampler | None = None  # of the data that the server knows of
        self._data_checksum: int | None = None
        self._told_of_options = False
        # Of each group, as join() was given them; None: nobody looks any more.
        looks = self.rank == 0 and self._local is None
        self._settings = [*map(_settings_of, _groups_of(train_state))] if looks else None
        self.steps = welcome.version

    # The loop ---------------------------------------------------------------------------------------------

    def _batches(self, source: Any, epochs: int | None, **options: Any) -> Iterator[Any]:
        found = resolve(source, open_loaders=True, **options)
        end = self.epoch + 1 if epochs is None else epochs
        if not isinstance(found, Indexed):
            self._refuse_own_data()
            return self._own_batches(found, end)
        self._tell_of_options(found.options)
        sampler = ShardedSampler(
            len(found.dataset), found.batch_size, seed=self.seed, shuffle=found.shuffle, last=found.last
        )
        self._check_same(sampler)
        batches = NumberedBatches(found.dataset, sampler, found.options.get("collate_fn"))
        checksum = self._checksum(batches) if self.rank == 0 else 0  # one worker's is enough
        self._client.describe(sampler.num_samples, sampler.batch_size, sampler.last, sampler.shuffle, checksum)
        return self._handed_out(batches, end)

    def _check_same(self, sampler: ShardedSampler) -> None:
        """Raise if the batches are of other data than those of the server."""
        self._sampler = self._sampler or sampler
        if sampler != self._sampler:
            raise UsageError(
                f"step {self.steps}: under {self.policy} the batches of a session are those of one data set, of which "
                f"the server says who takes which; first it had {self._sampler.num_samples} samples in batches of "
                f"{self._sampler.batch_size}, now {sampler.num_samples} in batches of {sampler.batch_size}. For other "
                "data, such as an evaluation's, iterate a plain DataLoader"
            )

    def _tell_of_options(self, options: Mapping[str, Any]) -> None:
        """Warn once about options of a loader that have no effect."""
        idle = [f"{name}={value}" for name, value in sorted(options.items()) if value and name != "collate_fn"]
        if idle and self.rank == 0 and not self._told_of_options:
            self._told_of_options = True
            logger.warning(
                "%s %s no effect under %s: the server says which batch comes next, and a worker fetches it itself, in "
                "its own process; leave %s out",
                ", ".join(idle),
                "has" if len(idle) == 1 else "have",
                self.policy,
                "it" if len(idle) == 1 else "them",
            )

    def _checksum(self, batches: NumberedBatches) -> int:
        """The checksum of the first batch, computed once, for a replay to compare its data."""
        if self._data_checksum is None:
            self._data_checksum = checksum_of(batches.fetch(0, 0))
        return self._data_checksum

    def _handed_out(self, batches: NumberedBatches, end: int) -> Iterator[Any]:
        self._demand = Demand(end)
        try:
            while (batch := self._next_batch()) is not None:
                epoch, number = batch
                self._data.epoch = max(self._data.epoch, epoch)  # after a loop that was broken off, its rest comes
                data, examples = batches.fetch(epoch, number)
                self._data.batch, self._data.handed_out = Fetched(data, examples, None, 0), True
                yield data
        finally:
            self._demand = OWN_DATA
            if self._data.batch is not None:  # no step was made of it: the server takes it back
                self._data.batch, self._phase = None, _Phase.NOTHING_ASKED
                self._undo_blocks()
        self._begin_epoch(end)

    def _next_batch(self) -> tuple[int, int] | None:
        """The batch for the next block, or None if there are no more."""
        if self._phase is _Phase.STEP_HELD and self._under_way and self._asked != self._demand:
            self._push_rest()  # of a loop that was broken off
        elif self._phase is _Phase.STEP_HELD and self._parts_made and self._data.batch is not None:
            self._skip()  # no block was made of a part
        elif self._phase is _Phase.STEP_HELD and self._parts_made:
            self._part = self._more()
            if self._part is not None:
                return self._part.epoch, self._part.batch
            self._give_up()
        elif self._phase is _Phase.STEP_HELD and self._under_way:
            more = self._more()
            if more is not None and more.batch >= 0:
                return more.epoch, more.batch
            if more is None:
                self._give_up()
            else:
                self._push_rest()
        elif self._phase is _Phase.STEP_HELD:  # no step was made of it
            self._client.skip()
            self._phase = _Phase.STEP_COMES
        if not self._have_step():
            return None
        self._part = self._go
        return self._go.epoch, self._go.batch

    def _more(self) -> BatchMessage | None:
        began = time.perf_counter()
        more = self._client.more()
        self._tell(Span(Kind.WAITING, began, time.perf_counter() - began))
        return more

    def _tell(self, *spans: Span) -> None:
        """Put what this worker has done into its timeline."""
        if self._timeline is not None:
            self._timeline.add(self.steps, spans)

    def _own_batches(self, source: Iterable[Any], end: int) -> Iterator[Any]:
        of_step: list[Any] = []  # batches of the present step
        while self.epoch < end:
            set_epoch = getattr(getattr(source, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
            for data in source:
                yield from self._until_used([data], of_step)
            while self.epoch + 1 == end and self._under_way and not self._push_rest():
                again, of_step = of_step, []
                yield from self._until_used(again, of_step)
            self._begin_epoch(self.epoch + 1)

    def _until_used(self, waiting: list[Any], of_step: list[Any]) -> Iterator[Any]:
        """Iterate over the worker's own batches; those of a cancelled step come again."""
        while waiting:
            data = waiting.pop(0)
            of_step.append(data)
            cancelled_before = self._num_cancelled
            self._data.batch, self._data.handed_out = Fetched(data, count_examples(data), None, 0), True
            yield data
            if self._num_cancelled > cancelled_before:
                waiting, of_step[:] = of_step + waiting, []
            elif not self._under_way:
                of_step.clear()

    def _begin_epoch(self, epoch: int) -> None:
        self._data.epoch, self._data.batch = epoch, None
        self._means = 0

    def minimize(self, closure: Callable[[], Tensor], *, examples: int | None = None) -> Tensor:
        raise UsageError(
            f"minimize(closure) evaluates a loss several times an update, and under {self.policy} the server "
            "updates, which has only gradients; use session.step() with another optimizer"
        )

    def averaged(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def refresh(self) -> None:
        if self._current is not None:
            raise UsageError(f"step {self.steps}: refresh() was called inside a step; call it after the block")
        self._refuse_between_parts("refresh()")
        if self._accumulating or (self._data.batch is not None and self._demand != OWN_DATA):
            raise UsageError(
                f"step {self.steps}: refresh() was called between a batch and its step, or between accumulating ones; "
                "call it after the step that updates the parameters"
            )
        if self._under_way:
            self._push_rest()
        self._phase = _Phase.NOTHING_ASKED  # a step that comes is given up
        self._client.ask(NEWEST_PARAMETERS)
        self.steps = self._client.next_step(NEWEST_PARAMETERS).version

    def _mean(self, value: Tensor, weight: float) -> Tensor:
        self._refuse_between_parts("mean()")
        self._means += 1
        values = tuple(value.reshape(-1).double().tolist())
        averaged = self._client.mean(self.epoch, f"{self.epoch}/{self._means}", weight, values)
        return torch.tensor(averaged, dtype=torch.float64).reshape(value.shape).to(value.device, averaged_dtype(value))

    def _refuse_own_data(self) -> None:
        if self._parts is not None:
            raise UsageError(
                f"step {self.steps}: under {self.policy} several workers compute the same batches, so the server has "
                "to hand them out; take them from session.batches(dataset, batch_size), with a map-style data set"
            )

    def _refuse_between_parts(self, what: str) -> None:
        if self._parts_made and self._demand == OWN_DATA:
            self._push_rest()  # of a loop that was broken off
        if self._parts_made:
            raise UsageError(
                f"step {self.steps}: {what} was called between two batches of one push, of which a worker computes "
                f"several under {self.policy}; call it after the loop over the batches of an epoch"
            )

    def save(self, path: str | Path | None = None) -> Path | None:
        if self._current is not None:
            raise UsageError(f"step {self.steps}: save() was called inside a step; call it after the block")
        return Path(self._client.save(str(path or ""))) if self.rank == 0 else None

    def _write(self, event: str, /, **values: Any) -> None:
        self._client.record(event, {name: as_number(value) for name, value in values.items()})

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """Do nothing: a signal stops the server, and its workers end with it."""

    def _end_well(self) -> None:
        """Push what local steps have changed; a worker that has asked for no step reads the parameters."""
        if self._local_steps_made:
            self._push_rest()
        if self._asked is None:
            self.refresh()

    def _release(self) -> None:
        if self._accumulating and not self._failed:
            logger.warning(
                "worker %d: %d accumulated blocks were not pushed; end with a step without accumulate=True",
                self.rank,
                self._blocks,
            )
        self._cancellation.close()
        self._client.leave(failed=self._failed)

    # One step ---------------------------------------------------------------------------------------------

    def _have_step(self) -> bool:
        """Wait until there is a step to make; False if the server has no more batches."""
        if self._local_steps_made:
            self._push_rest()
        if self._phase is not _Phase.STEP_COMES or self._asked != self._demand:
            self._client.ask(self._demand)
            self._asked = self._demand
        began = time.perf_counter()
        answer = self._client.next_step(self._demand)
        ended = time.perf_counter()
        self._copied = self._client.read_seconds
        self._waited = max(0.0, ended - began - self._copied)
        self._tell(Span(Kind.WAITING, began, self._waited), Span(Kind.EXCHANGING, ended - self._copied, self._copied))
        self.steps = answer.version
        if isinstance(answer, Finished):
            self._phase = _Phase.NOTHING_ASKED
            return False
        assert answer.fresh or answer.doomed or self._local is None, "local steps have changed the parameters"
        self._go, self._phase = answer, _Phase.STEP_HELD
        if self._local is not None:
            if self._client.welcome is not self._welcome:
                self._local.forget()
                self._welcome = self._client.welcome
            self._local.answered(self._client.differences)
        return True

    def _begin(self, step: Step) -> None:
        self._check_not_inside()
        if self._parts is not None:
            self._check_part(step)
        if self._phase is not _Phase.STEP_HELD or self._asked != self._demand:
            has_step = self._have_step()
            assert has_step, "the server has steps without end for those who have data of their own"
        fresh, computes = not self._under_way, not self._accumulating
        if self._local is not None and computes:
            self._local.begin(self._client.version)
        if fresh:
            self._look_at_settings()
            self._blocks = 0
            self._begin_update(keep_buffers=True)
        elif computes:
            self._train_state.clear_gradients()
        seed_streams(self._block_seed())
        self._blocks += 1
        self._count_examples(step)
        self._enter(step, fresh=fresh)
        self._cancellation.arm(self._pause if computes and self._injected_delays is not None else None)

    def _block_seed(self) -> int:
        """The seed of a block's random streams: of this worker's step, or of a batch that others compute too."""
        if self._parts is None:
            return derive_seed(self.seed, self.rank, "step", self._go.step, self._blocks)
        assert self._part is not None
        return derive_seed(self.seed, "part", self._part.epoch, self._part.batch)

    def _check_part(self, step: Step) -> None:
        """Raise if a block cannot be a part of a round."""
        batch = self._data.batch
        if self._demand == OWN_DATA:
            self._refuse_own_data()
        if batch is None:
            raise UsageError(
                f"step {self.steps}: a second step was made of one batch, and under {self.policy} each batch has one"
            )
        if step.accumulate:
            raise UsageError(
                f"step {self.steps}: accumulate=True cannot be combined with {self.policy}, under which a push is "
                "already a sum over several batches; leave it out"
            )
        if step.examples not in (None, batch.examples):
            raise UsageError(
                f"step {self.steps}: examples={step.examples} for a batch of {batch.examples}, and under {self.policy} "
                "the server weights each batch by its size; leave examples out"
            )

    def _look_at_settings(self) -> None:
        """Warn once, on worker 0, if the script changes its optimizer's options, which have no effect here."""
        if self._settings is None:
            return
        for group, settings in zip(_groups_of(self._train_state), self._settings, strict=False):
            for name, before in settings.items():
                if group.get(name) != before:
                    self._settings = None
                    logger.warning(
                        "step %d: %s of the optimizer was changed from %s to %s, which has no effect under %s: the "
                        "server updates the parameters, with its own optimizer. Give the scheduler to "
                        "join(scheduler=...), and do not step it",
                        self.steps,
                        name,
                        before,
                        group.get(name),
                        self.policy,
                    )
                    return

    def _pause(self) -> None:
        assert self._injected_delays is not None
        self._client.pause(self._injected_delays.of_step(self._go.step, self._blocks - 1))

    def _end(self, step: Step, error: BaseException | None) -> bool:
        self._current = None
        self._cancellation.disarm()
        self._data.batch = None
        if error is not None and not isinstance(error, StepCancelled):
            self._accumulating = False
            return False
        if error is not None or self._client.cancelled():
            step.cancelled = True
            self._give_up()
            return True
        self._accumulating = step.accumulate
        self._clock.computed()
        self._last_block = step
        if step.accumulate:
            self._remember_bad_loss(step)
        else:
            self._finish(step)
        return False

    def _give_up(self) -> None:
        """Undo the present step, which was cancelled."""
        self._tell(*self._clock.thrown_away())
        self._accumulating = False
        self._undo_blocks()
        self._train_state.clear_gradients()
        self._nan_guard.restore_buffers(self._train_state.model)
        self._phase = _Phase.STEP_COMES
        self._num_cancelled += 1

    @property
    def _local_steps_made(self) -> int:
        """Since the last push."""
        return 0 if self._local is None else self._local.made

    @property
    def _under_way(self) -> bool:
        """Whether a step has had blocks, and needs more before it is pushed."""
        return self._accumulating or self._local_steps_made > 0 or self._parts_made > 0

    @property
    def _parts_made(self) -> int:
        """The batches of a push that are computed, while others are not."""
        return 0 if self._parts is None else self._parts.made

    def _undo_blocks(self) -> None:
        """Forget the blocks since the last push."""
        if self._local is not None:
            self._local.undo()
        if self._parts is not None:
            self._parts.forget()

    def _push_rest(self) -> bool:
        """Push what there is of a step, as a smaller one; False if it was cancelled."""
        assert self._last_block is not None
        if self._parts_made:  # less than all parts is of no use
            self._phase = _Phase.NOTHING_ASKED
            self._undo_blocks()
            return False
        if self._client.cancelled():
            self._give_up()
            return False
        if self._accumulating:
            self._accumulating = False
            self._finish(self._last_block)
        if self._local_steps_made:
            self._push(self._loss_of(self._last_block))
        return True

    def _finish(self, step: Step) -> None:
        """The gradients of a step, of a local one, or of a part of a round are complete."""
        loss = self._loss_of(step)
        step.skipped = self._nan_guard.skips(loss, loss)
        if step.skipped:
            self._skip()
        elif self._parts is not None and not self._add_part(self._parts):
            self._remember_bad_loss(step)
        elif self._local is None:
            self._push(loss)
        else:
            self._local.step()
            self._clock.optimized()
            if self._local.made == self._welcome.local_steps:
                self._push(loss)

    def _add_part(self, parts: PartSum) -> bool:
        """Add the gradients of a batch to the sum; True if that is complete, and has their place."""
        assert self._part is not None
        parts.add(self._part.weight)
        if parts.made <= self._go.more:
            return False
        parts.end()
        return True

    def _skip(self) -> None:
        """Give the step up, and count its batches as used."""
        self._phase = _Phase.STEP_COMES
        self._undo_blocks()
        self._nan_guard.restore_buffers(self._train_state.model)
        self._client.skip()

    def _push(self, loss: float | None) -> None:
        if self._local is not None and not self._local.end():
            logger.warning(
                "step %d of worker %d: what its local steps have come to is not finite; it is left out",
                self._go.step,
                self.rank,
            )
            self._skip()
            return
        self._phase = _Phase.STEP_COMES
        with self._unscaled() if self._local is None else contextlib.nullcontext():
            self._clock.optimized()
            self._client.push(examples=self._examples, loss=loss, seconds=self._clock.computing)
        self._clock.exchanged()
        timing = self._clock.updated()
        self.timing = replace(timing, communication=timing.communication + self._copied, waited=self._waited)
        self._tell(*self._clock.spans())

    @contextlib.contextmanager
    def _unscaled(self) -> Iterator[None]:
        """Unscale the gradients, if there is a GradScaler: pushes are not scaled."""
        scaler = self._train_state.scaler
        if scaler is not None:
            for optimizer in self._train_state.optimizers:
                scaler.unscale_(optimizer)
        yield
        if scaler is not None:
            scaler.update()


def _groups_of(train_state: TrainState) -> list[dict[str, Any]]:
    return [group for optimizer in train_state.optimizers for group in optimizer.param_groups]


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, such as its rate, without tensors on a GPU: reading them would wait."""
    plain = {name: value for name, value in group.items() if isinstance(value, int | float | tuple)}
    tensors = {name: value for name, value in group.items() if isinstance(value, Tensor) and value.numel() == 1}
    return {**plain, **{name: value.clone() for name, value in tensors.items() if value.device.type == "cpu"}}


def join_as_worker(
    train_state: TrainState,
    model: nn.Module,
    assignment: ServerAssignment,
    *,
    policy: Policy,
    on_nan: OnNaN,
    run: Path | None = None,
) -> WorkerSession:
    """Join the run of the server that ``assignment`` names; the worker's timeline goes into the directory ``run``."""
    world = read_world()
    client = Client(
        train_state.model,
        address=assignment.address,
        token=bytes.fromhex(assignment.token),
        sealed=sealed_to(assignment.address, trusted=assignment.trusted),
        rank=world.rank if world is not None else -1,
        incarnation=assignment.incarnation,
        memory=assignment.memory_fd,
        shard_memories=assignment.shard_fds,
    )
    try:
        injected_delays = None
        if assignment.delay is not None:
            text, unit = assignment.delay
            injected_delays = InjectedDelays(text, unit, seed=client.welcome.seed, worker=client.rank)
        return WorkerSession(
            train_state,
            model=model,
            policy=policy,
            client=client,
            injected_delays=injected_delays,
            on_nan=on_nan,
            timeline=WorkerTimeline(run.absolute(), client.rank, assignment.incarnation) if run is not None else None,
        )
    except BaseException:
        client.leave(failed=True)
        raise
