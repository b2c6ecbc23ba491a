"""Workers of peers policies that are really killed, under the supervisor: what it does, says and leaves behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE, ENVIRONMENT
from workbench import Bench, Ended, workbench

from paceline.launch.service import ServerOptions
from paceline.record.metrics import read_metrics

pytestmark = pytest.mark.processes

# A script without torch: it says what a session would say.
TOLD = """
from paceline.launch.environment import take_server_assignment
from paceline.launch.roster import RunLog
place = take_server_assignment()
log = RunLog(place.log_fd)
def died():
    return [line["member"] for line in log.read() if line["event"] == "died"]
def wait_for_death(worker):
    while worker not in [dead for dead, _ in died()]:
        time.sleep(0.005)
report("joined", survives=True)
"""


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with workbench(tmp_path, capsys, monkeypatch) as bench:
        yield bench


def run(bench: Bench, source: str, workers: int = 3, **options: Any) -> Ended:
    return bench.run(TOLD + source, workers, **options)


def test_the_others_learn_of_a_death_and_the_user_in_one_line(bench: Bench) -> None:
    ended = run(
        bench,
        """
if rank == 1:
    os.abort()
wait_for_death(1)
report("re-formed", step=7, number=2, workers=2, joined=[])
report("left")
""",
    )
    assert ended == Ended(0, "", "paceline: worker 1 was killed by SIGABRT; the run goes on with 2 after step 7\n")


def test_one_killed_when_the_others_do_not_need_it_any_more(bench: Bench) -> None:
    source = """
if rank == 1:
    wait_for("left-0"), wait_for("left-2")
    os.kill(os.getpid(), signal.SIGKILL)
report("left")
Path(f"left-{rank}").touch()
"""
    assert run(bench, source) == Ended(0, "", "paceline: worker 1 was killed by SIGKILL\n")


def test_one_killed_before_it_joined_ends_the_run(bench: Bench) -> None:
    """Nothing is lost with it, and a script without a session needs all."""
    ended = bench.run("if rank == 1: os.abort()\nsleep()", 3)
    assert ended.code == 134 and ended.err.startswith("worker 1 was killed by SIGABRT (after ")


def test_a_session_that_cannot_go_on_ends_the_run(bench: Bench) -> None:
    ended = bench.run("report('joined')\nif rank == 1: os.abort()\nsleep()", 3)
    assert ended.code == 134 and ended.err.startswith("worker 1 was killed by SIGABRT (after ")


def test_all_killed(bench: Bench) -> None:
    ended = run(bench, "wait_for_death(0) if rank else None\nos.kill(os.getpid(), signal.SIGKILL)", 2)
    assert ended.code == 137
    assert re.search(r"worker 1 was killed by SIGKILL \(after \d+\.\d s\); no worker is left\n", ended.err)


def test_an_exception_ends_the_run_with_its_traceback_though_another_was_killed(bench: Bench) -> None:
    source = """
if rank == 1:
    os.abort()
wait_for_death(1)
if rank == 0:
    raise ValueError("the cause")
sleep()
"""
    ended = run(bench, source)
    assert ended.code == 1
    assert "worker 1 was killed by SIGABRT\\n" in repr(ended.err) and "ValueError: the cause" in ended.err


def test_another_takes_the_place_of_a_killed_one(bench: Bench) -> None:
    source = """
if rank == 1 and place.incarnation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    Path("again").touch()
wait_for("again")
report("re-formed", step=9, number=2, workers=3, joined=[1])
report("left")
"""
    ended = run(bench, source, server=ServerOptions(respawn=True))
    line = "worker 1 was killed by SIGKILL, worker 1 has joined; the run goes on with 3 after step 9"
    assert ended == Ended(0, "", f"paceline: {line}\n")


def test_nobody_takes_a_place_in_a_run_that_ends(bench: Bench) -> None:
    source = """
assert place.incarnation == 0
if rank == 1:
    wait_for("left")
    os.kill(os.getpid(), signal.SIGKILL)
report("left")
time.sleep(0.1)
Path("left").touch()
"""
    assert run(bench, source, 2, server=ServerOptions(respawn=True)).code == 0


def test_one_killed_before_it_joins_a_run_that_ends(bench: Bench) -> None:
    """It came in the place of another; nobody waits for it."""
    source = TOLD.replace('report("joined"', 'if not (rank == 1 and place.incarnation): report("joined"')
    source += """
if rank == 1 and place.incarnation == 0:
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    Path("again").touch()
    wait_for("left-0"), wait_for("left-2")
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("again")
report("left")
time.sleep(0.1)
Path(f"left-{rank}").touch()
time.sleep(0.5)
"""
    ended = bench.run(source, 3, server=ServerOptions(respawn=True))
    assert ended.code == 0, ended.err


def test_who_comes_too_late_does_not_end_the_session_after_it(bench: Bench) -> None:
    """Its own session is over. The others are in the next one, which goes on without it."""
    source = """
if rank == 1 and place.incarnation == 0:
    wait_for("joined-0"), wait_for("joined-2")
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1:
    wait_for("next-0"), wait_for("next-2")
    report("left")
    Path("late.partial").write_text(str(os.getpid()))
    Path("late.partial").rename("late")
    sys.exit(0)
Path(f"joined-{rank}").touch()
wait_for_death(1)
report("left")
report("joined", survives=True)
Path(f"next-{rank}").touch()
wait_for("late")
while Path("/proc", Path("late").read_text()).exists():
    time.sleep(0.005)
time.sleep(0.2)  # the supervisor has seen its end
report("left")
"""
    ended = run(bench, source, server=ServerOptions(respawn=True))
    assert ended.code == 0, ended.err


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(130)"])
def test_who_ends_while_all_stop_is_not_waited_for(bench: Bench, end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has told of a signal and saved; another ends meanwhile, and a third is to save without it."""
    monkeypatch.setattr("paceline.launch.supervisor._TIME_TO_SAVE", 5.0)
    source = f"""
if rank == 0:
    report("interrupted", step=3, saved=None, signal=15)
    sys.exit(130)
if rank == 1:
    wait_for("waiting")
    {end}
time.sleep(0.3)
Path("waiting").touch()
wait_for_death(1)
Path("saved").touch()
sys.exit(130)
"""
    ended = run(bench, source)
    assert ended.code == 143 and "worker 0 was asked to stop by SIGTERM" in ended.err
    assert (bench.directory / "saved").exists()


TRAINING = """
import json, torch, paceline
from torch import nn
torch.manual_seed(0)
inputs = torch.randn(120, 6)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(120))
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
first, made = not Path("killed").exists(), 0
ledger = open(f"ledger-{rank}-{os.getpid()}", "w")
with paceline.join(model, optimizer, policy=os.environ["WANTED"], seed=1, run="run") as session:
    for epoch in session.epochs(1_000_000):
        for x, y, samples in session.batches(data, 4):
            if first and rank == 0 and session.steps == 15:
                Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)  # let the one that joins import torch
            with session.step() as step:
                loss = (model(x) - y).square().mean()
                step.record(loss=loss)
                loss.backward()
            if not step.cancelled:
                made += 1
                print(json.dumps([epoch, session.steps, samples.tolist()]), file=ledger, flush=True)
        if session.mean(float(session.world_size == 3 and not first and made > 0)) > 0:
            Path("enough").write_text(str(epoch + 1))
        if session.mean(float(Path("enough").exists())) == 1:
            break
    with session.averaged():
        print("end", session.epoch, session.world_size, model.weight.sum().item())
"""


LAST_EXCHANGE = {"all-reduce": 15, "local-sgd(every=4)": 12}  # before the kill


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["all-reduce", "local-sgd(every=4)"])
def test_worker_0_is_killed_and_another_joins(bench: Bench, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's directory passes to another worker; no survivor starts anew; every sample is used once an epoch."""
    monkeypatch.setenv("WANTED", policy)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ended = bench.run(TRAINING, 3, server=ServerOptions(respawn=True))
    assert ended.code == 0, ended.err
    killed, joined = ended.err.splitlines()
    assert re.fullmatch(r"paceline: worker 0 was killed by SIGKILL; the run goes on with 2 after step 1[56]", killed)
    assert re.fullmatch(r"paceline: worker 0 has joined; the run goes on with 3 after step \d+", joined)
    ends = {line[4:] for line in ended.out.splitlines()}
    assert len(ended.out.splitlines()) == 3 and len(ends) == 1
    epochs = int(ends.pop().split()[1])
    files = sorted(file.name.split("-")[1] for file in bench.directory.glob("ledger-*"))
    assert files == ["0", "0", "1", "2"], "one process of each worker, and one more of the killed"
    uses: Counter[tuple[int, int]] = Counter()
    for file in bench.directory.glob("ledger-*"):
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        killed_here = file.name.startswith("ledger-0") and lines[0][1] == 1
        last = LAST_EXCHANGE[policy] if killed_here else lines[-1][1]
        uses.update((epoch, sample) for epoch, step, samples in lines if step <= last for sample in samples)
    if policy == "all-reduce":
        assert set(uses.values()) == {1} and len(uses) == 120 * epochs
    assert Counter(sample for _, sample in uses.elements()) == dict.fromkeys(range(120), epochs)
    changes = [line for line in read_metrics(bench.directory / "run" / "metrics.jsonl") if line["event"] == "re-formed"]
    assert [change["died"] + change["joined"] for change in changes] == [[0], [0]]
    assert max(change["pause"] for change in changes) < 3


RESTARTED = """
import os, signal, sys, torch, paceline
from pathlib import Path
from torch import nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 6))
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with paceline.join(model, optimizer, seed=1, run=sys.argv[1], resume=True, save_every=1) as session:
    for (x,) in session.batches(data, 4, epochs=3):
        if session.steps == 10 and session.rank == 1 and sys.argv[2] == "kill" and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with session.step():
            model(x).square().mean().backward()
    # One write, since both workers have the same pipe.
    sys.stdout.write(f"end {session.steps} {model.weight.sum().item()}\\n")
"""


@pytest.mark.soak
def test_torchrun_starts_all_anew_and_they_resume(tmp_path: Path) -> None:
    """There one that is killed ends all, and those that are started in their places go on from the checkpoint."""
    (tmp_path / "script.py").write_text(RESTARTED)
    ends = []
    for kill in ("kill", "spare"):
        options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, "script.py", kill, kill]
        ended = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE)
        assert ended.returncode == 0, ended.stderr
        ends.append(sorted(line for line in ended.stdout.splitlines() if line.startswith("end")))
    assert (tmp_path / "killed").exists()
    assert len(ends[0]) == 2 and ends[0] == ends[1]
