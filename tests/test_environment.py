"""The world as read from the environment, and the environment that local workers get."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.launch.environment import World, asked_policy, read_world, take_supervisor
from paceline.launch.process_environment import ProcessEnvironment, threads_per_worker

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),1",
    "SLURM_NODEID": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


@given(size=st.integers(1, 64), data=st.data())
def test_what_local_workers_get_is_what_they_read(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    world = read_world(ProcessEnvironment(workers=size, port=4711, base={}).worker(rank))
    assert world == World(
        rank=rank, size=size, local_rank=rank, local_size=size, master_addr="127.0.0.1", master_port=4711
    )


def test_torchruns_world() -> None:
    world = read_world(TORCHRUN)
    assert world == World(rank=3, size=4, local_rank=1, local_size=2, master_addr="10.0.0.7", master_port=29500)
    assert world.init_method == "tcp://10.0.0.7:29500"


def test_an_ipv6_address_is_bracketed() -> None:
    world = read_world({**TORCHRUN, "MASTER_ADDR": "fd00::1"})
    assert world is not None and world.init_method == "tcp://[fd00::1]:29500"


def test_without_local_variables_a_worker_is_alone_on_its_host() -> None:
    world = read_world({name: value for name, value in TORCHRUN.items() if not name.startswith("LOCAL")})
    assert world is not None and (world.local_rank, world.local_size) == (0, 1)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"RANK": ""},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"},  # a batch script, before srun
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"},
    ],
)
def test_no_launcher_no_world(environment: dict[str, str]) -> None:
    assert read_world(environment) is None


@pytest.mark.parametrize("missing", sorted(TORCHRUN))
def test_half_a_world_names_what_is_missing(missing: str) -> None:
    with pytest.raises(UsageError, match=rf"^{missing} is not set"):
        read_world({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "4"),
        ("RANK", "-1"),
        ("RANK", "one"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", "4.0"),
        ("LOCAL_RANK", "2"),
        ("LOCAL_WORLD_SIZE", "5"),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
        ("MASTER_PORT", "٣"),
    ],
)
def test_nonsense_is_named_and_quoted(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} .*found '{value}'"):
        read_world({**TORCHRUN, name: value})


def test_slurms_world() -> None:
    assert read_world(SLURM) == World(
        rank=5, size=7, local_rank=2, local_size=3, master_addr="node1", master_port=29500
    )


def test_slurm_without_a_list_of_nodes_is_one_node() -> None:
    world = read_world({name: value for name, value in SLURM.items() if "NODE" not in name})
    assert world is not None and (world.local_rank, world.local_size) == (2, 7)


def test_torchrun_inside_slurm_wins() -> None:
    world = read_world({**SLURM, **TORCHRUN})
    assert world is not None and world.rank == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", ""),
        ("SLURM_NTASKS", ""),
        ("SLURM_LOCALID", ""),
        ("SLURM_LOCALID", "3"),
        ("SLURM_PROCID", "7"),
        ("SLURM_STEP_TASKS_PER_NODE", "3(x2)"),
        ("SLURM_STEP_TASKS_PER_NODE", "many"),
        ("SLURM_NODEID", "3"),
    ],
)
def test_slurms_nonsense_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name} "):
        read_world({**SLURM, name: value})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PACELINE_POLICY", "local-sgd(every=4)")
    assert read_world() == read_world(TORCHRUN)
    assert asked_policy() == "local-sgd(every=4)"


def test_no_policy_asked_for() -> None:
    assert asked_policy({}) is None
    assert asked_policy({"PACELINE_POLICY": ""}) is None


def test_the_policy_reaches_the_worker() -> None:
    base = {"PACELINE_POLICY": "an outer one"}
    assert asked_policy(ProcessEnvironment(workers=1, port=1, policy="all-reduce", base=base).worker(0)) == "all-reduce"


@given(workers=st.integers(1, 10_000))
def test_threads_are_shared_without_oversubscription(workers: int) -> None:
    cores = len(os.sched_getaffinity(0))
    share = threads_per_worker(workers)
    assert share >= 1
    assert share * workers <= max(cores, workers)
    assert (share + 1) * workers > cores


def test_gloo_keeps_to_the_loopback_interface() -> None:
    interface = ProcessEnvironment(workers=2, port=1, base={}).worker(0)["GLOO_SOCKET_IFNAME"]
    assert interface in [name for _, name in socket.if_nameindex()]
    assert interface.startswith("lo")


def test_what_the_user_set_stays_and_what_places_the_worker_does_not() -> None:
    base = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "HOME": "/somewhere", "RANK": "9"}
    made = ProcessEnvironment(workers=2, port=1, base=base).worker(1)
    assert {name: made[name] for name in base} == {**base, "RANK": "1"}


def test_the_line_to_the_supervisor_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SUPERVISOR_PID", "12")
    monkeypatch.setenv("PACELINE_REPORT_FD", "5")
    assert take_supervisor() == (12, 5)
    assert take_supervisor() is None
    assert "PACELINE_REPORT_FD" not in os.environ
