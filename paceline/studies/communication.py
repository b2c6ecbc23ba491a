"""A parameter server against a ring and a tree, as in the deck's "PS vs Ring All-Reduce: Communication Cost"."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import UsageError
from paceline.quantities import SIZES, print_quantity, read_quantity
from paceline.report.series import Axis, Series
from paceline.studies.study import Cell, Column, Study, StudyContext, StudyResult, option
from paceline.virtual.links import (
    Link,
    parse_link,
    ring_seconds,
    server_bytes,
    server_seconds,
    tree_seconds,
)

WAYS: dict[str, Callable[[Link, float, int], float]] = {
    "server": server_seconds,
    "ring": ring_seconds,
    "tree": tree_seconds,
}


@dataclass(frozen=True, kw_only=True)
class CommunicationStudy(Study):
    """Compare the times in which a server, a ring and a tree sum one message over all workers.

    Times are those of a model of the link, not measured; nothing is random, so --seed changes nothing.
    """

    name: ClassVar[str] = "communication"
    title: ClassVar[str] = "Summing a message over all workers: server, ring, tree"

    workers: tuple[int, ...] = option((2, 4, 16, 64, 256, 1024), "Numbers of workers.")
    messages: tuple[str, ...] = option(("10kB", "100kB", "25MB"), "Sizes of the message.")
    link: str = option("50us 10Gbit/s", "Latency and bandwidth of every worker's link.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if parse_link(self.link).bandwidth == math.inf:
            raise UsageError(
                f"study {self.name!r} needs a link with a bandwidth, got {self.link!r}; e.g. 50us 10Gbit/s"
            )
        if not self.workers or not self.messages:
            raise UsageError(f"study {self.name!r} needs workers and messages; e.g. --workers 2,8 --messages 4kB,25MB")
        for workers in self.workers:
            if workers < 2:
                raise UsageError(f"study {self.name!r}: workers are at least 2, got {workers}")
        for message in self.messages:
            _bytes(message)
        for kind, values in (("number of workers", self.workers), ("message", list(map(_bytes, self.messages)))):
            if len(set(values)) < len(values):
                raise UsageError(f"study {self.name!r}: the same {kind} was named twice")

    def run(self, context: StudyContext) -> StudyResult:
        link = parse_link(self.link)
        rows: list[tuple[Cell, ...]] = []
        for message in self.messages:
            context.tell(message, len(rows), len(self.messages) * len(self.workers))
            rows += [_row(link, message, workers) for workers in sorted(self.workers)]
        context.tell("done", len(rows), len(rows))
        return StudyResult(
            study=self,
            seed=context.seed,
            columns=(
                Column(name="size"),
                Column(name="workers"),
                *(Column(name=f"{way} ms", decimals=2) for way in WAYS),
                Column(name="fastest"),
                Column(name="server MB", decimals=2),
            ),
            rows=tuple(rows),
            x_axis=Axis(label="workers", scale="log"),
            y_axis=Axis(label="time / time of one message on the link", scale="log"),
            series=tuple(self._series(link, message, way) for message in self.messages for way in WAYS),
            notes=_notes(link, max(self.workers)),
        )

    def _series(self, link: Link, message: str, way: str) -> Series:
        workers = sorted(self.workers)
        alone = link.seconds(_bytes(message))
        times = tuple(WAYS[way](link, _bytes(message), count) / alone for count in workers)
        return Series(label=way, panel=f"message of {message}", x=tuple(map(float, workers)), y=times)


def _row(link: Link, message: str, workers: int) -> tuple[Cell, ...]:
    nbytes = _bytes(message)
    seconds = {way: time(link, nbytes, workers) for way, time in WAYS.items()}
    milliseconds = (1e3 * value for value in seconds.values())
    return message, workers, *milliseconds, _fastest(seconds), server_bytes(nbytes, workers) / 1e6


def _fastest(seconds: dict[str, float]) -> str:
    least = min(seconds.values())
    return " = ".join(way for way, value in seconds.items() if value <= least * (1 + 1e-9))


def _bytes(message: str) -> float:
    try:
        nbytes = read_quantity(message, SIZES)
    except UsageError as error:
        raise UsageError(f"wanted the size of a message, such as 25MB, found {message!r}: {error}") from None
    if nbytes < 1:
        raise UsageError(f"a message has at least 1 byte, got {message!r}")
    return nbytes


def _notes(link: Link, workers: int) -> tuple[str, ...]:
    equal = workers * (workers - 2) / (workers - 1) ** 2 * link.latency * link.bandwidth
    return (
        'After "Parameter Server (PS) vs Ring All-Reduce: Communication Cost" in DS-UA 301, lecture 10. MB are those '
        "that pass the server, 2N(P-1); each worker of a ring sends 2N(P-1)/P, P times less.",
        f"Computed for a link of {link} from a latency a and b seconds a byte: server 2a + 2(P-1)Nb, ring 2(P-1)a + "
        "2(P-1)/P Nb, tree 2 ceil(log2 P)(a + Nb). One of the P processes is the server.",
        f"The ring beats the server for messages above P(P-2)/(P-1)^2 a/b, which for {workers} workers is "
        f"{print_quantity(float(f'{equal:.3g}'), SIZES)}: about the bytes that the link carries during its latency.",
        "Left out: the time of additions, computation that hides communication, links shared with others, and "
        "several servers, which divide the bytes by their number.",
    )
