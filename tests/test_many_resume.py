"""A run on many workers, broken off and resumed: on as many bit for bit, on others with the same joined batches."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import CASES, Odd, adam, assert_close, backward, copy_for
from quick import in_turn, over_one_backend
from same_bits import assert_same, metrics_of
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import TensorDataset

import paceline
from paceline.errors import CheckpointError, CommError
from paceline.record.checkpoint import read_checkpoint

CASE = CASES["mlp"]
JOINED_BATCH = 12
DATA = torch.randn(29, 6, generator=torch.Generator().manual_seed(2))  # 3 steps an epoch, the last one short
EPOCHS = 3


class WithStatistics(nn.Module):
    """Has a BatchNorm, so that workers' buffers differ within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        # A single example has no variance, so that it gets company.
        out: torch.Tensor = self.layers(torch.cat([inputs, inputs + 0.1]))
        return out[: len(inputs)]


class Broken(Exception):
    """The run is broken off."""


def train(
    group: Any,
    template: nn.Module,
    *,
    stop: int | None = None,
    accumulate: int = 1,
    own_batches: bool = False,
    **options: Any,
) -> dict[str, Any]:
    model = copy_for(group, template)
    optimizer = adam(model)
    scheduler = ExponentialLR(optimizer, 0.95)
    session = paceline.join(model, optimizer, scheduler=scheduler, seed=1, group=group, **options)
    try:
        with session:
            if own_batches:  # of sizes that the others do not know
                mine = DATA[session.rank :: session.world_size].tensor_split((2, 5))
                batches = session.batches([(batch,) for batch in mine], epochs=EPOCHS)
            else:
                batches = session.batches(TensorDataset(DATA), JOINED_BATCH // session.world_size, epochs=EPOCHS)
            for number, (batch,) in enumerate(batches, 1):
                with session.step(accumulate=number % accumulate != 0) as step:
                    loss = CASE.loss(model, batch)
                    step.record(loss=loss)
                    backward(loss)
                if session.steps == stop and number % accumulate == 0:
                    raise Broken
    except Broken:
        pass
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "steps": session.steps,
        "parameters": model,
    }


def state(result: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in result.items() if name != "parameters"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("workers", "stop"), in_turn([2, 3], [1, 3]))
@pytest.mark.parametrize(("build", "own_batches"), [(WithStatistics, False), (Odd, False), (WithStatistics, True)])
def test_as_many_workers_go_on_bit_for_bit(
    world: World, build: Any, own_batches: bool, workers: int, stop: int, tmp_path: Path
) -> None:
    """Sums of three numbers depend on their order, which is that of places in buckets; products on theirs too."""
    template = build()
    options: dict[str, Any] = {"own_batches": own_batches, "save_every": 1}
    whole = world(workers, lambda group: train(group, template, run=tmp_path / "whole", **options))
    options["run"] = tmp_path / "broken"
    world(workers, lambda group: train(group, template, stop=stop, **options))
    other = copy.deepcopy(template)
    nn.init.zeros_(next(other.parameters()))
    resumed = world(workers, lambda group: train(group, other, resume=True, **options))
    for found, expected in zip(resumed, whole, strict=True):
        assert_same(state(found), state(expected))
    assert_same(state(whole[1])["model"], state(whole[0])["model"])
    assert metrics_of(tmp_path / "broken") == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2), (2, 4)])
def test_another_number_of_workers_goes_on_with_the_same_joined_batches(
    world: World, before: int, after: int, tmp_path: Path
) -> None:
    template = CASE.build()
    (expected,) = world(1, lambda group: train(group, template))
    options: dict[str, Any] = {"run": tmp_path / "run", "save_every": 1}
    world(before, lambda group: train(group, template, stop=4, **options))
    resumed = world(after, lambda group: train(group, template, resume=True, **options))
    for found in resumed:
        assert found["steps"] == expected["steps"] == 9
        assert_same(found["model"], resumed[0]["model"])
        assert_close(found["parameters"], expected["parameters"])


@pytest.mark.parametrize("named", [True, False])
def test_only_worker_0_has_the_files(world: World, named: bool, tmp_path: Path) -> None:
    """The others may be on another host: they get the state from worker 0, and leave the file system alone."""
    template = CASE.build()
    (expected, _) = world(2, lambda group: train(group, template))
    world(2, lambda group: train(group, template, stop=4, run=tmp_path / "here", save_every=1))
    (file,) = list((tmp_path / "here").glob("**/*4.safetensors"))

    def work(group: Any) -> dict[str, Any]:
        if group.rank() == 0:
            return train(group, template, run=tmp_path / "here", resume=file if named else True)
        return train(group, template, run=tmp_path / "there", resume=tmp_path / "there.safetensors" if named else True)

    for found in world(2, work):
        assert_same(state(found), state(expected))
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@over_one_backend
def test_a_checkpoint_that_worker_0_cannot_read_stops_all(world: World, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")

    def work(group: Any) -> str:
        try:
            train(group, CASE.build(), resume=tmp_path / "bad.safetensors")
        except (CheckpointError, CommError) as error:
            return type(error).__name__
        return "nothing"

    assert world(2, work, timeout=2) == ["CheckpointError", "LostContactError"]


def test_a_checkpoint_between_accumulating_steps_is_of_the_last_update(world: World, tmp_path: Path) -> None:
    """Epochs of 3 batches and updates of 2: those that were accumulated and not used are lost, as on one worker."""
    template = CASE.build()
    options: dict[str, Any] = {"run": tmp_path / "run", "save_every": 1, "accumulate": 2}
    whole = world(2, lambda group: train(group, template, accumulate=2))
    world(2, lambda group: train(group, template, stop=2, **options))
    saved = read_checkpoint(max((tmp_path / "run").glob("**/*.safetensors")))
    assert saved["session"]["steps"] == 2
    resumed = world(2, lambda group: train(group, template, resume=True, **options))
    assert [found["steps"] for found in resumed] == [found["steps"] for found in whole]
    assert_same(resumed[0]["model"], resumed[1]["model"])
    assert_same(resumed[0]["model"], whole[0]["model"])
