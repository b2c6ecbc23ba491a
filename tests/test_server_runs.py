"""Runs with a parameter server: when it starts, who may die, who comes back, and how such runs end."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE
from workbench import Bench, Ended, when_all_say, workbench

from paceline.errors import UsageError
from paceline.launch import service, supervisor
from paceline.launch.failures import SERVER
from paceline.launch.service import ServerOptions
from paceline.launch.streams import Output

pytestmark = pytest.mark.processes

NEEDED = ServerOptions(needed=True)
RESPAWN = ServerOptions(needed=True, respawn=True)
PROLOGUE = """
from paceline.launch.environment import take_server_assignment
place = take_server_assignment()
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
"""
# As a real one does, the server ends after the work is done.
SERVE = """
if place.role == "server":
    wait_for("done")
    sys.exit()
"""


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with workbench(tmp_path, capsys, monkeypatch) as bench:
        yield bench


@pytest.fixture(autouse=True)
def _a_file_when_a_death_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts can wait for the file ``told-N``, N being the number of deaths told so far."""
    write, told = Output.write, iter(range(1, 100))

    def write_and_touch(output: Output, name: Any, text: str) -> None:
        write(output, name, text)
        if text.startswith("paceline: "):
            (tmp_path / f"told-{next(told)}").touch()

    monkeypatch.setattr(Output, "write", write_and_touch)


def run(
    bench: Bench, source: str, workers: int = 2, server: ServerOptions = NEEDED, *, serve: str = SERVE, **options: Any
) -> Ended:
    """Run a script in which ``place`` is known; the server's part comes first."""
    return bench.run(PROLOGUE + serve + textwrap.dedent(source), workers, server=server, **options)


def test_the_server_runs_the_same_command_and_shares_a_place(bench: Bench) -> None:
    ended = run(
        bench,
        """
        print(place.role, place.workers, os.environ.get("RANK"), os.environ["WORLD_SIZE"], place.delay)
        print("same", place.address, place.token, os.fstat(place.memory_fd).st_ino)
        assert not [name for name in os.environ if name in ("PACELINE_SERVER", "PACELINE_TOKEN", "PACELINE_MEMORY_FD")]
        assert place.token.encode() not in Path("/proc/self/cmdline").read_bytes()
        """,
        server=ServerOptions(needed=True, delay=("1+exp(0.5)", 0.04)),
        serve="",
    )
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert sorted(line for line in lines if "same" not in line) == [
        "[0] worker 2 0 2 ('1+exp(0.5)', 0.04)",
        "[1] worker 2 1 2 ('1+exp(0.5)', 0.04)",
        "[server] server 2 None 2 ('1+exp(0.5)', 0.04)",
    ]
    (shared,) = {line.partition("] ")[2] for line in lines if "same" in line}
    assert shared.startswith("same ipc://@paceline-")


def test_every_run_has_another_address_and_token(bench: Bench) -> None:
    first, second = (run(bench, "print(place.address, place.token)", 1, ServerOptions()).out.split() for _ in range(2))
    assert len(first) == 2 and not set(first) & set(second)


def test_a_script_that_needs_a_server_gets_one(bench: Bench) -> None:
    """All workers ask; one server is started."""
    servers: list[int] = []

    def hear(rank: int, report: dict[str, Any]) -> None:
        if report["event"] == "serving":
            servers.append(rank)
            (bench.directory / "done").touch()

    source = "report('needs server' if rank >= 0 else 'serving')\nwait_for('done')"
    assert run(bench, source, 3, ServerOptions(), serve="", on_report=hear) == Ended(0, "", "")
    assert servers == [SERVER]


def test_a_script_that_needs_no_server_gets_none(bench: Bench) -> None:
    assert sorted(run(bench, "print(place.role)", 2, ServerOptions()).out.splitlines()) == ["[0] worker", "[1] worker"]


def test_the_run_goes_on_without_the_killed(bench: Bench) -> None:
    ended = run(
        bench,
        """
        if rank == 1:
            kill()
        wait_for("told-1")
        if rank == 2:
            os.abort()
        wait_for("told-2")
        Path("done").touch()
        """,
        workers=4,
    )
    assert ended == Ended(
        0,
        "",
        "paceline: worker 1 was killed by SIGKILL; the run goes on with 3\n"
        "paceline: worker 2 was killed by SIGABRT; the run goes on with 2\n",
    )


def test_one_killed_after_the_others_have_ended(bench: Bench) -> None:
    source = """
        if rank == 0:
            Path("first").write_text(str(os.getpid()))
            sys.exit()
        wait_for("first")
        while Path("/proc", Path("first").read_text()).exists():
            time.sleep(0.01)
        Path("done").touch()
        kill()
        """
    ended = run(bench, source)
    assert ended == Ended(0, "", "paceline: worker 1 was killed by SIGKILL; the others had ended\n")


def test_workers_may_leave_early(bench: Bench) -> None:
    """In mid-session too, which is told of; the others go on."""
    source = """
        report("joined")
        if rank == 0:
            wait_for("left")
            time.sleep(0.3)
            Path("done").touch()
        Path("left").touch()
        """
    ended = run(bench, source)
    assert (ended.code, ended.out) == (0, "")
    assert re.fullmatch(r"paceline: worker [01] ended without closing its session; .*\n", ended.err)


def test_all_killed(bench: Bench) -> None:
    ended = run(bench, "wait_for('told-1') if rank else None\nkill()")
    assert ended.code == 137
    told, fault = ended.err.splitlines()
    assert told == "paceline: worker 0 was killed by SIGKILL; the run goes on with 1"
    assert re.fullmatch(r"worker 1 was killed by SIGKILL \(after \d+\.\d s\); no worker is left", fault)


def test_another_takes_the_place_of_a_killed_one(bench: Bench) -> None:
    ended = run(
        bench,
        """
        print(rank, place.incarnation, place.workers, os.fstat(place.memory_fd).st_size)
        if place.incarnation < 12 and rank == 1:
            report("joined")
            os.ftruncate(place.memory_fd, 100 + place.incarnation)
            kill()
        if rank == 0:
            wait_for("told-12")
        Path("done").touch()
        """,
        server=RESPAWN,
    )
    assert ended.code == 0
    sizes = [0, *range(100, 112)]
    # A thread for each incarnation passes its lines on, so these may come in any order.
    assert sorted(line for line in ended.out.splitlines() if line.startswith("[1] ")) == sorted(
        f"[1] 1 {incarnation} 2 {size}" for incarnation, size in enumerate(sizes)
    )
    assert ended.err == 12 * "paceline: worker 1 was killed by SIGKILL; another takes its place\n"


def test_another_takes_the_place_before_the_policy_is_known(bench: Bench) -> None:
    """A killed worker that has not joined is replaced under any policy; one that has, and no server, ends the run."""
    source = """
        if rank == 1 and place.incarnation == 0:
            kill()
        report("joined")
        if rank == 1:
            kill()
        sleep()
        """
    ended = run(bench, source, server=ServerOptions(respawn=True))
    told, fault = ended.err.splitlines()
    assert told == "paceline: worker 1 was killed by SIGKILL; another takes its place"
    assert re.fullmatch(r"worker 1 was killed by SIGKILL \(after .*\); out of memory\?", fault)
    assert ended.code == 137


def test_workers_that_never_join_are_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST_FAILED_STARTS", 3)
    ended = run(
        bench,
        """
        if rank == 0:
            sleep()
        if place.incarnation == 1:
            report("joined")
        kill()
        """,
        server=RESPAWN,
    )
    assert ended.code == 137
    *told, fault = ended.err.splitlines()
    assert told == 4 * ["paceline: worker 1 was killed by SIGKILL; another takes its place"]
    assert re.fullmatch(r"worker 1 was .* SIGKILL \(.*\); before it joined, and so were the 2 before it", fault)


def test_a_killed_server_is_replaced_and_finds_what_was_in_memory(bench: Bench) -> None:
    """Also where it listened: workers of other hosts know that address."""
    source = """
        if place.role == "server":
            report("joined")
            print(place.incarnation, place.bind, os.pread(place.memory_fd, 3, 100))
            report("serving", address="tcp://127.0.0.1:47" + str(place.incarnation))
            if place.incarnation < 2:
                os.pwrite(place.memory_fd, str(place.incarnation).encode() * 3, 100)
                kill()
            wait_for("done")
            sys.exit()
        while place.incarnation == 0 and not (Path("told-1").exists() and Path("told-2").exists()):
            time.sleep(0.01)
        Path("done").touch()
        """
    ended = run(bench, source, server=ServerOptions(needed=True, bind="127.0.0.1:0"), serve="")
    assert ended.code == 0
    assert ended.err == 2 * "paceline: the server was killed by SIGKILL; another takes its place\n"
    assert sorted(ended.out.splitlines()) == [
        "[server] 0 127.0.0.1:0 b''",
        "[server] 1 127.0.0.1:470 b'000'",
        "[server] 2 127.0.0.1:471 b'111'",
    ]


@pytest.mark.parametrize(("ending", "name"), [("kill()", "SIGKILL"), ("report('joined'); os.abort()", "SIGABRT")])
def test_servers_that_never_serve_are_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ending: str, name: str
) -> None:
    """One that crashes by itself would crash again where it goes on."""
    monkeypatch.setattr(service, "_MOST_FAILED_STARTS", 3)
    ended = run(bench, "sleep()", serve=f"if place.role == 'server': {ending}\n")
    assert ended.code == 128 + signal.Signals[name]
    *told, fault = ended.err.splitlines()
    assert told == 2 * [f"paceline: the server was killed by {name}; another takes its place"]
    assert re.fullmatch(
        rf"the server was killed by {name} \(.*\); (before it joined, and so|as) were the 2 before it", fault
    )


def test_of_several_servers_all_begin_anew_when_one_is_killed(bench: Bench) -> None:
    """When the last of them has begun, no one of those before is left."""
    serve = """
if place.role == "server":
    report("joined")
    os.symlink(str(os.getpid()), f"pid-{place.shard}-{place.incarnation}")
    for shard in range(3):
        while not os.path.islink(f"pid-{shard}-{place.incarnation}"):
            time.sleep(0.005)
        if place.incarnation:
            before = os.readlink(f"pid-{shard}-{place.incarnation - 1}")
            assert not Path("/proc", before).exists()
    if (place.incarnation, place.shard) in [(0, 1), (1, 0), (2, 2)]:
        kill()
    wait_for("done")
    print(place.incarnation)
    sys.exit()
"""
    ended = run(bench, "wait_for('told-3')\nPath('done').touch()", 1, replace(NEEDED, servers=3), serve=serve)
    assert ended.code == 0
    assert ended.err == "".join(
        f"paceline: {name} was killed by SIGKILL; all servers start anew\n"
        for name in ("server 1", "the server", "server 2")
    )
    assert sorted(ended.out.splitlines()) == ["[server 1] 3", "[server 2] 3", "[server] 3"]


@pytest.mark.parametrize("shard", [0, 1])
def test_several_servers_that_never_serve_are_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, shard: int
) -> None:
    monkeypatch.setattr(service, "_MOST_FAILED_STARTS", 3)
    serve = f"if place.role == 'server': kill() if place.shard == {shard} else sleep()\n"
    ended = run(bench, "sleep()", 1, replace(NEEDED, servers=2), serve=serve)
    assert ended.code == 137
    *told, fault = ended.err.splitlines()
    name = "server 1" if shard else "the server"
    assert told == 2 * [f"paceline: {name} was killed by SIGKILL; all servers start anew"]
    assert re.fullmatch(rf"{name} was killed by SIGKILL \(.*\); before it joined, and so were the 2 before it", fault)


def test_a_worker_that_is_replaced_together_with_the_server_is_not_told_of_as_gone(bench: Bench) -> None:
    serve = """
if place.role == "server":
    report("joined")
    if place.incarnation == 0:
        Path("process").write_text(str(os.getpid()))
        Path("server").touch()
        time.sleep(60)
    wait_for("again")
    from paceline.launch.service import read_gone
    assert read_gone(place.memory_fd, 1) == []
    Path("done").touch()
    sys.exit()
"""
    source = """
    if place.incarnation == 0:
        wait_for("server")
        os.kill(int(Path("process").read_text()), signal.SIGKILL)
        kill()
    Path("again").touch()
    wait_for("done")
    """
    ended = run(bench, source, 1, RESPAWN, serve=serve)
    assert (ended.code, ended.out) == (0, ""), ended.err
    assert len(ended.err.splitlines()) == 2


def test_a_server_killed_when_a_worker_has_left_is_told_so(bench: Bench) -> None:
    """The one before knew; its successor must not wait for it."""
    serve = """
if place.role == "server":
    report("joined")
    if place.incarnation == 0:
        wait_for("left")
        kill()
    from paceline.launch.service import read_gone
    while 1 not in read_gone(place.memory_fd, 2):
        time.sleep(0.01)
    assert 0 not in read_gone(place.memory_fd, 2)
    Path("done").touch()
    sys.exit()
"""
    source = "if rank == 0: wait_for('done')\nelse: Path('left').touch()"
    ended = run(bench, source, serve=serve)
    assert (ended.code, ended.out) == (0, "")
    assert ended.err == "paceline: the server was killed by SIGKILL; another takes its place\n"


def test_workers_killed_together_with_their_server_are_replaced_too(bench: Bench) -> None:
    source = """
        report("joined")
        Path(f"{place.role}-{rank}-{place.incarnation}").touch()
        if place.incarnation == 0:
            wait_for("server--1-0"), wait_for("worker-0-0"), wait_for("worker-1-0")
            kill()
        for name in ("server--1-1", "worker-0-1", "worker-1-1"):
            wait_for(name)
        """
    ended = run(bench, source, server=RESPAWN, serve="")
    assert ended.code == 0, ended.err
    assert ended.err.count("another takes its place") == 3


@pytest.mark.soak
def test_policies_given_to_the_command_go_before_the_scripts(bench: Bench) -> None:
    source = """
        import torch, paceline
        model = torch.nn.Linear(2, 1)
        with paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="all-reduce") as session:
            for (x,) in session.batches(torch.utils.data.TensorDataset(torch.ones(4, 2)), 2, epochs=1):
                with session.step():
                    model(x).sum().backward()
            print(session.policy, session.steps)
        """
    ended = run(bench, source, 1, ServerOptions(needed=True), serve="", policy="async")
    assert (ended.code, ended.out, ended.err) == (0, "async 2\n", "")


def test_a_server_that_finds_no_server_policy_says_so(bench: Bench) -> None:
    source = """
        import torch, paceline
        model = torch.nn.Linear(2, 1)
        paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="all-reduce")
        """
    ended = run(bench, source, 1, ServerOptions(alone=True, bind="127.0.0.1:0"), serve="")
    assert ended.code == 2
    assert "started as the server of this run, which needs a policy with a server, and found all-reduce" in ended.err


@pytest.mark.parametrize("killed_too", [False, True])
def test_a_worker_that_raises_ends_the_run(bench: Bench, killed_too: bool) -> None:
    """And no other is started in its place, even if it is killed as it ends."""
    end = "import atexit; atexit.register(os.abort)" if killed_too else ""
    ended = run(bench, f"{end}\nif rank == 1: raise ValueError('the cause')\nsleep()", server=RESPAWN)
    assert ended.code == 1
    assert ended.err.startswith("worker 1 failed (after ")
    assert ended.err.endswith("ValueError: the cause\n")


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("raise ValueError('the cause')", 1, "the server failed (after "),
        ("sys.exit(3)", 3, "the server exited with code 3 (after "),
    ],
)
def test_a_server_that_ends_badly_ends_the_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ending: str, code: int, message: str
) -> None:
    monkeypatch.setattr(supervisor, "_MORE_TO_GATHER", DEADLINE)  # until the cause is known
    source = f"""
        if place.role == "server":
            wait_for("noticed")
            {ending}
        class CommError(RuntimeError): pass
        if rank == 0:
            Path("noticed").touch()
            raise CommError("the server does not answer")
        sleep()
        """
    ended = run(bench, source, server=RESPAWN, serve="")
    assert ended.code == code
    assert ended.err.startswith(message)
    assert "CommError" not in ended.err


def test_a_server_that_does_not_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_TIME_TO_FINISH", 0.2)
    ended = run(bench, "pass")
    assert ended.code == 1
    assert ended.err.startswith("the server did not end within 0.2 s of the last worker (after ")


def test_a_signal_reaches_workers_and_server(bench: Bench) -> None:
    source = """
        try:
            report("ready")
            sleep()
        finally:
            print("saved")
        """
    stop = when_all_say("ready", [0, 1, SERVER], lambda: signal.raise_signal(signal.SIGINT))
    ended = run(bench, source, server=RESPAWN, serve="", on_report=stop)
    assert (ended.code, ended.err) == (130, "")
    assert sorted(ended.out.splitlines()) == ["[0] saved", "[1] saved", "[server] saved"]


def test_a_server_alone_expects_workers_from_elsewhere(bench: Bench) -> None:
    options = ServerOptions(alone=True, bind="127.0.0.1:0", trusted=True, token="ab" * 32)
    source = "print(place.role, place.workers, place.bind, place.trusted, place.memory_fd > 2, place.token)"
    ended = run(bench, source, 5, options, serve="")
    assert ended == Ended(0, f"server 5 127.0.0.1:0 True True {'ab' * 32}\n", "")


def test_workers_of_a_server_elsewhere(bench: Bench) -> None:
    options = ServerOptions(join="tcp://far:4711", token="ab" * 32)
    ended = run(
        bench,
        """
        print(place.address, place.token == "ab" * 32, place.workers, place.memory_fd, rank, os.environ["LOCAL_RANK"])
        if os.environ["LOCAL_RANK"] == "1":
            kill()
        wait_for("told-1")
        """,
        server=options,
    )
    assert ended.code == 0
    assert sorted(ended.out.splitlines()) == [f"[{n}] tcp://far:4711 True None None -1 {n}" for n in range(2)]
    assert ended.err == "paceline: worker 1 was killed by SIGKILL; the run goes on with 1\n"


def test_joining_needs_a_token(bench: Bench) -> None:
    with pytest.raises(UsageError, match="tcp://far:4711 needs the token"):
        run(bench, "print('started')", server=ServerOptions(join="tcp://far:4711"))


OPEN_SESSION = """
import torch, paceline
model = torch.nn.Linear(2, 1)
session = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="async")
for (x,) in session.batches(torch.utils.data.TensorDataset(torch.ones(12, 2)), 3, epochs=1):
    with session.step():
        model(x).mean().backward()
"""


@pytest.mark.parametrize("workers, servers", [(1, 1), pytest.param(2, 2, marks=pytest.mark.soak)])
def test_a_run_ends_at_once_though_no_session_was_closed_and_says_so_once(
    bench: Bench, workers: int, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_TIME_TO_FINISH", DEADLINE)  # a server that waits for it takes longer than the test
    ended = bench.run(OPEN_SESSION, workers, server=ServerOptions(servers=servers))
    assert ended.code == 0, ended.err
    told = [line for line in ended.err.splitlines() if "paceline: " in line]
    assert len(told) == 1
    assert re.fullmatch(
        r"paceline: worker [01] ended without closing its session; use `with paceline\.join\(\.\.\.\) as session:`, or "
        r"call session\.close\(\) at the end",
        told[0],
    )
