"""How the pushes of a commit combine, as values: one small file per idea, one table from name to class."""

from __future__ import annotations

from paceline.aggregators.base import Aggregator, Needs
from paceline.aggregators.delay_compensated import DelayCompensated
from paceline.aggregators.mean import Mean
from paceline.aggregators.median import Median
from paceline.errors import UsageError
from paceline.policies.messages import PushKind
from paceline.policies.server import ServerPolicy
from paceline.spec import from_spec

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "DelayCompensated",
    "Mean",
    "Median",
    "Needs",
    "aggregator_of",
    "parse_aggregator",
]

_ALL: tuple[type[Aggregator], ...] = (Mean, Median, DelayCompensated)
AGGREGATORS: dict[str, type[Aggregator]] = {aggregator.name: aggregator for aggregator in _ALL}


def parse_aggregator(text: str) -> Aggregator:
    """Read an aggregator from its text form.

    >>> parse_aggregator("median")
    Median()
    """
    return from_spec("aggregator", AGGREGATORS, text)


def aggregator_of(policy: ServerPolicy, workers: int | None = None) -> Aggregator:
    """The aggregator that a policy names; raise if there is none, or if it cannot combine the policy's pushes.

    If ``workers``, their number, is known, commits of so many must be large enough for it.
    """
    aggregator = parse_aggregator(policy.aggregator)
    if aggregator.needs is Needs.READS and policy.kind is not PushKind.GRADIENT:
        raise UsageError(
            f"policy {policy}: aggregator {aggregator} corrects gradients, and under {policy.name} workers push a "
            f"{policy.kind.value}; use another aggregator, or async"
        )
    pushes = policy.pushes_per_commit(workers) if workers is not None else aggregator.least
    if pushes < aggregator.least:
        raise UsageError(
            f"policy {policy}: aggregator {aggregator} needs at least {aggregator.least} pushes in a commit, but with "
            f"{workers} workers a commit has {pushes}; use a policy or a number of workers with more, such as "
            f"k-sync(k={aggregator.least}, aggregator={aggregator})"
        )
    return aggregator
