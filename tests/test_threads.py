"""How many threads a training gets: few where a step is small, what the user set always, and the same when resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import ENVIRONMENT
from torch import nn

from paceline.launch.process_environment import ProcessEnvironment, brief_spinning
from paceline.problems import Problem, load_problem
from paceline.training.threads import step_operations, wants_one_thread


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def digits() -> Problem:
    return load_problem("digits")


def test_operations_are_those_of_layers_and_of_the_batch() -> None:
    dense = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 2))
    assert step_operations(dense, torch.ones(3, 4), batch_size=10) == 3 * 10 * 2 * (12 * 5 + 5 * 2)
    filters = nn.Sequential(nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7))
    assert step_operations(filters, torch.ones(3, 8, 8), batch_size=1) == 3 * 2 * (7 * 3 * 9) * 64


def test_counting_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step_operations(model, torch.ones(4), batch_size=2)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.modules())


def test_small_steps_get_one_thread_and_large_ones_do_not(digits: Problem) -> None:
    assert wants_one_thread("digits", digits, 32)
    assert not wants_one_thread("digits", digits, 1024)
    large = replace(
        digits, make_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 30_000), nn.Linear(30_000, 10))
    )
    assert not wants_one_thread("digits", large, 32)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_that_the_user_asked_for_stay(name: str, digits: Problem) -> None:
    assert not wants_one_thread("digits", digits, 32, {name: "2"})
    assert wants_one_thread("digits", digits, 32, {name: ""})


def test_a_problem_of_a_file_keeps_the_threads_that_it_may_have_set(digits: Problem) -> None:
    assert not wants_one_thread("path/to/mine.py", digits, 32)


def threads_of(run: Path) -> int:
    found: int = json.loads((run / "config.json").read_text())["threads"]
    return found


def test_a_run_and_its_resumption_have_the_same_threads(paceline: Any, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    quick = ("train", "logistic", "--max-steps", "2", "--run", "mine")
    assert paceline(*quick).code == 0
    assert threads_of(tmp_path / "mine") == 1
    assert torch.get_num_threads() == 2
    assert paceline("train", "--resume", "mine", "--max-steps", "3").code == 0
    assert threads_of(tmp_path / "mine") == 1


def test_a_run_has_the_threads_that_the_user_set(
    paceline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert paceline("train", "logistic", "--max-steps", "2", "--run", "mine").code == 0
    assert threads_of(tmp_path / "mine") == 2


@pytest.mark.parametrize(("problem", "asked", "given"), [("digits", None, "1"), ("digits", "3", "3")])
def test_workers_of_a_small_problem_get_one_thread_each(
    problem: str, asked: str | None, given: str, paceline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []

    def supervise(*_: Any, workers: int, environment: dict[str, str] | None, **__: Any) -> int:
        environments.append(ProcessEnvironment(workers=workers, port=1, base=environment).worker(0))
        return 1

    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("paceline.launch.supervisor.supervise", supervise)
    paceline("train", problem, "--workers", "2")
    assert [process_environment["OMP_NUM_THREADS"] for process_environment in environments] == [given]


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_waiting_threads_spin_is_the_users_if_they_say_so(name: str) -> None:
    assert set(brief_spinning({"HOME": "/"})) == {"GOMP_SPINCOUNT"}
    assert brief_spinning({name: "7"}) == {}
    assert (
        ProcessEnvironment(workers=2, port=1, base={}).worker(0)["GOMP_SPINCOUNT"]
        == brief_spinning({})["GOMP_SPINCOUNT"]
    )
    user = ProcessEnvironment(workers=2, port=1, base={name: "7"}).worker(0)
    assert {each: user.get(each) for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} == {
        "GOMP_SPINCOUNT": None,
        "OMP_WAIT_POLICY": None,
        name: "7",
    }


COMMAND = """
import os, sys
from paceline.__main__ import main
sys.argv = ["paceline", "--version"]
assert "torch" not in sys.modules
try:
    main()
finally:
    print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.processes
def test_the_command_sets_how_threads_wait_before_torch_is_imported() -> None:
    kept = {name: value for name, value in {**os.environ, **ENVIRONMENT}.items() if name != "OMP_WAIT_POLICY"}
    kept.pop("GOMP_SPINCOUNT", None)
    found = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=200, env=kept)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == brief_spinning({})["GOMP_SPINCOUNT"]
