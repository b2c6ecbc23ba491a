"""The place at a parameter server: what the supervisor writes into the environment is what a process reads, once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.launch import environment
from paceline.launch.environment import ServerAssignment, read_world, server_variables, take_server_assignment
from paceline.launch.process_environment import ProcessEnvironment

PLACE = ServerAssignment(address="ipc://@somewhere", token="ab" * 32)
PLACES = st.builds(
    ServerAssignment,
    address=st.sampled_from(["ipc://@paceline-1f", "tcp://[fd00::1]:4711"]),
    token=st.just("5e" * 32),
    role=st.sampled_from(["worker", "server"]),
    workers=st.none() | st.integers(1, 999_999_999),
    incarnation=st.integers(0, 999_999_999),
    delay=st.none() | st.tuples(st.text(max_size=50), st.floats(0, allow_infinity=False)),
    bind=st.none() | st.just("0.0.0.0:0"),
    trusted=st.booleans(),
)


@pytest.fixture
def given_variables(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a process's variables in assignment of ours, as if nothing had been taken yet."""

    def give(variables: dict[str, str]) -> None:
        monkeypatch.setattr(environment, "_assignment", None)
        monkeypatch.setattr(os, "environ", dict(variables))

    return give


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(assignment=PLACES)
def test_what_is_written_is_what_is_read(given_variables: Callable[..., None], assignment: ServerAssignment) -> None:
    size = {} if assignment.workers is None else {"WORLD_SIZE": str(assignment.workers)}
    given_variables({**server_variables(assignment), **size})
    assert take_server_assignment() == assignment


def test_it_is_taken_once_and_given_again(given_variables: Callable[..., None]) -> None:
    given_variables({**server_variables(replace(PLACE, role="server", trusted=True)), "HOME": "/somewhere"})
    assert take_server_assignment() is not None
    assert os.environ == {"HOME": "/somewhere"}, "children find none of it"
    assert take_server_assignment() is take_server_assignment()


def test_without_a_server_there_is_no_place(given_variables: Callable[..., None]) -> None:
    given_variables({"PACELINE_TOKEN": PLACE.token})
    assert take_server_assignment() is None
    assert os.environ == {"PACELINE_TOKEN": PLACE.token}, "it is the user's own"


def test_the_memory_is_kept_from_children(given_variables: Callable[..., None]) -> None:
    descriptor = os.memfd_create("test", flags=0)
    os.set_inheritable(descriptor, True)
    try:
        given_variables(server_variables(replace(PLACE, memory_fd=descriptor)))
        assignment = take_server_assignment()
        assert assignment is not None and assignment.memory_fd == descriptor
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_memory_of_another_life_is_none(given_variables: Callable[..., None]) -> None:
    given_variables(server_variables(replace(PLACE, memory_fd=987_654)))
    assert take_server_assignment() == PLACE


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PACELINE_TOKEN", ""),
        ("PACELINE_ROLE", "master"),
        ("PACELINE_MEMORY_FD", "-1"),
        ("PACELINE_INCARNATION", "one"),
        ("PACELINE_DELAY", "1+exp(0.5)"),
        ("PACELINE_DELAY", '{"text": "1"}'),
        ("PACELINE_DELAY", '{"text": "1", "unit": null}'),
        ("PACELINE_THREADS", "many"),
        ("WORLD_SIZE", "0"),
    ],
)
def test_nonsense_is_named(given_variables: Callable[..., None], name: str, value: str) -> None:
    given_variables({**server_variables(PLACE), name: value})
    with pytest.raises(UsageError, match=f"^{name} "):
        take_server_assignment()


SET_BY_ANOTHER = {"PACELINE_ROLE": "server", "PACELINE_BIND": "x:1", "PACELINE_THREADS": "7", "SLURM_PROCID": "3"}
OUTER = {"RANK": "9", "WORLD_SIZE": "10", "OMP_NUM_THREADS": "2", **SET_BY_ANOTHER}


def test_a_local_worker_has_a_rank_and_a_place(given_variables: Callable[..., None]) -> None:
    given_variables(ProcessEnvironment(workers=2, port=1, assignment=PLACE, base=OUTER).worker(1, incarnation=3))
    assert take_server_assignment() == replace(PLACE, workers=2, incarnation=3)
    world = read_world()
    assert world is not None and (world.rank, world.size) == (1, 2)


def test_a_server_has_no_rank_and_no_world(given_variables: Callable[..., None]) -> None:
    place = replace(PLACE, delay=("1", 0.1))  # which it writes down
    given_variables(ProcessEnvironment(workers=2, port=1, assignment=place, base=OUTER).server(bind="0.0.0.0:0"))
    assert read_world() is None, "and no complaint about half a world"
    assert take_server_assignment() == replace(place, role="server", bind="0.0.0.0:0", workers=2)
    assert read_world() is None
    assert "RANK" not in os.environ and "LOCAL_RANK" not in os.environ


def test_the_server_gives_a_joiner_its_rank(given_variables: Callable[..., None]) -> None:
    slurm = {**OUTER, "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    given_variables(ProcessEnvironment(workers=2, assignment=PLACE, base=slurm).worker(1))
    assert take_server_assignment() == PLACE
    assert read_world() is None
    assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert "WORLD_SIZE" not in os.environ
