"""What a server policy hears of and what it answers: pushes in, actions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

PushKind = Literal["gradient", "delta", "parameters"]


class Push(NamedTuple):
    """The result of one step of one worker, as it reaches the server."""

    worker: int
    incarnation: int  # grows when the worker is restarted
    step: int  # the incarnation's steps before this one: every Send and every Continue begins the next
    version: int  # of the parameters that it was computed on
    examples: int = 1
    loss: float | None = None  # None: not known
    kind: PushKind = "gradient"


class Commit(NamedTuple):
    """Update the parameters once, with the weighted sum of the pushes."""

    pushes: tuple[Push, ...]
    weights: tuple[float, ...]


class Send(NamedTuple):
    """Send the parameters, as they are after the actions before this one; each worker begins its next step."""

    workers: tuple[int, ...]


class Continue(NamedTuple):
    """Let the worker begin its next step on the parameters that it has."""

    worker: int


class Cancel(NamedTuple):
    """Stop the workers' steps; one that has ended its step in the meantime takes no notice."""

    workers: tuple[int, ...]
    steps: tuple[int, ...]


class Drop(NamedTuple):
    """Throw the push away: the step was cancelled, or its worker is gone or was restarted."""

    push: Push


Action: TypeAlias = Commit | Send | Continue | Cancel | Drop
Actions: TypeAlias = Sequence[Action]
NOTHING: Actions = ()


def mean_of(pushes: Sequence[Push]) -> Commit:
    """The commit that averages the pushes over their examples."""
    examples = [push.examples for push in pushes]
    total = sum(examples)
    return Commit(tuple(pushes), tuple([count / total if total else 0.0 for count in examples]))
