"""A run that crashes and is resumed ends with the bits of the run that never crashed."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import Crash, Parts, train_by_session
from quick import in_turn
from same_bits import assert_same, metrics_of
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from training_cases import CASES, DATASET, INPUTS, TARGETS, Augmented, classifier, compiled, dropout, mlp, momentum, sgd

import paceline
from paceline.seeding import seed_streams


class Average:
    """An average of the weights over time, as an example of an object that is saved too."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weights = [parameter.detach().clone() for parameter in model.parameters()]
        self.updates = 0

    def update(self, _: Tensor) -> None:
        self.updates += 1
        for mean, parameter in zip(self.weights, self.model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 / (1 + self.updates))

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.updates = state["weights"], state["updates"]


def averaging() -> Parts:
    parts = sgd()
    average = Average(parts.model)
    parts.stateful = {"average": average}
    parts.before_update = lambda: average.update(torch.zeros(()))
    return parts


def on_plateau() -> Parts:
    """A rate that falls whenever the loss has not; stepped inside the step, so that checkpoints come after."""
    parts = sgd()
    plateau = ReduceLROnPlateau(parts.optimizers[0], patience=0)
    parts.stateful = {"plateau": plateau}
    inner = parts.loss

    def loss(batch: Any) -> Tensor:
        found = inner(batch)
        plateau.step(found.detach())
        return found

    parts.loss = loss
    return parts


class Shuffled(IterableDataset[Any]):
    """A stream that is shuffled through a buffer, drawing from a random stream all along the epoch."""

    def __iter__(self) -> Iterator[Any]:
        held: list[int] = []
        for place in range(40):
            held.append(place)
            if len(held) == 12:
                index = held.pop(int(torch.randint(12, ())))
                yield INPUTS[index], TARGETS[index]
        random.shuffle(held)
        yield from ((INPUTS[index], TARGETS[index]) for index in held)


class Noisy(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Augmented()[place] for place in range(40))


def with_generator(**options: Any) -> Parts:
    """As PyTorch's notes on reproducibility advise: a generator of the loader's own."""
    generator = torch.Generator().manual_seed(1 + torch.initial_seed())
    return sgd(source=DataLoader(DATASET, 8, shuffle=True, generator=generator, **options))


def of_data_set(dataset: Any, **options: Any) -> Callable[[], Parts]:
    return lambda: sgd(source=dataset, source_options={"batch_size": 8, **options})


RESUMED: dict[str, Callable[[], Parts]] = {
    **CASES,
    "compiled": compiled("aot_eager"),
    "data set": of_data_set(DATASET),
    "data set, short last batch": lambda: sgd(source=DATASET, source_options={"batch_size": 9}),
    "data set, dropped last batch": lambda: sgd(source=DATASET, source_options={"batch_size": 9, "last": "drop"}),
    "data set, padded last batch": lambda: sgd(source=DATASET, source_options={"batch_size": 9, "last": "pad"}),
    "augmented data set": of_data_set(Augmented()),
    "augmented data set, workers": of_data_set(Augmented(), num_workers=2),
    "augmented loader": lambda: sgd(source=DataLoader(Augmented(), 8, shuffle=True)),
    "augmented loader, workers": lambda: sgd(source=DataLoader(Augmented(), 8, shuffle=True, num_workers=2)),
    "loader with its own generator": with_generator,
    "loader with a sampler that is told the epoch": lambda: sgd(
        source=DataLoader(DATASET, 8, sampler=DistributedSampler(DATASET, num_replicas=1, rank=0))
    ),
    "iterable data set by session": lambda: sgd(source=Noisy(), source_options={"batch_size": 8}),
    "iterable that shuffles as it goes": lambda: sgd(source=DataLoader(Shuffled(), 8)),
    "list of batches": lambda: sgd(source=list(DataLoader(DATASET, 8))),
    "average of weights": averaging,
    "plateau": on_plateau,
}


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power is cut in these tests, and syncing takes most of their time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def start(build: Callable[[], Parts], seed: int) -> Parts:
    seed_streams(seed)
    return build()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("case", "seed"), in_turn(RESUMED, [None, 11]))
def test_a_resumed_run_is_the_run_that_never_crashed(case: str, seed: int | None, tmp_path: Path) -> None:
    """Crashes in mid-epoch, at an epoch's end, and again; all that is made anew starts from other bits."""
    build = RESUMED[case]
    options: dict[str, Any] = {"seed": seed, "save_every": 2}
    whole = start(build, 0)
    train_by_session(whole, run=tmp_path / "whole", **options)
    expected = whole.state()
    for attempt, crash_at in enumerate((3, 10, 13, None)):
        parts = start(build, attempt and 100 + attempt)
        with contextlib.suppress(Crash):
            train_by_session(parts, run=tmp_path / "run", resume=True, crash_at=crash_at, **options)
    assert_same(parts.state(), expected)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_lbfgs_is_resumed(crash_at: int, tmp_path: Path) -> None:
    def train(run: Path, seed: int, updates: int) -> Any:
        seed_streams(seed)
        model = mlp(nn.Dropout(0.1))
        optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=3, history_size=4)
        with paceline.join(model, optimizer, run=run, resume=True, save_every=1) as session:
            while session.steps < updates:

                def closure() -> Tensor:
                    loss = F.cross_entropy(model(INPUTS), TARGETS)
                    loss.backward()  # type: ignore[no-untyped-call]
                    return loss

                session.minimize(closure)
        return model.state_dict(), optimizer.state_dict()

    expected = train(tmp_path / "whole", 0, 5)
    train(tmp_path / "run", 0, crash_at)
    assert_same(train(tmp_path / "run", 9, 5), expected)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize("crash_at", [4, 5, 7, 10])
def test_epochs_with_something_after_each_are_resumed(crash_at: int, tmp_path: Path) -> None:
    """An evaluation after every epoch, and a rate that depends on it."""

    def train(run: Path, seed: int, crash_at: int | None) -> Any:
        seed_streams(seed)
        parts = dropout()
        plateau = ReduceLROnPlateau(parts.optimizers[0], patience=0, threshold=0.1)
        with paceline.join(
            parts.model, parts.optimizers, run=run, resume=True, save_every=3, stateful={"plateau": plateau}
        ) as session:
            for epoch in session.epochs(4):
                for batch in session.batches(DATASET, 8):
                    assert session.epoch == epoch
                    with session.step() as step:
                        loss = parts.loss(batch)
                        parts.backward(loss)
                        step.record(loss=loss.detach())
                    if session.steps == crash_at:
                        raise Crash
                parts.model.eval()
                with torch.no_grad():
                    test_loss = parts.loss((INPUTS, TARGETS))
                parts.model.train()
                plateau.step(test_loss)
                session.record("evaluation", test_loss=test_loss)
        return parts.state(), plateau.state_dict()

    expected = train(tmp_path / "whole", 0, None)
    with contextlib.suppress(Crash):
        train(tmp_path / "run", 0, crash_at)
    assert_same(train(tmp_path / "run", 9, None), expected)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_parameters_outside_the_model_are_not_forgotten(tmp_path: Path) -> None:
    """A learned temperature that only the optimizer knows: refused when joining, or resumed like the rest."""

    def train(seed: int, crash_at: int | None, run: Path) -> Any:
        seed_streams(seed)
        model, temperature = mlp(), nn.Parameter(torch.rand(()))
        optimizer = SGD([*model.parameters(), temperature], lr=0.1)
        parts = classifier(
            model, optimizer, loss=lambda batch: F.cross_entropy(model(batch[0]) * temperature.exp(), batch[1])
        )
        with contextlib.suppress(Crash):
            train_by_session(parts, run=run, resume=True, save_every=2, crash_at=crash_at)
        return temperature.detach(), model.state_dict()

    try:
        expected = train(0, None, tmp_path / "whole")
    except paceline.UsageError as error:
        assert "not in the model" in str(error)
        return
    train(0, 3, tmp_path / "run")
    assert_same(train(9, None, tmp_path / "run"), expected)


def test_a_finished_run_is_resumed_to_itself(tmp_path: Path) -> None:
    parts = start(dropout, 0)
    train_by_session(parts, run=tmp_path)
    before = parts.state(), metrics_of(tmp_path)
    again = start(dropout, 9)
    assert train_by_session(again, run=tmp_path, resume=True) == []
    assert_same((again.state(), metrics_of(tmp_path)), before)


def test_more_epochs_may_be_asked_for(tmp_path: Path) -> None:
    whole = start(dropout, 0)
    train_by_session(whole, epochs=3, run=tmp_path / "whole")
    train_by_session(start(dropout, 0), epochs=1, run=tmp_path / "run")
    parts = start(dropout, 5)
    train_by_session(parts, epochs=3, run=tmp_path / "run", resume=True)
    assert_same(parts.state(), whole.state())
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")


def test_leaving_and_entering_a_loop_over_batches_goes_on_in_the_epoch() -> None:
    """As resuming does, within one process."""

    def train(leave_after: int | None) -> Parts:
        parts = start(CASES["dropout"], 0)
        session = paceline.join(parts.model, parts.optimizers)
        while session.epoch < 2:
            for batch in session.batches(parts.source, epochs=2):
                with session.step():
                    parts.backward(parts.loss(batch))
                if session.steps == leave_after:
                    break
        assert session.steps == 10
        return parts

    assert_same(train(3).model.state_dict(), train(None).model.state_dict())


def test_momentum_matters_here() -> None:
    """The equalities above would say little if optimizer state could be lost without a difference."""
    parts = start(CASES["momentum"], 0)
    train_by_session(parts, epochs=1)
    other = start(CASES["momentum"], 0)
    train_by_session(other, epochs=1)
    other.optimizers = [momentum(other.model)]
    train_by_session(parts, epochs=1)
    train_by_session(other, epochs=1)
    assert not torch.equal(parts.model.state_dict()["0.weight"], other.model.state_dict()["0.weight"])


@pytest.mark.parametrize("given", ["nowhere", "scheduler", "stateful"])
def test_a_scheduler_that_was_not_saved_is_told(given: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert caplog.records == []  # there is nothing to tell before the run is resumed
        model = mlp()
        optimizer = momentum(model)
        scheduler = ExponentialLR(optimizer, 0.9)
        given_to_join: dict[str, Any] = {"scheduler": scheduler, "stateful": {"mine": scheduler}}
        options = {given: given_to_join[given]} if given in given_to_join else {}
        with paceline.join(model, optimizer, run=tmp_path, resume=True, **options) as session:
            session.save()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (given == "nowhere")
    assert all("join(scheduler=...)" in message and "stateful=" in message for message in told)
