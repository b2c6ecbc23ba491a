"""A loss that is NaN or infinite stops the run, or is skipped, or is let through; as told, and without harm."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops import Parts
from same_bits import assert_same, metrics_of
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.lr_scheduler import ExponentialLR
from training_cases import CASES, INPUTS, TARGETS, classifier, mlp, momentum

import paceline
from paceline.errors import NonFiniteLossError, UsageError
from paceline.record.checkpoint import read_checkpoint

GOOD = (INPUTS[:8], TARGETS[:8])
BAD: dict[str, Callable[[Any], Tensor]] = {
    "nan": lambda loss: loss * math.nan,
    "inf": lambda loss: loss + math.inf,
    "-inf": lambda loss: loss - math.inf,
}


def parts() -> Parts:
    found = CASES["adam with groups"]()
    found.schedulers = [ExponentialLR(found.optimizers[0], 0.9)]
    return found


def frozen_state(found: Parts) -> Any:
    return torch.utils._pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, found.state())


def take_step(session: paceline.Session, found: Parts, spoil: Callable[[Tensor], Tensor] | None = None) -> None:
    with session.step() as step:
        loss = found.loss(GOOD)
        loss = loss if spoil is None else spoil(loss)
        found.backward(loss)
        step.record(loss=loss.detach())


def join(found: Parts, **options: Any) -> paceline.Session:
    return paceline.join(found.model, found.optimizers, scheduler=found.schedulers, **options)


@pytest.mark.parametrize("kind", BAD)
def test_stopping_names_worker_step_and_the_last_checkpoint_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    found = parts()
    with pytest.raises(NonFiniteLossError) as caught, join(found, run=tmp_path, save_every=2) as session:
        for _ in range(3):
            take_step(session, found)
        before = frozen_state(found)
        take_step(session, found, BAD[kind])
    message = str(caught.value)
    saved = tmp_path / "checkpoints" / "step-0000000002.safetensors"
    assert re.search(rf"worker 0, step 3: the loss is {kind}\b", message), message
    assert str(saved) in message
    assert_same(frozen_state(found), before)
    assert saved.exists()
    assert len(list(saved.parent.iterdir())) == 1, "a stopped run saves nothing more"


def test_stopping_before_any_checkpoint_says_so() -> None:
    found = parts()
    session = join(found)
    with pytest.raises(NonFiniteLossError, match="there is no checkpoint"):
        take_step(session, found, BAD["nan"])


def test_the_checkpoint_that_is_named_is_a_good_one(tmp_path: Path) -> None:
    """A finite loss may have gradients that are not: the update spoils the parameters before any loss shows it."""
    found = parts()
    with pytest.raises(NonFiniteLossError) as caught, join(found, run=tmp_path, save_every=1, keep=1) as session:
        take_step(session, found)
        take_step(session, found, lambda loss: loss + (0 * next(found.model.parameters()).sum()).sqrt())
        take_step(session, found)
    named = re.search(r"\S+\.safetensors", str(caught.value))
    assert named is not None
    saved = read_checkpoint(Path(named[0]))["trainee"]["model"]
    assert all(value.isfinite().all() for value in saved.values())


def test_a_stopped_run_can_be_resumed(tmp_path: Path) -> None:
    found = parts()
    with pytest.raises(NonFiniteLossError), join(found, run=tmp_path, save_every=1) as session:
        take_step(session, found)
        before = frozen_state(found)
        take_step(session, found, BAD["nan"])
    again = parts()
    with join(again, run=tmp_path, resume=True) as session:
        assert session.steps == 1
        assert_same(again.state(), before)


@pytest.mark.parametrize("kind", BAD)
def test_skipping_changes_nothing_and_is_counted(kind: str, tmp_path: Path) -> None:
    found = parts()
    with join(found, run=tmp_path, on_nan="skip") as session:
        take_step(session, found)
        before = frozen_state(found)
        take_step(session, found, BAD[kind])
        assert_same(frozen_state(found), before)
        assert session.steps == 2
        take_step(session, found)
    lines = [json.loads(line) for line in metrics_of(tmp_path)]
    assert [line.get("skipped", False) for line in lines] == [False, True, False]
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_skipped_steps_are_as_if_they_had_never_been_tried() -> None:
    def train(spoiled: bool) -> Any:
        torch.manual_seed(0)
        found = parts()
        session = join(found, on_nan="skip")
        for number in range(4):
            if spoiled and number == 2:
                take_step(session, found, BAD["nan"])
            take_step(session, found)
        return found.state()

    assert_same(train(spoiled=True), train(spoiled=False))


def test_skipping_keeps_a_bad_batch_out_of_the_statistics_too() -> None:
    """BatchNorm takes its running mean in the forward pass; one NaN there would spoil every evaluation."""
    model = mlp(nn.BatchNorm1d(12))
    found = classifier(model, momentum(model))
    session = join(found, on_nan="skip")
    take_step(session, found)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with session.step() as step:
        loss = found.loss((INPUTS[:8] * math.nan, TARGETS[:8]))
        found.backward(loss)
        step.record(loss=loss.detach())
    assert step.skipped
    assert_same(dict(model.named_buffers()), before)


def test_ignoring_goes_on_as_a_plain_loop_would(tmp_path: Path) -> None:
    found = parts()
    with join(found, run=tmp_path, on_nan="ignore") as session:
        take_step(session, found, BAD["nan"])
        assert session.steps == 1
    assert any(parameter.isnan().any() for parameter in found.model.parameters())


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_bad_loss_among_accumulated_ones_is_found(where: int, on_nan: Any) -> None:
    """Its gradients are in the sum, whichever block it was recorded in."""
    found = parts()
    session = join(found, on_nan=on_nan)
    take_step(session, found)
    before = frozen_state(found)

    def update() -> None:
        for number in range(3):
            with session.step(accumulate=number < 2) as step:
                loss = found.loss(GOOD)
                loss = BAD["nan"](loss) if number == where else loss
                found.backward(loss)
                step.record(loss=loss.detach())

    if on_nan == "stop":
        with pytest.raises(NonFiniteLossError):
            update()
    else:
        update()
    assert_same(frozen_state(found), before)


def test_a_loss_may_be_recorded_as_backward_takes_it(tmp_path: Path) -> None:
    """Without a warning about its graph, and without keeping that."""
    found = parts()
    with join(found, run=tmp_path) as session, session.step() as step:
        loss = found.loss(GOOD)
        step.record(loss=loss)
        found.backward(loss)
    assert json.loads(metrics_of(tmp_path)[0])["loss"] == float(loss.detach())


def minimizer(**options: Any) -> tuple[nn.Module, LBFGS, paceline.Session, Callable[[], Tensor], list[int]]:
    model = mlp()
    optimizer = LBFGS(model.parameters(), max_iter=4)
    session = paceline.join(model, optimizer, **options)
    spoiled: list[int] = []  # which evaluations are bad, counted from 1 within an update

    def closure() -> Tensor:
        loss = F.cross_entropy(model(INPUTS), TARGETS)
        spoiled[:] = [number - 1 for number in spoiled]
        loss = loss * math.nan if 0 in spoiled else loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return model, optimizer, session, closure, spoiled


@pytest.mark.parametrize("evaluation", [1, 3])
def test_minimize_stops_and_puts_the_parameters_back(evaluation: int, tmp_path: Path) -> None:
    model, _, session, closure, spoiled = minimizer(run=tmp_path, save_every=1)
    session.minimize(closure)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spoiled.append(evaluation)
    with pytest.raises(NonFiniteLossError, match=r"worker 0, step 1: .*step-0000000001") as caught, session:
        session.minimize(closure)
    if "left as they were" in str(caught.value) or evaluation == 1:
        assert_same(model.state_dict(), before)
    else:
        assert "given up" in str(caught.value)


def test_minimize_skips() -> None:
    model, optimizer, session, closure, spoiled = minimizer(on_nan="skip")
    session.minimize(closure)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluations = optimizer.state_dict()["state"][0]["n_iter"]
    spoiled.append(1)
    session.minimize(closure)
    assert session.steps == 2
    assert_same(model.state_dict(), before)
    assert optimizer.state_dict()["state"][0]["n_iter"] == evaluations
    assert math.isfinite(session.minimize(closure))


def test_minimize_ignores() -> None:
    _, _, session, closure, spoiled = minimizer(on_nan="ignore")
    spoiled.append(1)
    assert math.isnan(session.minimize(closure))
    assert session.steps == 1


def test_an_unknown_choice_is_told_the_nearest() -> None:
    model = mlp()
    with pytest.raises(UsageError, match="Did you mean 'skip'"):
        paceline.join(model, momentum(model), on_nan="skipp")  # type: ignore[arg-type]
