"""Turns the outcomes of simulations into the rows, curves and records of a study."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from paceline.policies import parse_policy
from paceline.report.series import Series
from paceline.studies.study import Cell, Column
from paceline.virtual.formulas import STALENESS, NoFormulaError, iteration_time, mean_staleness
from paceline.virtual.formulas import TIMES as FORMULAS
from paceline.virtual.links import Link, parse_link
from paceline.virtual.plan import TrainingOutcome
from paceline.virtual.simulate import Scenario, as_record

_STALENESS_BINS = 40  # of the plot

TIMES = (
    Column(name="policy"),
    Column(name="workers"),
    Column(name="delay"),
    Column(name="s/commit", decimals=4),
    Column(name="+-", decimals=4),
    Column(name="formula", decimals=4),
    Column(name="examples/s"),
    Column(name="scaling efficiency %", decimals=1),
    Column(name="parallel efficiency %", decimals=1),
    Column(name="stale"),
    Column(name="waits %", decimals=1),
    Column(name="wasted %", decimals=1),
    Column(name="MB/commit"),
)


def times_row(case: Scenario, outcome: TrainingOutcome) -> tuple[Cell, ...]:
    """A row of the table ``TIMES``."""
    run = outcome.run
    moved = run.bytes_in + run.bytes_out
    return (
        run.policy,
        run.workers,
        run.delay,
        run.iteration,
        run.iteration_error,
        formula_of(case),
        finite(run.throughput),
        _percent(run.scaling_efficiency),
        _percent(run.parallel_efficiency),
        run.staleness,
        100 * run.waiting,
        100 * run.thrown_away,
        None if moved == case.nbytes == 0 else moved / run.commits / 1e6,
    )


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def formula_of(case: Scenario) -> float | None:
    """The closed form of the time per commit, if one is known and messages take no time."""
    policy = parse_policy(case.policy)
    name = "sync" if policy.name == "all-reduce" else policy.name
    if parse_link(case.link) != Link() or name not in FORMULAS:
        return None
    try:
        return finite(iteration_time(name, case.compute, case.workers, getattr(policy, "k", 1)))
    except NoFormulaError:
        return None


def staleness_formula(case: Scenario) -> float | None:
    policy = parse_policy(case.policy)
    name = "sync" if policy.name == "all-reduce" else policy.name
    return mean_staleness(name, case.workers, getattr(policy, "k", 1)) if name in STALENESS else None


def finite(number: float) -> float | None:
    """The number, or None if it is not finite, which JSON cannot hold."""
    return number if math.isfinite(number) else None


def record_of(outcome: TrainingOutcome) -> dict[str, Any]:
    """All measurements as a dict that fits JSON."""
    points = [dataclasses.asdict(point) for point in outcome.curve]
    curve = [{name: finite(value) for name, value in point.items()} for point in points]
    return {**as_record(outcome.run), "curve": curve}


def curve_series(case: Scenario, outcome: TrainingOutcome) -> Series:
    """Test loss against virtual time, without points whose loss is not finite."""
    good = [point for point in outcome.curve if math.isfinite(point.loss)]
    panel = f"{case.workers} workers, {case.delay}"
    return Series(
        label=str(case.policy),
        panel=panel,
        x=tuple(point.seconds for point in good),
        y=tuple(point.loss for point in good),
    )


def staleness_series(case: Scenario, outcome: TrainingOutcome) -> Series:
    """The histogram of staleness over pushes; if it is wide, averaged over neighbouring values."""
    histogram, pushes = outcome.run.staleness_histogram, outcome.run.pushes
    width = 1 + max(histogram) // _STALENESS_BINS
    bins: Counter[int] = Counter()
    for staleness, count in histogram.items():
        bins[staleness // width] += count
    return Series(
        label=str(case.policy),
        panel=f"{case.workers} workers, {case.delay}",
        x=tuple(index * width + (width - 1) / 2 for index in sorted(bins)),
        y=tuple(bins[index] / width / pushes for index in sorted(bins)),
    )


def series_over_workers(points: Sequence[tuple[Scenario, float | None]]) -> tuple[Series, ...]:
    """One curve per delay (its panel) and policy, over the number of workers."""
    groups: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for case, value in sorted(points, key=lambda point: point[0].workers):
        if value is not None:
            groups.setdefault((str(case.delay), str(case.policy)), []).append((case.workers, value))
    return tuple(
        Series(label=policy, panel=f"delay {delay}", x=tuple(x for x, _ in pairs), y=tuple(y for _, y in pairs))
        for (delay, policy), pairs in groups.items()
    )
