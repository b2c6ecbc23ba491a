"""Runs with several servers, in real processes that share memory: who may die, and what is whole in the end."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import DEADLINE, finished, started
from workbench import Bench, workbench

from paceline.cli import main
from paceline.launch.service import ServerOptions
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]

# All weights move by 1 a commit, and those of a commit's samples by 1000 more: a pull of several versions shows, and so
# does a batch that is used twice, or not at all.
SCRIPT = """
import os, signal, sys, torch, paceline
from torch import nn
from paceline.launch.environment import take_server_place
torch.set_num_threads(1)
SAMPLES = 40

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(SAMPLES)) for _ in range(5))
    def forward(self, x):
        return sum((-part.sum() - 1000 * part[x].sum()) for part in self.parts)

model = Model()
place = take_server_place()
before_join()
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=1.0), run="run") as session:
    for (x,) in session.batches(torch.utils.data.TensorDataset(torch.arange(SAMPLES)), 1, epochs=2):
        with session.step():
            first = model.parts[0].detach()
            assert all(torch.equal(part.detach(), first) for part in model.parts), "several versions at once"
            assert torch.equal(first % 1000, torch.full_like(first, session.steps % 1000)), "another version"
            in_step(session)
            model(x).backward()
"""
HOOKS = """
def before_join(): pass
def in_step(session): pass
"""


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with workbench(tmp_path, capsys, monkeypatch) as bench:
        yield bench


def final_weights(run: Path) -> list[torch.Tensor]:
    (*_, last) = CheckpointFolder(run / "checkpoints").files()
    return list(read_checkpoint(last)["trainee"]["model"].values())


def test_samples_are_used_once_and_pulls_are_one_version_though_a_worker_dies_in_mid_push(bench: Bench) -> None:
    hooks = """
from paceline.server.parts import OtherParts
def before_join():
    pass
def in_step(session):
    if session.rank == 1 and place.incarnation == 0 and session.steps > 5:
        def half(parts, step, used):
            parts._parts[0].begin_push(step)
            os.kill(os.getpid(), signal.SIGKILL)
        OtherParts.push = half
"""
    options = ServerOptions(needed=True, respawn=True, servers=3)
    ended = bench.run(hooks + SCRIPT, 3, policy="async", server=options)
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "paceline: worker 1 was killed by SIGKILL; another takes its place\n"
    for weights in final_weights(bench.directory / "run"):
        assert weights.tolist() == [2 * 1000 + 2 * 40] * 40, "two epochs of forty commits"


@pytest.mark.parametrize("shard", [0, 1])
def test_a_server_that_is_killed_ends_the_run(bench: Bench, shard: int) -> None:
    hooks = f"""
def before_join():
    if place.role == "server":
        Path(f"server-{{place.shard}}").write_text(str(os.getpid()))
def in_step(session):
    if session.rank == 0 and session.steps > 5:
        os.kill(int(Path("server-{shard}").read_text()), signal.SIGKILL)
        sleep()
"""
    ended = bench.run(hooks + SCRIPT, 2, policy="async", server=ServerOptions(needed=True, servers=2))
    assert ended.code == 137
    who = "the server" if shard == 0 else "server 1"
    assert re.fullmatch(
        rf"{who} was killed by SIGKILL \(.*\); out of memory\? of several servers none is replaced: resume .*\n",
        ended.err,
    ), ended.err


def test_a_model_of_too_few_tensors_is_told_so(bench: Bench) -> None:
    source = HOOKS + SCRIPT.replace("range(5)", "range(1)")
    ended = bench.run(source, 1, policy="async", server=ServerOptions(needed=True, servers=2))
    assert ended.code == 1
    assert "a model of 1 trained tensors cannot be dealt out to 2 servers" in ended.err


def test_the_command_and_its_workers_from_elsewhere(tmp_path: Path) -> None:
    """Over TCP, with a server and another beside it; the workers know the address of the first alone."""
    script, token = tmp_path / "script.py", tmp_path / "token"
    script.write_text((HOOKS + SCRIPT).replace('"run"', repr(str(tmp_path / "run"))))
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    arguments = ["--policy", "k-batch-sync(k=2)", "--token-file", str(token)]
    with started(["serve", "--workers", "2", "--servers", "2", *arguments, str(script)]) as server:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("serving at tcp://").strip()
        workers = finished(["run", "--workers", "2", "--join", address, *arguments, str(script)])
        assert (workers.returncode, workers.stderr) == (0, "")
        server.communicate(timeout=DEADLINE)
        assert server.returncode == 0
    first, *others = final_weights(tmp_path / "run")
    assert all(torch.equal(first, other) for other in others)
    assert float(first.sum()) == pytest.approx(40 * 40 + 1000 * 40, rel=1e-5), "forty commits of two batches each"


def test_train_resumes_with_another_number_of_servers(tmp_path: Path) -> None:
    common = ["train", "--json", "--workers", "1", "--policy", "sync", "--optimizer", "adam(lr=0.01)", "--delay", "0"]
    results = {}
    for name, plan in {"whole": [(1, 2)], "parts": [(2, 1), (3, 2)]}.items():
        for servers, epochs in plan:
            run = ["--run", str(tmp_path / name)] if (servers, epochs) == plan[0] else []
            resume = [] if run else ["--resume", str(tmp_path / name)]
            ended = finished([*common, *run, *resume, "--servers", str(servers), "--epochs", str(epochs)])
            assert (ended.returncode, ended.stderr) == (0, "")
            results[name] = json.loads(ended.stdout)["value"]
    assert results["whole"] == results["parts"]
    for mine, theirs in zip(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--servers", "2"], "--servers wants a policy with a parameter server, found all-reduce"),
        (["run", "--servers", "0", "script.py"], "a run needs at least 1 server, got 0"),
        (["run", "--servers", "2", "--join", "far:1", "script.py"], "--servers is for who starts the servers"),
    ],
)
def test_mistakes(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
