"""How the pushes of a commit combine, as values: one small file per idea, one table from name to class."""

from __future__ import annotations

from paceline.aggregators.base import Aggregator
from paceline.aggregators.mean import Mean
from paceline.spec import from_spec

__all__ = ["AGGREGATORS", "Aggregator", "Mean", "parse_aggregator"]

AGGREGATORS: dict[str, type[Aggregator]] = {aggregator.name: aggregator for aggregator in (Mean,)}


def parse_aggregator(text: str) -> Aggregator:
    """Read an aggregator from its text form.

    >>> parse_aggregator("mean")
    Mean()
    """
    return from_spec("aggregator", AGGREGATORS, text)
