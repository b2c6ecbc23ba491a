"""Workers that are stopped while they copy the parameters: the others go on, and nobody computes on half a commit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from led_by_hand import cluster_of_hands
from live import DEADLINE, TOKEN, Cluster, Weights
from processes import finished

from paceline.server import live
from paceline.server.client import Client
from paceline.store.memory import Copied, SharedMemory

HOLD = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_SH); print(flush=True); sys.stdin.read()"


class Reader:
    """A process that reads as the worker of a rank, and stops in mid-copy until it is told to go on."""

    def __init__(self, memory: SharedMemory, rank: int, *, reads: int = 1) -> None:
        told, self._tell = os.pipe()
        self._answers, answer = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self._tell)

            def copy() -> None:
                os.write(answer, b"c")
                os.read(told, 1)

            try:
                for _ in range(reads):
                    os.write(answer, memory.read(rank, copy).name[0].encode())
            finally:
                os._exit(0)
        os.close(told)
        os.close(answer)

    def has_begun(self) -> None:
        assert os.read(self._answers, 1) == b"c"

    def go_on(self) -> str:
        """The first letter of what has come of the copy."""
        os.write(self._tell, b"g")
        return os.read(self._answers, 1).decode()

    def close(self) -> None:
        os.close(self._tell)
        os.close(self._answers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    file = os.memfd_create("test")
    yield SharedMemory(file, down=64, up=0, slots=2, create=True)
    os.close(file)


def test_who_copies_for_too_long_is_overtaken_once_and_then_not_waited_for(memory: SharedMemory) -> None:
    with contextlib.closing(Reader(memory, 0, reads=2)) as reader:
        reader.has_begun()
        assert memory.begin_writing(0.01) == [0]
        memory.wrote()
        assert memory.begin_writing(2 * DEADLINE) == []  # or this would take for ever
        memory.wrote()
        assert reader.go_on() == "O"
        reader.has_begun()  # and is not overtaken if a commit was made before that
        assert reader.go_on() == "W"
        assert memory.begin_writing(DEADLINE) == []
        memory.wrote()


def test_a_worker_that_reads_again_is_waited_for_longer_than_before(memory: SharedMemory) -> None:
    with contextlib.closing(Reader(memory, 0, reads=3)) as reader:
        for copy in range(3):
            reader.has_begun()
            assert memory.begin_writing(0.01) == [0]
            memory.wrote()
            assert memory._patience == {0: 0.02 * 2**copy}
            assert reader.go_on() == "O"
    assert memory.begin_writing(0.01) == []  # it is dead, and has left no lock
    memory.wrote()


def test_others_cannot_read_while_a_commit_overtakes_one(memory: SharedMemory) -> None:
    with contextlib.closing(Reader(memory, 0)) as stopped:
        stopped.has_begun()
        assert memory.begin_writing(0.01) == [0]
        with contextlib.closing(Reader(memory, 1)) as other:
            os.set_blocking(other._answers, False)
            with pytest.raises(BlockingIOError):
                other.has_begun()
            os.set_blocking(other._answers, True)
            memory.wrote()
            other.has_begun()
            assert other.go_on() == "W"
        assert stopped.go_on() == "O"


def test_who_was_overtaken_does_not_read_before_that_commit_is_made(memory: SharedMemory) -> None:
    with contextlib.closing(Reader(memory, 0, reads=10**9)) as reader:
        reader.has_begun()
        assert memory.begin_writing(0.01) == [0]
        assert reader.go_on() == "O"
        assert os.read(reader._answers, 1) == b"O"  # it does not begin to copy
        memory.wrote()
        while (answer := os.read(reader._answers, 1)) == b"O":
            pass
        assert answer == b"c"
        assert reader.go_on() == "W"


def test_a_server_that_was_killed_while_it_overtook_a_worker_leaves_no_whole_copy(memory: SharedMemory) -> None:
    with contextlib.closing(Reader(memory, 0, reads=2)) as reader:
        reader.has_begun()
        server = os.fork()
        if server == 0:
            memory.begin_writing(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(server, 0)
        successor = SharedMemory(memory._file, down=64, up=0, slots=2, create=True)
        successor.wrote()
        assert reader.go_on() == "O"
        reader.has_begun()
        assert reader.go_on() == "W"


@contextlib.contextmanager
def holding(file: int) -> Iterator[None]:
    """Another process holds the locks of all readers, as a worker does that is stopped while it copies."""
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[file]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield
        process.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("policy", ["async", "k-async(k=1)", "k-sync(k=1)", "ssp(bound=2)"])
def test_commits_go_on_while_a_worker_is_stopped(
    policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "_LONGEST_READ", 0.01)
    with cluster_of_hands(policy, 2) as (cluster, (hand, other)), holding(cluster.memory):
        other.ask()
        hand.ask()
        for step in range(2):
            hand.push(1.0)
            hand.go()
            assert hand.value == cluster.value == -1.0 - step
    told = [record.message for record in caplog.records if "is it stopped?" in record.message]
    assert len(told) == 2, "once for each of the two locks, and not again for the next commit"


def test_a_worker_that_was_overtaken_reads_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copy is void by a commit in the middle of it, as one that does not wait for us makes it."""
    read, outcomes = SharedMemory.read, [Copied.OVERTAKEN, Copied.OVERTAKEN]

    def overtaken_twice(memory: SharedMemory, rank: int, copy: Any) -> Copied:
        found = read(memory, rank, copy)
        if not outcomes:
            return found
        for view in client._parameter_views:
            view += 1  # what comes now is newer
        memory.version += 1
        return outcomes.pop()

    monkeypatch.setattr(SharedMemory, "read", overtaken_twice)
    with Cluster("async", workers=1) as cluster:
        client = _local_client(cluster)
        client.ask(-1)
        go = client.next_step(-1)
        assert (go.version, client.version) == (2, 2)
        assert client._model.value == 2.0
        client.close()


def test_a_worker_that_was_overtaken_by_a_server_that_died_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster("async", workers=1) as cluster:
        client = _local_client(cluster)
        monkeypatch.setattr(SharedMemory, "read", lambda *_: Copied.OVERTAKEN)
        assert client._connection is not None
        client._connection.give_up()
        assert not client._read(0)
        assert client._must_ask
        client.close()


def _local_client(cluster: Cluster) -> Client:
    return Client(
        Weights(), address=cluster.address, token=TOKEN, sealed=False, rank=0, incarnation=0, memory=cluster.memory
    )


# All weights are equal at any version. Worker 1 stops in the middle of a copy; worker 0 wakes it five commits later.
STOPPED = """
    import os, signal, time
    from pathlib import Path
    import torch
    from torch import nn
    import paceline
    from paceline.server import client

    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.zeros(64, 64)) for _ in range(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    parameters = list(model.parameters())
    copy_all, copies, process = client.read_parameters, 0, Path("stopped")

    def stop_in_mid_copy(layouts, views):
        global copies
        copies += 1
        if copies != 3:
            return copy_all(layouts, views)
        with torch.no_grad():
            for parameter, view in list(zip(layouts.parameters, views))[:8]:
                parameter.copy_(view)
            process.with_suffix(".new").write_text(str(os.getpid()))
            process.with_suffix(".new").rename(process)
            os.kill(os.getpid(), signal.SIGSTOP)
            for parameter, view in list(zip(layouts.parameters, views))[8:]:
                parameter.copy_(view)

    late = 0
    with paceline.join(model, optimizer, run="run") as session:
        if session.rank == 1:
            client.read_parameters = stop_in_mid_copy
        while not Path("enough").exists():
            with session.step() as step:
                values = {float(value) for parameter in parameters for value in parameter.detach().aminmax()}
                assert len(values) == 1, f"torn: {values}"
                loss = sum(parameter.sum() for parameter in parameters)
                step.record(loss=loss)
                loss.backward()
            if session.rank == 0 and late < 5 and process.exists():
                state = Path(f"/proc/{process.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
                late += state == "T"
                if late == 5:
                    os.kill(int(process.read_text()), signal.SIGCONT)
            if session.rank == 1 and copies > 4:
                Path("enough").touch()
        print(session.rank, "went on", late)
"""


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_is_really_stopped_in_mid_copy(
    servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(textwrap.dedent(STOPPED))
    ran = finished(["run", "--workers", "2", "--policy", "async", "--servers", str(servers), "script.py"])
    assert ran.returncode == 0, ran.stderr
    assert "worker 1 has been copying the parameters" in ran.stderr
    assert "0 went on 5" in ran.stdout and "1 went on 0" in ran.stdout
