"""Several learners of sma on each worker: as many processes, and how their number is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import backward
from replicas import plain
from torch import nn

import paceline as library
from paceline.commands import learners
from paceline.commands.options import processes_per_worker
from paceline.errors import UsageError
from paceline.launch.environment import PROBE
from paceline.launch.process_environment import ProcessEnvironment, threads_per_worker
from paceline.policies import SMA
from paceline.training.train import pick_device
from paceline.virtual.scenario import Scenario


def test_learners_of_a_worker_share_its_local_rank_and_the_cores() -> None:
    environment = ProcessEnvironment(workers=6, port=1, per_device=3, base={})
    variables = [environment.worker(rank) for rank in range(6)]
    assert [each["RANK"] for each in variables] == ["0", "1", "2", "3", "4", "5"]
    assert [each["LOCAL_RANK"] for each in variables] == ["0", "0", "0", "1", "1", "1"]
    assert {each["LOCAL_WORLD_SIZE"] for each in variables} == {"2"}
    assert {each["OMP_NUM_THREADS"] for each in variables} == {str(threads_per_worker(6))}


def test_learners_of_a_worker_share_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert str(pick_device("auto")) == "cuda:0"
    environment = ProcessEnvironment(workers=6, port=1, per_device=2, base={})
    found = []
    for rank in range(6):
        for name, value in environment.worker(rank).items():
            monkeypatch.setenv(name, value)
        found.append(str(pick_device("auto")))
    assert found == ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cuda:0", "cuda:0"]


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        (
            "sma(learners=2)",
            r"sma\(learners=2\) wants 2 processes for each worker, and there are 3; start a multiple of 2",
        ),
        ("sma(learners=auto)", "the learners of auto are found by paceline train and paceline run"),
    ],
)
def test_processes_that_cannot_be_divided_are_refused(world: World, policy: str, complaint: str) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(1, 1)
        library.join(model, plain(model), policy=policy, group=group)

    with pytest.raises(UsageError, match=complaint):
        world(3, work)


def test_a_script_alone_is_one_learner() -> None:
    model = nn.Linear(1, 1)
    with library.join(model, plain(model), policy="sma(learners=auto)") as session:
        assert session.world_size == 1


def test_learners_are_added_until_they_gain_too_little(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = []

    def measure(command: list[str], workers: int, policy: SMA, environment: dict[str, str]) -> float:
        assert float(environment[PROBE]) > 0
        probed.append((command, workers))
        return min(policy.processes_per_worker, 2.5)

    monkeypatch.setattr(learners, "_measure", measure)
    found = learners.settle_learners("sma(every=2, learners=auto)", 3, lambda policy: ["script.py", policy])
    assert found == "sma(every=2, learners=3)"
    assert probed == [(["script.py", str(SMA(every=2, learners=count))], 3) for count in (1, 2, 3, 4)]
    assert "learners of each worker: 4, examples/s: 2" in capsys.readouterr().err
    assert learners.settle_learners("sma(learners=2)", 3, lambda _: []) == "sma(learners=2)"


@pytest.mark.parametrize("steps", [10**6, 5])
def test_a_probe_measures_and_ends_the_script_and_leaves_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int
) -> None:
    """All learners after the same update; or when the script is over."""
    monkeypatch.setenv(PROBE, "0.2")
    reports: list[Any] = []
    monkeypatch.setattr("paceline.sessions.probing.report", lambda event, **values: reports.append((event, values)))

    def work(group: Any) -> int:
        model = nn.Linear(1, 1)
        with pytest.raises(SystemExit) as ended:
            with library.join(model, plain(model), policy="sma", group=group, run=tmp_path / "run") as session:
                session.stop_when(lambda: True)
                for _ in range(steps):
                    with session.step(examples=3):
                        backward(model(torch.ones(1, 1)).sum())
                assert session.save(tmp_path / "mine") is None
            raise AssertionError("the script has gone on")
        assert ended.value.code == 0
        return session.steps

    made = world(2, work)
    assert made[0] == made[1] > 4
    assert [event for event, _ in reports] == ["probed"] * 2
    assert all(values["throughput"] > 0 for _, values in reports)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("once", [False, True])
def test_a_probe_begins_the_data_again_when_it_ends(world: World, monkeypatch: pytest.MonkeyPatch, once: bool) -> None:
    """So a short script does not run to its end, unless its data can be read only once."""
    monkeypatch.setenv(PROBE, "0.2")
    monkeypatch.setattr("paceline.sessions.probing.report", lambda *_, **__: None)

    def work(group: Any) -> tuple[int, bool]:
        model, ended = nn.Linear(1, 1), False
        with pytest.raises(SystemExit), library.join(model, plain(model), policy="sma", group=group) as session:
            data = torch.utils.data.TensorDataset(torch.ones(12, 1))
            source = (iter([[torch.ones(2, 1)]] * 3),) if once else (data, 2)
            for (x,) in session.batches(*source, epochs=1):
                with session.step():
                    backward(model(x).sum())
            ended = True
        return session.steps, ended

    for steps, ended in world(2, work):
        assert (steps == 3) == once and ended == once


@pytest.mark.soak
def test_workers_times_learners_train_and_resume(paceline: Any, tmp_path: Path) -> None:
    outcome = paceline("train", "--policy", "sma(learners=2)", "--epochs", "1", "--json", "--run", "mine")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["workers"] == 2
    outcome = paceline("train", "--resume", "mine", "--epochs", "2", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["workers"] == 2
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["policy"] == "sma(learners=2)"


@pytest.mark.soak
def test_the_number_is_found_before_the_run(paceline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "_SECONDS", 0.5)
    outcome = paceline("train", "--policy", "sma(learners=auto)", "--epochs", "20", "--json", "--run", "mine")
    assert outcome.code == 0, outcome.err
    assert "learners of each worker: 2, examples/s:" in outcome.err
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["world_size"] == json.loads(outcome.out)["workers"]
    assert "auto" not in config["policy"]


def test_an_alpha_that_diverges_is_refused_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"alpha must be below 0\.667"):
        processes_per_worker("sync-easgd(alpha=0.9)", 2)


def test_virtual_workers_have_one_learner() -> None:
    with pytest.raises(UsageError, match="a virtual worker has one learner"):
        Scenario(policy="sma(learners=2)", workers=4).check(has_loss=True)
