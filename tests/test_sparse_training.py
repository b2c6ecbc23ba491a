"""Sparse problems in ``paceline train``: runs on disk, exact resuming, stopping, and options that do not fit."""

from __future__ import annotations

import json
import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import CheckpointError, NonFiniteLossError, UsageError
from paceline.hogwild.engine import Engine, Report
from paceline.hogwild.fingerprint import fingerprint
from paceline.hogwild.problems import GraphCut, LinearProblem, MatrixCompletion, Problem
from paceline.hogwild.tasks import TaskOptions, load_task
from paceline.record.checkpoint import CheckpointFolder, read_checkpoint
from paceline.record.metrics import read_metrics
from paceline.training.sparse import SparseConfig, train_sparse

pytest.importorskip("paceline.native._sparse", exc_type=ImportError)
pytest.importorskip("paceline.native._readers", exc_type=ImportError)

TIMES = {"time", "seconds", "updates_per_second"}
ROWS = "".join(f"{1 if i % 3 else -1} {i % 7}:{1 + i % 4} {7 + i % 5}:-1\n" for i in range(200))
RATINGS = "".join(f"{i % 13}\t{i % 11}\t{1 + (i * i) % 5}\n" for i in range(200))
NETWORK = "p max 4 5\nn 1 s\nn 4 t\na 1 2 3\na 1 3 2\na 2 3 1\na 2 4 2\na 3 4 3\n"
TEXTS = {"svm": ROWS, "matrix-completion": RATINGS, "graph-cut": NETWORK}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """A small file of each problem."""
    for problem, text in TEXTS.items():
        (tmp_path / problem).write_text(text)
    return {problem: str(tmp_path / problem) for problem in TEXTS}


def config(run: Path | None, data: str | None, problem: str = "svm", **options: Any) -> SparseConfig:
    where = None if run is None else str(run)
    return SparseConfig(options=TaskOptions(problem=problem, data=data), run=where, **{"policy": "serial", **options})


def parameters_of(run: Path) -> dict[str, Any]:
    file = CheckpointFolder(run / "checkpoints").files()[-1]
    return {name: array.tolist() for name, array in read_checkpoint(file)["parameters"].items()}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    events = read_metrics(run / "metrics.jsonl")
    return [{name: value for name, value in event.items() if name not in TIMES} for event in events]


@pytest.mark.parametrize("problem", TEXTS)
def test_a_run_has_its_configuration_metrics_and_checkpoint(problem: str, data: dict[str, str], tmp_path: Path) -> None:
    result = train_sparse(config(tmp_path / "run", data[problem], problem, epochs=3))
    first, *epochs, end = metrics_of(tmp_path / "run")
    assert first["event"] == "data" and {"omega", "delta", "rho", "predicted_slowdown", "threads"} <= first.keys()
    assert [event["epoch"] for event in epochs] == [0, 1, 2, 3]
    assert {"objective", "updates", "lost_update_rate"} <= epochs[-1].keys()
    assert epochs[-1]["objective"] <= epochs[0]["objective"]
    assert end["event"] == "end" and end["objective"] == result.measured["objective"]
    items = load_task(TaskOptions(problem=problem, data=data[problem])).problem.items
    assert (result.epochs, result.updates) == (3, 3 * items)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["sparse"]
    assert SparseConfig.from_dict(saved) == config(tmp_path / "run", data[problem], problem, epochs=3)


class StopAfter:
    """Ask to stop after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("policy", ["serial", "cyclades(threads=2)"])
@pytest.mark.parametrize("problem", TEXTS)
def test_a_stopped_run_goes_on_to_the_same_bits(
    problem: str, policy: str, data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.training.sparse._FIRST_SLICE", 2)
    monkeypatch.setattr("paceline.training.sparse._SLICE_SECONDS", 0.0)
    options: dict[str, Any] = {"policy": policy, "epochs": 4}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_sparse(config(whole, data[problem], problem, **options))
    for looks in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            train_sparse(config(parts, data[problem], problem, resume=True, **options), stop=StopAfter(looks))
    result = train_sparse(config(parts, data[problem], problem, resume=True, **options))
    assert 0 < result.resumed_at < result.updates
    assert parameters_of(parts) == parameters_of(whole)
    assert metrics_of(parts) == metrics_of(whole)


def test_average_stops_inside_an_epoch_and_goes_on_from_its_beginning(
    data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"data": data["svm"], "policy": "average(threads=2)"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_sparse(config(whole, epochs=3, **options))
    train_sparse(config(parts, epochs=1, **options))
    before = parameters_of(parts)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("paceline.training.sparse.Engine", partial(Engine, delay=0.01))  # an epoch takes a second
        train_sparse(config(parts, epochs=3, resume=True, **options), stop=lambda: True)
    assert parameters_of(parts) == before
    assert train_sparse(config(parts, epochs=3, resume=True, **options)).resumed_at == 200
    assert parameters_of(parts) == parameters_of(whole)


def test_a_finished_run_is_finished(data: dict[str, str], tmp_path: Path) -> None:
    first = train_sparse(config(tmp_path / "run", data["svm"], epochs=2))
    again = train_sparse(config(tmp_path / "run", data["svm"], epochs=2, resume=True))
    assert again.resumed_at == first.updates == again.updates
    assert again.measured == first.measured
    assert [event["event"] for event in metrics_of(tmp_path / "run")].count("end") == 1
    longer = train_sparse(config(tmp_path / "run", data["svm"], epochs=3, resume=True))
    assert longer.epochs == 3


def test_a_checkpoint_of_other_data_is_refused(data: dict[str, str], tmp_path: Path) -> None:
    train_sparse(config(tmp_path / "run", data["svm"], epochs=1))
    (tmp_path / "other").write_text("1 100:1\n-1 2:1\n")
    with pytest.raises(CheckpointError, match="belongs to something else"):
        train_sparse(config(tmp_path / "run", str(tmp_path / "other"), epochs=2, resume=True))
    with pytest.raises(CheckpointError, match=r"belongs to something else.*svm"):
        train_sparse(config(tmp_path / "run", data["graph-cut"], "graph-cut", epochs=2, resume=True))


CHANGED = {"svm": ("6:3", "6:4"), "matrix-completion": ("\t2\n", "\t3\n"), "graph-cut": ("a 2 3 1", "a 2 3 2")}


@pytest.mark.parametrize("problem", TEXTS)
def test_a_checkpoint_of_data_of_the_same_size_is_refused(problem: str, data: dict[str, str], tmp_path: Path) -> None:
    train_sparse(config(tmp_path / "run", data[problem], problem, epochs=1))
    changed = Path(data[problem])
    changed.write_text(TEXTS[problem].replace(*CHANGED[problem], 1))
    with pytest.raises(CheckpointError, match=r"belongs to something else: it was trained on other data; resume with"):
        train_sparse(config(tmp_path / "run", data[problem], problem, epochs=2, resume=True))
    changed.rename(tmp_path / "moved").write_text(TEXTS[problem])
    assert train_sparse(config(tmp_path / "run", str(tmp_path / "moved"), problem, epochs=2, resume=True)).epochs == 2


@pytest.mark.parametrize("length", [10, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_a_fingerprint_has_the_ends_of_long_arrays(length: int) -> None:
    def of(weights: Any) -> str:
        nodes = np.zeros(length, np.int32)
        return fingerprint(GraphCut(nodes, nodes, weights, 1))

    weights = np.ones(length, np.float32)
    whole, shorter = of(weights), fingerprint(GraphCut(*(np.zeros(length - 1, np.int32),) * 2, weights[1:], 1))
    assert whole == of(weights.copy()) and whole != shorter
    for place in (0, length - 1):
        weights[place] = 2
        assert of(weights) != whole
        weights[place] = 1


def test_a_rate_that_diverges_is_told(data: dict[str, str]) -> None:
    with pytest.raises(NonFiniteLossError, match="lower the rate"):
        train_sparse(config(None, data["matrix-completion"], "matrix-completion", rate=1e9, epochs=5))


def test_save_every_counts_updates(data: dict[str, str], tmp_path: Path) -> None:
    train_sparse(config(tmp_path / "run", data["svm"], epochs=2, save_every=150))
    names = [file.name for file in CheckpointFolder(tmp_path / "run" / "checkpoints").files()]
    assert names == ["step-0000000750.safetensors", "step-0000001500.safetensors", "step-0000002000.safetensors"]


def test_classes_of_any_two_numbers_are_taken(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("0 1:1\n2 1:-1\n0 1:2\n")
    (tmp_path / "test").write_text("2 1:-1 9:1\n0 1:1\n")
    task = load_task(TaskOptions(data=str(tmp_path / "train"), test=str(tmp_path / "test")))
    result = train_sparse(SparseConfig(options=TaskOptions(), policy="serial", epochs=5), task)
    assert result.measured["train_error"] == result.measured["test_error"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("1 1:1\n2 1:1\n3 1:1\n", r"found 3 \(1, 2, 3\).*--loss squared"), ("1 1:1\n1 1:1\n", r"found 1 \(1\)")],
)
def test_targets_must_be_of_two_classes(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_task(TaskOptions(data=str(tmp_path / "train")))


def test_test_entries_of_unknown_users_are_left_out_and_told(data: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test").write_text("1 1 3\n99 1 4\n1 99 4\n")
    options = TaskOptions(problem="matrix-completion", data=data["matrix-completion"], test=str(tmp_path / "test"))
    task = load_task(options)
    assert task.test is not None and task.test.items == 1
    assert task.notes == ("2 of 3 test entries have a user or item without training entries",)


def test_rows_without_entries_are_told(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("1 1:1\n-1\n")
    assert "1 of 2 rows have no entries" in load_task(TaskOptions(data=str(tmp_path / "train"))).notes[0]
    assert load_task(TaskOptions(data=str(tmp_path / "train"), intercept=True)).notes == ()


def test_a_row_without_entries_is_of_the_negative_class(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("1 1:1\n-1\n-1\n1\n")
    result = train_sparse(config(None, str(tmp_path / "train"), epochs=2))
    assert result.measured["train_error"] == 0.25


def test_the_smallest_cut_of_a_small_network_is_found(data: dict[str, str]) -> None:
    result = train_sparse(config(None, data["graph-cut"], "graph-cut"))
    assert result.value == 5 == pytest.approx(result.measured["objective"], rel=0.01)


NOTHING_TO_LEARN = {
    "a network without arcs": ("graph-cut", "p max 2 0\nn 1 s\nn 2 t\n", 0.0),
    "a loop": ("graph-cut", "p max 3 1\nn 1 s\nn 2 t\na 3 3 5\n", 0.0),
    "an arc between the terminals": ("graph-cut", "p max 2 1\nn 1 s\nn 2 t\na 1 2 5\n", 5.0),
    "an arc from the sink": ("graph-cut", "p max 2 1\nn 1 s\nn 2 t\na 2 1 5\n", 0.0),
    "rows without columns": ("svm", "1\n-1\n-1\n", None),
}


@pytest.mark.parametrize("case", NOTHING_TO_LEARN)
def test_a_problem_without_parameters_has_an_answer(case: str, tmp_path: Path) -> None:
    problem, text, value = NOTHING_TO_LEARN[case]
    (tmp_path / "data").write_text(text)
    for policy in ("serial", "hogwild", "cyclades(threads=2)", "average(threads=2)"):
        options: dict[str, Any] = {"policy": policy, "run": tmp_path / policy, "data": str(tmp_path / "data")}
        first = train_sparse(config(problem=problem, epochs=2, **options))
        longer = train_sparse(config(problem=problem, epochs=3, resume=True, **options))
        assert (first.epochs, longer.epochs, longer.value) == (2, 3, first.value)
        assert value is None or first.value == first.measured["objective"] == value


MISTAKES = {
    "workers": (["svm", "--workers", "2"], "--workers does not go with the problem 'svm'"),
    "an option of another sparse problem": (["svm", "--rank", "3"], "--rank does not go with the problem 'svm'"),
    "an option of sparse problems": (["digits", "--rank", "3"], "--rank goes with the problems svm, .*not with digits"),
    "a policy of other problems": (["svm", "--policy", "all-reduce"], "'all-reduce' is not one of a sparse problem"),
    "a decay of other problems": (["svm", "--decay", "step"], "wanted a number as 0.9, got 'step'"),
    "a decay above 1": (["svm", "--decay", "2"], "at most 1, got 2"),
    "the rate": (["svm", "--rate", "-1"], "--rate must be above 0 and finite, got -1"),
    "the loss": (["svm", "--loss", "hing"], "hinge, logistic, squared, got 'hing'"),
    "the rank": (["matrix-completion", "--rank", "0"], "rank: wanted at least 1, got 0"),
    "the epochs": (["graph-cut", "--epochs", "0"], "epochs must be at least 1, got 0"),
    "the seed": (["svm", "--seed", "-1"], "seed must be a whole number"),
    "a name": (["svn"], "Did you mean 'svm'"),
    "a file": (["svm", "--data", "nowhere"], "nowhere: cannot be read"),
    "a directory": (["svm", "--data", "."], r"\.: wanted a file, found a directory"),
    "test data alone": (["svm", "--test", "nowhere"], "--test goes with --data"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line(case: str, paceline: Any) -> None:
    arguments, message = MISTAKES[case]
    ended = paceline("train", *arguments)
    assert ended.code == 2 and ended.out == ""
    assert re.fullmatch(rf"paceline: .*{message}.*\n", ended.err), ended.err
    assert not Path("runs").exists()


@pytest.mark.parametrize("command", [["train", "digits"], ["run", "--workers", "2"]])
@pytest.mark.parametrize("policy", ["serial", "cyclades(threads=2)", "average"])
def test_policies_of_sparse_problems_are_refused_for_modules(command: list[str], policy: str, paceline: Any) -> None:
    ended = paceline(*command, "--policy", policy, *(["script.py"] if command[0] == "run" else []))
    assert ended.code == 2 and ended.out == ""
    assert re.fullmatch(r"paceline: policy '[a-z]+' is for sparse problems \(svm, .*for a module use .*\n", ended.err)


def test_the_command_trains_and_shows_what_it_measured(
    data: dict[str, str], paceline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DATA", "nowhere")  # a directory of data sets is no file of rows
    ended = paceline("train", "svm", "--data", data["svm"], "--policy", "hogwild(threads=2)", "--epochs", "2")
    assert ended.code == 0, ended.err
    assert re.search(r"svm: train error 0\.\d+, objective .* after 2 epochs in", ended.out)
    assert "hogwild(threads=2) on 2 threads: " in ended.out
    assert "Omega 2, Delta" in ended.out and "run: runs/svm-1" in ended.out
    again = paceline("train", "--resume", "runs/svm-1", "--epochs", "4", "--json")
    result = json.loads(again.out)
    assert (result["epochs"], result["resumed_at"], result["policy"]) == (4, 400, "hogwild(threads=2)")
    assert result["metric"] == "train_error"


def test_one_epoch_on_one_thread_and_the_error_of_test_data(data: dict[str, str], paceline: Any) -> None:
    options = [
        "--data",
        data["svm"],
        "--test",
        data["svm"],
        "--policy",
        "serial",
        "--epochs",
        "1",
        "--loss",
        "log_loss",
    ]
    out = paceline("train", "svm", *options).out
    assert re.search(r"svm: test error 0\.\d+, objective .* after 1 epoch in .*\nserial on 1 thread: ", out)
    assert json.loads(paceline("train", "svm", *options, "--json").out)["metric"] == "test_error"


def test_an_objective_that_ends_above_its_start_is_told(data: dict[str, str], paceline: Any) -> None:
    high, fine = (
        paceline("train", "svm", "--data", data["svm"], "--epochs", "1", "--rate", r) for r in ("1e30", "1e-3")
    )
    assert "warning: the objective ended above that of the start, 1; lower the rate, 1e+30 (--rate)" in high.err
    assert "warning" not in fine.err


def test_a_run_has_a_checkpoint_after_its_first_epoch(data: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_sparse(config(tmp_path / "run", data["svm"], epochs=9), watch=interrupt)
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").files()


def interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def test_columns_of_the_test_data_alone_are_told(data: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test").write_text("1 1:1 99:1\n")
    notes = load_task(TaskOptions(data=data["svm"], test=str(tmp_path / "test"))).notes
    assert "the test data has columns up to 99, the training data up to 11" in notes[0]


def test_a_strange_target_is_told_by_its_row(data: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test").write_text("1 1:1\n7 1:1\n")
    with pytest.raises(UsageError, match=r"found 7 in row 2$"):
        load_task(TaskOptions(data=data["svm"], test=str(tmp_path / "test")))


def test_what_is_no_text_is_told_without_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(b"\x1b[31m\xff\x00 1:1\n")
    with pytest.raises(UsageError) as told:
        load_task(TaskOptions(data=str(tmp_path / "train")))
    assert str(told.value).isprintable() and str(told.value).isascii()


def test_the_bound_is_of_threads_that_race(data: dict[str, str], paceline: Any) -> None:
    for policy, races in [("hogwild(threads=2)", True), ("hogwild(threads=1)", False), ("locked(threads=2)", False)]:
        out = paceline("train", "svm", "--data", data["svm"], "--policy", policy, "--epochs", "1").out
        assert ("times the updates of one thread (a bound)" in out) == races, out


def test_resuming_a_finished_run_says_so_and_keeps_its_options(data: dict[str, str], paceline: Any) -> None:
    paceline("train", "svm", "--data", data["svm"], "--policy", "serial", "--epochs", "2")
    before = Path("runs/svm-1/config.json").read_bytes()
    again = paceline("train", "--resume", "runs/svm-1", "--rate", "7")
    assert again.code == 0 and "after 2 epochs; the run was finished already" in again.out
    assert Path("runs/svm-1/config.json").read_bytes() == before


def test_another_problem_is_not_resumed(data: dict[str, str], paceline: Any) -> None:
    paceline("train", "svm", "--data", data["svm"], "--policy", "serial", "--epochs", "1")
    Path("neural").mkdir()
    Path("neural/config.json").write_text('{"train": {"problem": "digits"}}')
    for name, run, own in (
        ("graph-cut", "runs/svm-1", "svm"),
        ("digits", "runs/svm-1", "svm"),
        ("svm", "neural", "digits"),
    ):
        ended = paceline("train", name, "--resume", run, "--epochs", "2")
        assert ended.code == 2 and ended.out == ""
        assert (
            ended.err == f"paceline: {run} is a run of {own!r}, not of {name!r}; leave the problem out to resume it\n"
        )


def test_a_run_that_is_not_there_is_named_before_options(paceline: Any) -> None:
    for arguments in (["--rate", "1"], ["--workers", "0"], ["svm", "--rank", "-3"]):
        ended = paceline("train", *arguments, "--resume", "nowhere")
        assert ended.code == 2 and re.fullmatch(
            r"paceline: --resume wants .*nowhere/config.json is missing.*\n", ended.err
        )


@pytest.mark.parametrize(
    "saved",
    [{}, {"options": {}, "speed": 3}, {"options": 5}, {"options": {"problem": "svn"}}, {"options": {"colour": 1}}]
    + [{"options": {}, name: [1]} for name in ("policy", "epochs", "rate", "decay", "seed", "save_every")]
    + [{"options": {"problem": []}}],
)
def test_a_broken_configuration_is_one_line(saved: dict[str, Any], paceline: Any) -> None:
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps({"sparse": saved}))
    ended = paceline("train", "--resume", "run")
    assert ended.code == 2 and re.fullmatch(r"paceline: .*run/config.json.*\n", ended.err), ended.err


def test_parameters_that_do_not_fit_in_memory_are_told(
    data: dict[str, str], paceline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("paceline.training.sparse.Engine", no_memory)
    ended = paceline("train", "svm", "--data", data["svm"])
    assert ended.code == 2
    assert re.fullmatch(r"paceline: svm: no memory .* 200 rows, 12 columns, .* largest index is 11\n", ended.err)


def test_ctrl_c_leaves_a_checkpoint(data: dict[str, str], paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Engine.run

    def interrupted(engine: Engine, updates: int | None = None, **options: Any) -> Report:
        if engine.position[0] == 2:
            signal.raise_signal(signal.SIGINT)
        return run(engine, updates, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", interrupted)
        ended = paceline("train", "svm", "--data", data["svm"], "--policy", "serial")
    assert ended.code == 130
    assert ended.err.endswith("paceline: interrupted; go on with: paceline train --resume runs/svm-1\n")
    result = json.loads(paceline("train", "--resume", "runs/svm-1", "--json").out)
    assert (result["epochs"], result["resumed_at"]) == (20, 600)


@pytest.mark.soak
@pytest.mark.data
def test_the_relaxed_cut_of_the_tsukuba_pair_is_near_the_smallest(data_dir: Path) -> None:
    file = str(data_dir / "tsukuba" / "tsukuba-nearfar.max.gz")
    result = train_sparse(config(None, file, "graph-cut", policy="hogwild"))
    assert 50979 <= result.value <= 1.01 * 50979


def test_built_in_data_is_the_same_for_the_same_seed() -> None:
    for problem in TEXTS:
        one, same, other = (load_task(TaskOptions(problem=problem, seed=seed)).problem for seed in (1, 1, 2))
        first, second, third = (numbers_of(each) for each in (one, same, other))
        assert np.array_equal(first, second) and not np.array_equal(first, third)


def numbers_of(problem: Problem) -> Any:
    if isinstance(problem, LinearProblem):
        return problem.rows.values
    return problem.values if isinstance(problem, MatrixCompletion) else problem.weights  # type: ignore[attr-defined]
