"""How runs end: failures, signals, a killed supervisor, bad input; and that nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import DEADLINE, started, wait_until_gone
from workbench import Bench, Ended, when_all_say, workbench

from paceline.errors import UsageError
from paceline.launch import reaper as guard
from paceline.launch import supervisor
from paceline.launch.store import HostedStore
from paceline.launch.supervisor import supervise

pytestmark = pytest.mark.processes


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with workbench(tmp_path, capsys, monkeypatch) as bench:
        yield bench


def test_the_times_allowed_add_up_to_less_than_two_seconds() -> None:
    gathering = supervisor._TIME_TO_GATHER + supervisor._MORE_TO_GATHER
    assert gathering + supervisor._TIME_TO_END + guard._PATIENCE < 2


def test_the_failed_workers_traceback_is_shown_not_its_neighbours(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MORE_TO_GATHER", DEADLINE)  # until the cause is known
    ended = bench.run(
        """
        if rank == 1:
            wait_for("noticed")
            raise ValueError("the cause")
        if rank == 0:
            Path("noticed").touch()
            raise RuntimeError("Connection closed by peer")
        sleep()
        """,
        workers=3,
    )
    assert ended.code == 1
    assert ended.err.startswith("worker 1 failed (after ")
    assert "ValueError: the cause" in ended.err
    assert "Connection closed" not in ended.err


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("sys.exit(3)", 3, "worker 1 exited with code 3 ("),
        ("sys.exit('words')", 1, "worker 1 exited with code 1 ("),
        ("sys.exit(-1)", 255, "worker 1 exited with code 255 ("),
        ("os._exit(7)", 7, "worker 1 exited with code 7 ("),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "worker 1 was killed by SIGKILL ("),
        ("os.abort()", 134, "worker 1 was killed by SIGABRT ("),
        ("raise KeyboardInterrupt", 130, "worker 1 exited with code 130 ("),
        ("raise GeneratorExit", 1, "worker 1 failed ("),
    ],
)
def test_every_way_to_end_badly(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ending: str, code: int, message: str
) -> None:
    monkeypatch.setattr(supervisor, "_TIME_TO_END", DEADLINE)  # what it prints in the end may come late
    ended = bench.run(f"if rank == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN); {ending}\nsleep()")
    assert ended.code == code
    assert message in ended.err
    assert ("[1] words" in ended.err) == ("words" in ending)


def test_a_neighbour_that_ignores_sigterm_is_ended_with_its_children(bench: Bench) -> None:
    ended = bench.run(
        """
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            if os.fork() == 0:
                sleep()
            Path("ready").touch()
            sleep()
        wait_for("ready")
        raise ValueError("the cause")
        """
    )
    assert ended.code == 1 and "the cause" in ended.err


def test_a_failure_is_told_before_the_teardown(bench: Bench) -> None:
    ended = bench.run(
        """
        import threading
        threading.Thread(target=sleep).start()
        raise ValueError("the cause")
        """
    )
    assert ended.code == 1 and "the cause" in ended.err


def test_a_worker_that_leaves_in_mid_session(bench: Bench) -> None:
    ended = bench.run(
        """
        report("joined")
        report("progress", step=7)
        if rank == 0:
            sleep()
        """
    )
    assert ended.code == 1
    assert ended.err.startswith("worker 1 exited with code 0 at step 7 before its session ended (after ")


def test_a_worker_that_does_not_join_the_others(bench: Bench) -> None:
    ended = bench.run(
        """
        if rank != 1:
            report("joined")
            Path(f"joined-{rank}").touch()
            sleep()
        wait_for("joined-0"), wait_for("joined-2")
        """,
        workers=3,
    )
    assert ended.code == 1
    assert ended.err.startswith("worker 1 exited with code 0 without joining the session that worker 0 is in (")


def test_sessions_that_end_in_time_are_fine(bench: Bench) -> None:
    ended = bench.run(
        """
        report("joined")
        if rank == 0:
            wait_for("left")
        report("left")
        Path("left").touch()
        """
    )
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("child", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork() or sleep()"])
def test_shared_memory_of_a_killed_worker_is_unlinked(bench: Bench, child: str) -> None:
    name = f"paceline-test-{bench.mark}"
    ended = bench.run(
        f"""
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory("{name}", create=True, size=4096)
        {child}
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        workers=1,
    )
    assert ended.code == 137
    assert not Path("/dev/shm", name).exists()


def test_ctrl_c_lets_the_workers_save(bench: Bench) -> None:
    ended = bench.run(
        """
        try:
            report("ready")
            sleep()
        finally:
            time.sleep(0.2)
            print("saved")
        """,
        on_report=when_all_say("ready", 2, lambda: signal.raise_signal(signal.SIGINT)),
    )
    assert ended.code == 130
    assert sorted(ended.out.splitlines()) == ["[0] saved", "[1] saved"]
    assert ended.err == ""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_command_says_that_it_was_interrupted(bench: Bench, name: str) -> None:
    script = bench.script("Path('ready').touch(); sleep()")
    if signal.getsignal(signal.Signals[name]) is signal.SIG_IGN:  # as under nohup: the command would ignore it too
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    with started(["run", script], mark=bench.mark) as process:
        while not (bench.directory / "ready").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.Signals[name])
        out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out, err) == (128 + signal.Signals[name], "", "paceline: interrupted\n")


@pytest.mark.parametrize("delay", [0.0, 0.04, 0.08])
def test_ctrl_c_before_the_workers_are_ready_is_quiet(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    def interrupt(store: HostedStore) -> None:
        time.sleep(delay)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(HostedStore, "serve", interrupt)
    assert bench.run("sleep()") == Ended(130, "", "")


def test_sigterm_lets_the_workers_save(bench: Bench) -> None:
    ended = bench.run(
        """
        def save(*_):
            print("saved")
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        report("ready")
        sleep()
        """,
        on_report=when_all_say("ready", 2, lambda: signal.raise_signal(signal.SIGTERM)),
    )
    assert ended.code == 143
    assert sorted(ended.out.splitlines()) == ["[0] saved", "[1] saved"]


def test_a_signal_to_one_worker_lets_the_others_save(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_TIME_TO_GATHER", "_MORE_TO_GATHER", "_TIME_TO_END"):
        monkeypatch.setattr(supervisor, limit, 0.05)
    ended = bench.run(
        """
        if rank == 0:
            time.sleep(0.5)  # longer than any process has after a failure
            print("saved")
        report("interrupted", step=3, saved="run", signal=int(signal.SIGTERM) if rank == 1 else 0)
        sys.exit(130)
        """
    )
    assert ended == Ended(143, "[0] saved\n", "paceline: worker 1 was asked to stop by SIGTERM\n")


STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
report("ready")
sleep()
"""


def test_a_second_ctrl_c_kills_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TIME_TO_SAVE", 600.0)

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    assert bench.run(STUBBORN, on_report=when_all_say("ready", 2, twice)).code == 130


def test_the_time_to_save_is_limited(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_TIME_TO_SAVE", 0.2)
    stop = when_all_say("ready", 2, lambda: signal.raise_signal(signal.SIGTERM))
    assert bench.run(STUBBORN, on_report=stop).code == 143


def test_an_error_while_saving_is_shown(bench: Bench) -> None:
    ended = bench.run(
        """
        try:
            report("ready")
            sleep()
        except KeyboardInterrupt:
            raise OSError("disk full") from None
        """,
        workers=1,
        on_report=when_all_say("ready", 1, lambda: signal.raise_signal(signal.SIGINT)),
    )
    assert ended.code == 130
    assert "OSError: disk full" in ended.err


def test_a_signal_that_takes_longer_than_a_look_at_the_workers_is_survived(bench: Bench) -> None:
    """As it does while torch is being imported; some queues then wait for ever."""
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(0.2))
    this_thread = threading.get_ident()

    def send() -> None:
        for number in (signal.SIGUSR1, signal.SIGINT):
            time.sleep(0.3)
            signal.pthread_kill(this_thread, number)

    sender = threading.Thread(target=send)
    try:
        assert bench.run("report('ready'); sleep()", on_report=when_all_say("ready", 2, sender.start)).code == 130
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def test_signal_handlers_are_put_back(bench: Bench) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    bench.run("pass", workers=1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_an_error_of_the_callers_own_ends_the_workers(bench: Bench) -> None:
    def raises(rank: int, report: dict[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bench.run("report('ready'); sleep()", on_report=raises)


def test_nothing_outlives_a_killed_supervisor(bench: Bench) -> None:
    name = f"paceline-test-{bench.mark}"
    script = bench.script(
        f"""
        from multiprocessing.shared_memory import SharedMemory
        memory = SharedMemory(f"{name}-{{rank}}", create=True, size=4096)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        if os.fork() == 0:
            Path(f"forked-{{rank}}").touch()
        sleep()
        """
    )
    code = "import sys; from paceline.launch.supervisor import supervise; supervise(sys.argv[1:], workers=2)"
    process = subprocess.Popen([sys.executable, "-c", code, script], env=bench.environment)
    try:
        while not all((bench.directory / f"forked-{rank}").exists() for rank in range(2)):
            assert process.poll() is None
            time.sleep(0.01)
        assert len(bench.processes()) >= 8, "supervisor, guard, and of each worker itself and two children"
    finally:
        process.kill()
        process.wait()
    assert wait_until_gone(bench.mark) == []
    assert list(Path("/dev/shm").glob(f"{name}*")) == []


@pytest.mark.parametrize("workers", [0, -1])
def test_no_workers(bench: Bench, workers: int) -> None:
    with pytest.raises(UsageError, match=f"at least 1 worker, got {workers}"):
        bench.run("print('started')", workers=workers)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing.py"], "no such script: missing.py"),
        (["."], "directory without a __main__.py"),
        ([], "no script to run"),
        (["-m"], "-m wants the name of a module"),
    ],
)
def test_nothing_to_run(bench: Bench, command: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        supervise(command, workers=2, environment=bench.environment)


def test_no_descriptor_or_port_is_left_behind(bench: Bench) -> None:
    bench.run("raise ValueError")  # whatever is opened once and for all is open now
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    ports = bench.run("print(os.environ['MASTER_PORT'])\nsys.exit(rank)").out
    # Earlier tests may have left threads that close theirs now.
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
    (port,) = {int(line.split()[1]) for line in ports.splitlines()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {int(local.partition(":")[2], 16) for _, local, _, state, *_ in rows if state == "0A"}
    assert port not in listening  # a closed connection to an earlier owner of the number may still be listed
