"""Ranks that die, are late, differ, are interrupted or find no memory: the others get an error that says so."""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from quick import quick
from shared_ranks import (
    DEADLINE,
    DirectoryStore,
    address,
    hurried,
    outcomes,
    run_ranks,
    start_process,
    start_ranks,
)

from paceline.collectives.core import SharedGroup
from paceline.collectives.segment import host_identity, memory_objection
from paceline.errors import CommError
from paceline.native import _core

NOTICE_SECONDS = 2.0  # that a death may go unnoticed

RANK = """
import signal, sys, time
from pathlib import Path
import numpy as np
from paceline.collectives.core import SharedGroup
from shared_ranks import DirectoryStore, address
directory, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
group = SharedGroup(DirectoryStore(directory), rank, size, timeout=30, name="g")
"""

VICTIM = """
array, small, region = np.ones(2_000_000, np.float32), np.ones(10, np.float32), group.allocate(4_000_000)
print("here", flush=True)
while True:
    group.all_reduce(address(array), array.size, "float32", "max")
    group.all_reduce(address(small), small.size, "float32", "max")
    group.all_reduce(region.address(), 1_000_000, "float32", "max")
    group.broadcast(address(array), array.size, "float32", 1)
"""


def survive(group: SharedGroup) -> tuple[str, float]:
    """Call collectives until one fails; give its message, and when that was."""
    array, small, region = np.ones(2_000_000, np.float32), np.ones(10, np.float32), group.allocate(4_000_000)
    try:
        while True:
            group.all_reduce(address(array), array.size, "float32", "max")
            group.all_reduce(address(small), small.size, "float32", "max")
            group.all_reduce(region.address(), 1_000_000, "float32", "max")
            group.broadcast(address(array), array.size, "float32", 1)
    except CommError as error:
        failed = time.monotonic()
        with pytest.raises(CommError, match=re.escape(str(error))):
            group.barrier()
        return str(error), failed


@pytest.mark.processes
@pytest.mark.parametrize("seed", quick(range(20), 0, 1))
def test_a_killed_rank_is_named_in_time(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    victim = start_process(RANK + VICTIM, tmp_path, 2, 3)
    started = start_ranks(survive, range(2), 3, tmp_path, timeout=30)
    try:
        assert victim.stdout is not None and victim.stdout.readline() == "here\n", victim.communicate()
        time.sleep(draw.uniform(0, 0.05))
    finally:
        victim.kill()
        killed = time.monotonic()
    for outcome in outcomes(started):
        assert isinstance(outcome, tuple), outcome
        message, failed = outcome
        named = (
            rf"rank 2 \(process {victim.pid}\) ended or was killed while others were in (all_reduce|broadcast)\(.*\), "
        )
        assert re.search(named + r"collective \d+ of group 'g'", message), message
        assert failed - killed < NOTICE_SECONDS
    victim.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_message_to_or_from_a_killed_rank(call: str, tmp_path: Path) -> None:
    victim = start_process(RANK + "print('here', flush=True); time.sleep(60)", tmp_path, 1, 2)

    def work(group: SharedGroup) -> str:
        assert victim.stdout is not None and victim.stdout.readline() == "here\n"
        array = np.ones(1_000_000)
        if call == "send":
            ticket = group.send(address(array), array.size, "float64", 1, async_=True)
        else:
            ticket = group.receive_later(address(array), array.size, "float64", 1)
        assert ticket is not None and not ticket.wait(0.05)
        victim.kill()
        with pytest.raises(CommError) as error:
            ticket.wait()
        return str(error.value)

    (message,) = outcomes(start_ranks(work, range(1), 2, tmp_path))
    assert isinstance(message, str), message
    assert f"rank 1 (process {victim.pid}) ended, was killed or left during a message" in message
    victim.communicate()


# Late ranks ---------------------------------------------------------------------------------------------------


def failure_of(call: Callable[[], object]) -> str:
    with pytest.raises(CommError) as error:
        call()
    return str(error.value)


def test_a_late_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third rank waits for the second, and still names the first, for which both wait."""
    noticed = threading.Event()

    def work(group: SharedGroup) -> str:
        array = np.ones(100_000)
        if group.rank == 0:
            assert noticed.wait(DEADLINE)
        message = failure_of(lambda: group.all_reduce(address(array), array.size, "float64", "sum"))
        noticed.set()
        return message

    monkeypatch.setattr(_core, "join", hurried(0.3))
    for message in run_ranks(work, 3, tmp_path):
        assert re.search(
            r"rank [12] timed out: it waited the whole timeout of 0\.3 s for rank 0 \(process \d+\) "
            r"in all_reduce\(100000 float64, sum\), collective 1 of group 'g'",
            message,
        ), message


def test_a_slow_rank_is_waited_for(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        if group.rank == 1:
            time.sleep(0.4)
        group.barrier()

    run_ranks(work, 2, tmp_path)


def test_a_late_message_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = threading.Event()

    def work(group: SharedGroup) -> str:
        if group.rank == 1:
            assert noticed.wait(DEADLINE)
            return failure_of(group.barrier)
        array = np.ones(4)
        message = failure_of(lambda: group.receive(address(array), 4, "float64", 1))
        noticed.set()
        return message

    monkeypatch.setattr(_core, "join", hurried(0.2))
    for message in run_ranks(work, 2, tmp_path):
        assert "rank 0 timed out: it waited the whole timeout of 0.2 s for a message from rank 1" in message
        assert "receive(4 float64) of group 'g'" in message


def test_a_ticket_not_done_in_time_may_be_waited_for_again(tmp_path: Path) -> None:
    looked = threading.Event()

    def work(group: SharedGroup) -> None:
        if group.rank == 1:
            assert looked.wait(DEADLINE)
        ticket = group.barrier(async_=True)
        assert ticket is not None
        if group.rank == 0:
            assert not ticket.wait(0.01)
            assert not ticket.done()
            looked.set()
        assert ticket.wait()

    run_ranks(work, 2, tmp_path)


def test_missing_ranks_are_named_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(CommError, match=r"rank 0 timed out waiting for ranks \[1, 2\]"):
        SharedGroup(DirectoryStore(tmp_path), 0, 3, timeout=0.1)


def test_a_rank_that_left_is_named(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> str:
        group.barrier()
        if group.rank == 1:
            return ""
        return failure_of(group.barrier)

    message = run_ranks(work, 2, tmp_path)[0]
    assert re.search(r"rank 1 \(process \d+\) left the group while others were in barrier, collective 2", message)


# Ranks that differ --------------------------------------------------------------------------------------------

Calls = list[Callable[[SharedGroup, int], object]]


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        (
            [lambda g, a: g.all_reduce(a, 10, "float32", "sum"), lambda g, a: g.all_reduce(a, 11, "float32", "sum")],
            ["all_reduce(10 float32, sum)", "all_reduce(11 float32, sum)"],
        ),
        (
            [lambda g, a: g.all_reduce(a, 9000, "float32", "sum"), lambda g, a: g.all_reduce(a, 9000, "int32", "sum")],
            ["all_reduce(9000 float32, sum)", "all_reduce(9000 int32, sum)"],
        ),
        (
            [lambda g, a: g.all_reduce(a, 10, "float32", "sum"), lambda g, a: g.all_reduce(a, 10, "float32", "max")],
            ["all_reduce(10 float32, sum)", "all_reduce(10 float32, max)"],
        ),
        (
            [lambda g, a: g.barrier(), lambda g, a: g.all_reduce(a, 90_000, "float32", "max")],
            ["is in barrier", "all_reduce(90000 float32, max)"],
        ),
        (
            [lambda g, a: g.broadcast(a, 90_000, "int8", 0), lambda g, a: g.broadcast(a, 90_000, "int8", 1)],
            ["broadcast(90000 int8, root 0)", "broadcast(90000 int8, root 1)"],
        ),
    ],
)
def test_ranks_that_differ_are_named(calls: Calls, names: list[str], tmp_path: Path) -> None:
    def work(group: SharedGroup) -> str:
        array = np.zeros(100_000)
        group.barrier()
        return failure_of(lambda: (calls[group.rank](group, address(array)), group.barrier()))

    for message in run_ranks(work, 2, tmp_path):
        assert "the ranks differ in collective 2 of group 'g': rank" in message
        assert all(name.removeprefix("is in ") in message for name in names), message


def test_uneven_pieces_that_do_not_fit_are_named(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> str:
        array = np.zeros(100)
        places, counts = [address(array)] * 2, [1, 2] if group.rank == 0 else [1, 1]
        return failure_of(lambda: (group.all_to_all_uneven(places, counts, places, [1, 1], "float64"), group.barrier()))

    for message in run_ranks(work, 2, tmp_path):
        assert "rank 1 expects 8 bytes from rank 0, which sends 16" in message


def test_a_message_that_does_not_fit_is_named(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> str:
        array = np.zeros(100)
        if group.rank == 0:
            group.send(address(array), 100, "float64", 1)
            time.sleep(0.2)
            return failure_of(group.barrier)
        return failure_of(lambda: group.receive(address(array), 99, "float64", 0))

    for message in run_ranks(work, 2, tmp_path):
        assert "rank 1 is in receive(99 float64) of group 'g', but rank 0 sent it send(100 float64)" in message


# Memory, interruptions, forks ---------------------------------------------------------------------------------


def test_too_much_memory_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> str:
        message = failure_of(lambda: group.allocate(1 << 50))
        region, array = group.allocate(100_000), np.ones(20_000, np.float32)
        np.frombuffer(memoryview(region), dtype=np.uint8)[:] = 1
        group.all_reduce(address(array), array.size, "float32", "sum")
        assert (array == 2).all()
        return message

    for message in run_ranks(work, 2, tmp_path):
        assert re.search(r"rank 0: 2 ranks want \d+\.\d GB together, but [\d.]+ GB of memory are free", message), (
            message
        )


@pytest.mark.processes
def test_one_rank_without_address_space_stops_all(tmp_path: Path) -> None:
    """A limit on address space hits one rank only, and after the check that all of them make."""
    limited = start_process(
        RANK
        + "import resource\n"
        + "used = int(Path('/proc/self/statm').read_text().split()[0]) * 4096\n"
        + "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        + "try: group.allocate(100 << 20)\n"
        + "except Exception as error: print(type(error).__name__, error, flush=True)\n"
        + "group.barrier()\n",
        tmp_path,
        1,
        2,
    )

    def work(group: SharedGroup) -> str:
        message = failure_of(lambda: group.allocate(100 << 20))
        group.barrier()
        return message

    (message,) = outcomes(start_ranks(work, range(1), 2, tmp_path))
    out, err = limited.communicate(timeout=DEADLINE)
    assert isinstance(message, str), message
    assert "rank 1: cannot map" in message and "Cannot allocate memory" in message
    assert out == f"CommError {message}\n", err


def test_more_than_there_can_be_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    """Whatever the host says about its free memory."""

    def work(group: SharedGroup) -> list[str]:
        messages = [failure_of(functools.partial(group.allocate, n)) for n in (1 << 61, 1 << 62, (1 << 63) - 1)]
        region = group.allocate(100_000)
        np.frombuffer(memoryview(region), dtype=np.uint8)[:] = 1
        return messages

    with unittest.mock.patch("paceline.collectives.core.memory_objection", return_value=""):
        for messages in run_ranks(work, 2, tmp_path):
            assert all("rank 0: no host has so much memory" in message for message in messages)


def test_the_longest_timeout_is_not_the_shortest(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        array = np.ones(10, np.float32)
        if group.rank == 1:
            time.sleep(0.3)
        group.all_reduce(address(array), array.size, "float32", "sum")
        if group.rank == 1:
            time.sleep(0.3)
            group.send(address(array), array.size, "float32", 0)
        else:
            assert group.receive(address(array), array.size, "float32", 1) == 1
        ticket = group.barrier(async_=True)
        assert ticket is not None and ticket.wait(1e10)

    run_ranks(work, 2, tmp_path, timeout=1e10)


def test_free_memory_is_known() -> None:
    assert memory_objection(1, 1) == ""
    assert "2 ranks want" in memory_objection(2, 1 << 50)


@pytest.fixture
def waiting_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Rank 1 of two, in a barrier that nobody else will enter for a while."""
    process = start_process(RANK + "print('here', flush=True)\ngroup.barrier()\n", tmp_path, 1, 2)
    yield process
    process.kill()
    process.communicate()


def state_of(process: int) -> str:
    """What a process does, as a letter of the system's: R while it computes, S while it sleeps."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.processes
def test_an_interrupted_rank_ends_and_is_named(waiting_process: subprocess.Popen[str], tmp_path: Path) -> None:
    def work(group: SharedGroup) -> str:
        assert waiting_process.stdout is not None and waiting_process.stdout.readline() == "here\n"
        while state_of(waiting_process.pid) != "S":  # asleep, which it is in the barrier alone
            time.sleep(0.001)
        waiting_process.send_signal(signal.SIGINT)
        _, err = waiting_process.communicate(timeout=DEADLINE)
        assert "KeyboardInterrupt" in err
        return failure_of(group.barrier)

    (message,) = outcomes(start_ranks(work, range(1), 2, tmp_path))
    assert isinstance(message, str), message
    assert "rank 1 was interrupted in barrier, collective 1 of group 'g'" in message


FORK = """
import os
array, region = np.ones(100_000), group.allocate(800_000)
ticket = group.all_reduce(address(array), array.size, "float64", "sum", async_=True)
ticket.wait()
if (child := os.fork()) == 0:
    for call in (group.barrier, lambda: group.allocate(100), ticket.wait):
        try: call(); print("no error", flush=True)
        except Exception as error: print(type(error).__name__, error, flush=True)
    group.close()
    del group, ticket, region
    sys.exit(0)
print(os.waitpid(child, 0)[1], flush=True)
group.barrier()
"""


@pytest.mark.processes
def test_a_forked_child_must_not_use_the_group(tmp_path: Path) -> None:
    process = start_process(RANK + FORK, tmp_path, 1, 2)

    def work(group: SharedGroup) -> None:
        array, region = np.ones(100_000), group.allocate(800_000)
        group.all_reduce(address(array), array.size, "float64", "sum")
        group.barrier()
        assert region.address() != 0

    (outcome,) = outcomes(start_ranks(work, range(1), 2, tmp_path))
    out, err = process.communicate(timeout=DEADLINE)
    assert outcome is None, err
    lines = out.splitlines()
    assert len(lines) == 4 and lines[3] == "0", (out, err)
    assert all("CommError" in line and "forked" in line for line in lines[:3]), lines


# Nothing stays behind -----------------------------------------------------------------------------------------


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:paceline")


def test_nothing_stays_open_or_mapped(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> None:
        region, array = group.allocate(1 << 20), np.ones(1000)
        ticket = group.all_reduce(address(array), 1000, "float64", "sum", async_=True)
        assert ticket is not None and ticket.wait()
        peer = (group.rank + 1) % group.size
        sent = group.send(address(array), 1000, "float64", peer, async_=True)
        group.receive(address(array), 1000, "float64", (group.rank - 1) % group.size)
        assert sent is not None and sent.wait()
        group.all_reduce(region.address(), 1 << 17, "float64", "sum")

    gc.collect()  # errors of earlier tests hold their groups
    before = open_files(), mapped()
    threads = num_threads()
    for turn in range(3):
        run_ranks(work, 3, tmp_path, name=f"g{turn}")
    # Threads that earlier tests have left may end meanwhile, and close what they have.
    assert open_files() <= before[0] and mapped() <= before[1]
    end = time.monotonic() + DEADLINE
    while num_threads() > threads and time.monotonic() < end:
        time.sleep(0.01)  # the system may show a thread for a moment after its end
    assert num_threads() <= threads


def test_nothing_stays_open_after_a_start_that_failed(tmp_path: Path) -> None:
    gc.collect()
    before = open_files()
    with pytest.raises(CommError):
        SharedGroup(DirectoryStore(tmp_path), 0, 2, timeout=0.05)
    assert open_files() <= before


def test_freed_memory_goes_back_while_the_group_lives(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> list[int]:
        blocks = []
        for _ in range(3):
            region = group.allocate(4 << 20)
            np.frombuffer(memoryview(region), dtype=np.uint8)[:] = 1
            del region
            group.barrier()
            blocks.append(shared_memory_blocks())
            group.barrier()
        return blocks

    blocks = run_ranks(work, 2, tmp_path)[0]
    assert max(blocks) - min(blocks) < 1 << 20, blocks


def shared_memory_blocks() -> int:
    """The bytes that the group's file takes, seen through one of our descriptors of it."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "memfd:paceline" in os.readlink(entry):  # noqa: PTH115
                return entry.stat().st_blocks * 512
        except OSError:
            continue
    raise AssertionError("no group is open")


def test_memory_outlives_its_group(tmp_path: Path) -> None:
    def work(group: SharedGroup) -> memoryview:
        region = group.allocate(4096)
        view = memoryview(region)
        view[0] = group.rank + 1
        return view

    assert [view[0] for view in run_ranks(work, 2, tmp_path)] == [1, 2]


def test_a_closed_group_says_so(tmp_path: Path) -> None:
    group = SharedGroup(DirectoryStore(tmp_path), 0, 1, name="alone")
    group.close()
    group.close()
    assert failure_of(group.barrier) == "the group is closed"


def test_closing_ends_calls_of_other_threads(tmp_path: Path) -> None:
    closed = threading.Event()

    def work(group: SharedGroup) -> str:
        group.barrier()
        if group.rank == 1:
            assert closed.wait(DEADLINE)
            return ""
        ticket = group.barrier(async_=True)
        assert ticket is not None and not ticket.wait(0.05)
        group.close()
        closed.set()
        return failure_of(ticket.wait)

    assert run_ranks(work, 2, tmp_path)[0] == "group 'g' is closed"


# Who may join -------------------------------------------------------------------------------------------------


def test_another_host_is_refused(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.set("g/address", '{"address": "", "token": "", "host": "elsewhere"}')
    with pytest.raises(CommError, match="rank 1 has another host, network namespace or user than rank 0"):
        SharedGroup(store, 1, 2, name="g")
    assert host_identity() == host_identity()


def test_the_address_of_a_rank_0_that_is_gone_is_waited_out(tmp_path: Path) -> None:
    """As after a restart by torchrun, whose store stays."""
    gone = {"address": "\0paceline-gone", "token": "", "host": host_identity()}
    DirectoryStore(tmp_path).set("g/address", json.dumps(gone))
    started = start_ranks(lambda group: group.barrier(), range(1, 2), 2, tmp_path)
    started += start_ranks(lambda group: group.barrier(), range(1), 2, tmp_path)
    assert outcomes(started) == [None, None]


def test_strangers_who_knock_change_nothing(tmp_path: Path) -> None:
    import socket

    store = DirectoryStore(tmp_path)
    started = start_ranks(lambda group: group.barrier(), range(1), 2, tmp_path)
    greeting = json.loads(store.get("g/address"))
    for words in (b"", b"garbage", json.dumps({"token": "wrong", "rank": 1}).encode().ljust(256)):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(greeting["address"])
            stranger.sendall(words)
    started += start_ranks(lambda group: group.barrier(), range(1, 2), 2, tmp_path)
    assert outcomes(started) == [None, None]
