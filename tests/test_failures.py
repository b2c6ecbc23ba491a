"""Who is at fault, from what is known of the workers; no process is started."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.failures import SERVER, Fault, ProcessState, find_fault


def failed(rank: int, at: float, *types: str, message: str = "", **state: Any) -> ProcessState:
    report = {"event": "failed", "at": at, "type": types[0], "traceback": f"traceback of {rank}\n"}
    return ProcessState(rank=rank, failure={**report, "first_types": list(types), "first_message": message}, **state)


def suffering(rank: int, at: float) -> ProcessState:
    return failed(rank, at, "RuntimeError", message="RuntimeError: [gloo/tcp/pair.cc:553] Connection closed by peer")


def failure(*states: ProcessState) -> Fault:
    fault = find_fault(states)
    assert fault is not None
    return fault


def test_nothing_wrong() -> None:
    running = ProcessState(rank=0, sessions=1, in_session=True, step=4)
    finished = ProcessState(rank=1, sessions=1, exiting=0, exiting_at=1.0, code=0, ended_at=2.0)
    assert find_fault([]) is None
    assert find_fault([running, running]) is None
    assert find_fault([running, finished]) is None, "it left the session that the other is still in"


@pytest.mark.parametrize(
    "guilty",
    [
        failed(1, 5.0, "ValueError", message="ValueError: boom"),
        failed(1, 5.0, "RuntimeError", message="RuntimeError: shapes do not fit"),
        failed(1, 5.0, "NameError", message="NameError: name 'gloo' is not defined"),
        ProcessState(rank=1, code=-9, ended_at=5.0),
        ProcessState(rank=1, code=7, ended_at=5.0),
        ProcessState(rank=1, exiting=3, exiting_at=5.0),
        ProcessState(rank=1, exiting=3, exiting_at=5.0, code=-signal.SIGABRT, ended_at=6.0),
        ProcessState(rank=1, exiting=0, exiting_at=5.0, sessions=1, in_session=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["CommError", "DistNetworkError", "DistBackendError", "a gloo RuntimeError"])
def test_a_neighbour_that_notices_first_is_not_blamed(guilty: ProcessState, name: str) -> None:
    noticed = suffering(0, at=4.0) if "gloo" in name else failed(0, 4.0, name, "RuntimeError")
    for states in ([noticed, guilty], [guilty, noticed]):
        assert failure(*states).rank == 1
        assert failure(*states).certain


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6, unique=True))
def test_of_equals_the_earliest(times: list[float]) -> None:
    earliest = times.index(min(times))
    assert failure(*(failed(rank, at, "KeyError") for rank, at in enumerate(times))).rank == earliest
    only_suffering = failure(*(suffering(rank, at) for rank, at in enumerate(times)))
    assert only_suffering.rank == earliest
    assert not only_suffering.certain


def test_a_kill_explains_everything_else() -> None:
    strange = failed(0, 1.0, "OSError", message="OSError: something that a dead neighbour leads to")
    assert failure(strange, ProcessState(rank=1, code=-11, ended_at=2.0)).what == "was killed by SIGSEGV"


def test_a_worker_that_failed_and_was_then_killed_has_failed() -> None:
    fault = failure(failed(0, 1.0, "ValueError", code=-6, ended_at=1.5))
    assert (fault.what, fault.code) == ("failed", 1)


@pytest.mark.parametrize(
    ("state", "message", "code"),
    [
        (failed(2, 13.14, "ValueError"), "worker 2 failed (after 3.1 s):\ntraceback of 2\n", 1),
        (failed(2, 13.14, "UsageError"), "worker 2 failed (after 3.1 s):\ntraceback of 2\n", 2),
        (
            ProcessState(rank=1, code=-9, ended_at=11),
            "worker 1 was killed by SIGKILL (after 1.0 s); out of memory?\n",
            137,
        ),
        (ProcessState(rank=1, code=-64, ended_at=11), "worker 1 was killed by SIGRTMAX (after 1.0 s)\n", 192),
        (
            ProcessState(rank=1, code=-6, exiting=0, ended_at=11),
            "worker 1 was killed by SIGABRT while exiting with code 0 (after 1.0 s)\n",
            134,
        ),
        (ProcessState(rank=1, code=7, ended_at=11), "worker 1 exited with code 7 (after 1.0 s)\n", 7),
        (ProcessState(rank=1, code=5, exiting=0, ended_at=11), "worker 1 exited with code 5 (after 1.0 s)\n", 5),
    ],
)
def test_what_the_user_is_told(state: ProcessState, message: str, code: int) -> None:
    fault = failure(state)
    assert (fault.message(started=10.0), fault.code) == (message, code)


def test_leaving_in_mid_session() -> None:
    state = ProcessState(rank=1, code=0, ended_at=11)
    for report in ({"event": "joined"}, {"event": "progress", "step": 7}, {"event": "progress", "loss": 1.0}):
        state.update(report)
    fault = failure(ProcessState(rank=0, sessions=1, in_session=True), state)
    assert fault.message(10.0).startswith("worker 1 exited with code 0 at step 7 before its session ended (")
    state.update({"event": "left"})
    assert find_fault([ProcessState(rank=0, sessions=1, in_session=True), state]) is None


def test_never_joining_what_others_wait_in() -> None:
    absent = ProcessState(rank=1, sessions=1, code=0, ended_at=11)
    assert find_fault([ProcessState(rank=0, sessions=1), absent]) is None
    fault = failure(ProcessState(rank=0, sessions=2, in_session=True), absent)
    assert "worker 1 exited with code 0 without joining the session that worker 0 is in" in fault.message(10.0)


def test_an_announced_exit_may_still_leave_its_session() -> None:
    leaving = ProcessState(rank=1, sessions=1, in_session=True, exiting=0, exiting_at=5.0)
    assert find_fault([ProcessState(rank=0, sessions=1, in_session=True), leaving]) is None


def test_a_failure_told_twice_counts_from_the_first_with_the_last_traceback() -> None:
    state = ProcessState(rank=0)
    state.update({"event": "failed", "at": 1.0, "traceback": "first"})
    state.update({"event": "failed", "at": 2.0, "traceback": "second"})
    assert (failure(state).at, failure(state).traceback) == (1.0, "second")


def test_who_had_gone_quietly_is_mentioned() -> None:
    quiet = ProcessState(rank=1, exiting=0, exiting_at=1.0, code=0, ended_at=2.0)
    assert "(worker 1 had exited with code 0 by then)" in failure(suffering(0, 3.0), quiet).message(0.0)
    assert "had exited" not in failure(failed(0, 3.0, "ValueError"), quiet).message(0.0)


def server_fault(*states: ProcessState) -> str | None:
    fault = find_fault(states, with_server=True)
    return None if fault is None else fault.message(started=10.0)


WORKING = ProcessState(rank=0, sessions=1, in_session=True)
SERVING = ProcessState(rank=SERVER)


@pytest.mark.parametrize(
    "state",
    [
        ProcessState(rank=1, code=-9, ended_at=11),
        ProcessState(rank=1, code=-11, sessions=1, in_session=True, ended_at=11),
        ProcessState(rank=1, code=0, exiting=0, sessions=1, in_session=True, ended_at=11),
        ProcessState(rank=1, code=0, exiting=0, ended_at=11),
    ],
    ids=repr,
)
def test_under_a_server_workers_may_be_killed_or_leave(state: ProcessState) -> None:
    assert server_fault(WORKING, state, SERVING) is None
    assert find_fault([WORKING, state]) is not None


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (failed(1, 11.0, "ValueError"), "worker 1 failed (after 1.0 s):\ntraceback of 1\n"),
        (failed(1, 11.0, "CommError"), "worker 1 failed (after 1.0 s):\ntraceback of 1\n"),
        (ProcessState(rank=1, code=3, ended_at=11), "worker 1 exited with code 3 (after 1.0 s)\n"),
        (failed(SERVER, 11.0, "ValueError"), f"the server failed (after 1.0 s):\ntraceback of {SERVER}\n"),
        (ProcessState(rank=SERVER, code=-15, ended_at=11), "the server was killed by SIGTERM (after 1.0 s)\n"),
        (ProcessState(rank=SERVER, code=4, ended_at=11), "the server exited with code 4 (after 1.0 s)\n"),
        (
            ProcessState(rank=1, code=-9, ended_at=11, given_up=True, failed_starts=9, incarnation=9),
            "worker 1 was killed by SIGKILL (after 1.0 s); before it joined, and so were the 9 before it\n",
        ),
    ],
)
def test_what_is_a_server_fault(state: ProcessState, message: str) -> None:
    others = [ProcessState(rank=2, code=-9, ended_at=10.5), ProcessState(rank=3, code=0, exiting=0, exiting_at=10.5)]
    assert server_fault(WORKING, state, *others, SERVING) == message


def test_the_servers_death_explains_what_workers_raise() -> None:
    suffers = failed(0, 10.5, "CommError")
    assert server_fault(suffers, ProcessState(rank=SERVER, code=-9, ended_at=11)) == (
        "the server was killed by SIGKILL (after 1.0 s); out of memory?\n"
    )
    quiet = ProcessState(rank=SERVER, exiting=0, exiting_at=10.4)
    assert "(the server had exited with code 0 by then)" in str(server_fault(suffers, quiet))


def test_no_worker_is_left() -> None:
    killed = [ProcessState(rank=rank, code=-9, ended_at=11 + rank) for rank in range(3)]
    assert server_fault(*killed[::-1], SERVING) == "worker 2 was killed by SIGKILL (after 3.0 s); no worker is left\n"
    assert server_fault(*killed[1:], ProcessState(rank=0, code=0, exiting=0), SERVING) is None, "one has ended well"
    assert server_fault(*killed[1:], WORKING, SERVING) is None


def test_a_worker_started_again_too_late_is_no_fault() -> None:
    ended = ProcessState(rank=SERVER, exiting=0, exiting_at=10.4)
    late = failed(0, 11.0, "CommError", incarnation=1)
    assert server_fault(late, ended) is None
    assert server_fault(late, SERVING) is not None
    assert server_fault(failed(0, 11.0, "CommError"), ended) is not None, "the first of its rank came in time"
    assert server_fault(failed(0, 11.0, "ValueError", incarnation=1), ended) is not None


def test_who_asks_for_a_server() -> None:
    state = ProcessState(rank=0)
    state.update({"event": "joined"})
    assert not state.needs_server
    state.update({"event": "needs server"})
    assert state.needs_server
