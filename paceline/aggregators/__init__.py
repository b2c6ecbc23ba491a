"""How the pushes of a commit combine, as values: one small file per idea, one table from name to class."""

from __future__ import annotations

from paceline.aggregators.base import Aggregator, Needs
from paceline.aggregators.delay_compensated import DelayCompensated
from paceline.aggregators.geometric_median import GeometricMedian
from paceline.aggregators.krum import Krum
from paceline.aggregators.mean import Mean
from paceline.aggregators.median import Median
from paceline.aggregators.multi_krum import MultiKrum
from paceline.aggregators.trimmed_mean import TrimmedMean
from paceline.aggregators.vote import Vote
from paceline.errors import UsageError
from paceline.policies.messages import PushKind
from paceline.policies.server import ServerPolicy
from paceline.spec import from_spec

__all__ = [
    "AGGREGATORS",
    "Aggregator",
    "DelayCompensated",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "Needs",
    "TrimmedMean",
    "Vote",
    "aggregator_of",
    "parse_aggregator",
]

_ALL: tuple[type[Aggregator], ...] = (
    Mean,
    Median,
    TrimmedMean,
    Krum,
    MultiKrum,
    GeometricMedian,
    DelayCompensated,
    Vote,
)
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
    aggregator = parse_aggregator(policy.combined_by)
    if isinstance(aggregator, Vote) and not policy.coded:
        raise UsageError(
            f"policy {policy}: aggregator {aggregator} finds what workers agree on, and under {policy.name} each "
            f"computes batches of its own; use draco(faulty={max(1, aggregator.faulty)})"
        )
    if policy.kind is PushKind.PARAMETERS and aggregator.needs is not Needs.SUM:
        raise UsageError(f"policy {policy}: the server exchanges with one worker at a time; leave the aggregator out")
    if aggregator.needs is Needs.READS and policy.kind is not PushKind.GRADIENT:
        raise UsageError(
            f"policy {policy}: aggregator {aggregator} corrects gradients, and under {policy.name} workers push a "
            f"{policy.kind.value}; use another aggregator, or async"
        )
    if aggregator.needs is Needs.READS and not policy.has_stale_pushes:
        raise UsageError(
            f"policy {policy}: aggregator {aggregator} corrects stale gradients, and under {policy.name} none is "
            "stale; leave it out, or use async"
        )
    pushes = policy.pushes_per_commit(workers) if workers is not None else aggregator.least
    if pushes < aggregator.least:
        raise UsageError(
            f"policy {policy}: aggregator {aggregator} needs at least {aggregator.least} pushes in a commit, but with "
            f"{workers} workers a commit has {pushes}; use a policy or a number of workers with more, such as "
            f"k-sync(k={aggregator.least}, aggregator={aggregator})"
        )
    return aggregator
