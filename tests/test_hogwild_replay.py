"""The recorded form of hogwild: blocks with versions, and replays that have the same bits."""

from __future__ import annotations

import contextlib
import copy
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from joined_batch import backward, copy_for, momentum
from mortals import Killed, Life, mortals
from processes import ENVIRONMENT
from replicas import CASE, take_turn
from same_bits import assert_same
from test_hogwild import BATCHES, STEPS, loss_of
from test_many_resume import WithStatistics
from torch import Tensor, nn

import paceline
from paceline import native
from paceline.errors import UsageError
from paceline.launch.roster import Member
from paceline.peers.block_trace import read_block_traces, trace_file
from paceline.record.trace import Met, Stepped, Trace, TraceError
from paceline.sessions.request import JoinRequest
from paceline.sessions.run_state import START

RECORDED = "hogwild(record=true)"
DATA = torch.utils.data.TensorDataset(torch.randn(90, 6, generator=torch.Generator().manual_seed(5)))


@contextlib.contextmanager
def replaying(recorded: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Sessions replay a run, inside the block; what they report comes into the list."""
    told: list[dict[str, Any]] = []

    def replayed(request: JoinRequest) -> tuple[JoinRequest, Path]:
        return replace(request, run=scratch, resume=recorded / START), recorded

    with monkeypatch.context() as patch:
        patch.setattr("paceline.sessions.peers._replayed", replayed)
        patch.setattr("paceline.peers.recorded.report", lambda _, result: told.append(result))
        yield told


def train(
    group: Any, template: nn.Module, run: Path, stop: int | None = None
) -> tuple[dict[str, Any], dict[str, Any], int]:
    model = copy_for(group, template)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    session = paceline.join(model, optimizer, policy=RECORDED, seed=3, group=group, run=run, save_every=4)
    session.stop_when(lambda: session.steps >= (stop or 1000))
    with contextlib.suppress(KeyboardInterrupt), session:
        for (batch,) in session.batches(DATA, batch_size=4, epochs=3):
            with session.step():
                backward(loss_of(model, batch))
    return model.state_dict(), optimizer.state_dict(), session.steps


@pytest.mark.parametrize("stop", [None, 3])
def test_a_replay_has_the_same_bits(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int | None
) -> None:
    """Also of a run that was stopped, and from whatever the workers begin with."""
    run = tmp_path / "run"
    recorded = world(3, lambda group: train(group, WithStatistics(), run, stop=stop))
    with replaying(run, tmp_path / "again", monkeypatch) as told:
        again = world(3, lambda group: train(group, WithStatistics(), tmp_path / "ignored"))
    for one, other in zip(recorded, again, strict=True):
        assert_same(one, other)
    (result,) = told
    assert result["difference"] is None and result["whole"] == (stop is None)
    assert result["hashes"] > 0 and result["version"] == recorded[0][2]


def test_a_changed_order_is_noticed(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here by other data: the parameters after the first evaluation differ."""
    run = tmp_path / "run"
    world(2, lambda group: train(group, CASE.build(), run))
    monkeypatch.setattr("test_hogwild_replay.DATA", torch.utils.data.TensorDataset(torch.ones(90, 6)))
    with replaying(run, tmp_path / "again", monkeypatch) as told:
        world(2, lambda group: train(group, CASE.build(), run))
    assert told[0]["difference"] == "the parameters after step 4 of every worker"


def test_in_turn_it_is_the_loop_by_hand(world: World, tmp_path: Path) -> None:
    """And hogwild itself; each worker meets the updates of all others."""
    template, workers = CASE.build(), 3

    def work(group: Any, policy: str) -> dict[str, Tensor]:
        model = copy_for(group, template)
        with paceline.join(model, momentum(model), policy=policy, group=group, run=tmp_path / policy) as session:
            for batch in BATCHES[session.rank]:
                take_turn(session)
                with session.step():
                    backward(CASE.loss(model, batch))
        return model.state_dict()

    by_hand = copy.deepcopy(template)
    optimizers = [momentum(by_hand) for _ in range(workers)]
    for step, rank in itertools.product(range(STEPS), range(workers)):
        by_hand.zero_grad()
        backward(CASE.loss(by_hand, BATCHES[rank, step]))
        optimizers[rank].step()
    for policy in ("hogwild", RECORDED):
        for found in world(workers, lambda group, policy=policy: work(group, policy)):  # type: ignore[misc]
            assert_same(found, by_hand.state_dict())
    blocks = len(list(template.parameters()))
    for rank, trace in enumerate(read_block_traces(tmp_path / RECORDED, workers)):
        wanted = [{(block, False): step * workers + rank for block in range(blocks)} for step in range(STEPS)]
        assert trace.steps == ([{}, *wanted[1:]] if rank == 0 else wanted)


def test_what_nobody_disturbed_takes_a_byte(world: World, tmp_path: Path) -> None:
    """Workers that use different parameters meet no updates of others."""

    def work(group: Any) -> None:
        model = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))
        with paceline.join(model, momentum(model), policy=RECORDED, group=group, run=tmp_path) as session:
            for batch in BATCHES[0]:
                with session.step():
                    backward(loss_of(model[session.rank], batch))
            session.mean(0.0)

    world(2, work)
    for rank in range(2):
        records = list(Trace(trace_file(tmp_path, rank)))
        assert sum(isinstance(record, Stepped) for record in records) == STEPS
        assert not any(isinstance(record, Met) and record.writing for record in records)


# Refused --------------------------------------------------------------------------------------------------------------


def test_a_run_in_which_one_has_died_goes_on_and_is_not_replayed(tmp_path: Path) -> None:
    if not native.available():
        pytest.skip(native.reason())
    run = tmp_path / "run"

    def work(life: Life) -> int:
        model = nn.Linear(6, 1)
        with paceline.join(model, momentum(model), policy=RECORDED, seed=1, run=run) as session:
            for (batch,) in session.batches(DATA, batch_size=4, epochs=2):
                if session.steps == 3 and life.member == Member(1):
                    raise Killed
                with session.step():
                    backward(loss_of(model, batch))
        return session.world_size

    assert mortals()(3, work) == [2, 2]
    with pytest.raises(UsageError, match=r"cannot be replayed: one of its workers has failed or was killed"):
        read_block_traces(run, 3)


def test_a_damaged_trace_is_refused(world: World, tmp_path: Path) -> None:
    run = tmp_path / "run"
    world(2, lambda group: train(group, CASE.build(), run))
    file = trace_file(run, 1)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(TraceError, match=r"trace-1\.bin is damaged"):
        read_block_traces(run, 2)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "records into the run's directory: give one"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "takes no GradScaler"),
    ],
)
def test_what_cannot_be_recorded(world: World, tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    def work(group: Any) -> None:
        model = nn.Linear(6, 1)
        run = tmp_path if options else None
        with (
            paceline.join(model, momentum(model), policy=RECORDED, group=group, run=run, **options) as session,
            session.step(),
        ):
            backward(loss_of(model, BATCHES[0, 0]))

    with pytest.raises(UsageError, match=complaint):
        world(2, work)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.processes
def test_the_command_replays_a_run(tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline", *arguments]
        return subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)

    trained = call("train", "--workers", "2", "--policy", RECORDED, "--epochs", "2", "--run", "run")
    assert trained.returncode == 0, trained.stderr
    replayed = call("replay", "run")
    assert replayed.returncode == 0, replayed.stderr
    assert "equal to the last bit" in replayed.stdout
    refused = call("replay", "run", "--until", "3")
    assert refused.returncode == 2 and "is replayed as a whole" in refused.stderr
