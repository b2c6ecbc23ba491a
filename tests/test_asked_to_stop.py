"""Ctrl-C and SIGTERM under the launcher: the update under way is made by all workers, and saved, before the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import World
from processes import DEADLINE, started
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from training_cases import DATASET, INPUTS, TARGETS, mlp, momentum

import paceline
from paceline.interrupts import StopRequest
from paceline.launch import reports


@pytest.fixture
def supervised() -> Iterator[None]:
    """This process has a supervisor, which does not listen."""
    reading, writing = os.pipe()
    reports.connect(writing)
    yield
    reports.disconnect()
    os.close(reading)


def join(run: Path | None, **options: Any) -> paceline.Session:
    model = mlp()
    return paceline.join(model, momentum(model), run=run, **options)


def loss_of(session: paceline.Session) -> Tensor:
    return nn.functional.cross_entropy(session._train_state.model(INPUTS), TARGETS)


def checkpoints(run: Path) -> list[str]:
    return [path.stem for path in sorted(run.glob("checkpoints/*.safetensors"))]


@pytest.mark.usefixtures("supervised")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_update_under_way_is_made_and_saved(number: signal.Signals, tmp_path: Path) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), join(tmp_path / "run") as session:
        for _ in session.batches(DATASET, 8):
            with session.step():
                if session.steps == 2:
                    signal.raise_signal(number)
                loss_of(session).backward()  # type: ignore[no-untyped-call]
    assert session.steps == 3
    assert checkpoints(tmp_path / "run") == ["step-0000000003"]
    assert signal.getsignal(number) == before
    with join(tmp_path / "run", resume=True) as resumed:
        assert (resumed.steps, resumed.consumed) == (3, 24)


@pytest.mark.usefixtures("supervised")
def test_accumulating_blocks_go_on_to_their_update(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), join(tmp_path / "run") as session:
        for number in range(9):
            with session.step(accumulate=number % 3 != 2):
                if number == 0:
                    signal.raise_signal(signal.SIGINT)
                loss_of(session).backward()  # type: ignore[no-untyped-call]
    assert checkpoints(tmp_path / "run") == ["step-0000000001"]


@pytest.mark.usefixtures("supervised")
def test_the_second_signal_interrupts_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), join(tmp_path / "run") as session, session.step():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert session.steps == 0
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.usefixtures("supervised")
def test_a_signal_after_the_last_step_ends_the_script_after_the_session(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), join(tmp_path / "run") as session:
        with session.step():
            loss_of(session).backward()  # type: ignore[no-untyped-call]
        signal.raise_signal(signal.SIGINT)
    assert checkpoints(tmp_path / "run") == ["step-0000000001"]


@pytest.mark.usefixtures("supervised")
def test_a_handler_of_the_script_is_left_alone(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with join(tmp_path / "run") as session, session.step():
            signal.raise_signal(signal.SIGINT)
            loss_of(session).backward()  # type: ignore[no-untyped-call]
    finally:
        signal.signal(signal.SIGINT, before)
    assert (heard, session.steps) == ([signal.SIGINT], 1)


@pytest.mark.usefixtures("supervised")
def test_two_sessions_hear_the_same_signal(tmp_path: Path) -> None:
    first = join(tmp_path / "first")
    with pytest.raises(KeyboardInterrupt), join(tmp_path / "run") as session, session.step():
        signal.raise_signal(signal.SIGINT)
        loss_of(session).backward()  # type: ignore[no-untyped-call]
    first.close()
    assert checkpoints(tmp_path / "run") == ["step-0000000001"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("launched", [True, False])
def test_without_a_run_or_a_launcher_python_answers(
    launched: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if launched:
        request.getfixturevalue("supervised")
    with join(None if launched else tmp_path / "run"):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_forked_process_dies_of_its_signal() -> None:
    with StopRequest().heard():
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize("closure", [False, True])
def test_all_workers_stop_after_the_update_in_which_one_was_asked(world: World, closure: bool, tmp_path: Path) -> None:
    def work(group: Any) -> tuple[int, bool]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = LBFGS(model.parameters(), max_iter=2) if closure else SGD(model.parameters(), lr=0.1)
        session = paceline.join(model, optimizer, group=group, run=tmp_path / "run")
        request = StopRequest()
        session.stop_when(lambda: request.asked)

        def backward() -> Tensor:
            if (session.rank, session.steps) == (1, 3):
                request.asked = True
            loss: Tensor = model(torch.ones(2, 3)).square().mean()
            torch.autograd.backward(loss)
            return loss

        try:
            with session:
                for _ in range(9):
                    if closure:
                        session.minimize(backward)
                    else:
                        with session.step():
                            backward()
        except KeyboardInterrupt:
            return session.steps, True
        return session.steps, False

    assert world(2, work) == [(4, True), (4, True)]
    assert checkpoints(tmp_path / "run") == ["step-0000000004"]


SCRIPT = """
import os, time, torch, paceline
model = torch.nn.Linear(4, 1)
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), run="run") as session:
    print("joined as", os.getpid(), flush=True)
    for x in session.batches([torch.ones(4)] * 1000, batch_size=1, epochs=10**6):
        with session.step():
            model(x).mean().backward()
            time.sleep(0.001)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "policy",
    ["all-reduce", *(pytest.param(name, marks=pytest.mark.soak) for name in ("async", "all-reduce, one worker asked"))],
)
def test_ctrl_c_leaves_a_checkpoint(policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    name, *one_asked = policy.split(", ")
    with started(["run", "--workers", "2", "--policy", name, "script.py"]) as process:
        assert process.stdout is not None
        joined = dict(process.stdout.readline().split(" joined as ") for _ in range(2))
        assert joined.keys() == {"[0]", "[1]"}
        if one_asked:
            os.kill(int(joined["[1]"]), signal.SIGTERM)
        else:
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE)
    (saved,) = checkpoints(tmp_path / "run")
    step = int(saved.removeprefix("step-"))
    told = f"paceline: interrupted after step {step}; saved in run, go on with join(..., resume=True)\n"
    if one_asked:
        assert (process.returncode, err) == (143, f"paceline: worker 1 was asked to stop by SIGTERM\n{told}")
    else:
        assert (process.returncode, err) == (130, told)
