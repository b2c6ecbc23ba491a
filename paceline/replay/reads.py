"""What became of the steps of a trace: which version their workers really read, and which came to nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.record.trace import (
    Asked,
    Began,
    Cancelled,
    Finished,
    Given,
    Joined,
    Late,
    Left,
    NotFinite,
    Pushed,
    Record,
    Skipped,
)


class Read(NamedTuple):
    """What became of what a worker was given."""

    version: int = 0  # that it read, as it said later; 0: not known, and of no consequence
    doomed: bool = False  # it was cancelled
    lost: bool = False  # its worker died of something else before it came to anything
    after_push: bool = False  # the push of its worker's step before came later than this was given


def read_versions(records: Sequence[Record]) -> dict[int, Read]:
    """Find out for every ``Given`` and ``Finished``, by its place in the trace."""
    found: dict[int, Read] = {}
    places: dict[tuple[int, int], int] = {}  # of the steps, by rank and number
    under_way: dict[int, int] = {}  # by rank: the place of what it was given last, if nothing has become of it yet
    for place, record in enumerate(records):
        match record:
            case Given() | Finished():
                if isinstance(record, Given):
                    places[record.rank, record.step] = place
                under_way[record.rank] = place
                found[place] = Read(lost=True)  # unless there is word of it
            case Cancelled():
                at = places[record.rank, record.step]
                found[at] = found[at]._replace(doomed=True, lost=False)
                under_way.pop(record.rank, None)
            case Late():
                at = places[record.rank, record.step]
                found[at] = found[at]._replace(version=record.version, doomed=False)
                later = under_way.get(record.rank)
                if later is not None and later != at:
                    found[later] = found[later]._replace(after_push=True)
            case Pushed() | NotFinite() | Skipped():
                at = places[record.rank, record.step]
                found[at] = found[at]._replace(version=record.version, lost=False)
                under_way.pop(record.rank, None)
            case Asked() | Left(dead=False):
                if record.rank in under_way:
                    at = under_way.pop(record.rank)
                    found[at] = found[at]._replace(version=record.version, lost=False)
            case Joined() | Left():
                under_way.pop(record.rank, None)
            case Began():
                under_way, places = {}, {}
            case _:
                pass
    return found
