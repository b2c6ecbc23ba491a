"""What a server policy hears of and what it answers: pushes in, actions out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, TypeAlias


class Push(NamedTuple):
    """The result of one step of one worker, as it reaches the server."""

    worker: int
    incarnation: int  # grows when the worker is restarted
    step: int  # the number that came with the Send or Continue that began it
    version: int  # of the parameters that it was computed on
    examples: int = 1
    loss: float | None = None  # None: not known


WORKER, STEP, VERSION, EXAMPLES = map(attrgetter, ("worker", "step", "version", "examples"))


def pushes_of(workers: Sequence[int], step: int, version: int, examples: int) -> list[Push]:
    """Make the pushes of workers that have ended the same step; a quarter of the time of calling ``Push`` for each."""
    shared = (0, step, version, examples, None)
    return list(map(tuple.__new__, repeat(Push), zip(workers, *map(repeat, shared), strict=False)))


class Commit(NamedTuple):
    """Update the parameters once, with the weighted sum of the pushes."""

    pushes: tuple[Push, ...]
    weights: tuple[float, ...]


class Send(NamedTuple):
    """Send the parameters, as they are after the actions before this one; the workers begin step ``step`` on them."""

    workers: tuple[int, ...]
    step: int


class Continue(NamedTuple):
    """Let the worker begin step ``step`` on the parameters that it has."""

    worker: int
    step: int


class Cancel(NamedTuple):
    """Stop the workers' steps; one that is no more on the step of that number takes no notice."""

    workers: tuple[int, ...]
    steps: tuple[int, ...]


class Drop(NamedTuple):
    """Throw the push away: its step was cancelled, or its worker is gone or was restarted."""

    push: Push


Action: TypeAlias = Commit | Send | Continue | Cancel | Drop
Actions: TypeAlias = Sequence[Action]
NOTHING: Actions = ()


def mean_of(pushes: Sequence[Push]) -> Commit:
    """The commit that averages the pushes over their examples."""
    return Commit(tuple(pushes), mean_weights([*map(EXAMPLES, pushes)]))


def mean_weights(examples: Sequence[int]) -> tuple[float, ...]:
    """The weights of a mean over examples, for pushes of so many each.

    >>> mean_weights([3, 1])
    (0.75, 0.25)
    """
    if examples.count(examples[0]) == len(examples) and examples[0]:  # as most often: no division for each
        return (1 / len(examples),) * len(examples)
    total = sum(examples)
    return tuple([count / total if total else 0.0 for count in examples])
