"""The study of error against time: what it reads off the curves, and whether it says that the order holds."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.studies import StudyContext, TradeOffStudy
from paceline.studies.trade_off import Fall, fall_of, order_of
from paceline.virtual.plan import Point, TrainingOutcome
from paceline.virtual.simulate import Scenario, simulate


@pytest.mark.parametrize("options", [{"policies": ()}, {"seconds": 0.0}, {"rate": -1.0}, {"weight_decay": -0.1}])
def test_mistakes_of_the_trade_off(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        TradeOffStudy(**options)


def test_the_trade_off_has_its_columns() -> None:
    study = TradeOffStudy(problem="digits", policies=("sync", "async"), seconds=60.0, points=30, rate=0.1)
    found = study.run(StudyContext())
    (_, commits, iteration, stale, _, *losses), fast = found.rows
    assert isinstance(commits, int) and isinstance(iteration, float)
    assert stale == 0 and commits * iteration == pytest.approx(60, rel=0.2)
    assert fast[1] > 8 * commits and all(isinstance(loss, float) for loss in losses)  # type: ignore[operator]


def test_weight_decay_is_part_of_the_trade_off() -> None:
    quick = TradeOffStudy(problem="digits", policies=("async",), seconds=20.0, points=5)
    floors = [dataclasses.replace(quick, weight_decay=decay).run(StudyContext()).rows[0][6] for decay in (0.0, 1.0)]
    assert floors[0] < floors[1]  # type: ignore[operator]


def outcome_of(policy: str, losses: list[float]) -> TrainingOutcome:
    """A run whose test loss was looked at once a second."""
    run = simulate(Scenario(policy=policy, workers=2, delay="1"), commits=1)
    curve = [Point(seconds=at, commits=at, loss=loss, value=1 - loss) for at, loss in enumerate(losses)]
    return TrainingOutcome(run=run, curve=tuple(curve))


def test_a_fall_is_read_off_its_curve() -> None:
    fall = fall_of(outcome_of("sync", [2.0, 1.5, 0.7, 0.8, 0.9, 0.5, 0.4, 0.6, 0.3, 0.1, 0.2]))
    assert fall.halved == pytest.approx(1 + 0.5 / 0.8)  # on the line from 1.5 to 0.7
    assert fall.before == pytest.approx(0.5)
    assert fall.floor == pytest.approx(0.2)
    assert fall.value == pytest.approx(0.8)
    never = fall_of(outcome_of("async", [2.0, 1.5, math.nan]))
    assert never.halved is None and never.floor is None


def test_the_order_is_told_only_where_there_is_one() -> None:
    slow, fast = (Fall(policy=name, halved=at, floor=at) for name, at in (("sync", 9.0), ("async", 1.0)))
    low, high = dataclasses.replace(slow, floor=0.1), dataclasses.replace(fast, floor=0.4)
    between = Fall(policy="k-sync(k=2)", halved=5.0, floor=0.2)
    (holds,) = order_of([low, between, high])
    assert holds.startswith("The order holds")
    assert "To half the loss: async, k-sync(k=2), sync. Floors from the highest: async, k-sync(k=2), sync." in holds
    for wrong in (
        [slow, between, fast],  # floors the other way round
        [low, dataclasses.replace(between, floor=0.05), high],  # one below sync
        [low, dataclasses.replace(between, halved=0.5), high],  # one before async
        [low, dataclasses.replace(between, halved=10.0), high],  # one behind sync
        [low, dataclasses.replace(between, floor=0.5), high],  # one above async
    ):
        assert order_of(wrong)[0].startswith("The order does not hold")
    assert "is unknown: async did not" in order_of([low, Fall(policy="async", floor=0.4)])[0]
    assert order_of([low, between]) == []


@pytest.mark.data
@pytest.mark.soak
def test_the_trade_off_begins_in_order_on_mnist(data_dir: Path) -> None:
    found = TradeOffStudy(seconds=250.0, points=40).run(StudyContext(data=data_dir))
    halved = {str(row[0]): row[4] for row in found.rows}
    wanted = ["async", "k-async(k=2)", "k-sync(k=2)", "sync"]
    assert sorted(halved, key=lambda policy: halved[policy] or math.inf) == wanted
