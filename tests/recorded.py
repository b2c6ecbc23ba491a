"""Runs with a trace, made in one process within a second by workers that are threads, as if by ``paceline train``."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from live import Cluster
from torch import nn

from paceline.optim import make_optimizer
from paceline.policies import parse_policy
from paceline.policies.server import ServerPolicy
from paceline.problems import Problem
from paceline.record.fingerprints import hash_of, state_tensors
from paceline.record.trace import Ended, Hashed, Record, Trace, TraceWriter
from paceline.server.live import CommitSummary
from paceline.sessions.worker import WorkerSession
from paceline.train_state import TrainState
from paceline.training.train import TrainConfig, build_scheduler, load_config_problem, loss_of, make_model, server_pace
from paceline.version import __version__

HASH_EVERY = 7  # commits

# BatchNorm's buffers show a step that went on from another one's; dropout, random streams that are another step's.
PROBLEM = """
import time
from dataclasses import replace
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from paceline.problems import Recipe
from paceline.problems.load import load_problem

def problem(*last):
    digits = load_problem("digits")
    def make_model():
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), *last, nn.Linear(32, 10))
    train = TensorDataset(*(tensor[:600] for tensor in digits.train.tensors))
    return replace(digits, name="norm", make_model=make_model, train=train, recipe=Recipe(batch_size=16, epochs=2))

def with_dropout():
    quick = problem(nn.Dropout(0.2))
    def loss(outputs, targets):
        if not Path(__file__).with_name("hurry").exists():
            time.sleep(0.02)
        return quick.loss(outputs, targets)
    return replace(quick, loss=loss)
"""


def problem_file(folder: Path) -> str:
    """Write the problem down; ``FILE:with_dropout`` is the other one, slow until a file ``hurry`` lies beside it."""
    file = folder / "norm.py"
    file.write_text(PROBLEM)
    return str(file)


class Recording:
    """Stands for the server's session: writes hashes of the parameters into the trace."""

    def __init__(self, trace: TraceWriter, model: nn.Module) -> None:
        self._trace, self._model, self._version = trace, model, 0

    def rate(self) -> float:
        return 1.0

    def committed(self, commit: CommitSummary) -> None:
        self._version = commit.version
        if commit.version % HASH_EVERY == 0:
            self.hash()
        self._trace.flush()

    def hash(self) -> None:
        self._trace.append(Hashed(self._version, hash_of(state_tensors(self._model))))

    def write_down(self) -> None:
        pass

    def save(self, path: Path | None) -> Path | None:
        return path

    def note(self, event: str, values: dict[str, Any]) -> None:
        pass


def record(folder: Path, policy: str, *, workers: int = 3, **options: Any) -> Path:
    """Record a run under the policy; gives its directory."""
    config = TrainConfig(problem=problem_file(folder), policy=policy, seed=5, **options)
    problem = load_config_problem(config)
    run = folder / "run"
    run.mkdir()
    about = {
        "paceline": __version__,
        "torch": torch.__version__,
        "policy": policy,
        "codec": config.codec,
        "seed": config.seed,
        "world_size": workers,
        "threads": torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
    }
    (run / "config.json").write_text(json.dumps({**about, "train": dataclasses.asdict(config)}))
    trace = TraceWriter(run / "trace.bin", about)
    server_state, *train_states = [_make_train_state(config, problem, workers) for _ in range(workers + 1)]
    host = Recording(trace, server_state.model)
    options = {"host": host, "seed": config.seed, "trace": trace, "codec": config.codec}
    with Cluster(policy, server_state, workers=workers, **options) as cluster:
        cluster.run(train_states, lambda session, train_state: _train(session, train_state.model, config, problem))
        cluster.wait_for_end()
    host.hash()
    trace.append(Ended(True))
    trace.close()
    return run


def _make_train_state(config: TrainConfig, problem: Problem, workers: int) -> TrainState:
    model, policy = make_model(config, problem), parse_policy(config.policy)
    assert isinstance(policy, ServerPolicy)
    optimizer = make_optimizer(config.optimizer or problem.recipe.optimizer, model.parameters())
    scheduler = build_scheduler(config, problem, optimizer, server_pace(config, problem, policy, workers))
    return TrainState(
        model=model,
        optimizers=[optimizer],
        schedulers=[scheduler] if scheduler is not None else [],
        clip_norm=config.clip_norm,
    )


def _train(session: WorkerSession, model: nn.Module, config: TrainConfig, problem: Problem) -> None:
    """The loop of ``paceline train``, with pauses of another length in every run."""
    dice = random.Random()
    for inputs, targets in session.batches(problem.train, problem.recipe.batch_size, epochs=problem.recipe.epochs):
        time.sleep(dice.choice([0, 0.001, 0.004]) * (1 + session.rank))
        with session.step() as step:
            loss = loss_of(config, problem, model, inputs, targets, worker=session.rank)
            step.record(loss=loss)
            loss.backward()  # type: ignore[no-untyped-call]


def rewrite(run: Path, change: Callable[[list[Record]], Iterable[Record]], **about: Any) -> None:
    """Write the trace of a run anew, with other records or another description, and good checksums."""
    trace = Trace(run / "trace.bin")
    records = list(change(list(trace)))
    writer = TraceWriter(run / "trace.bin", {**trace.about, **about})
    for one in records:
        writer.append(one)
    writer.close()
