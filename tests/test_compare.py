"""Comparisons: the table, mistakes told before anything starts, failures, interrupts, and what runs leave on disk."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import ENVIRONMENT

from paceline.comparing import compare as comparing
from paceline.comparing.comparison import Comparison
from paceline.comparing.options import ONE_WORKER, CompareOptions
from paceline.record.metrics import MetricsWriter, read_metrics
from paceline.record.timeline import Kind, TimelineWriter, read_timeline, timeline_file
from paceline.report.groups import group, summarise
from paceline.report.material import gather
from paceline.report.runs import read_run
from paceline.training.on_workers import WorkersFailed

TINY = ("quadratic", "--workers", "2", "--epochs", "1", "--batch-size", "512", "--target", "0.5")


def rows_of(found: Any) -> dict[str, dict[str, Any]]:
    return {row["label"].partition("(")[0]: row for row in json.loads(found.out)["rows"]}


# The table ------------------------------------------------------------------------------------------------------------


def make_run(run: Path) -> Path:
    """A run that began at 100 s: two workers, of which one throws a second away, and evaluations every 2 s."""
    run.mkdir()
    for worker in range(2):
        writer = TimelineWriter(timeline_file(run, worker))
        writer.began(0, 100.0)
        writer.span(Kind.COMPUTING, 0, 100.0, 4.0)
        writer.span(Kind.WAITING, 0, 104.0, 3.0)
        writer.span(Kind.EXCHANGING, 0, 107.0, 2.0)
        writer.span(Kind.CANCELLED if worker else Kind.COMPUTING, 0, 109.0, 1.0)
        writer.left(110.0)
        writer.close()
    metrics = MetricsWriter(run / "metrics.jsonl")
    metrics.write("joined", time=100.5, worker=0, incarnation=0, step=0)
    for step, staleness in enumerate(([0, 1], [2, 3]), 1):
        metrics.write("commit", time=100.0 + 2 * step, step=step, staleness=staleness, bytes=1_500_000)
    metrics.write("evaluation", time=110.0, step=2, accuracy=0.75, test_loss=1.5)
    metrics.close()
    lines = [{"time": 100.5 + 2 * step, "step": step, "accuracy": 0.4 * step, "test_loss": 2.0} for step in range(3)]
    (run / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_the_figures_of_a_run_come_from_its_files(tmp_path: Path) -> None:
    run = replace(read_run(make_run(tmp_path / "run"), metric="accuracy", higher_is_better=True), target=0.7)
    (row,) = summarise(group([run]))
    assert (row.seconds_to_target, row.final_error, row.megabytes, row.mean_staleness) == (4.5, 0.25, 3.0, 1.5)
    assert row.waiting == pytest.approx(0.3)
    assert row.thrown_away == pytest.approx(0.05)


def test_a_policy_that_misses_the_target_with_one_seed_has_no_time(tmp_path: Path) -> None:
    run = replace(read_run(make_run(tmp_path / "run"), metric="accuracy", higher_is_better=True), target=0.7)
    points = replace(run.points, value=run.points.value * 0.5)
    (row,) = summarise(group([run, replace(run, seed=1, points=points)]))
    assert (row.seeds, row.reached) == (2, 1)
    assert np.isnan(row.seconds_to_target)


# Options --------------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], str]] = {
    "policy": (["--policies", "sync", "asink"], "Did you mean 'async'"),
    "policy among commas": (["--policies", "sync,asink"], "Did you mean 'async'"),
    "k above the workers": (["--policies", "k-sync(k=9)"], "a commit needs 9 workers"),
    "policy of threads": (["--policies", "cyclades"], "sparse"),
    "sparse problem": (["svm"], "problem svm is sparse"),
    "problem": (["digit"], "Did you mean 'digits'"),
    "one worker": (["--workers", "1"], "--workers must be at least 2"),
    "no seeds": (["--seeds", "0"], "--seeds must be at least 1"),
    "unit without a delay": (["--delay-unit", "5ms"], "--delay-unit goes with --delay"),
    "slow worker that is not there": (["--delay", "1 slow(4, 5)"], "there is no worker 4"),
    "failure of a real worker": (["--delay", "1 fails(worker=1, at=5)"], "real workers can only be delayed"),
    "target": (["--target", "nan"], "--target must be a finite number"),
    "batch": (["--batch-size", "5000"], "5000"),
    "optimizer": (["--optimizer", "adm(lr=1)"], "Did you mean 'adam'"),
    "codec": (["--codec", "sing"], "Did you mean 'sign'"),
    "learners": (["--policies", "sma(learners=auto)"], "say how many, as in sma(learners=2)"),
    "resuming nothing": (["--resume", "nowhere"], "nowhere holds no comparison"),
    "resuming with options": (["--resume", "nowhere", "--epochs", "3"], "leave out --epochs"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_in_one_line_before_anything_starts(mistake: str, paceline: Any, tmp_path: Path) -> None:
    arguments, expected = MISTAKES[mistake]
    found = paceline("compare", *arguments)
    assert found.code == 2
    assert expected in found.err and found.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_problem_without_a_target_needs_one(paceline: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from paceline.problems import load_problem, ProblemOptions\nfrom dataclasses import replace\n"
        "def problem(): return replace(load_problem('quadratic', ProblemOptions()), target=None)\n"
    )
    found = paceline("compare", "mine.py")
    assert (found.code, "quadratic has no target of its own; give one" in found.err) == (2, True), found.err


def test_policies_are_several_values_or_one_with_commas(paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "train_real", lambda *_: 1.0)
    wanted = ["k-sync(k=2)", "ssp(bound=3)", "async"]
    for number, values in enumerate(
        (wanted, ["k-sync(k=2),ssp(bound=3),async"], ["k-sync(k=2), ssp(bound=3)", "async", "k-sync(k=2)"])
    ):
        assert paceline("compare", *TINY, "--policies", *values, "--out", f"c{number}").code == 0
        assert list(Comparison.load(Path(f"c{number}")).options.policies) == wanted


def test_directories_are_named_after_policies(tmp_path: Path) -> None:
    options = CompareOptions(policies=("k-sync(k=4)", "all-reduce"), problem="digits", seeds=2)
    entries = Comparison.begin(tmp_path, options, options.check(), ["paceline"]).entries
    runs = [entry.run for entry in entries]
    assert runs[:3] == ["one-worker/seed-0", "k-sync-k-4/seed-0", "all-reduce/seed-0"]
    assert runs[3:] == ["one-worker/seed-1", "k-sync-k-4/seed-1", "all-reduce/seed-1"]


# Failures and interrupts ----------------------------------------------------------------------------------------------


class Faults:
    """Stands in for real trainings: that of ``bad`` ends with this error, each time once."""

    def __init__(self, bad: str, error: BaseException) -> None:
        self._bad, self._error = bad, error
        self.trained: list[str] = []

    def __call__(self, options: CompareOptions, problem: Any, arm: str, seed: int, run: Path, tell: Any) -> float:
        self.trained.append(arm)
        assert not run.exists(), "what was begun is removed"
        shutil.copytree(self._made(run), run)
        tell(0.5)
        if arm == self._bad:
            self._bad = ""
            raise self._error
        return 1.5

    def _made(self, run: Path) -> Path:
        made = run.parent.parent / f"made-{len(self.trained)}"
        made.parent.mkdir(parents=True, exist_ok=True)
        return make_run(made)


def test_a_policy_that_fails_is_a_row_and_the_others_go_on(paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults("sync", WorkersFailed(1, "ValueError: the loss is NaN"))
    monkeypatch.setattr(comparing, "train_real", faults)
    found = paceline("compare", *TINY, "--policies", "sync", "async", "--out", "c", "--json")
    assert found.code == 1
    assert found.err == "paceline: 1 of 3 trainings failed; sync: ValueError: the loss is NaN\n"
    assert faults.trained == [ONE_WORKER, "sync", "async"]
    assert json.loads(found.out)["failures"] == ["sync, seed 0, failed: ValueError: the loss is NaN"]
    assert [each["status"] for each in json.loads(Path("c/comparison.json").read_text())["runs"]] == [
        "done",
        "failed",
        "done",
    ]


def test_an_interrupted_comparison_goes_on_where_it_stopped(paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = Faults("sync", KeyboardInterrupt())
    monkeypatch.setattr(comparing, "train_real", faults)
    found = paceline("compare", *TINY, "--policies", "sync", "async", "--out", "c")
    assert found.code == 130
    assert found.err == "paceline: interrupted; go on with: paceline compare --resume c\n"
    assert "one worker" in found.out, "the table so far is shown"
    assert [entry.status for entry in Comparison.load(Path("c")).entries] == ["done", "waiting", "waiting"]
    assert paceline("compare", *TINY, "--out", "c").code == 2, "another one there would lose it"
    assert paceline("compare", "--resume", "c").code == 0
    assert faults.trained == [ONE_WORKER, "sync", "sync", "async"]


# Runs -----------------------------------------------------------------------------------------------------------------


def check_run(run: Path, workers: int) -> None:
    """A run's workers did one thing after the other, and the evaluations go to its end."""
    timeline = read_timeline(run)
    assert list(timeline) == list(range(workers))
    for records in timeline.values():
        assert records["kind"][0] == Kind.BEGAN and records["kind"][-1] == Kind.LEFT
        assert (records["kind"] != Kind.DEAD).all()
        ends = records["start"] + records["duration"].astype(np.float64)
        assert (records["start"][1:] >= ends[:-1] - 1e-5 * (1 + records["duration"][:-1])).all()
    computed = [(records["kind"] == Kind.COMPUTING).any() for records in timeline.values()]
    assert any(computed), "one that came late may have found no batch left"
    points = list(read_metrics(run / "evaluations.jsonl"))
    assert points[0]["step"] == points[0]["examples"] == points[0]["bytes"] == 0
    for name in ("time", "step", "examples", "bytes"):
        assert [point[name] for point in points] == sorted(point[name] for point in points)
    made = [line for line in read_metrics(run / "metrics.jsonl") if line["event"] in ("step", "commit")]
    assert points[-1]["step"] == made[-1]["step"]
    assert points[-1]["examples"] == sum(line["examples"] for line in made)
    assert points[-1]["bytes"] == sum(line.get("bytes", 0) for line in made)


def check_comparison(path: Path, found: Any, policies: list[str]) -> None:
    assert found.code == 0, found.err
    result = json.loads(found.out)
    assert [each["label"] for each in result["rows"]] == [ONE_WORKER, *policies]
    assert all(0 < each["final_error"] < 10 and each["waiting"] is not None for each in result["rows"])
    comparison = Comparison.load(path)
    starts = []
    for entry in comparison.entries:
        assert entry.status == "done" and entry.seconds is not None and entry.seconds > 0
        check_run(comparison.run_of(entry), comparison.options.workers_of(entry.policy))
        first = next(read_metrics(comparison.run_of(entry) / "evaluations.jsonl"))
        starts.append(first["test_loss"])
    assert len(set(starts)) == 1, "all begin with the same parameters"


def test_policies_are_compared_on_the_virtual_cluster(paceline: Any, tmp_path: Path) -> None:
    policies = ["all-reduce", "k-sync(k=2)", "async", "local-sgd(every=2)", "gossip"]
    words = ["--virtual", "--workers", "3", "--delay", "1+exp(1)", "--delay-unit", "10ms", "--policies", *policies]
    found = paceline("compare", *TINY, *words, "--out", "c", "--json")
    check_comparison(tmp_path / "c", found, [str(each) for each in Comparison.load(Path("c")).options.policies])
    rows = rows_of(found)
    assert rows["k-sync"]["thrown_away"] > rows["async"]["thrown_away"] == rows["all-reduce"]["thrown_away"] == 0
    assert rows["async"]["mean_staleness"] > rows["k-sync"]["mean_staleness"] == 0
    assert rows["all-reduce"]["waiting"] > rows["local-sgd"]["waiting"] > rows["one worker"]["waiting"] == 0
    assert rows["all-reduce"]["megabytes"] > rows["local-sgd"]["megabytes"] > 0


def test_a_virtual_worker_that_fails_is_dead_in_the_timeline(paceline: Any) -> None:
    words = ["--virtual", "--workers", "3", "--delay", "1 fails(worker=1, at=3.5)", "--policies", "async"]
    assert paceline("compare", *TINY, *words, "--epochs", "3", "--out", "c").code == 0
    timeline = read_timeline(Path("c/async/seed-0"))
    assert [(records["kind"] == Kind.DEAD).sum() for records in timeline.values()] == [0, 1, 0]


def test_policies_are_compared_on_real_workers(paceline: Any, tmp_path: Path) -> None:
    delay = ["--delay", "1+exp(0.5) slow(1, 2)", "--delay-unit", "1ms"]
    found = paceline("compare", *TINY, *delay, "--policies", "all-reduce", "async", "--out", "c", "--json")
    check_comparison(tmp_path / "c", found, ["all-reduce", "async"])
    delays = {"one worker": "1+exp(0.5)"}  # without what it says of the others
    for run in gather(tmp_path / "c").runs:
        wanted = delays.get(run.policy, "1+exp(0.5) slow(worker=1, factor=2)")
        assert [run.config[name] for name in ("delay", "delay_unit", "servers", "script")] == [wanted, "1ms", 1, None]
        assert f"--delay '{wanted}' --delay-unit 1ms" in (run.command or "")
    for name in ("all-reduce", "async"):
        lines = list(read_metrics(tmp_path / "c" / name / "seed-0" / "metrics.jsonl"))
        assert {line["worker"] for line in lines if line["event"] == "joined"} == {0, 1}
        assert {(line["worker"], line["dead"]) for line in lines if line["event"] == "left"} == {(0, False), (1, False)}
        assert len(list((tmp_path / "c" / name / "seed-0" / "checkpoints").glob("*.safetensors"))) == 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.soak
@pytest.mark.parametrize("virtual", [False, True])
def test_ctrl_c_leaves_a_comparison_that_goes_on(tmp_path: Path, virtual: bool) -> None:
    words = ["--policies", "all-reduce", "k-sync(k=2)", "async", "local-sgd(every=4)", "--workers", "3", "--out", "c"]
    words += ["--virtual"] if virtual else ["--delay", "1+exp(1)", "--delay-unit", "5ms"]
    command = [sys.executable, "-m", "paceline", "compare"]
    process = subprocess.Popen(
        [*command, *words, "--epochs", "4"], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: (tmp_path / "c" / "all-reduce" / "seed-0" / "metrics.jsonl").exists())
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert told.endswith("paceline: interrupted; go on with: paceline compare --resume c\n")
    done = subprocess.run([*command, "--resume", "c", "--json"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 5
    comparison = Comparison.load(tmp_path / "c")
    for entry in comparison.entries:
        check_run(comparison.run_of(entry), comparison.options.workers_of(entry.policy))
