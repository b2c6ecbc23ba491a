"""A server on one host and workers on another: network namespaces, so that what passes between them is encrypted."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.bench.two_hosts import Host, NotPossibleError, two_hosts

REPOSITORY = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.processes

# Workers that pause tell of each step, and after some do not go on before they may.
SCRIPT = """
import os, sys, time, torch, paceline
from pathlib import Path
torch.manual_seed(0)
torch.set_num_threads(1)
folder, pause = Path(sys.argv[1]), float(sys.argv[3])
data = [torch.full((3,), float(i)) for i in range(64)]
model = torch.nn.Linear(3, 1)
with paceline.join(model, torch.optim.SGD(model.parameters(), lr=1e-4), policy=sys.argv[2]) as session:
    for number, x in enumerate(session.batches(data, batch_size=2, epochs=2)):
        with session.step():
            model(x).mean().backward()
        told = folder / f"worker-{session.rank}"
        told.with_suffix(".new").write_text(str(os.getpid()))
        told.with_suffix(".new").replace(told)
        time.sleep(pause)
        while pause and number in (10, 20) and not (folder / f"beyond-{number}").exists():
            time.sleep(0.01)
    print(f"version {session.steps} weight {model.weight.sum().item():.6f}")
"""


class Run:
    """A server on the first host, and workers on the second."""

    def __init__(self, hosts: list[Host], folder: Path, stack: contextlib.ExitStack) -> None:
        self.hosts, self.folder, self._stack = hosts, folder, stack
        (folder / "script.py").write_text(SCRIPT)
        (folder / "token").write_text(secrets.token_hex(32))
        (folder / "token").chmod(0o600)

    def start(self, place: int, *arguments: str) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.hosts[place].namespace, sys.executable, "-m", "paceline", *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def serve(self, policy: str, pause: float = 0.0) -> subprocess.Popen[str]:
        address = f"{self.hosts[0].address}:7777"
        options = ["--workers", "2", "--bind", address, "--token-file", "token"]
        return self.start(0, "serve", *options, "script.py", str(self.folder), policy, str(pause))

    def join(
        self, policy: str, pause: float = 0.0, token: str = "token", workers: int = 2, host: int = 1
    ) -> subprocess.Popen[str]:
        options = ["--workers", str(workers), "--join", f"{self.hosts[0].address}:7777", "--token-file", token]
        return self.start(host, "run", *options, "script.py", str(self.folder), policy, str(pause))

    def wait_for_workers(self, *processes: subprocess.Popen[str]) -> list[Path]:
        """Wait until both have made a step; give the files that each then changes at every step."""
        files = [self.folder / "worker-0", self.folder / "worker-1"]
        while not all(file.exists() for file in files):
            assert all(process.poll() is None for process in processes)
            time.sleep(0.05)
        return files

    def let_go_on(self, number: int) -> None:
        """Let the workers go on after so many steps."""
        (self.folder / f"beyond-{number}").touch()


def wait_for_step(files: list[Path], before: list[int]) -> None:
    """Wait until one of these workers has made a step since it made its last at that time."""
    end = time.monotonic() + 60
    while [file.stat().st_mtime_ns for file in files] == before:
        assert time.monotonic() < end, "the other worker never goes on"
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    try:
        with two_hosts("1gbit") as hosts, contextlib.ExitStack() as stack:
            yield Run(hosts, tmp_path, stack)
    except NotPossibleError as error:
        pytest.skip(str(error))


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    out, _ = process.communicate(timeout=200)
    assert process.returncode == code, out
    return out


@pytest.mark.soak
def test_a_run_over_two_hosts_refuses_who_has_not_the_token_and_is_unharmed(run: Run) -> None:
    (run.folder / "wrong").write_text(secrets.token_hex(32))
    (run.folder / "wrong").chmod(0o600)
    server = run.serve("k-async(k=2)")
    stranger = run.join("k-async(k=2)", token="wrong", workers=1)
    assert "the token is not the server's" in ended(stranger, code=1)
    told = set(re.findall(r"version \d+ weight \S+", ended(run.join("k-async(k=2)"))))
    assert len(told) == 1 and next(iter(told)).startswith("version 32 "), told
    served = ended(server)
    assert f"serving at tcp://{run.hosts[0].address}:7777" in served
    assert "refused a stranger" in served


@pytest.mark.soak
def test_a_worker_killed_on_the_other_host_is_missed(run: Run) -> None:
    server, workers = run.serve("sync", pause=0.05), run.join("sync", pause=0.05)
    files = run.wait_for_workers(server, workers)
    os.kill(int(files[1].read_text()), signal.SIGKILL)
    time.sleep(0.2)  # what was on its way has come
    before = files[0].stat().st_mtime_ns
    run.let_go_on(10)
    wait_for_step(files[:1], [before])
    run.let_go_on(20)
    told = ended(workers)  # the launcher counts its processes; their ranks are the server's to give
    assert re.search("worker [01] was killed by SIGKILL; the run goes on with 1", told), told
    ended(server)


@pytest.mark.soak
def test_a_host_that_vanishes_is_missed_and_its_worker_comes_back(run: Run) -> None:
    """Nothing closes its connections: only its silence tells."""
    server = run.serve("sync", pause=0.05)
    near, far = (run.join("sync", pause=0.05, workers=1, host=host) for host in (0, 1))
    files = run.wait_for_workers(server, near, far)
    link = ["ip", "link", "set", run.hosts[1].interface]
    run.hosts[1].run(*link, "down")
    time.sleep(0.3)  # what was on its way has come
    before = [file.stat().st_mtime_ns for file in files]
    run.let_go_on(10)
    wait_for_step(files, before)
    run.hosts[1].run(*link, "up")
    for file, last in zip(files, before, strict=True):
        wait_for_step([file], [last])
    run.let_go_on(20)  # not before: the server would end with those that it knows of
    told = [re.findall(r"version \d+ weight \S+", ended(process)) for process in (near, far)]
    assert told[0] == told[1] and told[0], told
    ended(server)
