"""The times of a step: forward, backward, exposed communication, waiting, optimizer; and the worker's timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from paceline.record.timeline import Kind, TimelineWriter, timeline_file

_SHORTEST = 1e-5  # seconds of a span that is worth a record


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one update on this worker, measured on its host (a GPU may still be computing).

    ``waited`` is the time in which slower workers were still computing. ``communication`` is the rest of the exchange
    that was not hidden by backward.
    """

    forward: float = 0.0
    backward: float = 0.0
    communication: float = 0.0
    waited: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.communication + self.waited + self.optimizer


class Span(NamedTuple):
    """What a worker did since ``start`` (by ``time.perf_counter()``), for so many seconds."""

    kind: Kind
    start: float
    seconds: float


class StepClock:
    """Measure one update: call ``start``, run the model, then ``computed``, ``optimized``, ``exchanged``, ``updated``.

    ``model`` is the module that the user calls; a hook on it marks the end of the forward pass. If it was compiled in
    place (``model.compile()``), it gets no hook, since it would compile that too; its forward counts as backward.
    """

    def __init__(self, model: nn.Module) -> None:
        compiled = getattr(model, "_compiled_call_impl", None) is not None
        self._hook = None if compiled else model.register_forward_hook(self._forward_done)
        self._begin_update()
        self._mark = self._forward_end = self._done = self.began

    def _begin_update(self) -> None:
        self.began = time.perf_counter()
        self._forward = self._backward = self._optimizer = 0.0
        self._computed: list[Span] = []
        self._exchanged: list[tuple[float, float]] = []  # start and seconds

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()

    def start(self, *, fresh: bool) -> None:
        """Begin a block; ``fresh`` if it is the first of its update (accumulating blocks add up)."""
        if fresh:
            self._begin_update()
        self._mark = self._forward_end = time.perf_counter()

    def _forward_done(self, *_: object) -> None:
        if torch.is_grad_enabled():  # an evaluation inside the step is not its forward pass
            self._forward_end = time.perf_counter()

    def computed(self, *, ended: float | None = None) -> None:
        """Mark the end of a block; if its gradients were exchanged, its backward pass has ``ended`` before that."""
        self._done = time.perf_counter()
        if ended is not None:
            self._exchanged.append((ended, self._done - ended))
        else:
            ended = self._done
        self._forward += self._forward_end - self._mark
        self._backward += max(0.0, ended - self._forward_end)
        self._computed.append(Span(Kind.COMPUTING, self._mark, ended - self._mark))

    @property
    def computing(self) -> float:
        """Seconds of the update's forward and backward passes so far."""
        return self._forward + self._backward

    def optimized(self) -> None:
        """Mark the end of the optimizer's step."""
        start, self._done = self._done, time.perf_counter()
        self._optimizer += self._done - start
        self._computed.append(Span(Kind.COMPUTING, start, self._done - start))

    def exchanged(self) -> None:
        """Mark the end of an exchange after the optimizer's step."""
        start, self._done = self._done, time.perf_counter()
        self._exchanged.append((start, self._done - start))

    def updated(self, waited: float = 0.0) -> Timing:
        """All times of the update; of its exchanges this worker has ``waited`` so long for slower ones."""
        in_exchanges = sum(seconds for _, seconds in self._exchanged)
        waited = min(waited, in_exchanges)
        return Timing(
            forward=self._forward,
            backward=self._backward,
            communication=in_exchanges - waited,
            waited=waited,
            optimizer=self._optimizer,
        )

    def spans(self, waited: float = 0.0) -> list[Span]:
        """The same as spans of time. A worker waits first, and then exchanges."""
        spans = list(self._computed)
        for start, seconds in self._exchanged:
            first = min(waited, seconds)
            waited -= first
            spans += [Span(Kind.WAITING, start, first), Span(Kind.EXCHANGING, start + first, seconds - first)]
        return spans

    def thrown_away(self) -> list[Span]:
        """The work of an update that is given up now."""
        return [Span(Kind.CANCELLED, self.began, time.perf_counter() - self.began)]


class WorkerTimeline:
    """Write what this worker does to its timeline in the directory ``run``."""

    def __init__(self, run: Path, worker: int, incarnation: int) -> None:
        now = time.time()
        self._since = now - time.perf_counter()  # of the epoch
        self._writer = TimelineWriter(timeline_file(run, worker))
        self._writer.began(incarnation, now)

    def add(self, step: int, spans: Iterable[Span]) -> None:
        """Add what was done in a step."""
        for kind, start, seconds in spans:
            if seconds >= _SHORTEST:
                self._writer.span(kind, step, start + self._since, seconds)

    def close(self, *, left: bool) -> None:
        """End; the worker has ``left`` by itself, or has failed."""
        if left:
            self._writer.left(time.perf_counter() + self._since)
        self._writer.close()
