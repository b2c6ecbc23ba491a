"""Going on without a worker that has died, and letting others join: what the session of peers does about it.

What workers do together is numbered. When one of them dies, the exchange that is under way fails on some or all of the
others. These form a new group. Some may have completed the exchange: those behind then copy all state from the
furthest, if it was an update, and need nothing if it was anything else, since that ends with a confirmation of all.
"""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.codecs import Codec
from paceline.errors import LostContactError
from paceline.launch.reports import report
from paceline.launch.roster import Doing, Member, Status
from paceline.peers.connect import make_exchange
from paceline.peers.exchange import Alone, Exchange, check_same_model
from paceline.peers.forming import Forming
from paceline.peers.group import Peers
from paceline.policies import Progress
from paceline.record.run import Run, checkpoints_of
from paceline.record.timeline import Kind
from paceline.sessions.run_state import Position, RunState
from paceline.sessions.session import Session
from paceline.sessions.timing import Span

logger = logging.getLogger("paceline")

T = TypeVar("T")

# After a new group has formed: repeat what failed; or go on, since all have done it; or go on from the state of another
# worker, which was copied; or exchange with that one the update that it has made.
Next = Literal["again", "go on", "copied", "exchange"]


class ReformingSession(Session):
    """A session whose workers may die and join; without ``forming`` the failure of an exchange ends it."""

    _exchange: Exchange
    _run_state: RunState

    def __init__(
        self,
        *args: Any,
        codec: Codec | None,
        forming: Forming | None,
        run_path: Path | None,
        keep: int,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._codec = codec
        self._coded: tuple[Mapping[str, Any], Mapping[str, Any]] = {}, {}  # kept and last state of the codec
        self._forming = forming
        self._run_path, self._keep = run_path, keep
        self._operations = 0  # exchanges done with all others
        self._part = self.rank, self.world_size  # of every step's batches
        # The steps after which it is that of the present group, and what is owed then.
        self._take_part_after: tuple[int, tuple[int, ...]] | None = None
        self._averaging: list[contextlib.ExitStack] = []  # what leaving the blocks of averaged() undoes
        self._stopping = False  # a worker was asked to stop, and all know it
        self._data.before_batch = self._let_others_in
        self._highest_rate, self._decayed = 0.0, False  # of the learning rates so far

    @abstractmethod
    def _progress(self) -> Progress:
        """How far the run has come."""

    @abstractmethod
    def _exchange_update(self) -> bool:
        """Exchange what is due after an update; return False if the state was copied from others, who had done so."""

    @abstractmethod
    def _abandon_update(self) -> None:
        """Leave the update under way as if it had not begun."""

    @abstractmethod
    def _after_update(self) -> None:
        """An update is made, and exchanged: do what is due after it."""

    def _position(self) -> Position:
        return Position(self.steps, self._blocks, self.seed, self._highest_rate, self._decayed)

    # When an exchange fails -------------------------------------------------------------------------------

    def _together(self, action: Callable[[], T]) -> T:
        """Do what all workers do together and changes no state of the run; with other workers again if one dies."""
        if self._forming is None:
            return action()
        if self._current is not None:  # the step is given up as a whole
            if self._current.cancelled:
                raise LostContactError("the step is given up, since another worker has died")
            return action()
        while True:
            done = False
            try:
                result = action()
                done = True
                self._exchange.confirm()
                break
            except LostContactError as lost:
                if self._accumulating and not self._exchange.replicas_differ:  # else what it has is its own
                    self._abandon_update()
                after = self._recover(lost, "other")
                if after == "again":
                    continue
                assert done, "who has gone on has the confirmation of all"
                if after == "exchange":
                    self._exchange_update()
                if after != "go on":
                    self._after_update()
                    return result
                break
        self._operations += 1
        return result

    def _recover(self, lost: LostContactError, doing: Doing, kept: Mapping[str, Any] | None = None) -> Next:
        """Go on with the workers that are left; return what to do now.

        ``kept`` is the state of the exchange before it began, if that is not its present one.
        """
        if self._forming is None:
            raise lost
        began = time.perf_counter()
        self._forming.await_death(lost)
        _forget_frames(lost)
        return self._regroup(doing, began, kept, failed=True)

    def _let_others_in(self) -> None:
        """Form a new group, if others wait to join: when the loop begins a turn, as a script that begins anew does."""
        if self._forming is None or self._accumulating:
            return
        if self._forming.is_due(self._operations, self._exchange.lead()):
            self._regroup("turn", time.perf_counter(), failed=False)
        elif self._forming.has_news():
            self._exchange.meet_soon()

    def _regroup(self, doing: Doing, began: float, kept: Mapping[str, Any] | None = None, *, failed: bool) -> Next:
        assert self._forming is not None
        before = self._forming.formation.members
        kept = self._exchange.kept_state() if kept is None else kept
        catches_up = self._exchange.catches_up
        if (coding := self._exchange.coding) is not None:
            self._coded = coding.kept_state(), coding.state_dict()
        self._exchange.close()
        self._exchange = Alone()
        self._run_state.go_on(self._exchange)
        in_hand = doing != "turn" and self._data.in_hand  # where a turn begins the loop is done with its last batch
        status = Status(self.steps, self._operations, doing, True, in_hand, self.epoch, catches_up)
        while True:
            try:
                peers = self._forming.form(status, failed=failed)
                self._go_on_with(peers, kept)
                break
            except LostContactError as lost:
                failed = True
                self._forming.await_death(lost)
                _forget_frames(lost)
        pause = time.perf_counter() - began
        if self._timeline is not None:
            self._timeline.add(self.steps, [Span(Kind.WAITING, began, pause)])
        self._tell(before, pause)
        formation = self._forming.formation
        if formation.copies(self.rank):
            return "exchange" if formation.furthest.doing == "exchange" else "copied"
        return "go on" if formation.is_behind(self.rank) else "again"

    # With the new group -----------------------------------------------------------------------------------

    def _go_on_with(self, peers: Peers, kept: Mapping[str, Any]) -> None:
        """Have the exchange and the state with which the members of a new group go on; all of them call it together."""
        assert self._forming is not None
        formation = self._forming.formation
        source = formation.source
        assert source is not None
        if peers.rank == source:
            # What a worker has learned since the last exchange is lost with it, or with the state that it had.
            staying = {member for rank, member in enumerate(formation.members) if not formation.copies(rank)}
            self._data.owe({*self._data.workers} - staying)
        if formation.newcomers:
            check_same_model(self._train_state.model, peers)
        exchange = make_exchange(self._train_state.model, self.policy, peers, self._codec)
        try:
            shared = {
                "owed": list(self._data.owed),
                "exchange": {name: kept[name] for name in exchange.common_state if name in kept},
                "run": self._state(kept) if any(map(formation.copies, range(peers.size))) else None,
            }
            shared = exchange.share(shared if peers.rank == source else None, source)
            # All save or none does, so they have to agree on what is saved already.
            saved_at = exchange.share(self._saved_at(formation.furthest.steps))
            if kept or not exchange.replicas_differ:  # else a newcomer, which copies all
                exchange.load_state_dict({**kept, **shared["exchange"]})
        except BaseException:
            exchange.close()
            raise
        self._exchange = exchange
        self._run_state.go_on(exchange)
        self._run_state.saved_at = saved_at
        self._nan_guard.each_skips = exchange.replicas_differ
        if formation.copies(peers.rank):
            self._copy(shared["run"])
        self._data.owed = owed = tuple(shared["owed"])
        self.rank, self.world_size, self.generation = peers.rank, peers.size, formation.number
        self._data.lose({*self._data.workers} - {*formation.members})
        self._take_part_after = formation.furthest.steps, owed
        self._take_part()
        if self.rank == 0 and self._run_path is not None and self.run is None:
            self.run = Run(self._run_path, resume=True, keep=self._keep)
            self._run_state.take_over(self.run, self.steps)
        self._prepare_codec()
        if exchange.coding is not None:
            # One that copies a later state has sent all of its part of it, or has just joined, and remembers nothing.
            exchange.coding.load_state_dict(self._coded[formation.copies(peers.rank)])
        self._exchange.started(self._progress())
        self._exchange.give_up(formation.furthest.steps)

    def _saved_at(self, steps: int) -> int | None:
        """The step of the newest checkpoint, as worker 0 knows it, of which others have made so many ``steps``."""
        if self.run is not None or self._run_path is None:
            return self._run_state.saved_at
        return steps if checkpoints_of(self._run_path).file(steps).exists() else None

    def _prepare_codec(self) -> None:
        """Let the codec's random numbers follow from the run's seed, and tell it what scales the gradients."""
        if self._exchange.coding is not None:
            self._exchange.coding.seed = self.seed
            self._exchange.coding.scaler = self._train_state.scaler

    def _take_part(self) -> None:
        """Take batches as a member of the new group, as soon as this worker has made the steps that others have made.

        Steps in which nothing is exchanged are not copied; so one that is behind makes them with batches of before.
        """
        assert self._forming is not None
        if self._take_part_after is not None and self.steps >= self._take_part_after[0]:
            self._data.owed = self._take_part_after[1]  # again: an epoch may have ended since
            self._take_part_after = None
            self._part = self.rank, self.world_size
            formation = self._forming.formation
            self._data.move(formation.members, in_hand=formation.in_hand, epoch=formation.furthest.epoch)

    def _state(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """All that another worker needs to go on from here."""
        return {
            **self._run_state.state(self._position()),
            "exchange": kept,
            "since": self._data.since_exchange(),
            "operations": self._operations,
            "stopping": self._stopping,
            "run_path": None if self._run_path is None else str(self._run_path),
        }

    def _copy(self, state: Mapping[str, Any]) -> None:
        """Have the state of another worker."""
        for stack in reversed(self._averaging):  # else leaving the blocks would put the parameters of before back
            stack.close()
        position = self._run_state.copy(state)
        self.steps, self._blocks, self.seed, self._highest_rate, self._decayed = position
        self._data.load_since_exchange(state["since"], lambda worker: worker and Member(*worker))
        self._operations, self._stopping = state["operations"], state["stopping"]
        self._run_path = None if state["run_path"] is None else Path(state["run_path"])

    def _tell(self, before: tuple[Member, ...], pause: float) -> None:
        """Tell the supervisor and the metrics who has died and joined."""
        self._write("re-formed", generation=self.generation, **self._tell_supervisor(before, pause))
        self._write_lives("left", [member for member in before if member not in self._members], dead=True)
        self._write_lives("joined", [member for member in self._members if member not in before], dead=None)

    def _tell_supervisor(self, before: tuple[Member, ...], pause: float) -> dict[str, Any]:
        """Tell the supervisor how the workers differ from those of ``before``, and return what it was told."""
        change = {
            "workers": self.world_size,
            "died": sorted({member.worker for member in before if member not in self._members}),
            "joined": sorted({member.worker for member in self._members if member not in before}),
            "pause": pause,
        }
        report("re-formed", step=self.steps, number=self.generation, **change)
        return change

    @property
    def _members(self) -> tuple[Member, ...]:
        """The workers that are in the run now; none if it has always been one alone."""
        if self._forming is not None:
            return self._forming.formation.members
        return tuple(map(Member, range(self.world_size))) if self.world_size > 1 else ()

    def _write_lives(self, event: str, members: Iterable[Member], *, dead: bool | None) -> None:
        """Tell the metrics of the workers that have joined, left or died."""
        for worker, incarnation in members:
            told = {} if dead is None else {"dead": dead}
            self._write(event, worker=worker, incarnation=incarnation, **told)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames of a failed call refer to: a Gloo group is left only when nothing refers to it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__
