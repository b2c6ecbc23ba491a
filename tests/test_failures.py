"""Who is at fault, from what is known of the workers; no process is started."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.failures import SERVER, Fault, Life, find_fault


def failed(rank: int, at: float, *types: str, message: str = "", **life: Any) -> Life:
    report = {"event": "failed", "at": at, "traceback": f"traceback of {rank}\n", "first_types": list(types)}
    return Life(rank=rank, failure={**report, "first_message": message}, **life)


def suffering(rank: int, at: float) -> Life:
    return failed(rank, at, "RuntimeError", message="RuntimeError: [gloo/tcp/pair.cc:553] Connection closed by peer")


def failure(*lives: Life) -> Fault:
    fault = find_fault(lives)
    assert fault is not None
    return fault


def test_nothing_wrong() -> None:
    running = Life(rank=0, sessions=1, in_session=True, step=4)
    finished = Life(rank=1, sessions=1, exiting=0, exiting_at=1.0, code=0, ended_at=2.0)
    assert find_fault([]) is None
    assert find_fault([running, running]) is None
    assert find_fault([running, finished]) is None, "it left the session that the other is still in"


@pytest.mark.parametrize(
    "guilty",
    [
        failed(1, 5.0, "ValueError", message="ValueError: boom"),
        failed(1, 5.0, "RuntimeError", message="RuntimeError: shapes do not fit"),
        failed(1, 5.0, "NameError", message="NameError: name 'gloo' is not defined"),
        Life(rank=1, code=-9, ended_at=5.0),
        Life(rank=1, code=7, ended_at=5.0),
        Life(rank=1, exiting=3, exiting_at=5.0),
        Life(rank=1, exiting=3, exiting_at=5.0, code=-signal.SIGABRT, ended_at=6.0),
        Life(rank=1, exiting=0, exiting_at=5.0, sessions=1, in_session=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("name", ["CommError", "DistNetworkError", "DistBackendError", "a gloo RuntimeError"])
def test_a_neighbour_that_notices_first_is_not_the_culprit(guilty: Life, name: str) -> None:
    noticed = suffering(0, at=4.0) if "gloo" in name else failed(0, 4.0, name, "RuntimeError")
    for lives in ([noticed, guilty], [guilty, noticed]):
        assert failure(*lives).rank == 1
        assert failure(*lives).certain


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6, unique=True))
def test_of_equals_the_earliest(times: list[float]) -> None:
    earliest = times.index(min(times))
    assert failure(*(failed(rank, at, "KeyError") for rank, at in enumerate(times))).rank == earliest
    only_suffering = failure(*(suffering(rank, at) for rank, at in enumerate(times)))
    assert only_suffering.rank == earliest
    assert not only_suffering.certain


def test_a_kill_explains_everything_else() -> None:
    strange = failed(0, 1.0, "OSError", message="OSError: something that a dead neighbour leads to")
    assert failure(strange, Life(rank=1, code=-11, ended_at=2.0)).what == "was killed by SIGSEGV"


def test_a_worker_that_failed_and_was_then_killed_has_failed() -> None:
    fault = failure(failed(0, 1.0, "ValueError", code=-6, ended_at=1.5))
    assert (fault.what, fault.code) == ("failed", 1)


@pytest.mark.parametrize(
    ("life", "message", "code"),
    [
        (failed(2, 13.14, "ValueError"), "worker 2 failed (after 3.1 s):\ntraceback of 2\n", 1),
        (
            Life(rank=1, code=-9, ended_at=11),
            "worker 1 was killed by SIGKILL (after 1.0 s); out of memory?\n",
            137,
        ),
        (Life(rank=1, code=-64, ended_at=11), "worker 1 was killed by SIGRTMAX (after 1.0 s)\n", 192),
        (
            Life(rank=1, code=-6, exiting=0, ended_at=11),
            "worker 1 was killed by SIGABRT while exiting with code 0 (after 1.0 s)\n",
            134,
        ),
        (Life(rank=1, code=7, ended_at=11), "worker 1 exited with code 7 (after 1.0 s)\n", 7),
        (Life(rank=1, code=5, exiting=0, ended_at=11), "worker 1 exited with code 5 (after 1.0 s)\n", 5),
    ],
)
def test_what_the_user_is_told(life: Life, message: str, code: int) -> None:
    fault = failure(life)
    assert (fault.message(started=10.0), fault.code) == (message, code)


def test_leaving_in_mid_session() -> None:
    life = Life(rank=1, code=0, ended_at=11)
    for report in ({"event": "joined"}, {"event": "progress", "step": 7}, {"event": "progress", "loss": 1.0}):
        life.hear(report)
    fault = failure(Life(rank=0, sessions=1, in_session=True), life)
    assert fault.message(10.0).startswith("worker 1 exited with code 0 at step 7 before its session ended (")
    life.hear({"event": "left"})
    assert find_fault([Life(rank=0, sessions=1, in_session=True), life]) is None


def test_never_joining_what_others_wait_in() -> None:
    absent = Life(rank=1, sessions=1, code=0, ended_at=11)
    assert find_fault([Life(rank=0, sessions=1), absent]) is None
    fault = failure(Life(rank=0, sessions=2, in_session=True), absent)
    assert "worker 1 exited with code 0 without joining the session that worker 0 is in" in fault.message(10.0)


def test_an_announced_exit_may_still_leave_its_session() -> None:
    leaving = Life(rank=1, sessions=1, in_session=True, exiting=0, exiting_at=5.0)
    assert find_fault([Life(rank=0, sessions=1, in_session=True), leaving]) is None


def test_a_failure_told_twice_counts_from_the_first_with_the_last_traceback() -> None:
    life = Life(rank=0)
    life.hear({"event": "failed", "at": 1.0, "traceback": "first"})
    life.hear({"event": "failed", "at": 2.0, "traceback": "second"})
    assert (failure(life).at, failure(life).traceback) == (1.0, "second")


def test_who_had_gone_quietly_is_mentioned() -> None:
    quiet = Life(rank=1, exiting=0, exiting_at=1.0, code=0, ended_at=2.0)
    assert "(worker 1 had exited with code 0 by then)" in failure(suffering(0, 3.0), quiet).message(0.0)
    assert "had exited" not in failure(failed(0, 3.0, "ValueError"), quiet).message(0.0)


def served_fault(*lives: Life) -> str | None:
    fault = find_fault(lives, served=True)
    return None if fault is None else fault.message(started=10.0)


WORKING = Life(rank=0, sessions=1, in_session=True)
SERVING = Life(rank=SERVER)


@pytest.mark.parametrize(
    "life",
    [
        Life(rank=1, code=-9, ended_at=11),
        Life(rank=1, code=-11, sessions=1, in_session=True, ended_at=11),
        Life(rank=1, code=0, exiting=0, sessions=1, in_session=True, ended_at=11),
        Life(rank=1, code=0, exiting=0, ended_at=11),
    ],
    ids=repr,
)
def test_under_a_server_workers_may_be_killed_or_leave(life: Life) -> None:
    assert served_fault(WORKING, life, SERVING) is None
    assert find_fault([WORKING, life]) is not None


@pytest.mark.parametrize(
    ("life", "message"),
    [
        (failed(1, 11.0, "ValueError"), "worker 1 failed (after 1.0 s):\ntraceback of 1\n"),
        (failed(1, 11.0, "CommError"), "worker 1 failed (after 1.0 s):\ntraceback of 1\n"),
        (Life(rank=1, code=3, ended_at=11), "worker 1 exited with code 3 (after 1.0 s)\n"),
        (failed(SERVER, 11.0, "ValueError"), f"the server failed (after 1.0 s):\ntraceback of {SERVER}\n"),
        (Life(rank=SERVER, code=-15, ended_at=11), "the server was killed by SIGTERM (after 1.0 s)\n"),
        (Life(rank=SERVER, code=4, ended_at=11), "the server exited with code 4 (after 1.0 s)\n"),
        (
            Life(rank=1, code=-9, ended_at=11, given_up=True, fruitless=9, incarnation=9),
            "worker 1 was killed by SIGKILL (after 1.0 s); before it joined, and so were the 9 before it\n",
        ),
    ],
)
def test_what_is_a_fault_under_a_server(life: Life, message: str) -> None:
    others = [Life(rank=2, code=-9, ended_at=10.5), Life(rank=3, code=0, exiting=0, exiting_at=10.5)]
    assert served_fault(WORKING, life, *others, SERVING) == message


def test_the_servers_death_explains_what_workers_raise() -> None:
    suffers = failed(0, 10.5, "CommError")
    assert served_fault(suffers, Life(rank=SERVER, code=-9, ended_at=11)) == (
        "the server was killed by SIGKILL (after 1.0 s); out of memory?\n"
    )
    quiet = Life(rank=SERVER, exiting=0, exiting_at=10.4)
    assert "(the server had exited with code 0 by then)" in str(served_fault(suffers, quiet))


def test_no_worker_is_left() -> None:
    killed = [Life(rank=rank, code=-9, ended_at=11 + rank) for rank in range(3)]
    assert served_fault(*killed[::-1], SERVING) == "worker 2 was killed by SIGKILL (after 3.0 s); no worker is left\n"
    assert served_fault(*killed[1:], Life(rank=0, code=0, exiting=0), SERVING) is None, "one has ended well"
    assert served_fault(*killed[1:], WORKING, SERVING) is None


def test_a_worker_started_again_too_late_is_no_fault() -> None:
    ended = Life(rank=SERVER, exiting=0, exiting_at=10.4)
    late = failed(0, 11.0, "CommError", incarnation=1)
    assert served_fault(late, ended) is None
    assert served_fault(late, SERVING) is not None
    assert served_fault(failed(0, 11.0, "CommError"), ended) is not None, "the first of its rank came in time"
    assert served_fault(failed(0, 11.0, "ValueError", incarnation=1), ended) is not None


def test_who_asks_for_a_server() -> None:
    life = Life(rank=0)
    life.hear({"event": "joined"})
    assert not life.needs_server
    life.hear({"event": "needs server"})
    assert life.needs_server
