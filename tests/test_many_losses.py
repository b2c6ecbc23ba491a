"""Losses on many workers: their mean, and what becomes of one that is not finite on a single worker."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import backward, momentum, one_weight
from quick import over_one_backend
from same_bits import assert_same
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

import paceline
from paceline.errors import CommError, NonFiniteLossError, PacelineError
from paceline.record.metrics import read_metrics


def lose(
    group: Any, on_nan: Any, *, bad: set[tuple[int, int]], record: str = "before", weightless: int | None = None
) -> tuple[list[str], float]:
    """Three steps; ``bad`` ones, by (step, worker), have a NaN loss. Tells what became of each, and the weight."""
    model = one_weight()
    said = []
    session = paceline.join(model, SGD(model.parameters(), lr=0.25), on_nan=on_nan, group=group)
    with session:
        for number in range(3):
            try:
                with session.step(examples=0 if session.rank == weightless else 1) as step:
                    loss = model(torch.ones(1, 1)).sum() * (math.nan if (number, session.rank) in bad else 1.0)
                    if record == "before":
                        step.record(loss=loss)
                    backward(loss)
                    if record == "after":
                        step.record(loss=loss)
                said.append("skipped" if step.skipped else "done")
            except PacelineError as error:
                said.append(type(error).__name__)
                break
    return said, model.weight.item()


def test_a_bad_loss_on_one_worker_stops_all(world: World) -> None:
    first, second = world(2, lambda group: lose(group, "stop", bad={(1, 1)}))
    assert first == (["done", "CommError"], 0.75)
    assert second == (["done", "NonFiniteLossError"], 0.75)


@over_one_backend
def test_a_bad_loss_recorded_late_stops_all_too(world: World) -> None:
    """Worker 0 does not know of it, and may only find that worker 1 is gone."""
    first, second = world(2, lambda group: lose(group, "stop", bad={(1, 1)}, record="after"), timeout=3)
    assert second == (["done", "NonFiniteLossError"], 0.75)
    assert first[0][-1] == "LostContactError"


@pytest.mark.parametrize("bad", [{(1, 0)}, {(1, 1)}, {(1, 0), (1, 1)}])
def test_all_skip_together(world: World, bad: set[tuple[int, int]]) -> None:
    assert world(2, lambda group: lose(group, "skip", bad=bad)) == [(["done", "skipped", "done"], 0.5)] * 2


def test_skipping_needs_the_loss_before_backward(world: World) -> None:
    def work(group: Any) -> None:
        model = one_weight()
        session = paceline.join(model, momentum(model), on_nan="skip", group=group)
        with session, pytest.raises(NonFiniteLossError, match=r"recorded before backward\(\)"), session.step() as step:
            backward(model(torch.ones(1, 1)).sum())
            step.record(loss=math.nan)

    world(2, work)


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
def test_the_loss_of_borrowed_data_is_nobodys_concern(world: World, on_nan: str) -> None:
    found = world(2, lambda group: lose(group, on_nan, bad={(1, 1)}, weightless=1))
    assert found == [(["done"] * 3, 0.25)] * 2


@pytest.mark.parametrize("on_nan", ["skip", "stop"])
@pytest.mark.parametrize("block", [0, 1])
def test_nor_is_that_of_one_micro_batch(world: World, on_nan: Any, block: int) -> None:
    def work(group: Any) -> tuple[bool, float]:
        model = one_weight()
        with paceline.join(model, SGD(model.parameters(), lr=0.25), on_nan=on_nan, group=group) as session:
            for number in range(2):
                none = (number, session.rank) == (block, 1)
                with session.step(accumulate=number == 0, examples=0 if none else 1) as step:
                    loss = model(torch.ones(1, 1)).sum() * (math.nan if none else 1.0)
                    step.record(loss=loss)
                    backward(loss)
        return step.skipped, model.weight.item()

    first, second = world(2, work)
    assert first == second
    assert not first[0] and first[1] < 0.75


def test_a_bad_loss_of_one_worker_among_accumulated_ones_makes_all_skip(world: World) -> None:
    def work(group: Any) -> tuple[bool, float]:
        model = one_weight()
        with paceline.join(model, SGD(model.parameters(), lr=0.25), on_nan="skip", group=group) as session:
            for number in range(2):
                bad = (number, session.rank) == (0, 1)
                with session.step(accumulate=number == 0) as step:
                    loss = model(torch.ones(1, 1)).sum() * (math.nan if bad else 1.0)
                    step.record(loss=loss)
                    backward(loss)
        return step.skipped, model.weight.item()

    assert world(2, work) == [(True, 1.0)] * 2


def test_lbfgs_on_all_workers_skips_together(world: World) -> None:
    def work(group: Any) -> float:
        model = one_weight()
        with paceline.join(model, LBFGS(model.parameters()), on_nan="skip", group=group) as session:

            def closure() -> Tensor:
                loss: Tensor = model(torch.ones(1, 1)).sum() * (math.nan if session.rank else 1.0)
                backward(loss)
                return loss

            session.minimize(closure)
            assert session.steps == 1
        return model.weight.item()

    assert world(2, work) == [1.0, 1.0]


def test_skipping_leaves_the_statistics_of_all_workers_as_they_were(world: World) -> None:
    def work(group: Any) -> list[Tensor]:
        model = nn.Sequential(one_weight(), nn.BatchNorm1d(1))
        with paceline.join(model, SGD(model.parameters(), lr=0.25), on_nan="skip", group=group) as session:
            for number in range(3):
                with session.step() as step:
                    loss = model(torch.tensor([[1.0], [number + session.rank]])).square().sum()
                    loss = loss * (math.nan if (number, session.rank) == (1, 1) else 1.0)
                    step.record(loss=loss)
                    backward(loss)
                assert step.skipped == (number == 1)
        return [buffer.clone() for buffer in model.buffers()]

    first, second = world(2, work)
    assert_same(first, second)
    assert first[2].item() == 2  # batches that counted


def test_no_worker_skips_alone(world: World) -> None:
    """Worker 0 records its loss in time, worker 1 too late: then worker 0 cannot know of worker 1's NaN."""

    def work(group: Any) -> tuple[str, float]:
        model = one_weight()
        try:
            session = paceline.join(model, SGD(model.parameters(), lr=0.25), on_nan="skip", group=group)
            with session, session.step() as step:
                if session.rank == 0:
                    step.record(loss=1.0)
                backward(model(torch.ones(1, 1)).sum())
                if session.rank == 1:
                    step.record(loss=math.nan)
        except (NonFiniteLossError, CommError) as error:
            return type(error).__name__, model.weight.item()
        return "skipped" if step.skipped else "done", model.weight.item()

    first, second = world(2, work)
    assert second == ("NonFiniteLossError", 1.0)
    assert first[0] != "skipped" and first[1] == 0.75


def test_the_mean_loss_of_all_workers_is_recorded(world: World, tmp_path: Path) -> None:
    def work(group: Any) -> None:
        model = one_weight()
        with paceline.join(model, SGD(model.parameters(), lr=0.0), run=tmp_path / "run", group=group) as session:
            for examples in ([1, 3], [0, 2]):
                with session.step(examples=examples[session.rank]) as step:
                    step.record(loss=torch.tensor(float(session.rank)))
                    backward(model(torch.ones(1, 1)).sum())

    world(2, work)
    steps = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["event"] == "step"]
    assert [(line["loss"], line["examples"]) for line in steps] == [(0.75, 4), (1.0, 2)]
