"""A session's position in its data, and the iteration over the remaining batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

from paceline.data.feed import Feed, Fetched, Used
from paceline.errors import UsageError
from paceline.seeding import capture_streams, restore_streams


class BatchStream:
    """Hand out batches, remember which were used, and resume an epoch at a checkpoint's position.

    A batch counts as used when its step is done, or when the next batch is requested. So a checkpoint written after
    a step resumes after its batch, and one written before the step repeats it.

    Where ``workers`` may die, the batches that were used since the last exchange are remembered too. Those of an update
    that is given up are handed out again, and those of a worker that has died at the end of the epoch.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch: Fetched | None = None  # handed out and not used yet
        self.outdated = False  # the batch that was handed out comes again, perhaps shared out in another way
        self.handed_out = False  # any batch, in this process
        self.consumed = 0  # the feed's position after the last used batch
        self.owed: tuple[int, ...] = ()  # samples that this epoch takes once more at its end
        self.workers: tuple[Hashable, ...] = ()  # that may die, by rank; empty if none may
        self._at_start: dict[str, Any] | None = None  # the captured state that the present epoch's order depends on
        self._unit: str | None = None  # of the position
        self.under_way = False  # an iteration over batches
        self.before_batch: Callable[[], None] = lambda: None  # called when the loop asks for another one
        self._loaded = False
        self._feed: Feed | None = None  # the last one
        self._moved = False  # batches go on from another position, or for another rank
        self._in_vain = False  # the next batch is outdated when it is handed out
        self._since: list[Used] = []  # used since the last exchange
        self._updates = 0  # begun
        self._update: tuple[int, int, int] = (0, 0, 0)  # where the present update began: epoch, position, used batches
        self._taken: list[Fetched] = []  # in the present update, if the feed can only give them again
        self._given_up: list[Fetched] = []  # to be given again, unless others have made that update

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the unfinished epochs up to ``count``; the loop's body may call ``batches`` in each."""
        while self.epoch < count:
            before = self.epoch
            yield before
            if self.epoch == before:
                self._finish_epoch()

    def batches(self, make_feed: Callable[[], Feed], epochs: int | None) -> Iterator[Any]:
        """Iterate over the remaining batches up to the end of ``epochs``, or of the present epoch.

        ``make_feed`` is called now, and again when the workers have changed.
        """
        return self._batches(make_feed(), make_feed, epochs)

    def _batches(self, feed: Feed, make_feed: Callable[[], Feed], epochs: int | None) -> Iterator[Any]:
        if self.under_way:
            raise UsageError(
                "batches() is already under way in this session, and a checkpoint holds only one position; "
                "use a plain DataLoader for other data, such as evaluation"
            )
        self.under_way = True
        try:
            end = self.epoch + 1 if epochs is None else epochs
            self.before_batch()
            while self.epoch < end:
                if self._moved:
                    feed, self._moved = make_feed(), False
                self._feed = feed
                for batch in self._rest_of_epoch(feed):
                    self.handed_out = True
                    if self._in_vain:
                        feed.take_back([batch])
                    self.batch, self.outdated, self._in_vain = None if self._in_vain else batch, self._in_vain, False
                    yield batch.data
                    self.use()
                    self.before_batch()
                    if (self._moved or self.outdated) and feed.shared:
                        break
                else:
                    self._finish_epoch(feed)
        finally:
            self.under_way = False

    def use(self) -> None:
        """Count the batch that was handed out as used."""
        if self.batch is not None:
            if self.workers:
                total = self.batch.total
                self._since.append(Used(self.epoch, self.consumed, self.workers, self.owed, total, self._updates))
            self.consumed = self.batch.consumed
            self.batch = None

    # Workers that die and join ----------------------------------------------------------------------------

    def begin(self, workers: tuple[Hashable, ...]) -> None:
        """Begin with these workers, by rank, which may die; in a checkpoint they have only ranks."""
        self.workers = workers
        self.load_since_exchange(self.since_exchange(), lambda rank: None if rank is None else workers[rank])

    def begin_update(self) -> None:
        """The batch that was handed out is the first of an update."""
        self._updates += 1
        self._update = self.epoch, self.consumed, len(self._since)
        self._taken = []

    def take(self) -> None:
        """The batch that was handed out is part of the present update."""
        if self.workers and self.batch is not None and self._feed is not None and not self._feed.shared:
            self._taken.append(self.batch)

    def give_up(self) -> None:
        """Go back to where the present update began, as if its batches had not been handed out.

        Those of an epoch that has ended since then are owed by the present one.
        """
        epoch, position, used = self._update
        given_up, self._since = self._since[used:], self._since[:used]
        self.batch, self.outdated = None, self.batch is not None
        self.consumed = position if epoch == self.epoch else 0
        if self._feed is not None:
            ended = [each for each in given_up if each.epoch < self.epoch]
            self.owed += tuple(self._feed.samples_of(self.workers, ended))
        self._given_up = self._taken

    def exchanged(self, *, but: int = 0) -> None:
        """What all workers have learned so far is in the state of each, ``but`` for that of the last updates."""
        self._since = [used for used in self._since if used.update > self._updates - but]

    def owe(self, workers: Collection[Hashable]) -> None:
        """These workers have died: what they have learned since the last exchange is lost."""
        if self._feed is not None:
            self.owed += tuple(self._feed.samples_of(workers, self._since))
            self._since = [each._replace(workers=_without(each.workers, workers)) for each in self._since]

    def lose(self, workers: Collection[Hashable]) -> None:
        """What these workers would have learned in steps of which others know is owed already."""
        self.workers = _without(self.workers, workers)

    @property
    def in_hand(self) -> bool:
        """Whether the loop has a batch of which nothing comes, or will come if the workers change."""
        return self.outdated or (self.batch is not None and self._feed is not None and self._feed.shared)

    def move(self, workers: tuple[Hashable, ...], *, in_hand: bool, epoch: int) -> None:
        """Go on with these workers, by rank, of which the furthest is in ``epoch`` and may have a batch in hand.

        Nothing comes of such a batch. A worker that has not begun that turn of the loop then has one in vain too.
        What is owed comes in that epoch: a worker that was about to end the one before has no more batches of it.
        """
        self.workers, self._moved = workers, True
        if self._feed is not None:
            self._feed.take_back(self._given_up)
        self._given_up = []
        if self.in_hand:
            self.batch, self.outdated = None, True
        else:
            self._in_vain = in_hand
        if self.epoch < epoch and self._feed is not None and self._feed.shared:
            owed = self.owed
            self._finish_epoch(self._feed)
            self.owed = owed

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        ranks = {worker: rank for rank, worker in enumerate(self.workers)}
        return {
            "epoch": self.epoch,
            "consumed": self.consumed,
            "unit": self._unit,
            "at_start": self._at_start,
            "owed": list(self.owed),
            "since": self.since_exchange(ranks.get) if self.workers else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.consumed = state["consumed"]
        self.owed = tuple(state.get("owed", ()))
        self.batch, self.outdated, self._given_up = None, False, []
        self._unit = state["unit"]
        self._at_start = state["at_start"]
        self.load_since_exchange(state.get("since", []), lambda rank: rank)
        self._loaded = True

    def since_exchange(self, name: Callable[[Hashable], Any] = lambda worker: worker) -> list[Any]:
        """The batches used since the last exchange, for a worker that joins; ``name`` makes JSON of a worker."""
        return [used._replace(workers=tuple(map(name, used.workers))) for used in self._since]

    def load_since_exchange(self, used: list[Any], worker: Callable[[Any], Hashable]) -> None:
        """Restore them; ``worker`` makes a worker from its JSON."""
        self._since = [
            Used(epoch, start, tuple(map(worker, workers)), tuple(owed), total, update)
            for epoch, start, workers, owed, total, update in used
        ]
        self._updates = max((each.update for each in self._since), default=0)

    def _rest_of_epoch(self, feed: Feed) -> Iterator[Fetched]:
        if self.consumed > 0 and self._unit != feed.unit:
            raise UsageError(
                f"the epoch stands after {self.consumed} {self._unit}, but these batches are counted in {feed.unit}; "
                "use the same kind of source (a DataLoader counts differently on one worker and on several)"
            )
        self._unit = feed.unit
        if self._at_start and (self.consumed > 0 or self._loaded):
            now = capture_streams()
            feed.restore(self._at_start)
            if self.consumed > 0:
                rest = feed.start(self.epoch, self.consumed)  # draws the same order again, up to this position
                restore_streams(now)
                return rest
            restore_streams(now)  # at an epoch's start, only the loader's own generators were needed
        self._loaded = False
        self._at_start = feed.capture()
        return feed.start(self.epoch, self.consumed, self.owed)

    def _finish_epoch(self, feed: Feed | None = None) -> None:
        self.epoch += 1
        self.consumed = 0
        self.owed = ()
        self._at_start = feed.capture() if feed is not None else None


def _without(workers: tuple[Hashable, ...], gone: Collection[Hashable]) -> tuple[Hashable, ...]:
    """The workers by rank, with None for those whose part of a batch is owed already."""
    return tuple(None if worker in gone else worker for worker in workers)
