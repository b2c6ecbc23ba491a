"""The pushes that a server policy receives, and the actions that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, TypeAlias


class PushKind(Enum):
    """What a push has for each trained parameter."""

    GRADIENT = "gradient"  # of the worker's loss; the server's optimizer steps with it
    DIFFERENCE = "difference"  # after the worker's own steps, minus as it was read; the server adds it
    PARAMETERS = "parameters"  # the worker's own; the server's move toward them, and they toward the server's


class Push(NamedTuple):
    """The result of one step of one worker, as the server receives it."""

    worker: int
    incarnation: int  # grows when the worker is restarted
    step: int  # the number of the Send or Continue that began it
    version: int  # of the parameters that it was computed from
    examples: int = 1
    loss: float | None = None  # None: not known


WORKER, STEP, VERSION, EXAMPLES = map(attrgetter, ("worker", "step", "version", "examples"))


def pushes_of(workers: Sequence[int], step: int, version: int, examples: int) -> list[Push]:
    """Make the pushes of workers that ended the same step, four times as fast as by calling ``Push``."""
    shared = (0, step, version, examples, None)
    return list(map(tuple.__new__, repeat(Push), zip(workers, *map(repeat, shared), strict=False)))


class Commit(NamedTuple):
    """Update the parameters once, with these pushes; the policy's aggregator combines them by their weights.

    Pushes of parameters x are exchanged: weight (x - z), of the server's parameters z, is added to z for each, and its
    worker takes the same from x.
    """

    pushes: tuple[Push, ...]
    weights: tuple[float, ...]
    groups: tuple[int, ...] = ()  # of each push, if those of one group are of the same batches


class Work(NamedTuple):
    """Some parts of a round. The worker pushes the sum of their gradients, each times its coefficient."""

    round: int  # a round is over when its commit is made, or when work of a later one is sent
    num_parts: int  # of the round; each is a batch
    parts: tuple[tuple[int, float], ...]  # of this worker, in order: number from 0, and coefficient


class Send(NamedTuple):
    """Send the parameters, after all earlier actions; the workers begin step ``step`` on them."""

    workers: tuple[int, ...]
    step: int
    work: tuple[Work, ...] = ()  # of each worker; empty: each has a batch of its own


class Continue(NamedTuple):
    """Let the worker begin step ``step`` on the parameters that it already has."""

    worker: int
    step: int


class Cancel(NamedTuple):
    """Stop the workers' steps of that number; a worker that is on another step ignores it."""

    workers: tuple[int, ...]
    steps: tuple[int, ...]


class Drop(NamedTuple):
    """Drop the push: its step was cancelled, or its worker has left or was restarted."""

    push: Push


Action: TypeAlias = Commit | Send | Continue | Cancel | Drop
Actions: TypeAlias = Sequence[Action]
NOTHING: Actions = ()


def mean_of(pushes: Sequence[Push]) -> Commit:
    """The commit that averages the pushes over their examples."""
    return Commit(tuple(pushes), mean_weights([*map(EXAMPLES, pushes)]))


def mean_weights(examples: Sequence[int]) -> tuple[float, ...]:
    """The weights of a mean over examples, for pushes with these numbers of examples.

    >>> mean_weights([3, 1])
    (0.75, 0.25)
    """
    if examples.count(examples[0]) == len(examples) and examples[0]:  # the usual case, without a division for each
        return (1 / len(examples),) * len(examples)
    total = sum(examples)
    return tuple([count / total if total else 0.0 for count in examples])
