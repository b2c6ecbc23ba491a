"""What a session is asked that cannot be: an error that says what was wanted and what to do, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from same_bits import assert_same, metrics_of
from torch import nn
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from training_cases import CASES, DATASET, INPUTS, TARGETS, Counted, mlp, momentum

import paceline
from paceline.errors import UsageError
from paceline.record.checkpoint import CheckpointFolder


def join(**options: Any) -> paceline.Session:
    model = mlp()
    return paceline.join(model, momentum(model), **options)


def backward(session: paceline.Session) -> None:
    F.cross_entropy(session._train_state.model(INPUTS), TARGETS).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "all-reduc"}, "Did you mean 'all-reduce'"),
        ({"policy": "all-reduce(bucket=1)"}, "bucket"),
        ({"policy": 3}, "policy"),
        ({"save_every": 0}, "save_every must be at least 1"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"log_every": -1}, "log_every must be at least 1"),
        ({"save_every": 2.5}, "save_every must be a whole number, got 2.5"),
        ({"keep": "3"}, "keep must be a whole number, got '3'"),
        ({"on_nan": "stopp"}, "Did you mean 'stop'"),
        ({"scheduler": "cosine"}, "scheduler must be"),
        ({"scheduler": [1]}, "scheduler must be"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"clip_norm": -1.0}, "clip_norm"),
        ({"clip_norm": math.nan}, "clip_norm"),
        ({"clip_norm": "x"}, "clip_norm must be a number above 0, got 'x'; leave it out"),
        ({"clip_norm": True}, "clip_norm must be a number above 0, got True"),
        ({"policy": ""}, "wanted a policy or its text form, got ''; for example policy='all-reduce'"),
        ({"run": 5}, "run must be the path of a directory, got 5; give one"),
        ({"run": ""}, "run must be the path of a directory, got ''; give one"),
        ({"resume": 5}, "resume must be True, False or the path of a checkpoint, got 5"),
        ({"keep": None}, "keep must be a whole number, got None"),
        ({"log_every": None}, "log_every must be a whole number, got None"),
        ({"stateful": {"mine": object()}}, "mine"),
        ({"stateful": [1]}, "stateful must be a dictionary of names, such as {'sampler': sampler}, got list"),
        ({"config": 5}, "config must be a dictionary of names, such as {'note': 'a try'}, got int"),
        ({"group": 5}, "group must be a process group of torch.distributed that this process is in, got 5; make one"),
        ({"scaler": "fp16"}, "scaler"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed must be a whole number, got True"),
    ],
)
def test_join_says_what_it_wants(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=re.escape(message)):
        join(**{"run": "run", **options})
    assert not [*tmp_path.iterdir()], "nothing is made for a session that never was"


@pytest.mark.parametrize(
    ("value", "examples", "message"),
    [
        (1.0, -1, "examples must be a number of at least 0, got -1; leave it out to weigh all workers alike"),
        (1.0, math.nan, "examples must be a number of at least 0, got nan"),
        (1.0, "x", "examples must be a number of at least 0, got 'x'"),
        ("x", None, "mean() wants a number or a tensor, got 'x'"),
        (None, None, "mean() wants a number or a tensor, got None"),
    ],
)
def test_a_mean_says_what_it_wants(value: Any, examples: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"step 0: {message}")):
        join().mean(value, examples=examples)


@pytest.mark.parametrize("optimizer", [None, [], [3], "sgd", SGD])
def test_join_wants_optimizers(optimizer: Any) -> None:
    with pytest.raises(UsageError, match="optimizer"):
        paceline.join(mlp(), optimizer)


def test_join_wants_a_module() -> None:
    with pytest.raises(UsageError, match="model"):
        paceline.join(torch.ones(3), momentum(mlp()))  # type: ignore[arg-type]


def test_a_scheduler_that_needs_a_metric_is_not_stepped_without_one() -> None:
    model = mlp()
    optimizer = momentum(model)
    with pytest.raises(UsageError, match="stateful"):
        paceline.join(model, optimizer, scheduler=ReduceLROnPlateau(optimizer))


def test_a_refused_session_leaves_the_directory_free(tmp_path: Path) -> None:
    with join(run=tmp_path):
        pass
    for _ in range(2):
        with pytest.raises(UsageError, match="already holds"):
            join(run=tmp_path)
    with join(run=tmp_path, resume=True):
        pass


def test_a_step_in_a_step_is_refused_and_the_outer_one_too() -> None:
    session = join()
    before = [parameter.detach().clone() for parameter in session._train_state.model.parameters()]
    with pytest.raises(UsageError, match="inside another"), session.step():
        backward(session)
        with session.step():
            raise AssertionError("never entered")
    assert_same([parameter.detach() for parameter in session._train_state.model.parameters()], before)
    with session.step():
        backward(session)
    assert session.steps == 1


def test_saving_inside_a_step_is_refused(tmp_path: Path) -> None:
    session = join()
    with pytest.raises(UsageError, match="inside a step"), session.step():
        session.save(tmp_path / "x")
    with session.step(accumulate=True):
        backward(session)
    with pytest.raises(UsageError, match="between accumulating ones"):
        session.save(tmp_path / "x")
    with session.step():
        backward(session)
    session.save(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_saving_needs_a_place() -> None:
    with pytest.raises(UsageError, match="run"):
        join().save()


def test_saving_after_the_end_does_not_lose_the_metrics(tmp_path: Path) -> None:
    """Refused, for the directory may be someone else's by now; or else as good as one before the end."""
    with join(run=tmp_path) as session, session.step() as step:
        backward(session)
        step.record(loss=1.0)
    before = metrics_of(tmp_path)
    assert len(before) == 1
    with contextlib.suppress(UsageError):
        session.save()
    with join(run=tmp_path, resume=True):
        pass
    assert metrics_of(tmp_path) == before


@pytest.mark.parametrize("updates", [0, 1])
def test_a_session_that_ends_well_is_saved_though_gradients_are_left_over(updates: int, tmp_path: Path) -> None:
    """Ten batches, four to an update: the last two make none, and what was learned before stays."""
    with join(run=tmp_path) as session:
        for number in range(4 * updates + 2):
            with session.step(accumulate=number % 4 != 3):
                backward(session)
    (saved,) = CheckpointFolder(tmp_path / "checkpoints").files()
    assert saved.name == f"step-{updates:010d}.safetensors"


@pytest.mark.parametrize("name", ["lr", "examples", "step", "epoch", "worker", "time", "event", "skipped"])
def test_what_a_user_records_may_have_any_name(name: str, tmp_path: Path) -> None:
    """Taken, or refused where it is recorded; but never an error of ours after the update was made."""
    with join(run=tmp_path) as session:
        with session.step() as step:
            backward(session)
            try:
                step.record(**{name: 0.5})
            except UsageError as error:
                assert name in str(error)
        assert session.steps == 1
        try:
            session.record("evaluation", **{name: 0.5})
        except UsageError as error:
            assert name in str(error)
    assert len(metrics_of(tmp_path)) >= 1


def test_an_update_counts_the_examples_of_all_its_blocks(tmp_path: Path) -> None:
    with join(run=tmp_path) as session:
        for number, _ in enumerate(session.batches(DATASET, 8, epochs=1), 1):
            with session.step(accumulate=number != 5):
                backward(session)
    assert [json.loads(line)["examples"] for line in metrics_of(tmp_path)] == [40]


def test_the_rate_in_the_metrics_is_the_one_of_the_step(tmp_path: Path) -> None:
    """Also where it is a tensor that the scheduler changes in place."""

    def rates(case: str) -> list[float]:
        parts = CASES[case]()
        run = tmp_path / case
        with paceline.join(parts.model, parts.optimizers, scheduler=parts.schedulers, run=run) as session:
            for _ in range(3):
                with session.step():
                    parts.backward(parts.loss((INPUTS, TARGETS)))
        return [json.loads(line)["lr"] for line in metrics_of(run)]

    found = rates("rate as a tensor")
    assert len(set(found)) == 3
    assert found[0] / found[1] == pytest.approx(1 / 0.9)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (DATASET, {}, "batch_size"),
        (DataLoader(DATASET, 4), {"batch_size": 4}, "batch_size"),
        (DataLoader(DATASET, 4), {"num_workers": 1}, "num_workers"),
        (iter([1, 2]), {"batch_size": 4}, "batch_size"),
        (DATASET, {"batch_size": 41}, "41"),
        (DATASET, {"batch_size": 0}, "batch_size"),
        (DATASET, {"batch_size": 32.0}, "batch_size must be a whole number, got 32.0"),
        (DATASET, {"batch_size": "32"}, "batch_size must be a whole number, got '32'"),
        (DATASET, {"batch_size": True}, "batch_size must be a whole number, got True"),
        (DATASET, {"batch_size": 8, "epochs": 2.0}, "epochs must be a whole number, got 2.0"),
        (DATASET, {"batch_size": 8, "epochs": -1}, "epochs must be at least 0, got -1"),
        (Counted(), {"batch_size": "4"}, "batch_size must be a whole number, got '4'"),
        ([], {"batch_size": 4}, "the data set is empty"),
        (DATASET, {"batch_size": 4, "last": "shor"}, "Did you mean 'short'"),
        (DATASET, {"batch_size": 4, "last": None}, "no ending of an epoch called None. Known: drop, pad, short"),
        (DATASET, {"batch_size": 4, "drop_last": True}, "last"),
        (DATASET, {"batch_size": 4, "sampler": [1]}, "sampler"),
        (DATASET, {"batch_size": 4, "num_wokers": 1}, "num_workers"),
        (Counted(), {"batch_size": 4, "num_wokers": 1}, "num_workers"),
        (3, {}, "int"),
        (None, {}, "None"),
    ],
)
def test_batches_say_what_they_want(source: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        next(join().batches(source, **arguments))


@pytest.mark.parametrize("count", [2.0, "2", None])
def test_a_number_of_epochs_is_whole(count: Any) -> None:
    with pytest.raises(UsageError, match="the number of epochs must be a whole number"):
        next(join().epochs(count))


def test_two_loops_over_batches_at_once_are_refused() -> None:
    session = join()
    first = session.batches(DATASET, 8)
    next(first)
    with pytest.raises(UsageError, match="already under way"):
        next(session.batches(DATASET, 8))
    assert len(list(first)) == 4
    assert len(list(session.batches(DATASET, 8))) == 5


def test_a_loop_that_was_left_may_be_entered_again() -> None:
    session = join()
    for _ in session.batches(DATASET, 8):
        break
    assert len(list(session.batches(DATASET, 8))) == 5


@pytest.mark.parametrize("wrong", ["clip_norm", "scaler", "optimizers"])
def test_minimize_takes_one_plain_optimizer(wrong: str) -> None:
    model = mlp()
    options: dict[str, Any] = {"clip_norm": {"clip_norm": 1.0}, "scaler": {"scaler": torch.amp.GradScaler("cpu")}}
    optimizers = [LBFGS(model.parameters())] + ([momentum(model)] if wrong == "optimizers" else [])
    session = paceline.join(model, optimizers, **options.get(wrong, {}))
    with pytest.raises(UsageError, match="minimize"):
        session.minimize(lambda: model(INPUTS).sum())
    assert session.steps == 0


def test_an_exception_in_the_loop_saves_nothing_and_frees_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), join(run=tmp_path) as session:
        with session.step():
            backward(session)
        raise ZeroDivisionError
    assert CheckpointFolder(tmp_path / "checkpoints").files() == []
    with join(run=tmp_path, resume=True) as session:
        assert session.steps == 0


def test_a_failure_of_the_update_itself_passes_through() -> None:
    class Broken(SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
            raise ZeroDivisionError

    model = nn.Linear(6, 3)
    session = paceline.join(model, Broken(model.parameters(), lr=0.1))
    with pytest.raises(ZeroDivisionError), session.step():
        F.cross_entropy(model(INPUTS), TARGETS).backward()  # type: ignore[no-untyped-call]
    assert session.steps == 0


def test_batches_without_a_step_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with join() as session:
        for _ in session.batches(DATASET, 8):
            pass
    (told,) = caplog.messages
    assert "opened no step" in told and "with session.step():" in told


def test_batches_before_an_error_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), join() as session:
        for _ in session.batches(DATASET, 8):
            raise ZeroDivisionError
    assert caplog.messages == []


@pytest.mark.parametrize("scaled", [False, True])
def test_a_second_update_in_a_step_is_told_of_once(scaled: bool, caplog: pytest.LogCaptureFixture) -> None:
    scaler = torch.amp.GradScaler("cpu")
    with join() as session:
        (optimizer,) = session._train_state.optimizers
        for _ in session.batches(DATASET, 8):
            with session.step():
                loss = F.cross_entropy(session._train_state.model(INPUTS), TARGETS)
                if scaled:
                    torch.autograd.backward(scaler.scale(loss))
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    torch.autograd.backward(loss)
                    optimizer.step()
    (told,) = caplog.messages
    assert told.startswith("step 0: optimizer.step() was called inside the block")


@pytest.mark.parametrize("case", ["plain", "LBFGS", "scaler"])
def test_the_sessions_own_update_is_not_told_of(case: str, caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    optimizer = LBFGS(model.parameters(), max_iter=2) if case == "LBFGS" else SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu") if case == "scaler" else None

    def loss() -> torch.Tensor:
        value = F.cross_entropy(model(INPUTS), TARGETS)
        torch.autograd.backward(value if scaler is None else scaler.scale(value))
        return value

    with paceline.join(model, optimizer, scaler=scaler) as session:
        for _ in range(2):
            if case == "LBFGS":
                session.minimize(loss)
            else:
                with session.step():
                    loss()
    assert caplog.messages == []
    optimizer.step(loss)  # type: ignore[no-untyped-call]
    assert caplog.messages == [], "nor is an update after the session's end"
