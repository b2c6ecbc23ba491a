"""A session that measures how fast its workers are for a few seconds, and then ends the script."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from paceline.launch.reports import report
from paceline.sessions.peers import PeersSession, join_peers
from paceline.sessions.request import JoinRequest
from paceline.sessions.session import Step

_WARM_UP = 0.25  # of the probe's length


class ProbingSession(PeersSession):
    """A session without a directory that reports this worker's examples per second and exits with 0.

    It saves nothing, and does not go on from what was saved.
    """

    def probe(self, seconds: float) -> None:
        """Measure for this long, after a little warm-up."""
        self._warm_up = _WARM_UP * seconds
        self._ends: list[tuple[float, int]] = []  # of blocks, each with the block's examples
        length = self._warm_up + seconds
        super().stop_when(lambda: bool(self._ends) and self._ends[-1][0] > self._ends[0][0] + length)

    def stop_when(self, asked: Callable[[], bool]) -> None:
        """The probe ends by itself."""

    def save(self, path: str | Path | None = None) -> Path | None:
        """Nothing is saved."""
        return None

    def _batches(self, source: Any, epochs: int | None, **options: Any) -> Iterator[Any]:
        """Begin the data again when it ends: the probe of a short script ends with its time too."""
        some = True
        while some:
            some = False  # a source that can be read only once gives no more
            for batch in super()._batches(source, None, **options):
                some = True
                yield batch

    def _conclude(self, step: Step) -> None:
        self._ends.append((time.perf_counter(), 1 if step.examples is None else step.examples))
        super()._conclude(step)

    def _end_well(self) -> None:
        super()._end_well()
        self._stop()  # what the script would do with the model is for the run itself

    def _stop(self) -> NoReturn:
        report("probed", throughput=throughput_of(self._ends, self._warm_up))
        raise SystemExit(0)


def throughput_of(ends: Sequence[tuple[float, int]], warm_up: float) -> float | None:
    """Examples per second, from the time at which each block ended and its examples; None of less than two blocks.

    Blocks of the first seconds are left out, unless there are no others.

    >>> throughput_of([(0.0, 8), (5.0, 8), (6.0, 8), (7.0, 4)], warm_up=4.0)
    6.0
    """
    warm = [end for end in ends if end[0] >= ends[0][0] + warm_up]
    measured = warm if len(warm) > 1 else ends
    if len(measured) < 2:
        return None
    return sum(examples for _, examples in measured[1:]) / (measured[-1][0] - measured[0][0])


def join_for_probe(request: JoinRequest, seconds: float) -> PeersSession:
    """Join a probe of this length in the place of the run."""
    session = join_peers(replace(request, run=None, resume=False, save_every=None), ProbingSession)
    assert isinstance(session, ProbingSession)
    session.probe(seconds)
    return session
