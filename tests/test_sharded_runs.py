"""Runs with several servers, in real processes that share memory: who may die, and what is whole in the end."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import DEADLINE, finished, started
from test_sharded_kills import NOT_ANSWERED, NOT_DECIDED, deaths, killed_by, told_of
from workbench import Bench, workbench

from paceline.commands.cli import main
from paceline.launch.service import ServerOptions
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint

pytestmark = pytest.mark.processes

# All weights move by 1 a commit, and those of a commit's samples by 1000 more: a pull of several versions shows, and so
# does a batch that is used twice, or not at all.
SCRIPT = """
import os, signal, sys, torch, paceline
from torch import nn
from paceline.launch.environment import take_server_assignment
torch.set_num_threads(1)
SAMPLES = 40

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(SAMPLES)) for _ in range(5))
    def forward(self, x):
        return sum((-part.sum() - 1000 * part[x].sum()) for part in self.parts)

model = Model()
place = take_server_assignment()
before_join()
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=1.0), run="run", resume=True) as session:
    for (x,) in session.batches(torch.utils.data.TensorDataset(torch.arange(SAMPLES)), 1, epochs=2):
        with session.step():
            first = model.parts[0].detach()
            assert all(torch.equal(part.detach(), first) for part in model.parts), "several versions at once"
            assert torch.equal(first % 1000, torch.full_like(first, session.steps % 1000)), "another version"
            in_step(session)
            model(x).backward()
"""
AFTER_TWO_EPOCHS = [2 * 1000.0 + 2 * 40] * 40  # of forty commits
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


@pytest.mark.soak
def test_samples_are_used_once_and_pulls_are_one_version_though_servers_die_and_a_worker_in_mid_push(
    bench: Bench,
) -> None:
    """The second epoch with one server: a checkpoint does not say how many there were."""
    hooks = """
from paceline.server.parts import OtherParts
def before_join():
    pass
def in_step(session):
    def half(parts, step, used):
        parts._parts[0].begin_push(step)
        os.kill(os.getpid(), signal.SIGKILL)
    if session.rank == 1 and place.incarnation == 0:
        if session.steps > 5:
            OtherParts.push = half
        return  # however far the other one has come meanwhile
    if place.incarnation == 1:
        Path("back").touch()
    if session.steps > 20:
        wait_for("back")
"""
    options = ServerOptions(needed=True, respawn=True, servers=2)
    source = killed_by([NOT_DECIDED]) + hooks + SCRIPT.replace("epochs=2", "epochs=1")
    ended = bench.run(source, 2, policy="async", server=options)
    assert (ended.code, ended.out) == (0, ""), ended.err
    told = ["worker 1 was killed by SIGKILL; another takes its place", *deaths([NOT_DECIDED])]
    assert sorted(told_of(ended.err)) == sorted(told)
    for weights in final_weights(bench.directory / "run"):
        assert weights.tolist() == [1000.0 + 40] * 40
    assert bench.run(HOOKS + SCRIPT, 1, policy="async", server=ServerOptions(needed=True)).code == 0
    for weights in final_weights(bench.directory / "run"):
        assert weights.tolist() == AFTER_TWO_EPOCHS


@pytest.mark.soak
def test_a_server_that_fails_by_itself_ends_the_run(bench: Bench) -> None:
    """The other one waits to be ended, and complains of nothing."""
    hooks = """
from paceline.store.double_buffer import DoubleBuffer
def before_join():
    if place.role == "server" and place.shard == 1:
        DoubleBuffer.before_update = lambda buffer: 1 / 0
def in_step(session):
    pass
"""
    ended = bench.run(hooks + SCRIPT, 1, policy="async", server=ServerOptions(needed=True, servers=2))
    assert ended.code == 1
    assert re.search(r"^server 1 failed \(after .*\):$", ended.err, re.MULTILINE), ended.err
    assert ended.err.endswith("ZeroDivisionError: division by zero\n") and "is gone" not in ended.err


@pytest.mark.soak
def test_the_command_and_a_worker_from_elsewhere(tmp_path: Path) -> None:
    """Over TCP, with a server and another beside it, both killed; the worker knows the address of the first alone."""
    script, token = tmp_path / "script.py", tmp_path / "token"
    plan = [NOT_DECIDED, NOT_ANSWERED]
    script.write_text(killed_by(plan) + (HOOKS + SCRIPT).replace('"run"', repr(str(tmp_path / "run"))))
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    arguments = ["--policy", "async", "--token-file", str(token)]
    with started(["serve", "--workers", "1", "--servers", "2", *arguments, str(script)]) as server:
        assert server.stdout is not None
        address = server.stdout.readline().removeprefix("serving at tcp://").strip()
        workers = finished(["run", "--workers", "1", "--join", address, *arguments, str(script)])
        assert workers.returncode == 0, workers.stderr
        assert all("does not answer; trying again" in line for line in workers.stderr.splitlines())
        _, err = server.communicate(timeout=DEADLINE)
        assert server.returncode == 0, err
        assert told_of(err) == deaths(plan)
    for weights in final_weights(tmp_path / "run"):
        assert weights.tolist() == AFTER_TWO_EPOCHS


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--servers", "2"], "--servers wants a policy with a parameter server, found all-reduce"),
        (["run", "--servers", "0", "script.py"], "a run needs at least 1 server, got 0"),
        (
            ["run", "--servers", "2", "--join", "far:1", "script.py"],
            "--servers is for the command that starts the servers",
        ),
    ],
)
def test_mistakes(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
