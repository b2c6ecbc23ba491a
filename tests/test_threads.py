"""How many threads a training gets: few where a step is small, what the user set always, and the same when resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from conftest import World
from processes import ENVIRONMENT
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import paceline
from paceline.launch.environment import ServerAssignment
from paceline.launch.process_environment import ProcessEnvironment, brief_spinning
from paceline.problems import Problem, load_problem
from paceline.sessions import join as join_module
from paceline.threads import OperationCounter, step_operations
from paceline.training.threads import wants_one_thread


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def digits() -> Problem:
    return load_problem("digits")


@pytest.mark.parametrize(
    ("layer", "shape", "products"),
    [
        (nn.Linear(12, 5), (7, 12), 7 * 12 * 5),
        (nn.Linear(12, 5, bias=False), (2, 7, 12), 14 * 12 * 5),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (7, 3, 4), 7 * 12 * 5),
        (nn.Conv2d(3, 7, 3, padding=1), (2, 3, 8, 8), 2 * 7 * 3 * 9 * 64),
        (nn.Conv2d(4, 8, 3, groups=2, padding=1), (1, 4, 8, 8), 8 * 2 * 9 * 64),
        (nn.ConvTranspose2d(3, 7, 2, stride=2), (1, 3, 8, 8), 7 * 3 * 4 * 64),
    ],
    ids=repr,
)
def test_operations_of_layers(layer: nn.Module, shape: tuple[int, ...], products: int) -> None:
    """Forward has one product; backward has one for the weights, and one for inputs that want gradients."""
    for wanted, inputs in ((2, torch.ones(shape)), (3, torch.ones(shape, requires_grad=True))):
        with OperationCounter() as counter:
            made = layer(inputs)
        assert 2 * products <= counter.total < 2 * products + 10 * inputs.numel()
        with OperationCounter() as counter:
            torch.autograd.backward(made, made)
        values = inputs.numel() + made.numel() + sum(each.numel() for each in layer.parameters())
        assert 0 <= counter.total - 2 * (wanted - 1) * products <= 10 * values


def test_a_result_that_is_no_product_counts_by_its_elements_and_a_view_does_not() -> None:
    values = torch.ones(3, 4)
    with OperationCounter() as counter:
        values.relu().t()
    assert counter.total == 10 * 12


@pytest.mark.parametrize("name", ["digits", "logistic"])
def test_operations_of_a_batch_are_those_of_two_examples_carried_on(name: str) -> None:
    problem = load_problem(name)
    model = problem.make_model()
    example, _ = problem.train[0]
    with OperationCounter() as counter:
        model(torch.stack([example] * 32)).sum().backward()
    assert step_operations(model, example, 32) == pytest.approx(counter.total, rel=0.02)


def test_counting_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step_operations(model, torch.ones(4), batch_size=2)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(layer._forward_hooks for layer in model.modules())


def test_small_steps_get_one_thread_and_large_ones_do_not(digits: Problem) -> None:
    assert wants_one_thread("digits", digits, 32)
    assert not wants_one_thread("digits", digits, 1024)
    large = replace(
        digits, make_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 30_000), nn.Linear(30_000, 10))
    )
    assert not wants_one_thread("digits", large, 32)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_threads_that_the_user_asked_for_stay(name: str, digits: Problem) -> None:
    assert not wants_one_thread("digits", digits, 32, {name: "2"})
    assert wants_one_thread("digits", digits, 32, {name: ""})


def test_a_problem_of_a_file_keeps_the_threads_that_it_may_have_set(digits: Problem) -> None:
    assert not wants_one_thread("path/to/mine.py", digits, 32)


def threads_of(run: Path) -> int:
    found: int = json.loads((run / "config.json").read_text())["threads"]
    return found


def test_a_run_and_its_resumption_have_the_same_threads(paceline: Any, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    quick = ("train", "logistic", "--max-steps", "2", "--run", "mine")
    assert paceline(*quick).code == 0
    assert threads_of(tmp_path / "mine") == 1
    assert torch.get_num_threads() == 2
    assert paceline("train", "--resume", "mine", "--max-steps", "3").code == 0
    assert threads_of(tmp_path / "mine") == 1


def test_a_run_has_the_threads_that_the_user_set(
    paceline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert paceline("train", "logistic", "--max-steps", "2", "--run", "mine").code == 0
    assert threads_of(tmp_path / "mine") == 2


@pytest.mark.parametrize(("problem", "asked", "given"), [("digits", None, "1"), ("digits", "3", "3")])
def test_workers_of_a_small_problem_get_one_thread_each(
    problem: str, asked: str | None, given: str, paceline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[dict[str, str]] = []

    def supervise(*_: Any, workers: int, environment: dict[str, str] | None, **__: Any) -> int:
        environments.append(ProcessEnvironment(workers=workers, port=1, base=environment).worker(0))
        return 1

    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("paceline.launch.supervisor.supervise", supervise)
    paceline("train", problem, "--workers", "2")
    assert [process_environment["OMP_NUM_THREADS"] for process_environment in environments] == [given]


SMALL, LARGE = (8, 4), (200_000, 4)  # of batches for a layer of 4 times 40 numbers


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher has chosen two threads, and nothing was compiled."""
    torch._dynamo.utils.counters.clear()
    assignment = ServerAssignment(address="ipc://@nobody", token="00" * 32, threads=2)
    monkeypatch.setattr(join_module, "take_server_assignment", lambda: assignment)
    torch.set_num_threads(2)


def join(**options: Any) -> tuple[nn.Module, paceline.Session]:
    model = nn.Linear(4, 40)
    return model, paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def step(model: nn.Module, session: paceline.Session, shape: tuple[int, int], **options: Any) -> int:
    """Make a step, and give the number of threads after it."""
    with session.step(**options):
        model(torch.ones(shape)).mean().backward()
    return torch.get_num_threads()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("shape", "threads"), [(SMALL, 1), (LARGE, 2)])
def test_the_first_step_of_a_script_decides(shape: tuple[int, int], threads: int, tmp_path: Path) -> None:
    model, session = join(run=tmp_path / "run", save_every=1)
    with session:
        assert torch.get_num_threads() == 2
        assert [step(model, session, each) for each in (shape, SMALL, LARGE)] == [threads] * 3
    assert torch.get_num_threads() == 2, "the session has ended"
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(each["step"], each["threads"]) for each in told if each["event"] == "threads"] == [(1, 1)] * (threads == 1)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("first", "next_one", "threads"), [(SMALL, LARGE, 1), (LARGE, SMALL, 2)])
def test_a_resumed_script_has_the_threads_of_its_first_step(
    first: tuple[int, int], next_one: tuple[int, int], threads: int, tmp_path: Path
) -> None:
    model, session = join(run=tmp_path / "run")
    with session:
        step(model, session, first)
    model, session = join(run=tmp_path / "run", resume=True)
    with session:
        assert torch.get_num_threads() == threads
        assert step(model, session, next_one) == threads


@pytest.mark.usefixtures("launched")
def test_threads_that_the_script_sets_stay() -> None:
    torch.set_num_threads(3)
    model, session = join()
    with session:
        assert step(model, session, SMALL) == 3
    assert torch.get_num_threads() == 3


def test_without_the_launcher_no_script_has_other_threads() -> None:
    torch.set_num_threads(2)
    model, session = join()
    with session:
        assert step(model, session, SMALL) == 2


@pytest.mark.usefixtures("launched")
def test_the_first_block_that_ends_well_is_counted() -> None:
    model, session = join()
    with session:
        with pytest.raises(KeyError), session.step():
            model(torch.ones(LARGE))
            raise KeyError
        assert step(model, session, SMALL, accumulate=True) == 2, "no update yet"
        assert step(model, session, LARGE) == 1


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_nothing_is_counted_after_the_first_step(steps: int) -> None:
    model, session = join()
    with session:
        for _ in range(steps):
            step(model, session, SMALL)
        with session.step():
            assert len(_get_current_dispatch_mode_stack()) == (1 if steps == 0 else 0)
            model(torch.ones(SMALL)).mean().backward()
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.usefixtures("launched")
def test_what_is_compiled_is_compiled_once_and_keeps_its_threads() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda model, x: model(x).relu().mean(), backend="aot_eager", fullgraph=True)
    model, session = join()
    with session:
        for _ in range(3):
            with session.step():
                compiled(model, torch.ones(SMALL)).backward()
        assert torch.get_num_threads() == 2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("launched")
def test_worker_0_decides_for_all(world: World) -> None:
    def work(group: Any) -> list[bool | None]:
        found = []
        for of_0, of_1 in ((SMALL, LARGE), (LARGE, SMALL)):
            model, session = join(group=group)
            with session, session.step(examples=1):
                model(torch.ones(of_1 if session.rank else of_0)).mean().backward()
            found.append(session._run_state.one_thread)  # type: ignore[attr-defined]
        return found

    assert world(2, work) == [[True, False]] * 2


@pytest.mark.parametrize(("variables", "threads"), [({}, "4"), ({"OMP_NUM_THREADS": "2"}, None)])
def test_a_worker_knows_whether_the_launcher_chose_its_threads(
    variables: dict[str, str], threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assignment = ServerAssignment(address="ipc://@nobody", token="00" * 32)
    environment = ProcessEnvironment(workers=2, port=1, assignment=assignment, base=variables)
    assert environment.worker(0).get("PACELINE_THREADS") == threads
    assert "PACELINE_THREADS" not in environment.server()


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_waiting_threads_spin_is_the_users_if_they_say_so(name: str) -> None:
    assert set(brief_spinning({"HOME": "/"})) == {"GOMP_SPINCOUNT"}
    assert brief_spinning({name: "7"}) == {}
    assert (
        ProcessEnvironment(workers=2, port=1, base={}).worker(0)["GOMP_SPINCOUNT"]
        == brief_spinning({})["GOMP_SPINCOUNT"]
    )
    user = ProcessEnvironment(workers=2, port=1, base={name: "7"}).worker(0)
    assert {each: user.get(each) for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} == {
        "GOMP_SPINCOUNT": None,
        "OMP_WAIT_POLICY": None,
        name: "7",
    }


COMMAND = """
import os, sys
from paceline.__main__ import main
sys.argv = ["paceline", "--version"]
assert "torch" not in sys.modules
try:
    main()
finally:
    print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.processes
def test_the_command_sets_how_threads_wait_before_torch_is_imported() -> None:
    kept = {name: value for name, value in {**os.environ, **ENVIRONMENT}.items() if name != "OMP_WAIT_POLICY"}
    kept.pop("GOMP_SPINCOUNT", None)
    found = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=200, env=kept)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == brief_spinning({})["GOMP_SPINCOUNT"]
