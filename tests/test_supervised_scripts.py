"""What scripts see, print and do under the supervisor, a real process group included."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quick import quick
from workbench import Bench, workbench

from paceline.launch.supervisor import supervise

pytestmark = pytest.mark.processes


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with workbench(tmp_path, capsys, monkeypatch) as bench:
        yield bench


def test_a_script_runs_as_it_would_without_us(bench: Bench) -> None:
    source = "import sys; print(sys.argv, sys.path[0], __name__, __file__, len(sys.modules) > 0)"
    script = bench.script(source, prologue=False)
    alone = subprocess.run([sys.executable, script, "-a", "b c"], capture_output=True, text=True, check=True)
    assert supervise([script, "-a", "b c"], workers=1, environment=bench.environment) == 0
    assert bench.capture.readouterr().out == alone.stdout


def test_a_module_runs_as_it_would_without_us(bench: Bench) -> None:
    package = bench.directory / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text("import sys; print(sys.argv, sys.path[0], __name__, __package__)")
    alone = subprocess.run(
        [sys.executable, "-m", "package", "a"], capture_output=True, text=True, check=True, env=bench.environment
    )
    assert supervise(["-m", "package", "a"], workers=1, environment=bench.environment) == 0
    assert bench.capture.readouterr().out == alone.stdout


def test_a_traceback_is_that_of_the_script_alone(bench: Bench) -> None:
    source = """
        def inner():
            raise KeyError("boom")
        try:
            inner()
        except KeyError as error:
            raise ValueError("outer") from error
        """
    script = bench.script(source)
    alone = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env={**bench.environment, "RANK": "0"}
    )
    ended = bench.run(source)
    headline, traceback = ended.err.split("\n", 1)
    assert re.fullmatch(r"worker [01] failed \(after \d+\.\d s\):", headline)
    assert traceback == alone.stderr
    assert ended.code == 1


def test_a_syntax_error_shows_the_line(bench: Bench) -> None:
    ended = bench.run("x = = 3\n", workers=1)
    assert ended.code == 1
    assert "x = = 3" in ended.err and "SyntaxError" in ended.err and "runpy" not in ended.err


def test_a_mistake_in_the_use_of_paceline_exits_with_2(bench: Bench) -> None:
    ended = bench.run("from paceline.errors import UsageError\nraise UsageError('use --servers 2 or fewer')", workers=1)
    assert ended.code == 2
    assert ended.err.endswith("paceline.errors.UsageError: use --servers 2 or fewer\n")


def test_a_workers_environment(bench: Bench) -> None:
    ended = bench.run(
        """
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS",
                 "PACELINE_POLICY", "PACELINE_REPORT_FD", "PACELINE_SUPERVISOR_PID"]
        print(*[os.environ.get(name) for name in names])
        """,
        policy="all-reduce",
    )
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(ended.out.splitlines()) == [
        f"[{rank}] {rank} {rank} 2 2 127.0.0.1 {threads} all-reduce None None" for rank in range(2)
    ]


def test_children_have_no_part_in_the_line(bench: Bench) -> None:
    (bench.directory / "child.py").write_text(
        "import os; print([n for n in range(3, 50) if os.path.exists(f'/proc/self/fd/{n}')])"
    )
    heard: list[dict[str, Any]] = []
    ended = bench.run(
        """
        subprocess.run([sys.executable, "child.py"], close_fds=False)
        if os.fork() == 0:
            report("from the child")
            os._exit(0)
        os.wait()
        report("from the worker")
        """,
        workers=1,
        on_report=lambda rank, report: heard.append(report),
    )
    assert (ended.code, ended.out) == (0, "[]\n")
    assert [report["event"] for report in heard] == ["from the worker", "exiting"]


def test_lines_carry_the_rank_and_keep_their_stream_and_order(bench: Bench) -> None:
    ended = bench.run(
        """
        for n in range(3):
            print("out", n)
            print("err", n, file=sys.stderr)
        sys.stdout.write("no newline")
        """,
        workers=3,
    )
    assert ended.code == 0
    for rank in range(3):
        mine = [line for line in ended.out.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {text}" for text in ("out 0", "out 1", "out 2", "no newline")]
        mine = [line for line in ended.err.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] err {n}" for n in range(3)]


def test_one_worker_has_no_prefix_and_any_bytes_pass(bench: Bench) -> None:
    ended = bench.run(r'sys.stdout.buffer.write("50%\rzwölf\n".encode() + b"\xff\xfe|"); sys.stdout.flush()', workers=1)
    assert ended.out == "50%\rzwölf\n\ufffd\ufffd|"


def test_two_chatty_workers_are_never_mixed_in_a_line(bench: Bench) -> None:
    ended = bench.run(
        """
        lines = "".join(f"{n} " + "x" * (n % 300) + chr(10) for n in range(20_000))
        for start in range(0, len(lines), 7_777):
            sys.stdout.write(lines[start : start + 7_777])
        print("long", "y" * 3_000_000)
        """
    )
    assert ended.code == 0
    expected = [f"{n} " + "x" * (n % 300) for n in range(20_000)] + ["long " + "y" * 3_000_000]
    lines = ended.out.splitlines()
    assert len(lines) == 2 * len(expected)
    for rank in range(2):
        assert [line[4:] for line in lines if line.startswith(f"[{rank}] ")] == expected


@pytest.mark.skipif(sys.platform != "linux", reason="pipes of packets are Linux's")
@pytest.mark.parametrize("wanted", ["", "1"])
def test_a_line_goes_out_at_once_that_others_cannot_print_into(bench: Bench, wanted: str) -> None:
    script = bench.script("import os; print('two', 'words'); print('end', end=''); os.write(1, b'|')", prologue=False)
    reading, writing = os.pipe2(os.O_DIRECT)  # each read is what one write wrote
    worker = [sys.executable, "-m", "paceline.launch.worker", script]
    environment = {**bench.environment, "PYTHONUNBUFFERED": wanted}
    subprocess.run(worker, stdout=writing, env=environment, check=True, close_fds=True)
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        assert list(iter(lambda: pipe.read(4096), b"")) == [b"two words\n", b"|", b"end"]


def test_an_escaped_process_that_holds_our_output_does_not_hold_us(bench: Bench) -> None:
    ended = bench.run(
        """
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path("escaped").write_text(str(child.pid))
        print("done")
        """,
        workers=1,
    )
    os.kill(int((bench.directory / "escaped").read_text()), signal.SIGKILL)
    while bench.processes():
        time.sleep(0.01)
    assert (ended.code, ended.out) == (0, "done\n")


def sockets_of(process: int) -> set[str]:
    """The sockets that a process has open, as the kernel names them."""
    found = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(str(path.readlink()))
    return found


def listening_addresses(sockets: set[str]) -> set[str]:
    """The addresses that any of these listens on, as the kernel writes them."""
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.parametrize("workers", quick([2, 4], 2))
def test_a_process_group_meets_through_our_store_on_the_loopback_only(bench: Bench, workers: int) -> None:
    processes = {os.getpid()}
    before = sockets_of(os.getpid())  # of earlier tests
    addresses: set[str] = set()

    def look(rank: int, report: dict[str, Any]) -> None:
        if report["event"] == "met":
            processes.add(report["process"])
        if len(processes) == 1 + workers:
            addresses.update(listening_addresses(set[str]().union(*map(sockets_of, processes)) - before))
            (bench.directory / "looked").touch()

    ended = bench.run(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        print(total.item(), dist.get_world_size())
        report("met", process=os.getpid())
        wait_for("looked")
        dist.destroy_process_group()
        """,
        workers,
        on_report=look,
    )
    assert ended.code == 0, ended.err
    total = float(sum(range(workers)))
    assert sorted(ended.out.splitlines()) == [f"[{rank}] {total} {workers}" for rank in range(workers)]
    assert addresses == {"0100007F"}, "127.0.0.1 and nothing else"


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("raise ValueError('the cause')", "ValueError: the cause"),
        pytest.param("sys.exit(3)", "worker 1 exited with code 3", marks=pytest.mark.soak),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", "worker 1 was killed by SIGKILL", marks=pytest.mark.soak),
    ],
)
def test_the_first_failure_in_a_process_group_is_shown(bench: Bench, ending: str, message: str) -> None:
    ended = bench.run(
        f"""
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(1_000_000):
            if rank == 1 and step == 5:
                {ending}
            dist.all_reduce(torch.ones(1))
        """
    )
    assert message in ended.err
    assert "worker 0" not in ended.err and "Connection" not in ended.err
