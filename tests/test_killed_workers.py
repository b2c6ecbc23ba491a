"""Several workers, really killed at a random moment: resumed on as many, or on another number of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DEADLINE, FRAGILE_MODEL, finished, living, started, wait_for_checkpoint, wait_until_gone
from same_bits import assert_same, metrics_of

from paceline.record.checkpoint import CheckpointFolder, read_checkpoint

pytestmark = pytest.mark.processes

SAVE_EVERY = 3

# A run must not end before it is killed.
SLOW = """
import os, time
steps = 0

def dawdle(outputs):
    global steps
    steps += outputs.requires_grad
    slow = outputs.requires_grad and steps > 45 and "TO_BE_KILLED" in os.environ
    time.sleep(1.0 if slow else 0.005)
"""

FRAGILE = f"""
{SLOW}
{FRAGILE_MODEL}
from dataclasses import replace
from paceline.problems.load import load_problem
from paceline.problems import Recipe

def problem():
    digits = load_problem("digits")
    def loss(outputs, targets):
        dawdle(outputs)
        return digits.loss(outputs, targets)
    recipe = Recipe(optimizer="adam(lr=0.003)", batch_size=32, epochs=3)
    return replace(digits, make_model=make_model, loss=loss, recipe=recipe)
"""

# The weight of a sample counts how often it was seen: this Adam moves it by 1 against the sign of its gradient, and
# leaves it where it is if the sample was not in the step, or only borrowed.
COUNTING = f"""
{SLOW}
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset
from paceline.problems import Recipe

SAMPLES = 203

def mean(outputs, targets):
    dawdle(outputs)
    return outputs.mean()

def problem():
    def make_model():
        model = nn.Linear(SAMPLES, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model
    data = TensorDataset(torch.eye(SAMPLES), torch.zeros(SAMPLES))
    return paceline.Problem(
        name="counting",
        make_model=make_model,
        train=data,
        test=data,
        loss=mean,
        metric=paceline.Metric(name="mean", measure=mean, higher_is_better=False),
        recipe=Recipe(optimizer="adam(lr=1, betas=(0, 0), eps=1e-30)", batch_size=4, epochs=3),
    )
"""

# What ``paceline train`` does, as a user would write it.
SCRIPT = f"""
import sys, paceline
from paceline.optim import make_optimizer
from paceline.seeding import derive_seed, seed_streams
from wanted import problem

problem = problem()
seed_streams(derive_seed(0, "model"))
recipe, model = problem.recipe, problem.make_model()
optimizer = make_optimizer(recipe.optimizer, model.parameters())
with paceline.join(model, optimizer, seed=0, run=sys.argv[1], resume=True, save_every={SAVE_EVERY}) as session:
    for inputs, targets in session.batches(problem.train, recipe.batch_size, epochs=recipe.epochs):
        with session.step() as step:
            loss = problem.loss(model(inputs), targets)
            step.record(loss=loss)
            loss.backward()
"""


@dataclass(frozen=True)
class Training:
    """A problem trained by ``paceline train``, or by a script under ``paceline run``, in a folder of its own."""

    command: str
    source: str
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def arguments(self, workers: int) -> list[str]:
        """The command line that starts the run, or goes on with it."""
        problem, script = self.folder / "wanted.py", self.folder / "script.py"
        problem.write_text(self.source)
        script.write_text(SCRIPT)
        if self.command == "run":
            return ["run", "--workers", str(workers), str(script), str(self.run)]
        train = ["train", "--workers", str(workers), "--json"]
        if self.run.exists():
            return [*train, "--resume", str(self.run)]
        return [*train, str(problem), "--save-every", str(SAVE_EVERY), "--run", str(self.run)]

    def finish(self, workers: int) -> None:
        ended = finished(self.arguments(workers))
        assert (ended.returncode, ended.stderr) == (0, "")

    def last_state(self) -> dict[str, Any]:
        (*_, last) = CheckpointFolder(self.run / "checkpoints").files()
        state = read_checkpoint(last)
        del state["session"]["metrics_bytes"]  # they hold times
        return state

    def step_metrics(self) -> list[str]:
        return [line for line in metrics_of(self.run) if '"event": "step"' in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    training = Training("run", FRAGILE, tmp_path_factory.mktemp("undisturbed"))
    training.finish(workers=2)
    return training


@pytest.fixture
def dice() -> random.Random:
    seed = random.randrange(2**32)
    print(f"dice: random.Random({seed})")  # pytest shows it if the test fails
    return random.Random(seed)


def kill_at_random(training: Training, dice: random.Random, *, workers: int, supervisor_alone: bool = False) -> None:
    """Start a run and kill it some time after one of its first checkpoints: all of its processes, or the first."""
    mark = uuid.uuid4().hex
    with started(training.arguments(workers), mark=mark, TO_BE_KILLED="1") as process:
        assert wait_for_checkpoint(process, training.run, newer_than=dice.randrange(40)), process.communicate()
        time.sleep(dice.uniform(0, 0.03))
        victims = [process.pid] if supervisor_alone else living(mark)
        assert supervisor_alone or len(victims) >= workers + 1, "the supervisor and its workers"
        dice.shuffle(victims)
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):  # one dies of another's death
                os.kill(victim, signal.SIGKILL)
        assert process.wait(DEADLINE) == -signal.SIGKILL, "it ended before it was killed"
        assert wait_until_gone(mark) == []


@pytest.mark.soak
@pytest.mark.parametrize(("command", "supervisor_alone"), [("train", False), ("run", True)])
def test_as_many_workers_end_with_the_same_bits(
    command: str, supervisor_alone: bool, undisturbed: Training, dice: random.Random, tmp_path: Path
) -> None:
    training = Training(command, FRAGILE, tmp_path)
    kill_at_random(training, dice, workers=2, supervisor_alone=supervisor_alone)
    training.finish(workers=2)
    assert_same(training.last_state(), undisturbed.last_state())
    assert training.step_metrics() == undisturbed.step_metrics()


@pytest.mark.soak
@pytest.mark.parametrize(("command", "workers"), [("train", 1), ("run", 3)])
def test_another_number_of_workers_sees_every_sample_once_an_epoch(
    command: str, workers: int, dice: random.Random, tmp_path: Path
) -> None:
    training = Training(command, COUNTING, tmp_path)
    kill_at_random(training, dice, workers=2)
    training.finish(workers)
    (weights,) = training.last_state()["trainee"]["model"].values()
    torch.testing.assert_close(-weights, torch.full_like(weights, 3), rtol=0, atol=1e-3)
