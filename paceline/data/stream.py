"""A session's position in its data, and the iteration over the remaining batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.data.feed import Feed, Fetched
from paceline.errors import UsageError
from paceline.seeding import capture_streams, restore_streams


class BatchStream:
    """Hand out batches, remember which were used, and resume an epoch at a checkpoint's position.

    A batch counts as used when its step is done, or when the next batch is requested. So a checkpoint written after
    a step resumes after its batch, and one written before the step repeats it.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.batch: Fetched | None = None  # handed out and not used yet
        self.handed_out = False  # any batch, in this process
        self.consumed = 0  # the feed's position after the last used batch
        self._at_start: dict[str, Any] | None = None  # the captured state that the present epoch's order depends on
        self._unit: str | None = None  # of the position
        self._loaded = False
        self._under_way = False

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the unfinished epochs up to ``count``; the loop's body may call ``batches`` in each."""
        while self.epoch < count:
            before = self.epoch
            yield before
            if self.epoch == before:
                self._finish_epoch()

    def batches(self, feed: Feed, epochs: int | None) -> Iterator[Any]:
        """Iterate over the remaining batches up to the end of ``epochs``, or of the present epoch."""
        if self._under_way:
            raise UsageError(
                "batches() is already under way in this session, and a checkpoint holds only one position; "
                "use a plain DataLoader for other data, such as evaluation"
            )
        self._under_way = True
        try:
            end = self.epoch + 1 if epochs is None else epochs
            while self.epoch < end:
                for batch in self._rest_of_epoch(feed):
                    self.batch, self.handed_out = batch, True
                    yield batch.data
                    self.use()
                self._finish_epoch(feed)
        finally:
            self._under_way = False

    def use(self) -> None:
        """Count the batch that was handed out as used."""
        if self.batch is not None:
            self.consumed = self.batch.consumed
            self.batch = None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "consumed": self.consumed, "unit": self._unit, "at_start": self._at_start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.consumed = state["consumed"]
        self._unit = state["unit"]
        self._at_start = state["at_start"]
        self._loaded = True

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
        return feed.start(self.epoch, self.consumed)

    def _finish_epoch(self, feed: Feed | None = None) -> None:
        self.epoch += 1
        self.consumed = 0
        self._at_start = feed.capture() if feed is not None else None
