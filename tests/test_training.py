"""Training a problem from a configuration: what it gives, what it records, what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from same_bits import assert_same, metrics_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from training_cases import DATASET, INPUTS, TARGETS, mlp

import paceline
from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.problems import Metric, Problem, Recipe
from paceline.record.checkpoint import read_checkpoint
from paceline.report.terminal import ProgressLine
from paceline.schedules import ScheduleConfig
from paceline.seeding import derive_seed, seed_streams
from paceline.training.train import Progress, TrainConfig, evaluate, train


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == targets).float().mean()


def problem(**changes: Any) -> Problem:
    parts: dict[str, Any] = {
        "name": "tiny",
        "make_model": lambda: mlp(nn.Dropout(0.2), nn.BatchNorm1d(12)),
        "train": DATASET,
        "test": TensorDataset(INPUTS[:11], TARGETS[:11]),
        "loss": F.cross_entropy,
        "metric": Metric(name="accuracy", measure=accuracy, higher_is_better=True),
        "target": 0.4,
        "recipe": Recipe(batch_size=9, epochs=3, optimizer="sgd(lr=0.05, momentum=0.9)"),
    }
    return Problem(**{**parts, **changes})


def test_training_is_the_loop_that_it_stands_for(tmp_path: Path) -> None:
    """Weights from (seed, "model"), the problem's recipe, steps seeded by a session."""
    result = train(TrainConfig(run=str(tmp_path / "run"), seed=3), problem())
    seed_streams(derive_seed(3, "model"))
    model = problem().make_model()
    optimizer = make_optimizer("sgd(lr=0.05, momentum=0.9)", model.parameters())
    with paceline.join(model, optimizer, seed=3) as session:
        for inputs, targets in session.batches(DATASET, 9, epochs=3):
            with session.step():
                F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    loss, value, _ = evaluate(model, problem())
    assert (result.loss, result.value) == (loss, value)
    assert (result.steps, result.epochs) == (15, 3)
    assert result.reached == (value >= 0.4)
    (*_, last) = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert_same(read_checkpoint(last)["trainee"]["model"], model.state_dict())


def test_what_is_recorded(tmp_path: Path) -> None:
    train(TrainConfig(run=str(tmp_path), epochs=2), problem())
    lines = [json.loads(line) for line in metrics_of(tmp_path)]
    assert [line["event"] for line in lines] == (["step"] * 5 + ["evaluation"]) * 2
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["examples"] for line in steps] == [9, 9, 9, 9, 4] * 2
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert {line["lr"] for line in steps} == {0.05}
    assert all({"test_loss", "accuracy", "step", "epoch"} <= set(line) for line in lines if line not in steps)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["train"]["epochs"] == 2
    assert config["policy"] == "all-reduce"
    assert config["model"] == "Sequential"


def test_evaluation_weighs_by_examples_and_leaves_the_model_as_it_was() -> None:
    """602 examples make batches of 500 and 102."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(602, 6, generator=generator), torch.randint(3, (602,), generator=generator)
    model = mlp(nn.Dropout(0.5), nn.BatchNorm1d(12))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    loss, value, examples = evaluate(model, problem(test=TensorDataset(inputs, targets)))
    assert examples == 602
    modes = [model.training]
    assert_same(model.state_dict(), before)
    assert_same(torch.get_rng_state(), stream)
    model.eval()
    evaluate(model, problem())
    assert [*modes, model.training] == [True, False]
    with torch.no_grad():
        outputs = model(inputs)
    assert loss == pytest.approx(float(F.cross_entropy(outputs, targets)), rel=1e-5)
    assert value == pytest.approx(float(accuracy(outputs, targets)), rel=1e-5)


def test_evaluating_or_logging_less_changes_nothing_else(tmp_path: Path) -> None:
    full = train(TrainConfig(run=str(tmp_path / "a")), problem())
    less = train(TrainConfig(run=str(tmp_path / "b"), evaluate=False, log_every=4, save_every=2), problem())
    none = train(TrainConfig(), problem())
    assert full.value == less.value == none.value
    assert full.loss == less.loss == none.loss
    assert none.run is None
    lines = [json.loads(line) for line in metrics_of(tmp_path / "b")]
    assert [line["step"] for line in lines if line["event"] == "step"] == [4, 8, 12]
    assert sum(line["event"] == "evaluation" for line in lines) == 1, "the end is always evaluated"


def test_whoever_watches_is_told_of_every_update() -> None:
    seen: list[Progress] = []
    train(TrainConfig(max_steps=7), problem(), seen.append)
    assert [progress.step for progress in seen] == list(range(1, 8))
    assert {progress.total_steps for progress in seen} == {7}
    assert [progress.epoch for progress in seen] == [0] * 5 + [1] * 2
    assert all(progress.loss > 0 and progress.examples_per_second > 0 for progress in seen)


@pytest.mark.parametrize("max_steps", [1, 5, 7, 15, 99])
def test_a_run_stops_after_so_many_updates(max_steps: int) -> None:
    assert train(TrainConfig(max_steps=max_steps), problem()).steps == min(max_steps, 15)


@pytest.mark.parametrize(
    "optimizer", ["lbfgs(max_iter=2)", "adamw(lr=0.01)", "lamb(lr=0.01)", "rmsprop-nesterov(lr=0.001)", "adafactor"]
)
def test_runs_with_any_optimizer_are_resumed(optimizer: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": optimizer, "clip_norm": None if "lbfgs" in optimizer else 1.0}
    whole = train(TrainConfig(**options), problem())
    run = str(tmp_path)
    train(TrainConfig(**options, run=run, max_steps=7, save_every=3), problem())
    resumed = train(TrainConfig(**options, run=run, resume=True), problem())
    assert (resumed.loss, resumed.value, resumed.steps) == (whole.loss, whole.value, whole.steps)


@pytest.mark.parametrize("batch_size", [5, 31])
@pytest.mark.parametrize("stop", [4, 10, 13])
def test_a_run_goes_on_with_another_batch_to_the_end_of_its_epochs(stop: int, batch_size: int, tmp_path: Path) -> None:
    seen: list[Progress] = []
    options: dict[str, Any] = {"run": str(tmp_path), "schedule": ScheduleConfig(decay="cosine")}
    train(TrainConfig(**options, max_steps=stop), problem())
    resumed = train(TrainConfig(**options, resume=True, batch_size=batch_size), problem(), seen.append)
    lines = [json.loads(line) for line in metrics_of(tmp_path)]
    steps = [line for line in lines if line["event"] == "step"]
    for epoch in range(3):
        assert sum(line["examples"] for line in steps if line["epoch"] == epoch) == len(DATASET)
    assert {progress.total_steps for progress in seen} == {resumed.steps}
    rates = [line["lr"] for line in steps]
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[-1] < 0.15 * rates[0], "at the end of the epochs, the end of the cosine"


def test_a_lower_metric_may_be_the_goal() -> None:
    metric = Metric(
        name="error", measure=lambda outputs, targets: 1 - accuracy(outputs, targets), higher_is_better=False
    )
    assert train(TrainConfig(epochs=1), problem(metric=metric, target=1.0)).reached is True
    assert train(TrainConfig(epochs=1), problem(metric=metric, target=-1.0)).reached is False
    assert train(TrainConfig(epochs=1), problem(metric=metric, target=None)).reached is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf15"}, "Did you mean 'bf16'"),
        ({"batch_size": 0}, "batch size"),
        ({"epochs": 0}, "epochs"),
        ({"max_steps": -1}, "max steps"),
        ({"clip_norm": 0}, "clip norm"),
        ({"clip_norm": float("nan")}, "clip norm"),
        ({"on_nan": "stpo"}, "Did you mean 'stop'"),
        ({"policy": "allreduce"}, "Did you mean 'all-reduce'"),
        ({"batch_size": 41}, "41"),
        ({"device": "tpu9"}, "tpu9"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        train(TrainConfig(run=str(tmp_path / "run"), **options), problem())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.1234567, "loss 0.1235"), (1.5e30, "loss 1.5e+30"), (-2e9, "loss -2e+09")]
)
def test_the_progress_line_stays_short(loss: float, shown: str) -> None:
    """A loss that explodes, under an attack for example, leaves room for the rest."""
    text = io.StringIO()
    line = ProgressLine("a[/b].py", console=Console(file=text, width=79))  # a name is no markup
    with line:
        line(Progress(step=1, total_steps=2, epoch=0, loss=loss, examples_per_second=9.0, timing={}))
    assert all(part in text.getvalue() for part in ("a[/b].py", shown, "1/2"))
